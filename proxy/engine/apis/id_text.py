"""IdText: token ids as JSON text, read and written only where they are new.

An engine is told a whole prompt and renders a whole history with every call. In one conversation each of those lists begins with
the one before, so its text is compared with the last ones and only the rest is parsed or spelled out. Comparing is a hundred times
cheaper than parsing, but for a short list, which is parsed and spelled out as it is. A rendering that is sampled after as it came is
sent on in the engine's own words. `IdTexts` holds those of the sessions that were heard of last.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import numpy as np

from reconstruct.records import Ids, pack_ids

_REMEMBERED = 2
"""Lists remembered each way: two conversations may take turns in one session."""

_MOST_SESSIONS, _MOST_BYTES = 256, 512 * 2**20
"""How many sessions are remembered, and what they may hold together: that of about a hundred of a hundred thousand tokens each."""

_SHORT = 1024
"""Ids in a list below which comparing costs more than parsing."""
_DIGITS = 5
"""Bytes that an id takes in a list, about."""

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(list[int]).decode


@dataclass(frozen=True, slots=True, eq=False)
class _Known:
    """A JSON list of integers and the same as ids."""

    text: bytes
    ids: Ids

    @property
    def size(self) -> int:
        return len(self.text) + self.ids.nbytes


class IdText:
    """The lists of one session, as far as they are remembered: `size` bytes. Those of fewer than `short` ids are parsed and spelled
    out as they are. `grown` is told by how many bytes it grows."""

    def __init__(self, short: int = _SHORT, grown: Callable[[int], None] | None = None) -> None:
        self.size = 0
        self._short = short
        self._grown = grown or _nobody
        self._read: deque[_Known] = deque(maxlen=_REMEMBERED)
        self._written: deque[_Known] = deque(maxlen=_REMEMBERED)

    def read(self, text: bytes, *, remember: bool = True) -> Ids:
        """The ids of a JSON list of integers. Raises msgspec.DecodeError when it is something else."""
        ids = self._parse(text)
        if remember:
            self._remember(self._read, _Known(text.rstrip(), ids))
        return ids

    def _parse(self, text: bytes) -> Ids:
        if len(text) < self._short * _DIGITS:
            return pack_ids(_decode(text))
        end, known = max(((_shared_ids_end(item.text, text), item) for item in self._read), key=_first, default=(0, None))
        if not end or known is None:
            return pack_ids(_decode(text))
        head = known.ids[: text.count(b",", 0, end) + 1]
        return pack_ids(np.concatenate((head, pack_ids(_decode(b"[" + text[end + 1 :])))))

    def write(self, ids: Ids) -> bytes:
        """`ids` as a JSON list."""
        for item in self._written:
            if item.ids is ids:
                return item.text
        text = next((item.text for item in self._read if item.ids is ids), None) or self._spelled_out(ids)
        self._remember(self._written, _Known(text, ids))
        return text

    def let_go(self) -> None:
        """Nobody counts it any more; a call that is under way may still use it."""
        self._grown = _nobody

    def _remember(self, lists: deque[_Known], known: _Known) -> None:
        grown = known.size - (lists[0].size if len(lists) == _REMEMBERED else 0)
        lists.append(known)
        self.size += grown
        self._grown(grown)

    def _spelled_out(self, ids: Ids) -> bytes:
        begun = [item for item in self._written if _begins(ids, item.ids)] if len(ids) >= self._short else []
        return _extended(max(begun, key=_length), ids) if begun else _encode(ids.tolist())


class IdTexts:
    """The lists of the sessions heard of last, `most_sessions` at most and as many as `most_bytes` hold; they take `size` bytes."""

    def __init__(self, most_sessions: int = _MOST_SESSIONS, most_bytes: int = _MOST_BYTES) -> None:
        self._most_sessions = most_sessions
        self._most_bytes = most_bytes
        self.size = 0
        self._known: OrderedDict[str, IdText] = OrderedDict()

    def of(self, session_id: str) -> IdText:
        known = self._known.get(session_id)
        if known is None:
            known = self._known[session_id] = IdText(grown=self._grown)
            self._grown(0)
        else:
            self._known.move_to_end(session_id)
        return known

    def _grown(self, size: int) -> None:
        self.size += size
        while len(self._known) > self._most_sessions or (self.size > self._most_bytes and self._known):
            _, oldest = self._known.popitem(last=False)
            oldest.let_go()
            self.size -= oldest.size


def _nobody(size: int) -> None:
    pass


def _extended(known: _Known, ids: Ids) -> bytes:
    rest = _encode(ids[len(known.ids) :].tolist())
    return known.text if len(rest) == 2 else known.text[:-1] + b"," + rest[1:]


def _begins(ids: Ids, known: Ids) -> bool:
    return 0 < len(known) <= len(ids) and np.array_equal(ids[: len(known)], known)


def _shared_ids_end(left: bytes, right: bytes) -> int:
    """Where the comma after the last id stands that both texts begin with; 0 for none."""
    length = min(len(left), len(right))
    differs = np.frombuffer(left, np.uint8, length) != np.frombuffer(right, np.uint8, length)
    shared = int(differs.argmax()) if differs.any() else length
    return max(0, right.rfind(b",", 0, shared))


def _length(known: _Known) -> int:
    return len(known.ids)


def _first(pair: tuple[int, object]) -> int:
    return pair[0]
