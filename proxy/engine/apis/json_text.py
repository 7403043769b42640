"""JSON text of what every call sends and reads back whole: token ids, messages and tools. Parsed and written only where it is new.

Every call sends a whole prompt to the engine and reads a whole rendering back. Within a conversation each of these lists begins with
the previous one, so the text is compared with the last ones and only the rest is parsed or written: comparing is about a hundred
times cheaper than parsing, except for short lists. A rendering that is sampled from unchanged is sent back as the engine wrote it.
`IdTexts` holds the lists of the most recent sessions.

What is new is read and written by msgspec: 32,000 ids take 0.96 ms to read and 0.47 to write. orjson (1.1, 0.16) and simdjson (0.40 to
read) would save half a millisecond of the first call of a session, and be one more dependency; numpy's reader of text (0.62) takes for
numbers what is none.

Messages and tools are the very same objects from turn to turn, as long as a harness changes nothing in them: those are compared by
identity, and what is new is encoded.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from operator import is_
from typing import Any

import msgspec
import numpy as np

from reconstruct.records import Ids, pack_ids

NO_IDS = pack_ids([])

_REMEMBERED = 2
"""Lists remembered in each direction: two conversations may alternate in one session."""

_MAX_SESSIONS, _MAX_BYTES = 256, 512 * 2**20
"""Limits over all sessions; the bytes hold about a hundred sessions of a hundred thousand tokens."""

_ITEM_BYTES = 48
"""What an object takes in the lists that remember it."""

_SHORT = 1024
"""Length in ids below which comparing costs more than parsing."""
_DIGITS = 5
"""Approximate bytes per id in a list."""

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(list[int]).decode


@dataclass(frozen=True, slots=True, eq=False)
class _Known:
    """A JSON list of integers and the same list as ids."""

    text: bytes
    ids: Ids
    size: int
    """Of both, in bytes."""


class IdText:
    """The remembered lists of one session. Lists under `short` ids are not compared. `on_growth` gets each change of their size, in
    bytes."""

    def __init__(self, short: int = _SHORT, on_growth: Callable[[int], None] = lambda size: None) -> None:
        self._short = short
        self._on_growth = on_growth
        self._read: deque[_Known] = deque(maxlen=_REMEMBERED)
        self._written: deque[_Known] = deque(maxlen=_REMEMBERED)
        self.messages, self.tools = ObjectText(on_growth), ObjectText(on_growth)

    @property
    def size(self) -> int:
        """In bytes."""
        ids = sum(each.size for each in (*self._read, *self._written))
        return ids + sum(each.size for each in (*self.messages.written, *self.tools.written))

    def read(self, text: bytes, *, remember: bool = True) -> Ids:
        """The ids of a JSON list of integers. Raises msgspec.DecodeError for anything else."""
        ids = self._parse(text)
        if remember:
            self._remember(self._read, text.rstrip(), ids)
        return ids

    def write(self, ids: Ids) -> bytes:
        """`ids` as a JSON list."""
        for item in self._written:
            if item.ids is ids:
                return item.text
        for item in self._read:
            if item.ids is ids:
                text = item.text
                break
        else:
            text = self._format(ids)
        self._remember(self._written, text, ids)
        return text

    def detach(self) -> None:
        """Stop reporting growth; a call in flight may still use the lists."""
        self._on_growth = self.messages.on_growth = self.tools.on_growth = lambda size: None

    def _parse(self, text: bytes) -> Ids:
        if len(text) < self._short * _DIGITS:
            return pack_ids(_decode(text))
        end, ids = 0, NO_IDS
        for item in self._read:
            shared = _shared_ids_end(item.text, text)
            if shared > end:
                end, ids = shared, item.ids
        if not end:
            return pack_ids(_decode(text))
        head = ids[: text.count(b",", 0, end) + 1]
        return pack_ids(np.concatenate((head, pack_ids(_decode(b"[" + text[end + 1 :])))))

    def _format(self, ids: Ids) -> bytes:
        known, length = None, 0
        for item in self._written if len(ids) >= self._short else ():
            if length < len(item.ids) <= len(ids) and np.array_equal(ids[: len(item.ids)], item.ids):
                known, length = item, len(item.ids)
        if known is None:
            return _encode(ids.tolist())
        rest = _encode(ids[length:].tolist())
        return known.text if len(rest) == 2 else known.text[:-1] + b"," + rest[1:]

    def _remember(self, lists: deque[_Known], text: bytes, ids: Ids) -> None:
        known = _Known(text, ids, len(text) + ids.nbytes)
        growth = known.size - (lists[0].size if len(lists) == _REMEMBERED else 0)
        lists.append(known)
        self._on_growth(growth)


@dataclass(frozen=True, slots=True, eq=False)
class _Written:
    """A list of objects and its JSON text, in which each item ends at the offset in `ends`. `size` is in bytes; the objects are taken to be
    as long as their text, for a session's cache may have let them go."""

    items: list[Any]
    text: bytes
    ends: list[int]
    size: int


