"""The demo's children: one that dies is named with its log, and none is left behind."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from examples.demo.fleet import unless_one_ends
from examples.demo.processes import ROOT, Child, ChildDied

SLEEPS = "import time; time.sleep(600)"
# A process that starts another one and prints its pid.
HAS_A_CHILD = f"""
import subprocess, sys, time
print(subprocess.Popen([sys.executable, "-c", {SLEEPS!r}]).pid, flush=True)
time.sleep(600)
"""


def child(code: str, log: Path, *, may_finish: bool = False) -> Child:
    return Child("the worker", [sys.executable, "-c", code], log, may_finish=may_finish)


def is_running(pid: int) -> bool:
    """False also for a zombie that nobody has waited for yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def has_written(log: Path) -> bool:
    return log.exists() and log.read_text() != ""


async def written(log: Path) -> None:
    """Returns when the child has written something."""
    async with asyncio.timeout(60):
        while not has_written(log):
            await asyncio.sleep(0.02)


async def test_a_child_that_fails_is_named_with_its_exit_and_its_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    async with child("import sys; sys.exit('it broke')", log) as process:
        with pytest.raises(ChildDied, match=f"the worker exited with code 1; its log is {log}"):
            await process.finished()
    assert "it broke" in log.read_text()


async def test_a_child_that_is_killed_is_no_normal_end(tmp_path: Path) -> None:
    async with child("import os; os.kill(os.getpid(), 9)", tmp_path / "log", may_finish=True) as process:
        with pytest.raises(ChildDied, match="was killed by signal 9"):
            await process.finished()


async def test_only_a_child_that_may_finish_may(tmp_path: Path) -> None:
    async with child("", tmp_path / "log", may_finish=True) as process:
        await process.finished()
    async with child("", tmp_path / "log") as process:
        with pytest.raises(ChildDied, match="exited with code 0"):
            await process.finished()


async def test_the_end_of_the_block_ends_the_child_and_its_children(tmp_path: Path) -> None:
    log = tmp_path / "log"
    async with child(HAS_A_CHILD, log) as process:
        await written(log)
        pids = [process.process.pid, int(log.read_text())]
        assert all(map(is_running, pids))
    async with asyncio.timeout(60):
        while any(map(is_running, pids)):
            await asyncio.sleep(0.05)


async def test_work_stops_as_soon_as_a_child_dies(tmp_path: Path) -> None:
    stopped = asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.sleep(600)
        finally:
            stopped.set()

    async with child(SLEEPS, tmp_path / "log") as process:
        os.kill(process.process.pid, 15)
        with pytest.raises(ChildDied, match="signal 15"):
            await unless_one_ends(work(), process.finished())
    assert stopped.is_set()


async def test_the_result_of_the_work_comes_back_though_a_child_finished_before(tmp_path: Path) -> None:
    async def work() -> str:
        await asyncio.sleep(0.5)
        return "done"

    async with child("", tmp_path / "log", may_finish=True) as process:
        assert await unless_one_ends(work(), process.finished()) == "done"


async def test_a_dead_child_is_named_rather_than_the_error_it_led_to(tmp_path: Path) -> None:
    """The child dies a moment after the work that needs it."""

    async def work() -> None:
        await written(tmp_path / "log")
        raise ConnectionError("nobody listens")

    program = "import time; print('started', flush=True); time.sleep(0.1); raise SystemExit(3)"
    async with child(program, tmp_path / "log") as process:
        with pytest.raises(ChildDied, match="exited with code 3"):
            await unless_one_ends(work(), process.finished())


async def test_an_error_of_the_work_itself_comes_through(tmp_path: Path) -> None:
    async def work() -> None:
        raise ConnectionError("nobody listens")

    async with child(SLEEPS, tmp_path / "log") as process:
        with pytest.raises(ConnectionError):
            await unless_one_ends(work(), process.finished())


async def test_a_child_ends_when_the_demo_is_killed(tmp_path: Path) -> None:
    """The demo is a program of its own, which gets SIGKILL: it cannot end its children itself."""
    program = f"""
import asyncio, sys
from pathlib import Path
from examples.demo.processes import Child

async def main():
    async with Child("the worker", [sys.executable, "-c", {SLEEPS!r}], Path({str(tmp_path / "log")!r})) as child:
        print(child.process.pid, flush=True)
        await child.finished()

asyncio.run(main())
"""
    demo = await asyncio.create_subprocess_exec(sys.executable, "-c", program, cwd=ROOT, stdout=asyncio.subprocess.PIPE)
    pid = int(await demo.stdout.readline())
    demo.kill()
    await demo.wait()
    async with asyncio.timeout(60):
        while is_running(pid):
            await asyncio.sleep(0.05)
