"""The raw bytes of a request's history, and what a body holds: what `proxy.dialects.splitting` makes of it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt

from reconstruct.messages import DIGEST_BYTES, hash_bytes

_SEPARATOR = re.compile(rb"[ \t\r\n,]*")

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
            found.append(self.body[skip_separator(self.body, at) : stop])
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
        before = self.before
        hashed = [] if before is None or self.span is None else self._known_hashes(before)
        if before is None or not hashed:
            return len(self.body)
        known = int(before.ends[hashed[-1][0] - 1]) - before.start
        return len(self.body) - known - (len(before.body) - known if self.way == "fast" else 0)

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
            at = skip_separator(self.body, at) + len(item)
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


def skip_separator(body: bytes, at: int) -> int:
    """The offset of the item that follows."""
    match = _SEPARATOR.match(body, at)
    return at if match is None else match.end()
