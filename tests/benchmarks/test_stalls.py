"""A turn of the event loop that takes long is noted with what was at work, and counted in the phase in which it ended."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

from benchmarks.stalls import Phase, describe, tables
from benchmarks.watched_service import SLOW_SECONDS, Watch


def turn(at: float, seconds: float, **told: Any) -> dict[str, Any]:
    return {"at": at, "seconds": seconds, "cpu_seconds": 0.0, "without_core": 0.0, "collecting": 0.0, "stacks": [], **told}


def test_a_phase_tells_its_own_answers_and_turns() -> None:
    probes = [(9.9, 900.0), (10.5, 20.0), (11.0, 101.0), (12.1, 800.0)]
    slow = turn(10.2, 0.3, without_core=0.1, stacks=["loop: a", "loop: b", "loop: b"])
    others = [turn(9.0, 5.0), turn(11.9, 0.2, cpu_seconds=0.06, collecting=0.05), turn(12.5, 5.0)]
    told = describe(Phase("close", 10.0, 12.0, 512.0), probes, [slow, *others])
    figures = ("probes", "worst_healthz_ms", "over_100_ms", "longest_turn_ms", "longest_own_ms", "longest_turn_cpu_ms")
    assert [told[name] for name in figures] == [2, 101.0, 1, 300.0, 200.0, 60.0]
    assert (told["longest_collection_ms"], told["peak_mib"]) == (50.0, 512.0)
    assert told["slowest"][0] == {"ms": 300.0, "cpu_ms": 0.0, "without_core_ms": 100.0, "at_work": ["2x loop: b", "1x loop: a"]}
    (grid,) = tables({"sessions": 8, "tokens": 64, "phases": [told]})
    assert grid.rows[0][:3] == ("close", "2", "101")


def test_a_slow_turn_is_noted_with_the_stack_that_was_at_work(tmp_path: Path) -> None:
    def work_long() -> None:
        while time.thread_time() < until:
            pass

    async def watched() -> None:
        with (tmp_path / "turns").open("w") as file:
            watch = Watch(asyncio.get_running_loop(), file)
            work_long()
            while not (tmp_path / "turns").read_text():
                await asyncio.sleep(0.01)
            watch.close()

    until = time.thread_time() + 10 * SLOW_SECONDS
    asyncio.run(watched())
    noted = [json.loads(line) for line in (tmp_path / "turns").read_text().splitlines()]
    assert noted[0]["cpu_seconds"] > 5 * SLOW_SECONDS and noted[0]["without_core"] >= 0
    assert any(stack.startswith("loop: work_long (test_stalls.py:") for stack in noted[0]["stacks"])
