"""A request body taken apart: its fields decoded, the items of its history raw. What a recorded body of the session brought as well is
neither parsed nor decoded again.

Three ways lead through `split_body`, and all give the same:

- fast: the body begins as a known one does up to the end of its history's last item, and ends as that does after it. Only what stands
  between is parsed. JSON is read from left to right by an automaton: equal bytes from the start leave it inside the list, after an item;
  what follows is taken only if it is whole items, and equal bytes to the end then read alike.
- medium: the top level is parsed in one pass, and the history begins with items of a known one, byte for byte with what separates them,
  up to where an item ends in both.
- full: nothing is known.

Whatever is in doubt goes the full way, which also makes all errors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from proxy.dialects.fields import (
    MAX_FIELD_VALUES,
    MAX_VALUES,
    check_tools,
    check_values,
    count_values,
    decode,
    replace_surrogates,
)
from proxy.errors import RequestError
from reconstruct.messages import DIGEST_BYTES, hash_bytes

MAX_MESSAGES = 20_000
"""Messages, or items, in one history."""

_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])
_LIST = msgspec.json.Decoder(list[msgspec.Raw])
_SPACE = b" \t\r\n"
_SEPARATOR = re.compile(rb"[ \t\r\n,]*")

_LONG_FIELD = 1024
"""A field of at least so many bytes, such as the tools, is decoded once: its bytes are compared with those of known bodies."""

_COUNTED_BYTES = 2 * MAX_VALUES
"""A shorter body cannot hold too many values."""

_HASHED_ENDS = 5
"""Items at the end of a history after which the state of its hash is kept: some harnesses rewrite the last ones with every request."""

Span = tuple[int, int]
"""Where something begins and ends in a body, in bytes."""


@dataclass(frozen=True, slots=True, eq=False)
class RawHistory:
    """A body, and where its history lies in it. `start` and `tail` are the offsets of the list's brackets, `ends` those after each of its
    items, of which there is at least one. `fields` is what stands beside the history, decoded; it is shared, do not change it."""

    body: bytes
    start: int
    ends: npt.NDArray[np.int64]
    tail: int
    fields: Mapping[str, Any]
    long: Mapping[str, Span]
    """The fields that are long, and where they stand."""
    values: int | None
    """How many values the body holds at most; None where it is too short to hold too many."""
    hashed: Sequence[tuple[int, blake2b]]
    """The state of the history's hash after so many items, for its last ones."""
    rest: bytes
    """The digest of what stands around the history."""

    def __len__(self) -> int:
        return len(self.ends)

    def items(self, first: int, end: int) -> list[bytes]:
        """The raw items from number `first` to `end`."""
        at = self.start + 1 if not first else int(self.ends[first - 1])
        found = []
        for stop in self.ends[first:end].tolist():
            found.append(self.body[_skip(self.body, at) : stop])
            at = stop
        return found

    @property
    def size_bytes(self) -> int:
        return len(self.body) + self.ends.nbytes


