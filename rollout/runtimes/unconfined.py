"""One command with no sandbox: the node's user on the node's machine. Only the supervisor sees to it that all it starts ends with it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from rollout.runtimes import processes
from rollout.runtimes.base import Executed
from rollout.runtimes.command import Held, started
from rollout.runtimes.supervisor import BELL

_SUPERVISOR = Path(__file__).with_name("supervisor.py")


@asynccontextmanager
async def supervised(argv: Sequence[str], env: Mapping[str, str], owner: Mapping[str, str]) -> AsyncIterator[Held]:
    """The command, held before its start. `owner` marks the supervisor, by which it is found again."""
    hold, go = os.pipe()
    try:
        line = [sys.executable, "-I", "-S", str(_SUPERVISOR), str(hold), *argv]
        async with started(line, env={**env, **owner}, pass_fds=(hold,)) as process:
            os.close(hold)
            hold = -1
            # It waits to be released, so these are still its own.
            outputs = processes.pipes(process.pid)

            def pids() -> list[int]:
                return processes.descendants([process.pid]) if process.returncode is None else []

            def send(number: int) -> None:
                if process.returncode is None:
                    process.send_signal(BELL if number == signal.SIGKILL else number)
                    # A command may have stopped it.
                    process.send_signal(signal.SIGCONT)
                elif process.returncode < 0 or not _read_whole(process):
                    # A command may have killed it: then its session is left, and what went out of that and holds the output.
                    processes.send({*processes.of_session(process.pid), *processes.holding(outputs)}, number)

            async def failure(done: Executed) -> str | None:
                return None

            yield Held(process, process.pid, partial(_released, go), send, pids, failure)
    finally:
        os.close(go)
        if hold >= 0:
            os.close(hold)


def _read_whole(process: asyncio.subprocess.Process) -> bool:
    """Whether nobody holds its output any more."""
    assert process.stdout and process.stderr
    return process.stdout.at_eof() and process.stderr.at_eof()


def _released(go: int) -> None:
    os.write(go, b"x")
