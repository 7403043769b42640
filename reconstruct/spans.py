"""Ranges of tokens of which one thing holds: the weights that sampled them, or what their logprobs were taken from."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Span:
    """The sampled tokens `start:end` of a call were sampled under weights `version`."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class ModeSpan:
    """The logprobs of the sampled tokens `start:end` of a call are of `mode`, one of LOGPROB_MODES or LOGITS."""

    mode: str
    start: int
    end: int


def merge_modes(spans: Iterable[ModeSpan]) -> tuple[ModeSpan, ...]:
    """The spans in their order, adjacent ones of one mode as one."""
    merged: list[ModeSpan] = []
    for span in spans:
        if merged and (merged[-1].mode, merged[-1].end) == (span.mode, span.start):
            span = ModeSpan(span.mode, merged.pop().start, span.end)
        merged.append(span)
    return tuple(merged)
