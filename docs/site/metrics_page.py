"""The reference of metrics, from those that a service registers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

from proxy.engine.weights.keeper import WeightMetrics
from proxy.metrics import Metrics
from proxy.scoring.metrics import ScoreMetrics
from proxy.tasks.metrics import RolloutNumbers

HEAD = """# Metrics

Every family of `GET /metrics`. Those that say *Shared* are the store's: every process reports the same, across restarts, so take their
`max`, not their `sum`. Sums that depend on rewards are gauges, because a reward may be corrected until it is leased: take their `delta`.
[Observability](../observability.md#labels) says what the labels hold.

| name | type | labels | meaning |
|---|---|---|---|
"""


def render() -> str:
    return HEAD + "\n".join(sorted(_list_families())) + "\n"


def _list_families() -> Iterator[str]:
    metrics = Metrics()
    metrics.show_groups({}, {}, versions_ahead=0)  # a family that is absent without the setting
    metrics.watch_sessions(cast(Any, _NoSessions()))
    metrics.watch_engines(tuple, dict)
    WeightMetrics(metrics.registry, tuple)
    ScoreMetrics(metrics.registry)
    metrics.registry.register(RolloutNumbers(cast(Any, None)))
    for collector in list(metrics.registry._collector_to_names):
        for family in collector.collect():
            labels = collector if hasattr(collector, "_labelnames") else family
            name = f"{family.name}_total" if family.type == "counter" else family.name
            if not name.startswith("process_"):
                named = ", ".join(cast(Any, labels)._labelnames)
                yield f"| `{name}` | {family.type} | {named} | {family.documentation} |"


class _NoSessions:
    found = restored = reloaded = memory_bytes = capacity_bytes = 0
