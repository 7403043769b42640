"""What a benchmark found: figures with their spread, written as JSON with the machine they were measured on.

Every module that measures has a `run(quick)` that gives its figures, and a `tables(result)` that shows them; both the terminal and
Markdown files get them from here, so that they cannot differ.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, track
from rich.table import Table

from benchmarks.measured_code import is_current, name_commit
from benchmarks.processes import ROOT, machine

RESULTS = ROOT / "benchmarks" / "results"
BUSY_CORES, BUSY_LOAD = 0.3, 1.5
"""Above this, in cores or as load average, a machine had other work to do when the benchmark began: the clock is not to be trusted."""


@dataclass(frozen=True, slots=True)
class Grid:
    """A table as text: `rows` have a cell for every name in `columns`."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def markdown(self) -> str:
        lines = [self.columns, tuple("---" if number == 0 else "---:" for number, _ in enumerate(self.columns)), *self.rows]
        return f"**{self.title}**\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"

    def rich(self) -> Table:
        table = Table(title=self.title, title_justify="left")
        for number, column in enumerate(self.columns):
            table.add_column(column, justify="left" if number == 0 else "right")
        for row in self.rows:
            table.add_row(*row)
        return table


def spread(values: Iterable[float]) -> dict[str, float]:
    """Median, least and most of the runs."""
    found = sorted(values)
    return {"median": rounded(statistics.median(found)), "least": rounded(found[0]), "most": rounded(found[-1])}


def rounded(value: float) -> float:
    """Four significant digits, which is more than any of it is worth."""
    return float(f"{value:.4g}")


def number(value: float | None) -> str:
    """For a table: three significant digits, thousands apart; a dash for what was not measured."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def median_of(cell: Mapping[str, Any], name: str) -> float | None:
    """The median of a figure that has a spread; None where it was not measured."""
    found = cell.get(name)
    return None if found is None else float(found["median"])


def ratio(value: float | None, base: float | None) -> float | None:
    """None where either was not measured."""
    return value / base if value is not None and base else None


def times(value: float | None) -> str:
    """A ratio for a table."""
    return "-" if value is None else f"{number(value)}x"


Found = dict[str, Any]
Run = Callable[[bool], Found | Iterator[Found]]
"""What was found; or, where that takes long, all that has been found so far, again and again."""
Show = Callable[[dict[str, Any]], Sequence[Grid]]
Draw = Callable[[dict[str, Any], Path], None]


def main(name: str, description: str, run: Run, tables: Show, draw: Draw | None = None, *, alone: bool = True) -> None:
    """The command line of a module: measure, print, write `results/NAME.json` and, where it can be drawn, `.png`. `alone`: what it
    measures has a core of its own."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help="a minute instead of many: to see that it works, not what it costs"
    )
    parser.add_argument(
        "--out", type=Path, default=None, help=f"folder of {name}.json and its plot; --quick writes none without"
    )
    options = parser.parse_args()
    interruptible()
    try:
        measure(name, run, tables, draw, quick=options.quick, out=options.out, alone=alone)
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def interruptible() -> None:
    """However this process is told to end, it ends as by Ctrl-C: block by block, each ending the processes that it started."""
    for signalled in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signalled, signal.default_int_handler)


def disturbed(described: Mapping[str, Any]) -> bool:
    """Whether something else was at work; results of before there was `cores_busy` tell the load average."""
    if "cores_busy" in described:
        return float(described["cores_busy"]) > BUSY_CORES
    return float(described["load_average"]) > BUSY_LOAD


def measure(name: str, run: Run, tables: Show, draw: Draw | None, *, quick: bool, out: Path | None, alone: bool = True) -> None:
    console, described, began = Console(width=160), machine(alone), time.monotonic()
    if disturbed(described):
        console.print(f"{described['cores_busy']} cores busy: something else is at work, wall-clock figures will be noisy")
    ran = run(quick)
    folder = out or (None if quick else RESULTS)
    result: Found = {}
    for found in (ran,) if isinstance(ran, dict) else ran:
        if not is_current(described):
            raise SystemExit(f"{name}: the code changed while it was measured; measure it again")
        result = {"machine": described | {"quick": quick, "seconds": round(time.monotonic() - began)}, **found}
        if folder is not None:
            _write(result, folder, name, draw)
    for grid in tables(result):
        console.print(grid.rich())
    console.print(f"measured: {name_commit(described)}")
    if folder is not None:
        console.print(f"written: {folder / name}.json", soft_wrap=True)


def _write(result: Found, folder: Path, name: str, draw: Draw | None) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    if draw is not None:
        draw(result, folder / f"{name}.png")


def progress() -> Progress:
    return Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())


__all__ = ["Grid", "main", "measure", "median_of", "number", "progress", "ratio", "rounded", "spread", "times", "track"]
