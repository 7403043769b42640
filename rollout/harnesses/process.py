"""A running harness: its own process group, stopped as a whole; and what it detached from that, which ends after it.

It is also its own session. Without a controlling terminal it is not stopped for writing to the screen, and does not get the
terminal's Ctrl-C: the caller decides which signals it gets.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rollout.harnesses.prepared import CannotStart, MissingExecutable
from rollout.runtimes.local.supervisor import PR_SET_CHILD_SUBREAPER, find_descendants, send

GRACE_SECONDS = 10.0
"""How long a harness may take to exit after a signal before it is killed."""
POLL_SECONDS = 0.02
VERSION_SECONDS = 30.0

_VERSION = re.compile(rb"\d+(?:\.\d+)+")


@dataclass(frozen=True, slots=True)
class ProcessExit:
    """`exit_code` is a shell's: 128 + the signal that ended the harness."""

    exit_code: int
    timed_out: bool


class HarnessProcess:
    """Starts when constructed; `given` is its stdin if that is the `prompt`. Raises `MissingExecutable` or `CannotStart`."""

    def __init__(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        workdir: Path,
        *,
        stdin: str = "none",
        given: bytes = b"",
        grace_seconds: float = GRACE_SECONDS,
    ) -> None:
        self._grace_seconds = grace_seconds
        self._kill_at: float | None = None
        try:
            self._process = self._start(argv, env, workdir, None if stdin == "inherit" else given)
        except (OSError, ValueError) as error:
            raise CannotStart(f"{argv[0]} could not be started: {error}") from error

    def _start(
        self, argv: Sequence[str], env: Mapping[str, str], workdir: Path, given: bytes | None
    ) -> subprocess.Popen[bytes]:
        with tempfile.TemporaryFile() as file:
            file.write(given or b"")
            file.seek(0)
            return subprocess.Popen(
                [find_executable(argv[0], env), *argv[1:]],
                # Some harnesses trust PWD over their working directory.
                env={**env, "PWD": str(workdir)},
                cwd=workdir,
                stdin=file if given else subprocess.DEVNULL if given is not None else None,
                start_new_session=True,
            )

    def stop(self, number: int = signal.SIGTERM) -> None:
        """Send the signal; whatever still runs after the grace period is killed. A second stop kills at once."""
        if self._kill_at is None:
            self._kill_at = time.monotonic() + self._grace_seconds
            self._signal(number)
        else:
            self._kill_at = time.monotonic()

    def wait(self, timeout_seconds: float | None = None) -> ProcessExit:
        """Wait until the harness has ended, then kill the rest of its group. After `timeout_seconds` it is stopped."""
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        timed_out = False
        while self._process.poll() is None:
            now = time.monotonic()
            if deadline is not None and now >= deadline and self._kill_at is None:
                timed_out = True
                self.stop()
            if self._kill_at is not None and now >= self._kill_at:
                self._signal(signal.SIGKILL)
            time.sleep(POLL_SECONDS)
        # The leader is gone; what it left running would keep the terminal, and call a closed session.
        self._signal(signal.SIGKILL)
        code = self._process.returncode
        return ProcessExit(code if code >= 0 else 128 - code, timed_out)

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)


def adopt_orphans() -> None:
    """From now on whatever detaches itself below this process stays below it, where the system can do that (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_orphans(seconds: float = GRACE_SECONDS) -> None:
    """Kill everything below this process until nothing is left, for so long at the most: another user's processes cannot be killed."""
    end = time.monotonic() + seconds
    while sys.platform == "linux" and find_descendants(os.getpid()) and time.monotonic() < end:
        send(signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(-1, os.WNOHANG)
        time.sleep(POLL_SECONDS)


def read_version(argv: Sequence[str], env: Mapping[str, str], workdir: Path) -> str | None:
    """The version that the command prints; None if it prints none, cannot be run, or takes longer than VERSION_SECONDS."""
    try:
        command = [find_executable(argv[0], env), *argv[1:]]
        done = subprocess.run(
            command, env=dict(env), cwd=workdir, stdin=subprocess.DEVNULL, capture_output=True, timeout=VERSION_SECONDS
        )
    except (MissingExecutable, OSError, ValueError, subprocess.TimeoutExpired):
        return None
    found = _VERSION.search(done.stdout + done.stderr)
    return found[0].decode() if found else None


def find_executable(command: str, env: Mapping[str, str]) -> str:
    """The path of `command` on the PATH of `env`. Raises `MissingExecutable`."""
    found = shutil.which(command, path=env.get("PATH", os.defpath))
    if found is None:
        raise MissingExecutable(f"there is no executable {command!r}" + ("" if "/" in command else " on PATH"))
    return found
