"""Prometheus metrics of tasks.

They are counted in the store, so every process exports the same values: aggregate them with max, not sum."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from proxy.store.tasks.tasks import TaskStore

ALIVE_SECONDS = 60.0
STAGES = ("prepare", "ready", "run", "evaluate")
QUEUE_LABELS = ("priority", "runtimes", "cpus", "memory_mb", "labels")
LABELLED = (
    ("verbatim_tasks", "Shared: tasks that ended.", "status", "task:"),
    ("verbatim_rollouts", "Shared: rollouts that ended.", "status", "rollout:"),
    ("verbatim_rollout_failures", "Shared: failures, including those that were retried.", "failure", "failure:"),
    ("verbatim_task_callbacks", "Shared: tries of callbacks.", "outcome", "callback:"),
)
PLAIN = (
    ("verbatim_rollout_attempts", "Shared: attempts that nodes took.", "attempts"),
    ("verbatim_rollout_retries", "Shared: attempts that failed through no fault of the agent and were retried.", "retried"),
)


class RolloutNumbers(Collector):
    """The values of the last `refresh`."""

    def __init__(self, store: TaskStore) -> None:
        self._store = store
        self._totals: Mapping[str, int] = {}
        self._depths: Mapping[str, int] = {}
        self._running: Counter[str] = Counter()
        self._nodes = 0

    async def refresh(self) -> int:
        """Always 0, as the sweeper's parts return how much they did. Raises `StoreUnavailable`."""
        self._totals, self._depths = await self._store.load_totals(), await self._store.count_waiting()
        earliest = await self._store.now() - ALIVE_SECONDS
        alive = [node for node in await self._store.list_nodes() if node.seen_at >= earliest]
        self._nodes = len(alive)
        # A draining node frees no slots: its rollouts end with it.
        self._running = sum((Counter(node.busy) for node in alive if not node.draining), Counter())
        return 0

    def collect(self) -> Iterator[Metric]:
        for name, text, label, prefix in LABELLED:
            family = CounterMetricFamily(name, text, labels=[label])
            for what, count in sorted(self._totals.items()):
                if what.startswith(prefix):
                    family.add_metric([what.removeprefix(prefix)], count)
            yield family
        for name, text, what in PLAIN:
            yield CounterMetricFamily(name, text, value=self._totals.get(what, 0))
        yield self._collect_waiting()
        running = GaugeMetricFamily(
            "verbatim_rollouts_running", "Shared: rollouts on nodes that are not draining.", labels=["stage"]
        )
        for stage in STAGES:
            running.add_metric([stage], self._running[stage])
        yield running
        yield GaugeMetricFamily(
            "verbatim_nodes", "Shared: nodes that renewed their lease within the last minute.", value=self._nodes
        )

    def _collect_waiting(self) -> Metric:
        family = GaugeMetricFamily(
            "verbatim_rollouts_waiting", "Shared: rollouts that wait for a node with that much room.", labels=QUEUE_LABELS
        )
        for queue, count in sorted(self._depths.items()):
            priority, kinds, cpus, memory_mb, labels = json.loads(queue)
            shown = ",".join(f"{name}={value}" for name, value in labels.items())
            family.add_metric([str(priority), ",".join(kinds), f"{cpus:g}", str(memory_mb), shown], count)
        return family
