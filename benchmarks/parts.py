"""Where the CPU of a call goes, by part of the service: py-spy's samples of its stacks, times the CPU that a call takes.

    python -m benchmarks.parts [--quick]
    python -m benchmarks.parts --compare BEFORE.json [AFTER.json]     # two results side by side; nothing is measured

A sample counts for the innermost frame that belongs to a part (`PARTS`), so what a library or C code does counts for the part that called
it. uvloop's own work, polling and the writes that it puts off, has no such frame and is part of the loop. The CPU per call comes from a run
without the profiler.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.calls import NAMES
from benchmarks.contenders import CONTENDERS, Proxy, peer
from benchmarks.load import Body, load
from benchmarks.measured_code import name_commit
from benchmarks.replies import SIZES
from benchmarks.results import Grid, main, median_of, number, progress, rounded
from benchmarks.trials import figures, open_all, trial, warm

CONNECTIONS = 16
RATE = 500
"""Samples per second."""
LOOP = "event loop, and what nobody called"

PARTS: dict[str, tuple[str, ...]] = {
    "harness HTTP": (
        "uvicorn/",
        "starlette/",
        "fastapi/",
        "cli/serving/",
        "proxy/app.py",
        "proxy/call/door.py",
        "proxy/call/http.py",
        "proxy/call/writer.py",
    ),
    "messages: dialect, tree, plan": (
        "proxy/dialects/",
        "proxy/call/phases.py",
        "proxy/call/plan.py",
        "proxy/call/prompts.py",
        "proxy/call/cache.py",
        "proxy/call/session.py",
        "reconstruct/",
    ),
    "engine: HTTP, JSON, choice of a replica": ("proxy/engine/",),
    "ids, logprobs and records": (
        "proxy/engine/apis/reply.py",
        "proxy/engine/apis/vllm_reply.py",
        "proxy/engine/apis/chat_format.py",
        "proxy/call/record.py",
        "reconstruct/codec.py",
        "reconstruct/records.py",
    ),
    "Redis client": ("redis/", "hiredis/", "proxy/store/"),
    "flow: tasks, generators, metrics": ("proxy/", "asyncio/", "contextlib.py", "prometheus_client/"),
    LOOP: ("asyncio/runners.py", "asyncio/base_events.py", "uvicorn/server.py", "uvicorn/_compat.py", "cli/"),
}
"""Files and folders by part; the longest that fits a frame's file decides. Other libraries count for whoever called them."""

_WAITING = ("Condition.wait (threading.py", "_worker (concurrent/futures/thread.py")
"""Idle threads of a pool, which py-spy takes for active ones."""

_PREFIXES = {prefix: part for part, prefixes in PARTS.items() for prefix in prefixes}
_BY_LENGTH = sorted(_PREFIXES, key=len, reverse=True)


def part_of(file: str) -> str | None:
    """The part that a file belongs to, by its path from a folder of imports."""
    return next((_PREFIXES[prefix] for prefix in _BY_LENGTH if file.startswith(prefix)), None)


def attribute(stack: str) -> str:
    """The part of py-spy's `outer (file:line);inner (file:line)`."""
    for frame in reversed(stack.split(";")):
        part = part_of(frame.rpartition(" (")[2].partition(":")[0])
        if part is not None:
            return part
    return LOOP


def shares(lines: Iterable[str]) -> tuple[dict[str, float], int]:
    """The share of each part in py-spy's raw output, lines of `stack count`, and the number of samples."""
    counts: Counter[str] = Counter()
    for line in lines:
        stack, _, count = line.rstrip("\n").rpartition(" ")
        if not stack.rpartition(";")[2].startswith(_WAITING):
            counts[attribute(stack)] += int(count)
    total = counts.total()
    if not total:
        raise SystemExit("py-spy took no samples")
    return {part: rounded(counts[part] / total) for part in PARTS}, total


