"""Prometheus metrics of one process. Labels are bounded: no session, call or group ids.

The site's table of metrics is made of these texts. Those of weight updates are in proxy/engine/weights/keeper.py, those of tasks in
proxy/tasks/metrics.py.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter as Tally
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, Protocol

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from contract.attempts import ENDED
from proxy.engine.replica import Replica
from proxy.store.run import Curve, Point, RunRecord, merge
from proxy.timeline import PARTS, STEPS, Timeline
from reconstruct.records import Call

_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120, 300)


class StoredGroups(Collector):
    """Numbers that the store keeps for all processes, and over their restarts."""

    def __init__(self) -> None:
        self.counts: Mapping[str, int] = {}
        self.totals: Mapping[str, int] = {}
        self.versions_ahead: int | None = None
        self.free_bytes: int | None = None

    def collect(self) -> Iterator[Metric]:
        groups = GaugeMetricFamily("verbatim_store_groups", "Shared: groups in the store.", labels=["state"])
        for state, number in sorted(self.counts.items()):
            groups.add_metric([state], number)
        yield groups
        moved = CounterMetricFamily(
            "verbatim_groups", "Shared: how often a group entered a state, and other group outcomes.", labels=["state"]
        )
        for state, number in sorted(self.totals.items()):
            moved.add_metric([state], number)
        yield moved
        free = GaugeMetricFamily(
            "verbatim_store_free_bytes",
            "Bytes free on the store's disk; only for a store on the same machine, reached by its socket.",
        )
        if self.free_bytes is not None:
            free.add_metric([], self.free_bytes)
        yield free
        if self.versions_ahead is not None:
            text = "Shared: versions until a group begun now is leased; only with admission."
            yield GaugeMetricFamily("verbatim_admission_versions_ahead", text, value=self.versions_ahead)


SUMMED = (
    ("verbatim_run_truncated", "Shared: closed sessions with a trained row whose last reply was cut short.", "truncated"),
    ("verbatim_run_calls", "Shared: calls of closed sessions.", "calls"),
    (
        "verbatim_run_invalid_tool_calls",
        "Shared: calls of closed sessions with an invalid tool call.",
        "invalid_tool_calls",
    ),
    ("verbatim_run_sampled_tokens", "Shared: sampled tokens of closed sessions.", "sampled_tokens"),
    ("verbatim_run_exported_tokens", "Shared: tokens of closed sessions that rows train.", "exported_tokens"),
    (
        "verbatim_run_incomplete",
        "Shared: closed sessions with a dangling or damaged call, or whose outcome depends on a quarantined one.",
        "incomplete",
    ),
    ("verbatim_run_versions_behind", "Shared: weight versions between a session's oldest token and its end, summed.", "behind"),
)
CORRECTED = (
    ("verbatim_run_rewarded", "Shared: closed sessions with a reward, since the store began.", "rewarded"),
    ("verbatim_run_summed_reward", "Shared: the sum of the rewards of closed sessions.", "reward"),
    ("verbatim_run_solved", "Shared: closed sessions with a reward of at least VERBATIM_SOLVED_REWARD (1).", "solved"),
    ("verbatim_run_zero_rewards", "Shared: closed sessions with the reward 0.", "r:0"),
    ("verbatim_run_groups", "Shared: decided groups of two or more.", "groups"),
    ("verbatim_run_equal_groups", "Shared: decided groups whose rewards are all equal.", "equal_groups"),
)
"""Sums since the store began that a corrected reward may lower, which no counter may: take their `delta`."""
PERCENTILES = (10, 50, 90)


MOST_RUNS = 10
"""Runs that the metrics show: those begun last, without what is over or hidden. The store has numbers of more."""


class RunNumbers(Collector):
    """What closed sessions of all processes add up to, per run, policy and label; the store bounds the number of the latter two."""

    def __init__(self) -> None:
        self.totals: Sequence[Curve] = ()
        self.recent: Sequence[Curve] = ()
        self.runs: Sequence[RunRecord] = ()

    def collect(self) -> Iterator[Metric]:
        labels = ["run", "policy", "label"]
        ended = CounterMetricFamily("verbatim_run_rollouts", "Shared: closed sessions.", labels=[*labels, "status"])
        for curve, sums in self._sums():
            for status in ENDED:
                ended.add_metric([curve.run, curve.policy, curve.label, status], sums.count(status))
        yield ended
        kinds: list[tuple[Any, Any]] = [(CounterMetricFamily, SUMMED), (GaugeMetricFamily, CORRECTED)]
        for name, text, what, kind in ((*each, kind) for kind, families in kinds for each in families):
            family = kind(name, text, labels=labels)
            for curve, sums in self._sums():
                family.add_metric([curve.run, curve.policy, curve.label], sums.count(what))
            yield family
        yield from self._collect_losses()
        recent = GaugeMetricFamily(
            "verbatim_run_reward", "Shared: rewards of the last hour, to two digits.", labels=[*labels, "percentile"]
        )
        for curve in self.recent:
            (whole,) = merge([replace(curve, points=[replace(point, start=0) for point in curve.points])]) or [Point(0)]
            for percent in PERCENTILES:
                reward = whole.quantile(percent / 100)
                if reward is not None:
                    recent.add_metric([curve.run, curve.policy, curve.label, str(percent)], reward)
        yield recent

    def _collect_losses(self) -> Iterator[Metric]:
        """Quarantine by reason, over all policies and labels of a run, and its groups by state."""
        text = "Shared: quarantined tokens of closed sessions, by reason."
        tokens = CounterMetricFamily("verbatim_run_quarantined_tokens", text, labels=["run", "reason"])
        text = "Shared: quarantined and dangling calls of closed sessions, by reason."
        calls = CounterMetricFamily("verbatim_run_quarantined_calls", text, labels=["run", "reason"])
        for run in self.runs:
            whole = merge(curve for curve in self.totals if curve.run == run.run) or [Point(0)]
            for reason, (number, lost) in whole[0].quarantined.items():
                calls.add_metric([run.run, reason], number)
                tokens.add_metric([run.run, reason], lost)
        yield from (tokens, calls)
        text = "Shared: groups of a run by state, and why they were dropped or died."
        groups = GaugeMetricFamily("verbatim_run_group_states", text, labels=["run", "state", "cause"])
        for run in self.runs:
            for (state, cause), number in sorted(run.groups.items()):
                groups.add_metric([run.run, state, cause], number)
        yield groups

    def _sums(self) -> Iterator[tuple[Curve, Point]]:
        return ((curve, point) for curve in self.totals for point in curve.points)


class EngineNumbers(Collector):
    """Gauges of the replicas that there are: one that is gone leaves no line behind."""

    def __init__(self, replicas: Callable[[], Iterable[Replica]], waiting: Callable[[], Mapping[str, int]]) -> None:
        self._replicas = replicas
        self._waiting = waiting

    def collect(self) -> Iterator[Metric]:
        labels = ["replica", "policy"]
        up = GaugeMetricFamily("verbatim_engine_up", "1: the replica serves, 0: it does not.", labels=labels)
        stalled = GaugeMetricFamily("verbatim_engine_stalled", "1: the replica has calls and samples nothing.", labels=labels)
        calls = GaugeMetricFamily("verbatim_engine_calls_in_flight", "Calls in flight at a replica.", labels=labels)
        # One that returns while its earlier calls still drain is there twice.
        serves: Tally[tuple[str, str]] = Tally()
        hang: Tally[tuple[str, str]] = Tally()
        in_flight: Tally[tuple[str, str]] = Tally()
        for replica in self._replicas():
            serves[replica.name, replica.policy] += replica.healthy
            hang[replica.name, replica.policy] += replica.stalled
            in_flight[replica.name, replica.policy] += replica.in_flight
        for named, number in serves.items():
            up.add_metric(named, number)
        for named, number in hang.items():
            stalled.add_metric(named, number)
        for named, number in in_flight.items():
            calls.add_metric(named, number)
        waiting = GaugeMetricFamily("verbatim_engine_queue", "Calls that wait for a replica with room.", labels=["policy"])
        for policy, number in self._waiting().items():
            waiting.add_metric([policy], number)
        yield from (up, stalled, calls, waiting)


class SessionMemory(Protocol):
    """What a process keeps of open sessions; see proxy/call/cache.py."""

    found: int
    restored: int
    reloaded: int
    memory_bytes: int
    capacity_bytes: int


class SessionNumbers(Collector):
    def __init__(self, sessions: SessionMemory) -> None:
        self._sessions = sessions

    def collect(self) -> Iterator[Metric]:
        text = "Calls that continue a session, by where it was: in memory, there but stripped of its texts, or in the store."
        opened = CounterMetricFamily("verbatim_session_opens", text, labels=["found"])
        opened.add_metric(["memory"], self._sessions.found)
        opened.add_metric(["stripped"], self._sessions.restored)
        opened.add_metric(["store"], self._sessions.reloaded)
        yield opened
        text = "What the sessions kept in memory are estimated to take."
        yield GaugeMetricFamily("verbatim_session_memory_bytes", text, value=self._sessions.memory_bytes)
        text = "The most that sessions in memory may take."
        yield GaugeMetricFamily("verbatim_session_memory_limit_bytes", text, value=self._sessions.capacity_bytes)


class Metrics:
    def __init__(self) -> None:
        # The times at which counters began would be as many series again, which nothing reads.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self._calls = Counter("verbatim_calls", "Recorded calls.", ("dialect", "api", "status"), registry=self.registry)
        self._tokens = Counter(
            "verbatim_tokens",
            "Tokens of recorded calls: prompt (only what the call added to its context) and sampled.",
            ("kind",),
            registry=self.registry,
        )
        self._branches = Counter(
            "verbatim_branches", "Calls that do not simply extend their parent.", ("reason",), registry=self.registry
        )
        self._projections = Counter(
            "verbatim_projections",
            "Calls that continue a reply otherwise than it was sampled: changed, or with the template's turn end (turn_end).",
            ("projection",),
            registry=self.registry,
        )
        self._refused = Counter(
            "verbatim_refused",
            "Calls answered with an error; as dialect control, requests to the control side without a valid token.",
            ("dialect", "code"),
            registry=self.registry,
        )
        self._dropped = Counter(
            "verbatim_tools_dropped",
            "Tools that harnesses offered and no engine can serve.",
            ("dialect", "kind"),
            registry=self.registry,
        )
        self._seconds = Histogram(
            "verbatim_call_seconds",
            "Time of a recorded call: planning and sampling, and the rest until it is stored.",
            ("part",),
            registry=self.registry,
            buckets=_SECONDS,
        )
        self._recalled = Counter(
            "verbatim_replay_requests",
            "Requests of forks before their pivot: replayed, or diverged.",
            ("outcome",),
            registry=self.registry,
        )
        self._in_flight = Gauge("verbatim_calls_in_flight", "Calls in flight.", registry=self.registry)
        # Looking a labelled metric up costs more than counting.
        self._engine_seconds, self._own_seconds = self._seconds.labels("engine"), self._seconds.labels("own")
        self._prompt_tokens, self._sampled_tokens = self._tokens.labels("prompt"), self._tokens.labels("sampled")
        self._held_back = Counter(
            "verbatim_backpressure", "Sessions refused because of what trainers have not taken yet.", registry=self.registry
        )
        self._expired = Counter(
            "verbatim_expired_sessions", "Sessions closed as timeout because they were idle.", registry=self.registry
        )
        self._retained = Counter(
            "verbatim_retained_sessions", "Closed sessions taken out of the store.", ("step",), registry=self.registry
        )
        self._sweep_age = Gauge(
            "verbatim_sweep_age_seconds",
            "Since the sweep last succeeded, or since its start.",
            ("sweep",),
            registry=self.registry,
        )
        self._queued = Histogram(
            "verbatim_engine_queue_seconds",
            "How long calls waited for a replica with room; 0 counts.",
            ("policy",),
            registry=self.registry,
            buckets=_SECONDS,
        )
        self._queued_for, self._calls_of = cache(self._queued.labels), cache(self._calls.labels)
        self._retries = Counter(
            "verbatim_engine_retries",
            "Calls that a replica did not accept and that went to another one.",
            ("policy",),
            registry=self.registry,
        )
        self._ejections = Counter(
            "verbatim_engine_ejections",
            "Replicas that served and were taken out because they failed.",
            ("policy",),
            registry=self.registry,
        )
        self._groups, self._run = StoredGroups(), RunNumbers()
        self.registry.register(self._groups)
        self.registry.register(self._run)
        self.steps = StepSeconds()
        self.registry.register(self.steps)
        ProcessCollector(registry=self.registry)

    def watch(self, in_flight: Callable[[], float]) -> None:
        """Where the gauge reads its value when it is scraped."""
        self._in_flight.set_function(in_flight)

    def watch_sessions(self, sessions: SessionMemory) -> None:
        """Where the numbers of sessions in memory are read when they are scraped."""
        self.registry.register(SessionNumbers(sessions))

    def watch_engines(self, replicas: Callable[[], Iterable[Replica]], waiting: Callable[[], Mapping[str, int]]) -> None:
        """Where the gauges of engines read their values when they are scraped."""
        self.registry.register(EngineNumbers(replicas, waiting))

    def observe_wait(self, policy: str, seconds: float) -> None:
        """A call got a replica, or gave up waiting for one."""
        self._queued_for(policy).observe(seconds)

    def count_retry(self, policy: str) -> None:
        self._retries.labels(policy).inc()

    def count_ejection(self, policy: str) -> None:
        self._ejections.labels(policy).inc()

    def count_calls(self, calls: Iterable[Call], seconds: float, engine_seconds: float) -> None:
        for call in calls:
            self._calls_of(call.dialect, call.api, call.status).inc()
            self._prompt_tokens.inc(len(call.node.delta_ids))
            self._sampled_tokens.inc(len(call.node.completion_ids))
            if call.node.branch_reason:
                self._branches.labels(call.node.branch_reason).inc()
            for loss in call.projection.split(",") if call.projection not in ("", "exact") else ():
                self._projections.labels(loss).inc()
        self._engine_seconds.observe(engine_seconds)
        self._own_seconds.observe(max(0.0, seconds - engine_seconds))

    def count_replay(self, outcome: str) -> None:
        """replayed, or diverged."""
        self._recalled.labels(outcome).inc()

    def count_refusal(self, dialect: str, code: str) -> None:
        self._refused.labels(dialect, code).inc()

    def count_dropped_tools(self, dialect: str, kinds: Iterable[str]) -> None:
        """`kinds` are words of the dialect's own, never a harness's."""
        for kind in kinds:
            self._dropped.labels(dialect, kind).inc()

    def count_held_back(self) -> None:
        self._held_back.inc()

    def count_expired(self) -> None:
        self._expired.inc()

    def count_archived(self, sessions: int) -> None:
        self._retained.labels("archived").inc(sessions)

    def count_deleted(self) -> None:
        self._retained.labels("deleted").inc()

    def note_sweep(self, sweep: str) -> None:
        """The sweep, sessions or retention, ended well just now, or is about to begin for the first time."""
        ended_at = time.monotonic()
        self._sweep_age.labels(sweep).set_function(lambda: time.monotonic() - ended_at)

    def show_groups(self, counts: Mapping[str, int], totals: Mapping[str, int], versions_ahead: int | None = None) -> None:
        """What the store counts; shown until it is given anew, and not at all before."""
        self._groups.counts, self._groups.totals, self._groups.versions_ahead = counts, totals, versions_ahead

    def show_free_bytes(self, free_bytes: int | None) -> None:
        """Room on the store's disk; None: not known."""
        self._groups.free_bytes = free_bytes

    def show_runs(self, runs: Sequence[RunRecord], totals: Sequence[Curve], recent: Sequence[Curve]) -> None:
        """The whole of every curve of these runs, and its points of the last hour; shown until they are given anew."""
        self._run.runs, self._run.totals, self._run.recent = runs, totals, recent

    @staticmethod
    def choose_runs(runs: Sequence[RunRecord]) -> list[RunRecord]:
        """Those that have labels of their own. Given the newest first."""
        return [run for run in runs if run.ended_at is None and not run.hidden][:MOST_RUNS]

    def page(self) -> bytes:
        return generate_latest(self.registry)


