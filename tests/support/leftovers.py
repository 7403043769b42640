"""A watcher that outlives the test run and ends the processes that it leaves behind, also when it is killed.

Every process that a test starts inherits a variable that names the run. The watcher, a process in a session of its own, waits until the
run has ended, and then ends every process with that variable and their children.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from pathlib import Path

RUN = "TESTS_OF_RUN"
GRACE_SECONDS = 20.0
"""From SIGTERM to SIGKILL: vLLM takes a few seconds to end its own children."""


def watch() -> None:
    """Start the watcher of this process, and name the run to every process started from here on.

    One watcher serves all processes that share the tests, and a pytest that a test starts."""
    if RUN in os.environ:
        return
    name = f"{os.getpid()}-{time.monotonic_ns()}"
    os.posix_spawn(
        sys.executable,
        [sys.executable, "-S", "-E", str(Path(__file__)), str(os.getpid()), name],
        os.environ,
        file_actions=[(os.POSIX_SPAWN_OPEN, number, os.devnull, os.O_RDWR, 0) for number in (0, 1)],
        setsid=True,
    )
    os.environ[RUN] = name


def processes_of(name: str) -> set[int]:
    """Ids of the processes of that run and of their descendants."""
    marked, parents = set(), {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"{RUN}={name}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                marked.add(int(folder.name))
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if state == "Z":
            marked.discard(int(folder.name))
        else:
            parents[int(folder.name)] = int(parent)
    while below := {pid for pid, parent in parents.items() if parent in marked} - marked:
        marked |= below
    return marked - {os.getpid()}


def end(name: str) -> None:
    _send(signal.SIGTERM, name)
    deadline = time.monotonic() + GRACE_SECONDS
    while processes_of(name) and time.monotonic() < deadline:
        time.sleep(0.2)
    while _send(signal.SIGKILL, name):
        time.sleep(0.2)


def _send(number: signal.Signals, name: str) -> set[int]:
    """The processes of that run that were there to take the signal."""
    pids = processes_of(name)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
    return pids


if __name__ == "__main__":
    watched, run = int(sys.argv[1]), sys.argv[2]
    try:
        until_its_end = os.pidfd_open(watched)
    except ProcessLookupError:
        pass
    else:
        select.select([until_its_end], [], [])
    end(run)
