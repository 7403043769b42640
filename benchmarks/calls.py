"""Calls per second, latency and CPU of the service beside its peers: sizes of calls, connections, streamed and whole.

wrk asks each contender in turn, all of them before one static upstream in vLLM's shapes, each on one core: rllm-model-gateway with its
memory and its SQLite store, the LiteLLM proxy, nginx that passes through unread, and the upstream without any proxy. Every call is a
conversation that no call before it had. The service is measured on both of its paths to an engine, with a redis-server that keeps
an append-only file.

    python -m benchmarks.calls [--quick]

writes `results/calls.json` and `.png`. CPU seconds are those of the contender's own processes; they hardly depend on what else
the machine does, calls per second and latency do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.contenders import CONTENDERS, peer_versions
from benchmarks.plots import bars
from benchmarks.replies import LARGE, SIZES, SMALL, VERY_LARGE, Size
from benchmarks.results import Grid, main, median_of, number, progress, ratio, times
from benchmarks.trials import measured, open_all, warm_all

Cell = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Setting:
    """What all contenders are asked, over so many connections, and how often."""

    size: Size
    streamed: bool
    rounds: Mapping[int, int]
    """By number of connections."""
    named: tuple[str, ...] = (
        "engine",
        "nginx",
        "verbatim",
        "verbatim-token",
        "verbatim-plugin",
        "rllm-sqlite",
        "litellm",
    )

    @property
    def runs(self) -> int:
        return sum(self.rounds.values()) * len(self.named)


SECONDS = 2.0
"""Of a run; longer for the slow, see `benchmarks.trials`."""
FULL = (
    # The targets are held against these two, so they are measured most.
    Setting(SMALL, False, {1: 2, 16: 3, 64: 1}, tuple(CONTENDERS)),
    Setting(LARGE, False, {1: 2, 16: 2}),
    Setting(VERY_LARGE, False, {16: 1}),
    Setting(SMALL, True, {16: 1}),
    Setting(LARGE, True, {16: 1}),
    Setting(VERY_LARGE, True, {1: 1}),
)
QUICK = (
    Setting(SMALL, False, {1: 1, 16: 1}),
    Setting(LARGE, False, {1: 1, 16: 1}),
    Setting(SMALL, True, {16: 1}),
)


def run(quick: bool) -> Iterator[dict[str, Any]]:
    settings, seconds = (QUICK, 1.0) if quick else (FULL, SECONDS)
    cells: list[Cell] = []
    with progress() as bar:
        task = bar.add_task("calls", total=sum(setting.runs for setting in settings))
        for setting in settings:
            cells += _measure(setting, seconds, lambda: bar.advance(task))
            yield {"peers": peer_versions(), "seconds_per_run": seconds, "cells": cells}


def _measure(setting: Setting, seconds: float, advance: Callable[[], None]) -> list[Cell]:
    cells = []
    size, streamed = setting.size, setting.streamed
    body = size.body(streamed)
    with open_all(size, streamed, {name: CONTENDERS[name] for name in setting.named}) as proxies:
        bodies = dict.fromkeys(proxies, body)
        warmed = warm_all(proxies, bodies)
        for connections, rounds in setting.rounds.items():
            found = measured(proxies, bodies, connections, seconds, rounds, warmed, advance)
            where = {"size": size.name, "streamed": streamed, "connections": connections, "rounds": rounds}
            cells += [{"contender": name, **where, **cell} for name, cell in found.items()]
    return cells


def find(cells: Iterable[Cell], **setting: Any) -> Cell | None:
    return next((cell for cell in cells if all(cell[name] == value for name, value in setting.items())), None)


NAMES = {
    "engine": "the static engine itself",
    "nginx": "nginx passing through unread",
    "verbatim": "**Verbatim**, chat path, Redis",
    "verbatim-token": "**Verbatim**, token path, Redis",
    "verbatim-plugin": "**Verbatim**, token path with the plugin, Redis",
    "rllm-sqlite": "rllm-model-gateway, SQLite",
    "rllm-memory": "rllm-model-gateway, memory",
    "litellm": "LiteLLM proxy",
}


def plain_name(contender: str) -> str:
    """For a plot, which knows no Markdown."""
    return NAMES[contender].replace("*", "")


TIMES_PEERS = {
    "small": {"rllm-sqlite": 12.0, "litellm": 40.0, "nginx": 0.06},
    "large": {"rllm-sqlite": 12.0, "litellm": 40.0, "nginx": 0.1},
}
"""How many times a peer's calls per second the service is to make."""
ADDED_MS = {"small": 1.0, "large": 4.0}
"""What the service may add to a call at one connection, p50."""


