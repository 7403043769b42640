"""What the commands of a local runtime may use together, and how they are held to it.

A control group of the runtime's own where the node may make one (version 2 below `VERBATIM_CGROUP` or the root group, version 1 below
the node's own groups): then the kernel holds memory, CPU time and the number of processes. Elsewhere the node looks at each command's
memory and number of processes every `WATCH_SECONDS` and kills what passes them, and the commands are kept on as many cores as they may
use. Such a look sees memory of processes, shared or not, and files in memory that they have open; whoever hides memory from it on
purpose is held by a control group alone. The size of one file is held to `disk_mb` either way; the sum of all files is not.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import resource
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rollout.runtimes import processes
from rollout.task import RuntimeSpec

WATCH_SECONDS = 0.25
PIDS = 4096
"""Processes and threads of one runtime; of one command, where no control group counts them."""
_PERIOD_MICROSECONDS = 100_000
_REMOVAL_SECONDS = 5.0
_turn = itertools.count()


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """Where control groups are made: `folder` holds those of runtimes, `files` are its settings: name -> value of a spec."""

    folder: Path
    files: Sequence[tuple[str, Callable[[RuntimeSpec], str]]]


def _memory(spec: RuntimeSpec) -> str:
    return str(spec.memory_mb << 20)


def _quota(spec: RuntimeSpec) -> str:
    return str(int(spec.cpus * _PERIOD_MICROSECONDS))


_VERSION_2 = (
    ("memory.max", _memory),
    ("memory.swap.max", lambda spec: "0"),
    ("cpu.max", lambda spec: f"{_quota(spec)} {_PERIOD_MICROSECONDS}"),
    ("pids.max", lambda spec: str(PIDS)),
)
_VERSION_1 = {
    "memory": (("memory.limit_in_bytes", _memory), ("memory.memsw.limit_in_bytes", _memory)),
    "cpu": (("cpu.cfs_period_us", lambda spec: str(_PERIOD_MICROSECONDS)), ("cpu.cfs_quota_us", _quota)),
    "pids": (("pids.max", lambda spec: str(PIDS)),),
}
_OPTIONAL = ("memory.swap.max", "memory.memsw.limit_in_bytes")
"""Not there where the kernel does not account for swap."""


def hierarchies(given: Path | None, root: Path = Path("/sys/fs/cgroup")) -> list[Hierarchy]:
    """Those in which the node may make groups; none: it may not. `given` is a folder of version 2 that is delegated to it."""
    if given is not None or (root / "cgroup.controllers").exists():
        folder = given or root / "verbatim"
        with suppress(OSError):
            folder.mkdir(exist_ok=True)
            needed = {"memory", "cpu", "pids"}
            if not needed <= set((folder / "cgroup.subtree_control").read_text().split()):
                (folder / "cgroup.subtree_control").write_text("+memory +cpu +pids")
            return [Hierarchy(folder, _VERSION_2)]
        return []
    found = []
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, names, path = line.split(":", 2)
        for name, files in _VERSION_1.items():
            folder = root / name / path.lstrip("/")
            if name in names.split(",") and folder.is_dir() and os.access(folder, os.W_OK):
                found.append(Hierarchy(folder, files))
    return found if len(found) == len(_VERSION_1) else []


def held_by(where: Sequence[Hierarchy]) -> str:
    """How limits are held, in one sentence."""
    if where:
        return f"memory, CPUs and {PIDS} processes are held by control groups below {', '.join(str(each.folder) for each in where)}"
    return (
        f"memory and {PIDS} processes are looked at every {WATCH_SECONDS:g} s, and what is hidden from a look is not held: no control "
        "group with memory, cpu and pids can be made here (VERBATIM_CGROUP)"
    )


class Resources:
    """Of one runtime. `name` is the runtime's."""

    def __init__(self, spec: RuntimeSpec, name: str, where: Sequence[Hierarchy]) -> None:
        self._spec = spec
        self._groups = [(hierarchy, hierarchy.folder / name) for hierarchy in where]

    @property
    def by_the_kernel(self) -> bool:
        """Whether it counts what is used, all commands together."""
        return bool(self._groups)

    def make(self) -> None:
        """Raises `OSError`."""
        for hierarchy, group in self._groups:
            group.mkdir()
            for file, value in hierarchy.files:
                if file not in _OPTIONAL or (group / file).exists():
                    (group / file).write_text(value(self._spec))

    def hold(self, pid: int) -> None:
        """Puts a process that has not started the command yet under the limits."""
        for _, group in self._groups:
            (group / "cgroup.procs").write_text(str(pid))
        if self._spec.disk_mb is not None:
            size = self._spec.disk_mb << 20
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, size))
        resource.prlimit(pid, resource.RLIMIT_CORE, (0, 0))
        if not self._groups:
            os.sched_setaffinity(pid, self._cores())

    def _cores(self) -> list[int]:
        """As many as the spec says, others for each command."""
        cores = sorted(os.sched_getaffinity(0))
        first = next(_turn)
        return [cores[(first + each) % len(cores)] for each in range(min(len(cores), math.ceil(self._spec.cpus)))]

    async def watched(self, pids: Callable[[], Iterable[int]], kill: Callable[[], None]) -> None:
        """Calls `kill` when what runs takes too much. Ends with it, or at once where the kernel sees to it."""
        while not self._groups:
            await asyncio.sleep(WATCH_SECONDS)
            # On a machine with many processes a look takes longer than the rest of a node may wait.
            if await asyncio.to_thread(self._passed, pids):
                kill()
                return

    def _passed(self, pids: Callable[[], Iterable[int]]) -> bool:
        """Whether what runs takes too much. Their number is looked at first: the memory of very many takes long to see."""
        running = list(pids())
        return processes.threads(running) > PIDS or processes.memory_bytes(running) > self._spec.memory_mb << 20

    async def remove(self) -> None:
        await removed([group for _, group in self._groups])


async def removed(groups: Iterable[Path]) -> None:
    """Ends what is in the groups and removes them."""
    deadline = time.monotonic() + _REMOVAL_SECONDS
    for group in groups:
        while group.exists():
            with suppress(OSError):
                processes.send(int(pid) for pid in (group / "cgroup.procs").read_text().split())
            try:
                group.rmdir()
            except OSError:
                if time.monotonic() > deadline:
                    break
                await asyncio.sleep(0.05)
