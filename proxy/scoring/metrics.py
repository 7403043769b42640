"""Metrics of scoring. The settings bound every label."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class ScoreMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self._queue = Gauge(
            "verbatim_score_jobs",
            "Sessions that wait for a scorer or are scored now, in all processes; as this process last saw it.",
            registry=registry,
        )
        self._tokens = Counter(
            "verbatim_scored_tokens", "Sampled tokens that this process scored.", ("scorer",), registry=registry
        )
        self._computed = Counter(
            "verbatim_score_computed_tokens",
            "Tokens that engines computed for scores, contexts included, those of a prefix cache not.",
            ("scorer",),
            registry=registry,
        )
        self._seconds = Histogram(
            "verbatim_score_request_seconds",
            "One request for scores, with its wait for an engine.",
            ("scorer",),
            registry=registry,
            buckets=_SECONDS,
        )
        self._failures = Counter(
            "verbatim_score_failures",
            "Calls that stay without a score (window, refused, gave_up, version), and tries that failed (engine, timeout, fault).",
            ("scorer", "reason"),
            registry=registry,
        )

    def show_queue(self, jobs: int) -> None:
        self._queue.set(jobs)

    def count_tokens(self, scorer: str, tokens: int) -> None:
        self._tokens.labels(scorer).inc(tokens)

    def count_request(self, scorer: str, computed: int, seconds: float) -> None:
        self._computed.labels(scorer).inc(computed)
        self._seconds.labels(scorer).observe(seconds)

    def count_failure(self, scorer: str, reason: str, times: int = 1) -> None:
        self._failures.labels(scorer, reason).inc(times)
