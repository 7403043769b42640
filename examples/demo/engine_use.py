"""How busy the engines were, told from the records of the calls."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self


@dataclass(frozen=True, slots=True)
class Stint:
    """One call's time at a replica, in epoch seconds of the service's clock."""

    replica: str
    began: float
    ended: float

    @classmethod
    def of(cls, call: Mapping[str, Any]) -> Self:
        """`call` is a finished one, as `GET /sessions/{id}/calls` tells it."""
        # What it waited for its turn is own time and lies before.
        ended = call["started_at"] + call["own_seconds"] + call["engine_seconds"]
        return cls(call["replica"], ended - call["engine_seconds"], ended)


def idle_shares(stints: Iterable[Stint]) -> dict[str, float]:
    """Per replica the share of the time without a call at it, from the first call's begin to the last one's end anywhere."""
    by_replica: dict[str, list[Stint]] = defaultdict(list)
    for stint in stints:
        by_replica[stint.replica].append(stint)
    every = [stint for own in by_replica.values() for stint in own]
    whole = max((stint.ended for stint in every), default=0.0) - min((stint.began for stint in every), default=0.0)
    return {replica: 1 - _busy_seconds(own) / whole for replica, own in sorted(by_replica.items())}


def _busy_seconds(stints: list[Stint]) -> float:
    """Seconds with one call or more."""
    busy, until = 0.0, float("-inf")
    for stint in sorted(stints, key=lambda stint: stint.began):
        busy += max(0.0, stint.ended - max(stint.began, until))
        until = max(until, stint.ended)
    return busy
