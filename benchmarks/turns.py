"""Sessions of 50 turns whose history grows: what a turn costs at its beginning and at its end, beside the peers.

    python -m benchmarks.turns [--quick]

One harness holds one conversation of tool calls at a time (a tool's answer of about 500 tokens, 200 sampled per turn), with each
contender in turn, before an engine that costs next to nothing and remembers what it rendered. CPU is that of the contender's
process per turn; the body that it must read grows with the history, its work should not grow much faster.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.calls import NAMES, plain_name
from benchmarks.contenders import CONTENDERS, Proxy, peer_versions
from benchmarks.plots import lines
from benchmarks.processes import family_cpu_seconds, fast_engine
from benchmarks.results import Grid, main, number, progress, ratio, rounded, times
from benchmarks.sessions import Harness

RESULT_BYTES = 2_000
SAMPLED = 199
NAMED = ("nginx", "verbatim", "verbatim-token", "rllm-sqlite", "litellm")
ENDS = 5
"""Turns at the beginning and at the end over which figures are taken."""


@dataclass(slots=True)
class Course:
    """Milliseconds of each turn, one list per session."""

    cpu_ms: list[list[float]] = field(default_factory=list)
    wall_ms: list[list[float]] = field(default_factory=list)
    body_bytes: list[int] = field(default_factory=list)


def run(quick: bool) -> dict[str, Any]:
    turns, sessions = (10, 1) if quick else (50, 3)
    courses = {name: Course() for name in NAMED}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="verbatim-bench-", ignore_cleanup_errors=True)))
        folder.chmod(0o755)
        engine = stack.enter_context(fast_engine("--tokens", str(SAMPLED), side="load"))
        proxies = {name: stack.enter_context(CONTENDERS[name](engine, folder / name)) for name in NAMED}
        bar = stack.enter_context(progress())
        task = bar.add_task("turns", total=len(NAMED) * (sessions + 1))
        for session in range(sessions + 1):
            for name, proxy in proxies.items():
                # The first is not counted: everything happens in it for the first time.
                _converse(proxy, session, 5 if session == 0 else turns, Course() if session == 0 else courses[name])
                bar.advance(task)
    return {
        "peers": peer_versions(),
        "turns": turns,
        "contenders": {name: _figures(course) for name, course in courses.items()},
    }


def _converse(proxy: Proxy, session: int, turns: int, course: Course) -> None:
    target = proxy.targets[session % len(proxy.targets)]
    assert proxy.tested is not None
    harness = Harness(proxy.url + target.path.removesuffix("/chat/completions"), target.key, RESULT_BYTES)
    cpu, wall, sizes = [], [], []
    for _ in range(turns):
        before, clock = family_cpu_seconds(proxy.tested.pid), time.perf_counter()
        harness.turn()
        wall.append((time.perf_counter() - clock) * 1000)
        cpu.append((family_cpu_seconds(proxy.tested.pid) - before) * 1000)
        sizes.append(harness.body_bytes)
    harness.close()
    course.cpu_ms.append(cpu)
    course.wall_ms.append(wall)
    course.body_bytes = sizes


def _figures(course: Course) -> dict[str, Any]:
    """Medians over the sessions, turn by turn."""
    cpu = [statistics.median(turn) for turn in zip(*course.cpu_ms, strict=True)]
    wall = [statistics.median(turn) for turn in zip(*course.wall_ms, strict=True)]
    return {
        "cpu_ms": [rounded(value) for value in cpu],
        "wall_ms": [rounded(value) for value in wall],
        "body_bytes": course.body_bytes,
        "session_cpu_seconds": rounded(sum(cpu) / 1000),
    }


def tables(result: dict[str, Any]) -> Sequence[Grid]:
    own = result["contenders"]["verbatim"]["session_cpu_seconds"]
    rows = []
    for name, found in result["contenders"].items():
        cpu, wall = found["cpu_ms"], found["wall_ms"]
        ends = (statistics.fmean(values[part]) for values in (cpu, wall) for part in (slice(ENDS), slice(-ENDS, None)))
        whole = found["session_cpu_seconds"]
        rows.append((NAMES[name], *map(number, ends), number(whole), times(ratio(whole, own))))
    last = result["contenders"]["verbatim"]["body_bytes"][-1]
    columns = (
        "",
        "CPU ms, first turns",
        "last turns",
        "wall ms, first turns",
        "last turns",
        "CPU s per session",
        "beside Verbatim",
    )
    return [Grid(f"A session of {result['turns']} turns; the last body has {last // 1000} kB", columns, tuple(rows))]


def draw(result: dict[str, Any], path: Path) -> None:
    panels = []
    for name, title in (("cpu_ms", "CPU of the proxy per turn"), ("wall_ms", "wall clock per turn")):
        series = {
            plain_name(contender): list(enumerate(found[name], start=1)) for contender, found in result["contenders"].items()
        }
        panels.append((title, "turn", "ms", series))
    lines(path, panels)


if __name__ == "__main__":
    main("turns", __doc__, run, tables, draw)