def tables(result: dict[str, Any]) -> Sequence[Grid]:
    grids = []
    settings = list(dict.fromkeys((cell["size"], cell["streamed"]) for cell in result["cells"]))
    for size, streamed in settings:
        grids.append(_table(result["cells"], size, streamed))
    return [_targets(result["cells"]), *grids]


def _table(cells: Sequence[Cell], size: str, streamed: bool) -> Grid:
    there = [cell for cell in cells if cell["size"] == size and cell["streamed"] == streamed]
    connections = list(dict.fromkeys(cell["connections"] for cell in there))
    rows = []
    for name in dict.fromkeys(cell["contender"] for cell in there):
        at = {cell["connections"]: cell for cell in there if cell["contender"] == name}
        busiest = at.get(max(set(connections) & {1, 16}), {})
        cost = median_of(busiest, "cpu_seconds_per_1000_calls")
        speeds = [number(median_of(at.get(count, {}), "calls_per_second")) for count in connections]
        latencies = [number(median_of(at.get(count, {}), "p50_ms")) for count in connections]
        by_round = ", ".join(map(number, busiest.get("cpu_seconds_by_round", ()))) or "-"
        rows.append((NAMES[name], *speeds, *latencies, number(cost), by_round, number(busiest.get("resident_mib"))))
    columns = (*(f"{count} conn." for count in connections), *(f"p50 ms, {count}" for count in connections))
    title = f"{size} calls ({SIZES[size].label.partition(' (')[2]}, {'streamed' if streamed else 'whole'}: calls/s"
    return Grid(title, ("", *columns, "CPU s per 1,000 calls", "by round", "MiB"), tuple(rows))


def _targets(cells: Sequence[Cell]) -> Grid:
    rows = []
    for size in ("small", "large"):
        for ours in ("verbatim", "verbatim-token", "verbatim-plugin"):
            own = find(cells, contender=ours, size=size, streamed=False, connections=16)
            if own is None:
                continue
            for peer, wanted in TIMES_PEERS[size].items():
                rows.append((f"{NAMES[ours]}, {size}", NAMES[peer], f"≥ {times(wanted)}", *_ratios(own, cells, peer, size)))
            rows.append(_added(cells, ours, size))
    columns = ("", "beside", "wanted", "calls/s", "by CPU seconds", "least", "most")
    return Grid(
        "Targets: calls per second at 16 connections, whole answers; latency added at one connection", columns, tuple(rows)
    )


def _ratios(own: Cell, cells: Sequence[Cell], peer: str, size: str) -> tuple[str, ...]:
    """By calls per second; by CPU seconds per call; the least and the most of the first that the runs allow."""
    other = find(cells, contender=peer, size=size, streamed=False, connections=16)
    if other is None or "calls_per_second" not in own or "calls_per_second" not in other:
        return ("-",) * 4
    cost = "cpu_seconds_per_1000_calls"
    speed, theirs = own["calls_per_second"], other["calls_per_second"]
    by_cpu = ratio(median_of(other, cost), median_of(own, cost))
    by_speed = ((speed[mine], theirs[its]) for mine, its in (("median", "median"), ("least", "most"), ("most", "least")))
    middle, least, most = (ratio(*pair) for pair in by_speed)
    return tuple(times(found) for found in (middle, by_cpu, least, most))


def _added(cells: Sequence[Cell], ours: str, size: str) -> tuple[str, ...]:
    """What the service adds to the engine's own latency, and what of that is its own CPU."""
    own, engine = (find(cells, contender=name, size=size, streamed=False, connections=1) for name in (ours, "engine"))
    head = (f"{NAMES[ours]}, {size}", "added latency, p50", f"≤ {number(ADDED_MS[size])} ms")
    base = None if engine is None else median_of(engine, "p50_ms")
    if own is None or base is None or "p50_ms" not in own:
        return (*head, *("-",) * 4)
    p50, cpu = own["p50_ms"], median_of(own, "cpu_seconds_per_1000_calls")
    added = (p50["median"] - base, cpu, p50["least"] - base, p50["most"] - base)
    return (*head, *(f"{number(value)} ms" for value in added))


def draw(result: dict[str, Any], path: Path) -> None:
    """Calls per second at 16 connections, by size, on a logarithmic scale."""
    cells = [cell for cell in result["cells"] if cell["connections"] == 16 and not cell["streamed"]]
    groups = list(dict.fromkeys(cell["size"] for cell in cells))
    series = {
        plain_name(name): [
            found.get("calls_per_second") if (found := find(cells, contender=name, size=size)) else None for size in groups
        ]
        for name in NAMES
    }
    bars(path, "calls per second on one core, 16 connections, whole answers", groups, series)


if __name__ == "__main__":
    main("calls", __doc__, run, tables, draw)
