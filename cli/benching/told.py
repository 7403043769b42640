"""What a service's /metrics says of some calls: its own time and its waiting in each step, and its CPU time."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from cli.control import Control
from cli.exposition import Exposition


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


def told(control: Control) -> Told:
    """Raises `Refusal` where the service does not tell."""
    page = Exposition(control.text("/metrics"))
    return Told(
        process=page.total("process_start_time_seconds"),
        cpu_seconds=page.total("process_cpu_seconds_total"),
        calls=int(page.total("verbatim_step_seconds_count", step="commit", part="own")),
        seconds={(of.labels["step"], of.labels["part"]): of.value for of in page.series("verbatim_step_seconds_sum")},
    )


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
