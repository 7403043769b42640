"""Samples of stacks become the CPU of a call by part."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.parts import LOOP, PARTS, attribute, compare, part_of, shares, tables
from benchmarks.processes import ROOT
from benchmarks.results import Grid

SERVER = "_run_module_as_main (<frozen runpy>:198);serve (cli/serve.py:185);Runner.run (asyncio/runners.py:118)"
OURS = ("proxy", "reconstruct", "cli")
ENGINE, MESSAGES, IDS = "engine: HTTP, JSON, choice of a replica", "messages: dialect, tree, plan", "ids, logprobs and records"


@pytest.mark.parametrize(
    ("inner", "part"),
    [
        ("run_asgi (uvicorn/protocols/http/httptools_impl.py:422);Harness.__call__ (proxy/call/door.py:59)", "harness HTTP"),
        ("run_call (proxy/call/run.py:9);ask (proxy/engine/wire/http.py:7);dumps (json/encoder.py:3)", ENGINE),
        ("run_call (proxy/call/run.py:9);wait (asyncio/tasks.py:428)", "flow: tasks, generators, metrics"),
        ("parse (proxy/dialects/chat.py:3);encode (msgpack/__init__.py:3)", MESSAGES),
        ("read (proxy/engine/apis/reply.py:3)", IDS),
        ("begin (proxy/store/sessions.py:3);pack (redis/connection.py:9)", "Redis client"),
    ],
)
def test_a_sample_counts_for_the_innermost_frame_that_belongs_to_a_part(inner: str, part: str) -> None:
    assert attribute(f"{SERVER};{inner}") == part


def test_what_the_loop_does_by_itself_is_the_loops() -> None:
    assert attribute(SERVER) == LOOP
    assert attribute("start (somewhere.py:1)") == LOOP


def test_shares_leave_out_threads_that_wait_and_are_of_all_other_samples() -> None:
    lines = [
        f"{SERVER} 1",
        f"{SERVER};begin (proxy/store/sessions.py:3) 3",
        "run (threading.py:982);get (queue.py:171);Condition.wait (threading.py:327) 90",
    ]
    found, samples = shares(lines)
    assert samples == 4
    assert (found["Redis client"], found[LOOP], found["harness HTTP"]) == (0.75, 0.25, 0.0)
    with pytest.raises(SystemExit, match="no samples"):
        shares([])


def test_every_file_of_the_service_has_a_part_and_every_rule_names_something() -> None:
    files = {str(path.relative_to(ROOT)) for folder in OURS for path in (ROOT / folder).rglob("*.py")}
    assert not [file for file in files if part_of(file) is None]
    own = [prefix for prefixes in PARTS.values() for prefix in prefixes if prefix.split("/")[0] in OURS]
    gone = [prefix for prefix in own if not any(file.startswith(prefix) for file in files)]
    assert not gone, f"in benchmarks/parts.py, name the files that took over from {gone}"


def result(commit: str, cost: float, share: float) -> dict[str, Any]:
    cell = {"contender": "verbatim-token", "size": "small", "cpu_us_per_call": cost, "shares": {LOOP: share}, "samples": 100}
    return {"machine": {"commit": commit, "dirty": False}, "connections": 16, "cells": [cell]}


def by_part(grid: Grid) -> dict[str, str]:
    return {row[0]: row[1] for row in grid.rows}


def test_microseconds_are_the_share_of_a_call_and_two_results_stand_side_by_side() -> None:
    before, after = result("old", 1_200.0, 0.25), result("new", 400.0, 0.5)
    (grid,) = tables(before)
    assert grid.columns == ("", "small, token path")
    assert by_part(grid)[LOOP] == "300" and by_part(grid)["together"] == "1,200"
    beside = compare(before, after)
    assert "commit old → commit new" in beside.title
    assert by_part(beside)[LOOP] == "300 → 200" and by_part(beside)["together"] == "1,200 → 400"


def test_the_profiler_is_installed_with_the_peers() -> None:
    assert re.search(r"^py-spy==", Path(ROOT / "benchmarks" / "peers.txt").read_text(), re.MULTILINE)
