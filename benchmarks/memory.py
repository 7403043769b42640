"""Memory of the service over 100,000 calls, and of rllm-model-gateway over fewer: does it grow with the calls?

    python -m benchmarks.memory [--quick]

Small calls over 16 connections, in 64 sessions at a time that are closed and deleted when their time is over, as a trainer's
retention would. rllm's sessions are deleted as well. What is measured is resident memory of the service's process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.calls import NAMES, plain_name
from benchmarks.contenders import CONTENDERS, SESSIONS, Proxy
from benchmarks.load import Target, load
from benchmarks.plots import lines
from benchmarks.processes import request, resident_mib
from benchmarks.replies import SMALL
from benchmarks.results import Grid, main, number, progress, rounded
from benchmarks.trials import open_all, warm

CONNECTIONS = 16
WINDOW_SECONDS = 5
FULL = {"verbatim": 100_000, "verbatim-token": 10_000, "rllm-memory": 1_000, "rllm-sqlite": 1_000}
QUICK = {"verbatim": 100, "verbatim-token": 50, "rllm-memory": 50, "rllm-sqlite": 50}
Point = tuple[int, float]


def _show(bar: Any, task: Any, done: int) -> None:
    bar.update(task, completed=done)


def run(quick: bool) -> dict[str, Any]:
    plan = QUICK if quick else FULL
    found = {}
    with progress() as bar:
        for name, calls in plan.items():
            task = bar.add_task(name, total=calls)
            found[name] = _measure(name, calls, partial(_show, bar, task))
    return {"contenders": found}


def _measure(name: str, calls: int, advance: Callable[[int], None]) -> dict[str, Any]:
    with open_all(SMALL, False, {name: CONTENDERS[name]}) as opened:
        proxy, body, done = opened[name], SMALL.body(False), 0
        warm(proxy, body)
        assert proxy.tested is not None
        points: list[Point] = [(0, resident_mib(proxy.tested.pid))]
        while done < calls:
            targets = _sessions(proxy, done)
            spent = load(proxy.url, targets, body, CONNECTIONS, WINDOW_SECONDS).calls
            done += spent
            _end(proxy, targets)
            points.append((done, round(resident_mib(proxy.tested.pid), 2)))
            advance(min(done, calls))
    return {"points": points, "mib_per_1000_calls": rounded(_slope(points))}


def _sessions(proxy: Proxy, done: int) -> tuple[Target, ...]:
    """New ones for each window."""
    if proxy.redis_port is None:
        return tuple(Target(f"/sessions/at-{done}-{place}/v1/chat/completions", "") for place in range(SESSIONS))
    made = [request(proxy.url, "POST", "/sessions", {}) for _ in range(SESSIONS)]
    return tuple(Target(f"/s/{session['session_id']}/v1/chat/completions", session["api_key"]) for session in made)


def _end(proxy: Proxy, targets: Sequence[Target]) -> None:
    for target in targets:
        session = target.path.split("/")[2]
        if proxy.redis_port is not None:
            request(proxy.url, "POST", f"/sessions/{session}/close", {"status": "completed", "reward": 0.0})
        request(proxy.url, "DELETE", f"/sessions/{session}")


def _slope(points: Sequence[Point]) -> float:
    """MiB per 1,000 calls over the second half, when everything has been used once."""
    half = points[len(points) // 2 :] if len(points) > 3 else points
    return float(np.polyfit([calls / 1000 for calls, _ in half], [mib for _, mib in half], 1)[0])


def tables(result: dict[str, Any]) -> Sequence[Grid]:
    rows = []
    for name, found in result["contenders"].items():
        points = found["points"]
        middle = points[len(points) // 2]
        figures = (number(points[0][1]), f"{number(middle[1])} ({middle[0]:,})", f"{number(points[-1][1])} ({points[-1][0]:,})")
        rows.append((NAMES[name], *figures, number(found["mib_per_1000_calls"])))
    columns = ("", "MiB at the start", "at half (calls)", "at the end (calls)", "MiB per 1,000 calls, second half")
    return [Grid("Resident memory over small calls, sessions closed and deleted on the way", columns, tuple(rows))]


def draw(result: dict[str, Any], path: Path) -> None:
    contenders = result["contenders"].items()
    series = {plain_name(name): [tuple(point) for point in found["points"]] for name, found in contenders}
    lines(path, [("resident memory", "calls", "MiB", series)])


if __name__ == "__main__":
    main("memory", __doc__, run, tables, draw)
