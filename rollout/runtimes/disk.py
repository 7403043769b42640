"""`disk_mb` for kinds whose engine cannot limit the sum of a runtime's files: it is measured while a command runs.

What is measured are the blocks of the files in the runtime's own folders on the node's machine. Files that are deleted and still open do
not count, nor do folders that the node may not read.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

from rollout.runtimes.base import Executed, RuntimeFailed
from rollout.runtimes.command import start_process

log = logging.getLogger(__name__)

WATCH_SECONDS = 1.0
LARGEST_SHARE = 0.05
"""Of the time is spent on measuring, however many files there are."""
FILE_TOO_LARGE = 128 + 25
"""The exit code of a command that SIGXFSZ ends, as it does where a single file grows beyond the limit."""


@dataclass(slots=True)
class DiskWatch:
    """Used in a `with` block around a command: calls `kill` when `folders` hold more than `limit_mb` together; None: anything."""

    folders: Sequence[Path]
    limit_mb: int | None
    kill: Callable[[], None]
    _exceeded: bool = False
    _task: asyncio.Task[None] | None = field(default=None, init=False)

    async def __aenter__(self) -> Self:
        if self.limit_mb is not None:
            self._task = asyncio.create_task(self._watch(self.limit_mb))
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    def judge(self, done: Executed) -> Executed:
        """The command's result, which says so if it was killed for its files."""
        if not self._exceeded:
            return done
        told = f"the files of this runtime take more than the {self.limit_mb} MiB that it may have\n"
        return replace(done, exit_code=FILE_TOO_LARGE, stderr=done.stderr + told.encode())

    async def _watch(self, limit_mb: int) -> None:
        pause = WATCH_SECONDS
        while not self._exceeded:
            await asyncio.sleep(pause)
            begun = time.monotonic()
            try:
                self._exceeded = await measure_disk(self.folders) > limit_mb << 20
            except RuntimeFailed as error:
                log.warning("the sum of a runtime's files is not limited: %s", error)
                return
            pause = max(WATCH_SECONDS, (time.monotonic() - begun) / LARGEST_SHARE)
        self.kill()


async def measure_disk(folders: Sequence[Path]) -> int:
    """Bytes on the disk. Raises `RuntimeFailed`."""
    # No walk of ours gets through folders that are nested too deeply for a path.
    argv = ["du", "-skx", *map(str, folders)]
    async with start_process(argv, env={"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C"}) as process:
        told, _ = await process.communicate()
    return sum(int(line.split()[0]) for line in told.splitlines()) << 10


def find_overlay(pid: int) -> Path | None:
    """Where the changes of a container's own files are, given its first process; None if its root is no overlay that can be read."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/mountinfo").read_text(errors="replace").splitlines():
            mount, _, storage = line.partition(" - ")
            kind, _, options = storage.split(" ", 2)
            if mount.split(" ")[4] == "/" and kind == "overlay":
                upper = next((each[9:] for each in options.split(",") if each.startswith("upperdir=")), "")
                return Path(upper) if upper and Path(upper).is_dir() else None
    return None