SECONDS = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 2.0, 10.0, 60.0, 300.0)
"""Upper ends of the histogram's buckets."""


class StepSeconds(Collector):
    """`verbatim_step_seconds`: histograms by step and part. Only those that were ever seen are shown.

    Counted in lists instead of metric objects, whose locks would cost a call more than all its marks: one thread writes here."""

    def __init__(self) -> None:
        cells = len(STEPS) * len(PARTS)
        self._counts = [[0] * (len(SECONDS) + 1) for _ in range(cells)]
        self._sums = [0.0] * cells

    def took(self, timeline: Timeline) -> None:
        """A call was recorded and its answer has gone out."""
        for cell, seconds in timeline.list_spent():
            self._counts[cell][bisect_left(SECONDS, seconds)] += 1
            self._sums[cell] += seconds

    def collect(self) -> Iterator[Metric]:
        shown = HistogramMetricFamily(
            "verbatim_step_seconds", "Own time and waiting in each step of a recorded call.", labels=["step", "part"]
        )
        for cell, counts in enumerate(self._counts):
            if any(counts):
                step, part = divmod(cell, len(PARTS))
                shown.add_metric([STEPS[step], PARTS[part]], _buckets(counts), self._sums[cell])
        yield shown


def _buckets(counts: list[int]) -> list[tuple[str, float]]:
    """(upper end, calls up to it), the whole last."""
    buckets: list[tuple[str, float]] = []
    total = 0
    for end, count in zip((*map(str, SECONDS), "+Inf"), counts, strict=True):
        total += count
        buckets.append((end, total))
    return buckets
