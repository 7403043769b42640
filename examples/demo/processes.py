"""Child: a process the demo starts, watches and ends, with its output in a log file."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

ROOT = Path(__file__).resolve().parents[2]
# Runs in the child and becomes its program. The parent may have died before prctl was called, hence the check after it.
LAUNCH = """
import os, sys
if sys.platform == "linux":
    import ctypes
    ctypes.CDLL(None).prctl(1, 15)
if os.getppid() != int(sys.argv[1]):
    sys.exit("the demo ended")
os.execvp(sys.argv[2], sys.argv[2:])
"""


class ChildDied(RuntimeError):
    """A child ended before it was told to; the message names it, its exit and its log."""


class Child:
    """`may_finish`: exit code 0 is its normal end. `piped`: its standard input and output are pipes, not the log. On Linux it gets SIGTERM
    when the demo dies, however that dies."""

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        log: Path,
        *,
        env: Mapping[str, str] | None = None,
        may_finish: bool = False,
        piped: bool = False,
    ) -> None:
        self.name = name
        self.log = log
        # Without `site`, which tests use to start some programs otherwise.
        self._argv = [sys.executable, "-S", "-E", "-c", LAUNCH, str(os.getpid()), *argv]
        # The children talk over loopback only: a proxy for the outer world must not get in between.
        self._env = {**os.environ, "NO_PROXY": "127.0.0.1,localhost", "PYTHONUNBUFFERED": "1", **(env or {})}
        self._may_finish = may_finish
        self._piped = piped
        self.process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> Self:
        # A session of its own: Ctrl-C in the terminal reaches the demo alone, which then ends its children in order.
        pipe = subprocess.PIPE if self._piped else None
        with self.log.open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                *self._argv,
                cwd=ROOT,
                env=self._env,
                stdin=pipe or subprocess.DEVNULL,
                stdout=pipe or log,
                stderr=log,
                start_new_session=True,
                limit=2**20,
            )
        return self

    async def __aexit__(self, *_: object) -> None:
        """SIGTERM, after 20 seconds SIGKILL, to the whole group, so that no grandchild is left behind."""
        assert self.process is not None
        self._signal(signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.process.wait(), 20)
        self._signal(signal.SIGKILL)
        await self.process.wait()

    async def finished(self) -> None:
        """Returns when the process has ended by itself with exit code 0. Raises ChildDied at any other end."""
        assert self.process is not None
        code = await self.process.wait()
        if code != 0 or not self._may_finish:
            how = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
            raise ChildDied(f"{self.name} {how}; its log is {self.log}")

    def _signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)
