"""Calls per second over 1, 2 and 4 processes of one service (`--workers`), on a machine that has what cores it has.

    python -m benchmarks.scaling [--quick]

Nothing is pinned, and load, engine and Redis use the same cores: beyond the number of cores no more can come of it. The sum of CPU
seconds per call says whether more processes cost more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.contenders import verbatim
from benchmarks.plots import bars
from benchmarks.replies import LARGE, SMALL, Size
from benchmarks.results import Grid, main, median_of, number, progress, ratio, times
from benchmarks.trials import measured, open_all, warm_all

CONNECTIONS = 64
WORKERS = (1, 2, 4)


def run(quick: bool) -> dict[str, Any]:
    sizes = (SMALL,) if quick else (SMALL, LARGE)
    seconds, rounds = (1, 1) if quick else (3, 2)
    cells: list[dict[str, Any]] = []
    with progress() as bar:
        task = bar.add_task("scaling", total=len(sizes) * len(WORKERS) * rounds)
        for size in sizes:
            cells += _measure(size, seconds, rounds, lambda: bar.advance(task))
    return {"connections": CONNECTIONS, "cells": cells}


def _measure(size: Size, seconds: float, rounds: int, advance: Callable[[], None]) -> list[dict[str, Any]]:
    body = size.body(False)
    openers = {str(workers): partial(verbatim, workers=workers, alone=False) for workers in WORKERS}
    with open_all(size, False, openers) as proxies:
        bodies = dict.fromkeys(proxies, body)
        warmed = warm_all(proxies, bodies)
        found = measured(proxies, bodies, CONNECTIONS, seconds, rounds, warmed, advance)
    return [{"workers": int(name), "size": size.name, **cell} for name, cell in found.items()]


def tables(result: dict[str, Any]) -> Sequence[Grid]:
    rows = []
    for cell in result["cells"]:
        alone = next(one for one in result["cells"] if one["size"] == cell["size"] and one["workers"] == 1)
        speed, cost = median_of(cell, "calls_per_second"), median_of(cell, "cpu_seconds_per_1000_calls")
        beside = times(ratio(speed, median_of(alone, "calls_per_second")))
        rows.append((cell["size"], str(cell["workers"]), number(speed), beside, number(cost), number(cell["resident_mib"])))
    columns = ("calls", "processes", "calls/s", "beside one", "CPU s per 1,000 calls", "MiB")
    title = f"{result['machine']['cores']} cores for everything, {result['connections']} connections, chat path"
    return [Grid(title, columns, tuple(rows))]


def draw(result: dict[str, Any], path: Path) -> None:
    groups = list(dict.fromkeys(cell["size"] for cell in result["cells"]))
    series = {
        f"{workers} processes": [
            next(cell["calls_per_second"] for cell in result["cells"] if cell["size"] == size and cell["workers"] == workers)
            for size in groups
        ]
        for workers in WORKERS
    }
    bars(path, "calls per second, chat path", groups, series, "linear")


if __name__ == "__main__":
    main("scaling", __doc__, run, tables, draw, alone=False)