@dataclass(slots=True, eq=False)
class SplitBody:
    """A body's decoded fields and the raw items of its history: `known` of them are those that `before` begins with, `new` follow.

    `span` goes from the history's opening bracket to the end of its last item; None where the body as it came has no such list."""

    body: bytes
    fields: Mapping[str, Any]
    new: list[bytes]
    span: Span | None = None
    tail: int = 0
    long: Mapping[str, Span] = field(default_factory=dict)
    values: int | None = None
    known: int = 0
    before: RawHistory | None = None
    way: str = "full"
    _hashed: list[tuple[int, blake2b]] = field(default_factory=list)
    _rest: bytes = b""
    _ends: npt.NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return self.known + len(self.new)

    def items(self, first: int = 0) -> list[bytes]:
        """The raw items from number `first` on."""
        if self.before is None or first >= self.known:
            return self.new[first - self.known :]
        return [*self.before.items(first, self.known), *self.new]

    def remember(self) -> RawHistory | None:
        """What the next body is compared with; None where nothing of it can be known again."""
        if self.span is None or not len(self):
            return None
        ends, start = self._find_ends(), self.span[0]
        self._hash(ends)
        kept = self._hashed[-_HASHED_ENDS:]
        return RawHistory(self.body, start, ends, self.tail, self.fields, self.long, self.values, kept, self._rest)

    def digest(self) -> bytes:
        """The body's digest, 16 bytes: of its history, and then of what stands around that. The same for all ways."""
        if self.span is None:
            return hash_bytes(hash_bytes(self.body))
        self._hash(self._find_ends())
        state = self._hashed[-1][1].copy()
        state.update(self.body[self.span[1] : self.tail])
        state.update(self._rest)
        return state.digest()

    @property
    def unhashed_bytes(self) -> int:
        """About how many bytes `digest` hashes."""
        if self.before is None or self.span is None:
            return len(self.body)
        known = [int(self.before.ends[count - 1]) - self.before.start for count, _ in self._known_hashes(self.before)[-1:]]
        return len(self.body) - sum(known) - (len(self.before.body) - known[0] if known and self.way == "fast" else 0)

    def _find_ends(self) -> npt.NDArray[np.int64]:
        """The offset in the body after each item."""
        assert self.span is not None
        if self._ends is not None:
            return self._ends
        start, ends = self.span[0], []
        at, known = start + 1, np.zeros(0, np.int64)
        if self.before is not None:
            known = self.before.ends[: self.known] + (start - self.before.start)
            at = int(known[-1])
        for item in self.new:
            at = _skip(self.body, at) + len(item)
            ends.append(at)
        self._ends = np.concatenate((known, np.array(ends, np.int64))) if ends else known
        return self._ends

    def _known_hashes(self, before: RawHistory) -> list[tuple[int, blake2b]]:
        """The states of the known history's hash that this one goes through, too."""
        return [each for each in before.hashed if each[0] <= self.known]

    def _hash(self, ends: npt.NDArray[np.int64]) -> None:
        if self._hashed or self.span is None:
            return
        view, (start, end) = memoryview(self.body), self.span
        hashed = [] if self.before is None else self._known_hashes(self.before)
        count, state = hashed[-1] if hashed else (0, blake2b(digest_size=DIGEST_BYTES))
        at = int(ends[count - 1]) if count else start
        # All but the last items in one go.
        stops = ends[max(count, len(ends) - _HASHED_ENDS) :].tolist() if len(ends) else [end]
        for number, stop in enumerate(stops, len(ends) - len(stops) + 1):
            state = state.copy()
            state.update(view[at:stop])
            at = stop
            hashed.append((number, state))
        self._hashed = hashed
        known = self.before.rest if self.before is not None and self.way == "fast" else None
        self._rest = known or hash_bytes(self.body[:start], self.body[self.tail :])


def split_body(body: bytes, listed: str, known: Sequence[RawHistory] = ()) -> SplitBody:
    """The body's fields, decoded, without `listed`, and the raw items of that; an absent list is empty. `known`: what earlier bodies
    were remembered as.

    A lone surrogate, which JSON can express and UTF-8 cannot, becomes the replacement character. Raises RequestError if the body is no
    JSON object, `listed` is no list, or there are more values, items or tools than one request may have.
    """
    for before in known:
        if (found := _go_on(body, before)) is not None:
            return found
    values = count_values(body) if len(body) > _COUNTED_BYTES else None
    if values is not None and values > MAX_VALUES:
        check_values(body, MAX_VALUES, "the body")
    try:
        return _split(body, listed, known, values)
    except RequestError:
        raise
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        found = _split(replace_surrogates(body, error), listed, (), None)
        # Its offsets are not those of the body that came.
        return SplitBody(body, found.fields, found.new)


def _go_on(body: bytes, before: RawHistory) -> SplitBody | None:
    """The body as `before` and items that follow its last one; None where it is something else."""
    view, end = memoryview(before.body), int(before.ends[-1])
    tail = len(body) - (len(before.body) - before.tail)
    if tail < end or not body.startswith(view[:end]) or not body.endswith(view[before.tail :]):
        return None
    between = body[end:tail]
    new = _read_more(between)
    if new is None or len(before) + len(new) > MAX_MESSAGES:
        return None
    values = None
    if len(body) > _COUNTED_BYTES:
        values = (count_values(before.body) if before.values is None else before.values) + count_values(between)
        if values > MAX_VALUES:
            return None
    grown = len(body) - len(before.body)
    # A field after the history has moved with its end.
    long = {name: (at, to) if at < before.start else (at + grown, to + grown) for name, (at, to) in before.long.items()}
    last = end + len(between.rstrip(_SPACE))
    return SplitBody(body, before.fields, new, (before.start, last), tail, long, values, len(before), before, "fast")


