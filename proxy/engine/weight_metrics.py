"""Prometheus metrics of weight updates; docs/metrics.md has the table of them. Every label is bounded by the settings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from proxy.engine.replica import Replica

_SECONDS = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600)


class WeightVersions(Collector):
    """Read from the pool whenever they are asked for, since replicas come and go."""

    def __init__(self, replicas: Callable[[], Iterable[Replica]]) -> None:
        self._replicas = replicas

    def collect(self) -> Iterator[Metric]:
        versions = GaugeMetricFamily(
            "verbatim_weight_version", "Weight version that a replica holds.", labels=["policy", "replica"]
        )
        for replica in self._replicas():
            if replica.weight_version is not None:
                versions.add_metric([replica.policy, replica.name], replica.weight_version)
        yield versions


class WeightMetrics:
    def __init__(self, registry: CollectorRegistry, replicas: Callable[[], Iterable[Replica]]) -> None:
        registry.register(WeightVersions(replicas))
        self._pushes = Counter("verbatim_weight_pushes", "Weight pushes.", ("policy", "mode", "outcome"), registry=registry)
        self._seconds = Histogram(
            "verbatim_weight_push_seconds", "Seconds of a push.", ("policy", "mode"), registry=registry, buckets=_SECONDS
        )
        self._paused = Counter(
            "verbatim_weight_paused_seconds", "Seconds paused.", ("policy", "replica", "mode"), registry=registry
        )
        self._repairs = Counter("verbatim_weight_repairs", "Replicas repaired.", ("policy", "outcome"), registry=registry)
        self._takeovers = Counter("verbatim_weight_takeovers", "Replicas found paused.", ("policy",), registry=registry)

    def pushed(self, policy: str, mode: str, outcome: str, seconds: float) -> None:
        self._pushes.labels(policy, mode, outcome).inc()
        if outcome != "refused":
            self._seconds.labels(policy, mode).observe(seconds)

    def paused(self, policy: str, replica: str, mode: str, seconds: float) -> None:
        self._paused.labels(policy, replica, mode).inc(seconds)

    def repaired(self, policy: str, outcome: str) -> None:
        self._repairs.labels(policy, outcome).inc()

    def taken_over(self, policy: str) -> None:
        self._takeovers.labels(policy).inc()