def run(quick: bool) -> dict[str, Any]:
    seconds = 1.0 if quick else 6.0
    settings = [
        (size, name)
        for size in (("small",) if quick else ("small", "large"))
        for name in ("verbatim-plugin", "verbatim-token", "verbatim")
    ]
    cells = []
    with progress() as bar:
        for size, name in bar.track(settings, description="parts"):
            body = SIZES[size].body(False)
            with open_all(SIZES[size], False, {name: CONTENDERS[name]}) as opened:
                cells.append({"contender": name, "size": size, **_measure(opened[name], body, seconds)})
    return {"connections": CONNECTIONS, "cells": cells}


def _measure(proxy: Proxy, body: Body, seconds: float) -> dict[str, Any]:
    warm(proxy, body)
    cost = median_of(figures([trial(proxy, body, CONNECTIONS, seconds / 2)]), "cpu_seconds_per_1000_calls")
    assert proxy.tested is not None and cost is not None
    found, samples = shares(_sample(proxy, body, seconds))
    return {"cpu_us_per_call": rounded(1000 * cost), "shares": found, "samples": samples}


def _sample(proxy: Proxy, body: Body, seconds: float) -> list[str]:
    """py-spy's lines while the service is under load."""
    assert proxy.tested is not None
    with tempfile.TemporaryDirectory(prefix="verbatim-bench-") as folder:
        raw = Path(folder) / "raw"
        what = ["--pid", str(proxy.tested.pid), "--rate", str(RATE), "--duration", str(round(seconds))]
        argv = [peer("py-spy"), "record", *what, "--format", "raw", "--output", str(raw)]
        with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as spy:
            # Longer than the profile, or its end would see an idle service; idle samples are not taken.
            load(proxy.url, proxy.targets, body, CONNECTIONS, seconds + 1)
            said, _ = spy.communicate()
        if not raw.exists():
            raise SystemExit(f"py-spy could not watch the service; it needs the right to trace it (ptrace):\n{said}")
        return raw.read_text().splitlines()


def tables(result: dict[str, Any]) -> Sequence[Grid]:
    cells = result["cells"]
    columns = tuple(_setting(cell) for cell in cells)
    rows = [(part, *(number(_spent(cell, part)) for cell in cells)) for part in PARTS]
    rows.append(("together", *(number(cell["cpu_us_per_call"]) for cell in cells)))
    return [Grid(f"CPU µs per call by part, whole replies, {result['connections']} connections", ("", *columns), tuple(rows))]


def compare(before: Mapping[str, Any], after: Mapping[str, Any]) -> Grid:
    """For the settings that both have."""
    old = {_setting(cell): cell for cell in before["cells"]}
    pairs = [(_setting(cell), old[_setting(cell)], cell) for cell in after["cells"] if _setting(cell) in old]
    rows = [(part, *(_change(_spent(was, part), _spent(now, part)) for _, was, now in pairs)) for part in PARTS]
    rows.append(("together", *(_change(was["cpu_us_per_call"], now["cpu_us_per_call"]) for _, was, now in pairs)))
    commits = " → ".join(name_commit(result["machine"]) for result in (before, after))
    return Grid(f"CPU µs per call by part, {commits}", ("", *(setting for setting, _, _ in pairs)), tuple(rows))


def _setting(cell: Mapping[str, Any]) -> str:
    return f"{cell['size']}, {NAMES[cell['contender']].split(', ')[1]}"


def _spent(cell: Mapping[str, Any], part: str) -> float:
    return float(cell["shares"].get(part, 0.0) * cell["cpu_us_per_call"])


def _change(was: float, now: float) -> str:
    return f"{number(was)} → {number(now)}"


def _compare_files(names: Sequence[str]) -> None:
    if len(names) not in (1, 2):
        raise SystemExit("usage: python -m benchmarks.parts --compare BEFORE.json [AFTER.json]")
    before, after = (json.loads(Path(name).read_text()) for name in (names[0], (*names, "benchmarks/results/parts.json")[1]))
    Console(width=160).print(compare(before, after).rich())


if __name__ == "__main__":
    if "--compare" in sys.argv:
        _compare_files(sys.argv[sys.argv.index("--compare") + 1 :])
    else:
        main("parts", __doc__, run, tables)
