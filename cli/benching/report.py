"""What was measured, as JSON and as tables."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from cli.benching.load import Asked, Tally
from cli.benching.told import Cost
from proxy.steps import PARTS, STEPS

DIRECT, THROUGH = "engine alone", "through verbatim"


@dataclass(frozen=True, slots=True)
class Report:
    """`notes` are sentences about what is missing, and why."""

    engine: str
    service: str
    asked: Asked
    connections: int
    ways: Mapping[str, Tally]
    cost: Cost | None
    notes: Sequence[str]

    def data(self) -> dict[str, Any]:
        return {
            "engine": self.engine,
            "service": self.service,
            "asked": asdict(self.asked),
            "connections": self.connections,
            "ways": {name: figures(tally) for name, tally in self.ways.items()},
            "service_cost": asdict(self.cost) if self.cost else None,
            "notes": list(self.notes),
        }

    def show(self, console: Console) -> None:
        console.print(self._ways())
        if self.cost is not None:
            console.print(_steps(self.cost))
            console.print(f"CPU of the service: {self.cost.cpu_seconds_per_1000_calls:.2f} s per 1,000 calls")
        for note in self.notes:
            console.print(note, soft_wrap=True)

    def _ways(self) -> Table:
        asked = self.asked
        how = "streamed" if asked.stream else "whole"
        title = f"{asked.prompt_words} words in, {asked.sampled_tokens} tokens out, {how}, {self.connections} at once"
        table = Table(title=title, title_justify="left")
        for name in ("", "calls", "failed", "calls/s", "p50 ms", "p95 ms", "first byte p50", "p95"):
            table.add_column(name, justify="right" if name else "left")
        for name, tally in self.ways.items():
            told = figures(tally)
            times = (told["p50_ms"], told["p95_ms"], told["first_byte_p50_ms"], told["first_byte_p95_ms"])
            rate = _shown(told["calls_per_second"])
            table.add_row(name, str(tally.calls), str(tally.failed), rate, *map(_shown, times))
        return table


def figures(tally: Tally) -> dict[str, Any]:
    """Numbers of one way; None for what no call has told."""
    return {
        "calls": tally.calls,
        "failed": tally.failed,
        "failure": tally.failure or None,
        "seconds": tally.seconds,
        "calls_per_second": tally.calls / tally.seconds if tally.calls else None,
        "p50_ms": quantile(tally.whole, 0.5),
        "p95_ms": quantile(tally.whole, 0.95),
        "first_byte_p50_ms": quantile(tally.first, 0.5),
        "first_byte_p95_ms": quantile(tally.first, 0.95),
    }


def quantile(seconds: Sequence[float], share: float) -> float | None:
    """Milliseconds within which this share of the calls was done: one that was measured, none in between."""
    if not seconds:
        return None
    return sorted(seconds)[math.ceil(share * len(seconds)) - 1] * 1000


def _steps(cost: Cost) -> Table:
    table = Table(title=f"Where the service spends a call: ms in the mean of {cost.calls}", title_justify="left")
    for name in ("step", *PARTS):
        table.add_column(name, justify="left" if name == "step" else "right")
    for step in STEPS:
        if parts := cost.steps.get(step):
            table.add_row(step, *(_shown(parts.get(part)) for part in PARTS))
    table.add_section()
    sums = [sum(parts.get(part, 0.0) for parts in cost.steps.values()) for part in PARTS]
    table.add_row("all", *map(_shown, sums))
    return table


def _shown(number: float | None) -> str:
    return "" if number is None else f"{number:,.2f}" if number < 100 else f"{number:,.0f}"
