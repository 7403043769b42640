"""How fast the cores are at the moment. Those of a virtual machine may do half of what they did a minute ago, when somebody else uses
the same hardware; what is measured meanwhile says nothing of the program."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping

STEADY = 1.25
"""How much longer than at its best the machine may take for the same work and count as itself."""
_STEPS = 50_000
_TRIES = 3


def pace(cores: Iterable[int]) -> float:
    """Seconds that the slowest of these cores takes for a fixed amount of work."""
    mine = os.sched_getaffinity(0)
    try:
        return max(_pace_of(core) for core in cores)
    finally:
        os.sched_setaffinity(0, mine)


def _pace_of(core: int) -> float:
    os.sched_setaffinity(0, {core})
    return min(_worked() for _ in range(_TRIES))


def _worked() -> float:
    started = time.perf_counter()
    total = 0
    for step in range(_STEPS):
        total += step
    return time.perf_counter() - started


def steady(paces: Mapping[int, float]) -> set[int]:
    """Of what was measured, whose pace is given, that for which the machine was about as fast as it ever was."""
    best = min(paces.values())
    return {number for number, seconds in paces.items() if seconds <= STEADY * best}
