"""What stands for a container where only its commands matter: the machine's own system in namespaces made by bubblewrap, in which a first
process runs, and which further commands enter. Files outside /usr and /etc are its own; needs root."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from tests.support.runtimes.bwrap_words import ENV, as_user, entering

LACKING = [name for name in ("bwrap", "nsenter", "setpriv") if shutil.which(name) is None]


class Container:
    """`held` is called in every process before it becomes part of the container, which runs as `user`; `before` are words before each
    command inside."""

    def __init__(self, held: Callable[[], None] = lambda: None, user: int = 0, before: Sequence[str] = ()) -> None:
        self._held = held
        self._user = user
        self._before = before
        self.process: Process | None = None
        self.pid = 0

    async def start(self, arguments: Iterable[str], argv: Sequence[str], *, stays: bool = False) -> None:
        """With `stays` it outlives the caller."""
        told, tell = os.pipe()
        try:
            words = [
                "bwrap",
                "--info-fd",
                str(tell),
                *([] if stays else ["--die-with-parent"]),
                *arguments,
                "--",
                *as_user(self._user),
                *self._before,
                *argv,
            ]
            self.process = await asyncio.create_subprocess_exec(
                *words,
                pass_fds=[tell],
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.DEVNULL,
                env=ENV,
                preexec_fn=self._held,
                start_new_session=True,
            )
            os.close(tell)
            tell = -1
            text = b""
            while b"}" not in text and (more := await asyncio.to_thread(os.read, told, 4096)):
                text += more
            self.pid = json.loads(text)["child-pid"]
            await asyncio.to_thread(_became, self.pid, argv[0])
        finally:
            os.close(told)
            if tell >= 0:
                os.close(tell)

    async def exec(self, argv: Sequence[str]) -> Process:
        return await asyncio.create_subprocess_exec(
            *entering(self.pid),
            *as_user(self._user),
            *self._before,
            *argv,
            stdin=PIPE,
            stdout=PIPE,
            stderr=PIPE,
            env=ENV,
            preexec_fn=self._held,
            start_new_session=True,
        )

    async def stop(self) -> None:
        if self.process is not None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, 9)
            await self.process.wait()


def _became(pid: int, program: str) -> None:
    """Returns when bubblewrap has made the container and the first process runs, or has ended."""
    while (words := Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")) and words[0] not in (program.encode(), b""):
        time.sleep(0.005)
