"""Media in a prompt: which ids stand for an image, and what two prompts of equal ids share where their images differ.

An engine expands an image to placeholder ids, which are the same for every image of its size: equal ids mean equal context only if the
same media stand behind them. So no base ends within a range, and none reaches beyond the first range that differs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

IMAGE = "image"
"""The one kind there is."""


@dataclass(frozen=True, slots=True)
class Media:
    """The `length` ids from `start` on stand for the media whose bytes, as the harness sent them, have the sha256 `digest` (hex)."""

    digest: str
    kind: str
    start: int
    length: int

    @property
    def end(self) -> int:
        return self.start + self.length


def shift(media: Iterable[Media], by: int) -> tuple[Media, ...]:
    """The same at positions `by` further on."""
    return tuple(replace(each, start=each.start + by) for each in media)


def overlapping(media: Iterable[Media], start: int, end: int) -> list[Media]:
    """Those with ids in `start:end`."""
    return [each for each in media if each.start < end and each.end > start]


def agreed_length(shared: int, left: Sequence[Media], right: Sequence[Media]) -> int:
    """How many of the `shared` first ids of two prompts stand for the same; never a part of a range."""
    for one, other in zip_longest(left, right):
        if one != other or one.end > shared:
            return min(shared, *(each.start for each in (one, other) if each is not None))
    return shared


def as_wire(media: Iterable[Media]) -> list[dict[str, Any]]:
    return [{"digest": each.digest, "kind": each.kind, "start": each.start, "length": each.length} for each in media]
