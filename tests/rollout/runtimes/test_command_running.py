"""Commands of the node's own machine: what goes on in the node while they run, and that nothing keeps them from being ended."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from contract.tasks import RuntimeSpec
from rollout.runtimes import processes
from rollout.runtimes.command import ExecLimits, finish_process, start_process
from rollout.runtimes.local.resources import Resources
from rollout.runtimes.processes import ContainerProcesses
from tests.support.machine import require
from tests.support.runtimes.runtime_places import SECONDS, shell, unconfined


async def test_a_great_input_goes_to_a_command_piece_by_piece() -> None:
    """Handed over at once it is copied at once, and nothing else of the node goes on meanwhile."""
    async with start_process(["sleep", "600"], env=os.environ) as process:
        running = asyncio.ensure_future(
            finish_process(
                process,
                bytes(64 << 20),
                ExecLimits(SECONDS, grace_seconds=0.1),
                lambda number: processes.send_signal([process.pid], number),
            )
        )
        async with asyncio.timeout(SECONDS):
            while not process.stdin.transport.get_write_buffer_size():
                await asyncio.sleep(0.01)
        assert process.stdin.transport.get_write_buffer_size() <= 1 << 20
        running.cancel()
        await asyncio.wait({running})


async def test_a_command_that_is_cancelled_while_it_starts_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The old bug: its first process was killed and nothing else, and what that had detached held the output, for which was waited for
    ever: a runtime's stop did not return."""
    start, detached, sent = asyncio.create_subprocess_exec, tmp_path / "detached", []

    async def start_slowly(*argv: str, **options: Any) -> asyncio.subprocess.Process:
        process = await start(*argv, **options)
        while not (detached.exists() and detached.read_text().endswith("\n")):
            await asyncio.sleep(0.01)
        running.cancel()
        return process

    async def run() -> None:
        line = f"(setsid sh -c 'echo $$ > {detached}; exec sleep 600' &); exec sleep 600"
        async with start_process(["sh", "-c", line], env=os.environ) as process:

            def send(number: int) -> None:
                sent.append(number)
                processes.send_signal([process.pid, int(detached.read_text())], number)

            await finish_process(process, b"", ExecLimits(SECONDS, grace_seconds=0.1), send)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start_slowly)
    running = asyncio.ensure_future(run())
    await asyncio.wait({running}, timeout=SECONDS)
    if not running.done():
        processes.send_signal([int(detached.read_text())])
        await asyncio.wait({running})
    assert sent[:1] == [signal.SIGTERM] and sent[-1] == signal.SIGKILL
    assert running.cancelled()


async def test_memory_is_looked_at_while_the_node_goes_on() -> None:
    looked: list[threading.Thread] = []
    killed: list[threading.Thread] = []

    def pids() -> list[int]:
        looked.append(threading.current_thread())
        return [os.getpid()]

    await Resources(RuntimeSpec(memory_mb=1), "t", []).watch(pids, lambda: killed.append(threading.current_thread()))
    assert killed == [threading.main_thread()]
    assert threading.main_thread() not in looked


@pytest.mark.parametrize("sent", ["STOP", "KILL"])
async def test_a_command_that_stops_or_kills_its_supervisor_is_ended_all_the_same(tmp_path: Path, sent: str) -> None:
    line = f"echo $$ > pid; kill -{sent} $PPID; sleep 600"
    async with unconfined(tmp_path).started() as runtime:
        for seconds in (0.5, 5.0, 25.0, SECONDS) if sent == "STOP" else (SECONDS,):
            async with asyncio.timeout(2 * SECONDS):
                done = await shell(runtime, line, timeout_seconds=seconds)
                told = (await shell(runtime, "cat pid")).stdout
            # On a slow machine it had not begun by then.
            if told:
                break
        # Without its supervisor it is over.
        assert (done.timed_out, done.exit_code) == ((True, 143) if sent == "STOP" else (False, 137))
        assert processes.find_parent(int(told)) is None


async def test_a_daemon_that_holds_the_output_of_a_command_without_supervisor_keeps_nobody_waiting(tmp_path: Path) -> None:
    """It is in no session of the command's, and no child of what watched over it."""
    daemon = "setsid sh -c 'echo $$ > pid; exec sleep 600' &"
    async with unconfined(tmp_path).started() as runtime:
        async with asyncio.timeout(SECONDS):
            done = await shell(runtime, f"{daemon} until [ -s pid ]; do sleep 0.1; done; kill -KILL $PPID")
            assert (done.timed_out, done.exit_code) == (False, 137)
            pid = int((await shell(runtime, "cat pid")).stdout)
        assert processes.find_parent(pid) is None


async def test_repeated_kills_in_a_container_keep_the_node_from_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three looks find something; between them the node goes on."""
    within = ContainerProcesses(1, "pid:[1]")
    within.commands["c"] = frozenset()
    looks: list[int] = []

    def started_by(command: str) -> list[int]:
        looks.append(len(looks))
        return [2**22 + 1] if len(looks) < 4 else []

    monkeypatch.setattr(within, "_find_started", started_by)
    within.kill("c")
    assert looks == [0]
    async with asyncio.timeout(SECONDS):
        while len(looks) < 4:
            await asyncio.sleep(0.01)


def test_a_late_kill_never_hits_a_container_that_was_started_afterwards() -> None:
    """The kernel gave the next namespace the number of the one that was gone, and its first process was killed."""
    require("bwrap")
    with apart() as first:
        within = ContainerProcesses(first, str(processes.read_namespace(first, "pid")))
    within.commands["c"] = frozenset()
    for _ in range(20):
        with apart() as other:
            assert within._find_started("c") == [], other


@contextmanager
def apart() -> Iterator[int]:
    """The first process of a process namespace, which ends with the block."""
    argv = ["bwrap", "--bind", "/", "/", "--unshare-pid", "--die-with-parent", "sh", "-c", "echo; exec sleep 600"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout.readline()
        (first,) = (pid for pid in processes.find_descendants([process.pid]) if processes.find_parent(pid) == process.pid)
        try:
            yield first
        finally:
            processes.send_signal([first])
