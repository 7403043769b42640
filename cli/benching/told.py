"""What a service's /metrics says of some calls: its own time and its waiting in each step, and its CPU time."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import httpx
from prometheus_client.parser import text_string_to_metric_families

from cli.refusal import Refusal

TIMEOUT_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Told:
    """The counters of one process since it began. Seconds by (step, part)."""

    process: float
    cpu_seconds: float
    calls: int
    seconds: dict[tuple[str, str], float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one call in the mean: `steps` are milliseconds by step, then by part (own, engine, store, harness)."""

    calls: int
    cpu_seconds_per_1000_calls: float
    steps: dict[str, dict[str, float]]


def told(url: str) -> Told:
    """Raises `Refusal` where the service does not tell."""
    try:
        answer = httpx.get(f"{url}/metrics", timeout=TIMEOUT_SECONDS).raise_for_status()
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise Refusal(f"{url}/metrics says nothing: {error}") from error
    return read(answer.text)


def read(page: str) -> Told:
    process = cpu = 0.0
    calls, seconds = 0, {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            where = sample.labels.get("step", ""), sample.labels.get("part", "")
            if sample.name == "process_start_time_seconds":
                process = sample.value
            elif sample.name == "process_cpu_seconds_total":
                cpu = sample.value
            elif sample.name == "verbatim_step_seconds_sum":
                seconds[where] = sample.value
            elif sample.name == "verbatim_step_seconds_count" and where == ("commit", "own"):
                calls = int(sample.value)
    return Told(process, cpu, calls, seconds)


def cost(before: Told, after: Told, calls: int) -> Cost | None:
    """What the calls in between cost; None where another process answered the second time, or where others than these `calls`, or
    not all of them, went through this one."""
    counted = after.calls - before.calls
    if not calls or after.process != before.process or counted != calls:
        return None
    steps: dict[str, dict[str, float]] = defaultdict(dict)
    for (step, part), seconds in after.seconds.items():
        steps[step][part] = (seconds - before.seconds.get((step, part), 0.0)) * 1000 / calls
    return Cost(calls, (after.cpu_seconds - before.cpu_seconds) * 1000 / calls, dict(steps))