def _read_more(text: bytes) -> list[bytes] | None:
    """The raw items of what stands between an item and the end of its list; None where that is no more of the list."""
    text = text.strip(_SPACE)
    if not text:
        return []
    if text[:1] != b",":
        return None
    try:
        new = _LIST.decode(b"[%b]" % text[1:])
    except (msgspec.DecodeError, RecursionError):
        return None
    return [bytes(item) for item in new] or None


def _split(body: bytes, listed: str, known: Sequence[RawHistory], values: int | None) -> SplitBody:
    try:
        raw = _OBJECT.decode(body)
    except msgspec.ValidationError as error:
        raise RequestError("the body must be a JSON object") from error
    history = raw.pop(listed, None)
    fields: dict[str, Any] = {}
    long: dict[str, Span] = {}
    for name, value in raw.items():
        fields[name], place = _decode_field(name, value, body, known)
        if place is not None:
            long[name] = place
    if history is None or bytes(history) == b"null":
        return SplitBody(body, fields, [])
    place = _find_place(history, body)
    if place is None:
        return SplitBody(body, fields, _list_items(history, listed))
    before, count, new = _find_shared(body, place, known)
    if before is None:
        new = _list_items(history, listed)
    if count + len(new) > MAX_MESSAGES:
        # Without `param`: callers take an error about this field to mean that it is no list, which some vendors allow.
        raise RequestError(f"'{listed}' holds {count + len(new)} items, of at most {MAX_MESSAGES}")
    start, tail = place[0], place[1] - 1
    last = start + len(body[start:tail].rstrip(_SPACE))
    return SplitBody(body, fields, new, (start, last), tail, long, values, count, before, "medium" if before else "full")


def _list_items(history: msgspec.Raw, listed: str) -> list[bytes]:
    try:
        return [bytes(item) for item in _LIST.decode(history)]
    except msgspec.ValidationError as error:
        raise RequestError(f"'{listed}' must be a list", param=listed) from error


def _find_shared(body: bytes, place: Span, known: Sequence[RawHistory]) -> tuple[RawHistory | None, int, list[bytes]]:
    """The known history that shares most items with the beginning of the list at `place`, how many they are, and the items after."""
    best, count = None, 0
    for before in known:
        shared = _count_shared(body, place, before)
        if shared > count:
            best, count = before, shared
    while best is not None and count:
        end = place[0] + int(best.ends[count - 1]) - best.start
        new = _read_more(body[end : place[1] - 1]) if end < place[1] else None
        if new is not None:
            return best, count, new
        # The beginning of a longer number is no item.
        count -= 1
    return None, 0, []


def _count_shared(body: bytes, place: Span, before: RawHistory) -> int:
    """How many items of `before` the list at `place` begins with byte for byte, what separates them included."""
    view, low, high = memoryview(before.body), 0, len(before)
    while low < high:
        middle = (low + high + 1) // 2
        if body.startswith(view[before.start : int(before.ends[middle - 1])], place[0]):
            low = middle
        else:
            high = middle - 1
    return low


def _decode_field(name: str, raw: msgspec.Raw, body: bytes, known: Sequence[RawHistory]) -> tuple[Any, Span | None]:
    """The field's value, the very same as in a known body that has the same bytes for it, and where it stands if it is long."""
    text = bytes(raw)
    place = _find_place(raw, body) if len(text) >= _LONG_FIELD else None
    if place is not None:
        for before in known:
            at, to = before.long.get(name, (0, 0))
            if to - at == len(text) and before.body[at:to] == text:
                return before.fields[name], place
    check_values(text, MAX_FIELD_VALUES, f"'{name}'", name)
    value = decode(text)
    if name == "tools" and isinstance(value, list):
        check_tools(value)
    return value, place


def _find_place(raw: msgspec.Raw, body: bytes) -> Span | None:
    """Where the decoder found the value in the body, by its address; None if it stands elsewhere."""
    start = _address(raw) - _address(body)
    end = start + len(memoryview(raw))
    return (start, end) if 0 <= start < end <= len(body) else None


def _address(buffer: bytes | msgspec.Raw) -> int:
    return int(np.frombuffer(buffer, np.uint8).__array_interface__["data"][0])


def _skip(body: bytes, at: int) -> int:
    """The offset of the item that follows."""
    match = _SEPARATOR.match(body, at)
    return at if match is None else match.end()
