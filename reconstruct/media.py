"""Media in a prompt: which ids stand for an image, and what two prompts of equal ids share where their images differ.

An engine expands an image to placeholder ids, which are the same for every image of its size: equal ids mean equal context only if the
same media stand behind them. So no base ends within a range, and none reaches beyond the first range that differs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Ids: TypeAlias = NDArray[np.int32]

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


# Ranges: where an engine put the media of a prompt, as (start, length), in their order.

Ranges = tuple[tuple[int, int], ...]


def count_media(messages: Iterable[Mapping[str, Any]]) -> int:
    """How many images the chat messages have."""
    contents = (message.get("content") for message in messages)
    parts = (part for content in contents if isinstance(content, list) for part in content)
    return sum(isinstance(part, Mapping) and part.get("type") in ("image", "image_url") for part in parts)


def name_ranges(ranges: Ranges, digests: Sequence[str]) -> tuple[Media, ...]:
    """The images at these places. Raises ValueError for another number of them."""
    placed = zip(ranges, digests, strict=True)
    return tuple(Media(digest, IMAGE, start, length) for (start, length), digest in placed)


def carry_ranges(
    parent: Ids, known: Ranges, prompt: Ids, rendering: Ids, rendered: Ranges, history: int, tail: int
) -> Ranges | None:
    """The ranges of a `prompt` that continues the `parent` with the last ids of a `rendering` of the whole request. `known` are the
    parent's, `rendered` the rendering's; `history` and `tail` are how many media the messages of each have. None: they do not fit."""
    if len(known) != history or len(rendered) != history + tail:
        return None
    by = len(prompt) - len(rendering)
    new = tuple((start + by, length) for start, length in rendered[history:])
    for start, length in new:
        if start < len(parent) or not np.array_equal(prompt[start : start + length], rendering[start - by :][:length]):
            return None
    return known + new


def find_placeholders(ids: Ids, ranges: Ranges) -> list[int]:
    """The id that each range is mostly made of."""
    found = []
    for start, length in ranges:
        values, counts = np.unique(ids[start : start + length], return_counts=True)
        found.append(int(values[counts.argmax()]))
    return found


def collapse(ids: Ids, ranges: Ranges) -> Ids | None:
    """The ids with one placeholder for each range. An engine that is given the media expands it again, and takes the first ones it finds.
    None: one stands elsewhere, too, since it was sampled or is in a text."""
    if not ranges:
        return ids
    placeholders, end = find_placeholders(ids, ranges), 0
    pieces: list[Ids] = []
    for (start, length), placeholder in zip(ranges, placeholders, strict=True):
        pieces += [ids[end:start], np.array([placeholder], dtype=np.int32)]
        end = start + length
    pieces.append(ids[end:])
    if np.isin(np.concatenate(pieces[::2]), placeholders).any():
        return None
    collapsed: Ids = np.concatenate(pieces)
    return collapsed
