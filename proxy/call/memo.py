"""What a session's last recorded bodies said, so that a turn reads only what it adds.

A memo belongs to one `Session` and one way of dividing a history, is made only of a body whose call was recorded, and ends before the
prompt: what the model is to see and what is recorded is proven as without it. To forget one at any moment changes nothing but the time
that the next turn takes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

from proxy.dialects.base import Divide, HistoryMessage
from proxy.dialects.raw_history import RawHistory, SplitBody

_MEMOS = 4
"""Conversations of a session that are remembered: those of agents that work beside each other alternate."""

_MOST_BYTES = 2**24
"""Bodies of one session that are kept, all together."""

_REWRITTEN = 4
"""A harness that rewrites no more than so many of its last items goes on with the same conversation."""

_PLACE_BYTES = 200
"""What an item takes beside its bytes: in `Reading`, and its number in lists."""

Converted = tuple[Any, Callable[[Any], Any], Any]
"""A field's value, what converts it, and what that makes of it."""

Place = tuple[int, int, int]
"""How many items, messages and units without a reader there are before a unit."""


@dataclass(frozen=True, slots=True, eq=False)
class Reading:
    """What the items of a history became. `places` are those of the units from which on it can be divided anew."""

    messages: list[HistoryMessage] = field(default_factory=list)
    aside: list[bytes] = field(default_factory=list)
    """The units without a reader."""
    places: list[Place] = field(default_factory=list)

    def up_to(self, items: int) -> tuple[Reading, int]:
        """What it is before the last unit that begins with one of the first `items`, and how many items that is."""
        at = bisect_left(self.places, items, key=itemgetter(0)) - 1
        if at < 0:
            return Reading(), 0
        first, messages, aside = self.places[at]
        return Reading(self.messages[:messages], self.aside[:aside], self.places[:at]), first


@dataclass(frozen=True, slots=True, eq=False)
class HistoryMemo:
    """A recorded body and what its history became."""

    divide: Divide
    raw: RawHistory
    reading: Reading

    @property
    def size_bytes(self) -> int:
        return self.raw.size_bytes + _PLACE_BYTES * len(self.raw)


class Memos:
    """A session's memos, the newest first. Read by threads that parse, replaced as a whole."""

    __slots__ = ("_kept", "_most", "converted", "size_bytes")

    def __init__(self, most: int = _MEMOS) -> None:
        """`most`: how many are kept; without any, every body is read in full."""
        self._most = most
        self._kept: tuple[HistoryMemo, ...] = ()
        self.converted: tuple[Converted, ...] = ()
        """What dialects made of the fields of those bodies, the newest first."""
        self.size_bytes = 0

    def find(self, divide: Divide) -> Sequence[HistoryMemo]:
        """Those of histories that are divided in that way: the same bytes mean something else elsewhere."""
        return [memo for memo in self._kept if memo.divide is divide]

    def forget(self) -> None:
        self._kept, self.converted, self.size_bytes = (), (), 0

    def keep(self, divide: Divide, split: SplitBody, reading: Reading, converted: Sequence[Converted]) -> None:
        """The call of that body is recorded; `converted` is what was made of its fields and not known before."""
        raw = split.remember() if self._most and len(split.body) <= _MOST_BYTES else None
        if raw is None:
            return
        goes_on = split.before is not None and len(split.before) - split.known <= _REWRITTEN
        others = [memo for memo in self._kept if not (goes_on and memo.raw is split.before)]
        kept, room, size = [], _MOST_BYTES, 0
        for memo in (HistoryMemo(divide, raw, reading), *others[: self._most - 1]):
            room -= len(memo.raw.body)
            if room < 0:
                break
            kept.append(memo)
            size += memo.size_bytes
        self._kept, self.size_bytes = tuple(kept), size
        if converted:
            self.converted = (*converted, *self.converted)[: self._most]