class ObjectText:
    """The lists of objects that one session wrote last. `on_growth` gets each change of their size, in bytes."""

    def __init__(self, on_growth: Callable[[int], None] = lambda size: None) -> None:
        self.on_growth = on_growth
        self.written: deque[_Written] = deque(maxlen=_REMEMBERED)

    def write(self, items: Sequence[Any]) -> msgspec.Raw:
        """The items as a JSON list. None of them may change afterwards."""
        if not items:
            return msgspec.Raw(b"[]")
        known, shared = None, 0
        for each in self.written:
            count = sum(takewhile(bool, map(is_, each.items, items)))
            if count > shared:
                known, shared = each, count
        if known is not None and shared == len(items):
            return msgspec.Raw(known.text if shared == len(known.items) else known.text[: known.ends[shared - 1]] + b"]")
        new = list(map(_encode, items[shared:]))
        head, ends = (b"[", []) if known is None else (known.text[: known.ends[shared - 1]] + b",", known.ends[:shared])
        end = len(head) - 1
        for item in new:
            end += 1 + len(item)
            ends.append(end)
        text = b"%b%b]" % (head, b",".join(new))
        self._remember(_Written(list(items), text, ends, 2 * len(text) + _ITEM_BYTES * len(items)), known)
        return msgspec.Raw(text)

    def _remember(self, written: _Written, before: _Written | None) -> None:
        """In place of the one that it goes on from, or else of the oldest."""
        if before is not None:
            self.written.remove(before)
        elif len(self.written) == _REMEMBERED:
            before = self.written.popleft()
        self.written.append(written)
        self.on_growth(written.size - (before.size if before is not None else 0))


class IdTexts:
    """The lists of the most recent sessions, at most `max_sessions` and `max_bytes` together; `size` is in bytes."""

    def __init__(self, max_sessions: int = _MAX_SESSIONS, max_bytes: int = _MAX_BYTES) -> None:
        self._max_sessions = max_sessions
        self._max_bytes = max_bytes
        self.size = 0
        self._known: OrderedDict[str, IdText] = OrderedDict()

    def of(self, session_id: str) -> IdText:
        known = self._known.get(session_id)
        if known is None:
            known = self._known[session_id] = IdText(on_growth=self._grow)
            self._grow(0)
        else:
            self._known.move_to_end(session_id)
        return known

    def _grow(self, size: int) -> None:
        self.size += size
        while len(self._known) > self._max_sessions or (self.size > self._max_bytes and self._known):
            _, oldest = self._known.popitem(last=False)
            oldest.detach()
            self.size -= oldest.size


def _shared_ids_end(left: bytes, right: bytes) -> int:
    """The position of the comma after the last id that both texts begin with; 0 if there is none."""
    shared = min(len(left), len(right))
    if left[:shared] != right[:shared]:
        shared = int((np.frombuffer(left, np.uint8, shared) != np.frombuffer(right, np.uint8, shared)).argmax())
    return max(0, right.rfind(b",", 0, shared))
