"""A service at one moment, put together from its metrics and its admin endpoints."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cli.exposition import Exposition
from cli.refusal import Refusal

if TYPE_CHECKING:
    from cli.control import Control

_COUNTED = {
    "recorded": ("verbatim_calls_total", {}),
    "refused": ("verbatim_refused_total", {}),
    "prompt_tokens": ("verbatim_tokens_total", {"kind": "prompt"}),
    "sampled_tokens": ("verbatim_tokens_total", {"kind": "sampled"}),
    "timed": ("verbatim_call_seconds_count", {"part": "own"}),
    "own_seconds": ("verbatim_call_seconds_sum", {"part": "own"}),
    "engine_seconds": ("verbatim_call_seconds_sum", {"part": "engine"}),
}
"""Totals since the process began, and where they are read."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """`calls`: those of the process that answered, in totals and in flight. `groups`: by state. `sessions`: the newest open ones;
    `more`: there are others. `engines`, `nodes` and `queues` as the API shows them."""

    at: float
    url: str
    calls: dict[str, float]
    engines: list[dict[str, Any]]
    waiting: dict[str, int]
    groups: dict[str, int]
    sessions: list[dict[str, Any]]
    more: bool
    nodes: list[dict[str, Any]] = field(default_factory=list)
    queues: list[dict[str, Any]] = field(default_factory=list)

    def rate(self, of: str, before: Snapshot | None) -> float | None:
        """Per second since `before`; None without one, or when another process answered or it began anew."""
        if before is None or self.at <= before.at or self.calls[of] < before.calls[of]:
            return None
        return (self.calls[of] - before.calls[of]) / (self.at - before.at)


def look(control: Control, sessions: int) -> Snapshot:
    """The service now, with at most so many of its open sessions. Raises `Refusal`."""
    engines = control.get("/engines")
    page = Exposition(control.text("/metrics"))
    if "replicas" not in engines or "verbatim_calls_in_flight" not in page:
        raise Refusal(f"what answers at {control.url} is no Verbatim service (set VERBATIM_URL to where it is)")
    opened, nodes = control.get("/sessions", status="open", limit=sessions), control.get("/nodes")
    calls = {name: page.total(series, **labels) for name, (series, labels) in _COUNTED.items()}
    return Snapshot(
        at=time.time(),
        url=control.url,
        calls={**calls, "in_flight": page.total("verbatim_calls_in_flight")},
        engines=engines["replicas"],
        waiting=engines["waiting"],
        groups={state: int(number) for state, number in page.by("verbatim_store_groups", "state").items()},
        sessions=opened["sessions"],
        more=opened.get("cursor") is not None,
        nodes=nodes["nodes"],
        queues=nodes["queues"],
    )
