"""Versions: with which versions of an engine a kind was run, and on which it is known to work."""

from __future__ import annotations

import re
from dataclasses import dataclass

_VERSION = re.compile(r"v?(\d+)\.(\d+)(?:\.(\d+))?(?![\d])[\w.+-]*")


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


def parse_version(text: str) -> tuple[int, ...] | None:
    """(major, minor, patch) of a text like 0.32.0+cpu or 0.33.1rc1; None for anything else."""
    found = _VERSION.fullmatch(text)
    return None if found is None else tuple(int(number or 0) for number in found.groups())


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(".")))
