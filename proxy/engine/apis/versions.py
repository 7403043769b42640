"""Versions: with which versions of an engine a kind was run, and on which it is known to work."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Versions:
    """Of one program: `run` were run against the real one, `first` to `last` (each "0.24" or "0.5.23") are known to answer alike."""

    program: str
    run: tuple[str, ...]
    first: str
    last: str

    def knows(self, version: tuple[int, ...]) -> bool:
        first, last = _numbers(self.first), _numbers(self.last)
        return first <= version and version[: len(last)] <= last

    def __str__(self) -> str:
        span = self.first if self.first == self.last else f"{self.first} to {self.last}"
        return f"{self.program} {span} ({'run on ' + ', '.join(self.run) if self.run else 'by its source, never run'})"


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(".")))
