"""The limits that all commands of a local runtime share, and their enforcement.

If the node may make a control group (version 2 below `VERBATIM_CGROUP` or the root group, version 1 below the node's own groups), the
kernel limits memory, CPU time and the number of processes. Otherwise the node checks each command's memory and number of processes every
`WATCH_SECONDS`, kills what exceeds them, and confines commands to as many cores as they may use. Such a check sees the memory of processes,
shared or not, and files in memory that they have open; only a control group stops a command that hides memory on purpose. Either way the
size of a single file is limited to `disk_mb`; the sum of all files is checked (`rollout.runtimes.disk`).
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

from contract.tasks import RuntimeSpec
from rollout.runtimes import processes

WATCH_SECONDS = 0.25
PIDS = 4096
"""Processes and threads of one runtime; of one command if no control group counts them."""
_PERIOD_MICROSECONDS = 100_000
_REMOVAL_SECONDS = 5.0
_turn = itertools.count()


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """Where control groups are made: `folder` holds those of runtimes; `files` are their settings, name -> value for a spec."""

    folder: Path
    files: Sequence[tuple[str, Callable[[RuntimeSpec], str]]]


def _get_memory(spec: RuntimeSpec) -> str:
    return str(spec.memory_mb << 20)


def _get_quota(spec: RuntimeSpec) -> str:
    return str(int(spec.cpus * _PERIOD_MICROSECONDS))


_VERSION_2 = (
    ("memory.max", _get_memory),
    ("memory.swap.max", lambda spec: "0"),
    ("cpu.max", lambda spec: f"{_get_quota(spec)} {_PERIOD_MICROSECONDS}"),
    ("pids.max", lambda spec: str(PIDS)),
)
_VERSION_1 = {
    "memory": (("memory.limit_in_bytes", _get_memory), ("memory.memsw.limit_in_bytes", _get_memory)),
    "cpu": (("cpu.cfs_period_us", lambda spec: str(_PERIOD_MICROSECONDS)), ("cpu.cfs_quota_us", _get_quota)),
    "pids": (("pids.max", lambda spec: str(PIDS)),),
}
_OPTIONAL = ("memory.swap.max", "memory.memsw.limit_in_bytes")
"""Missing on kernels that do not account for swap."""


def find_hierarchies(given: Path | None, root: Path = Path("/sys/fs/cgroup")) -> list[Hierarchy]:
    """The hierarchies in which the node may make groups, if any. `given` is a version 2 folder delegated to the node."""
    if given is not None or (root / "cgroup.controllers").exists():
        folder = given or root / "verbatim"
        with suppress(OSError):
            folder.mkdir(exist_ok=True)
            if not {"memory", "cpu", "pids"} <= set((folder / "cgroup.subtree_control").read_text().split()):
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


def describe_limits(where: Sequence[Hierarchy]) -> str:
    if where:
        folders = ", ".join(str(each.folder) for each in where)
        return f"memory, CPUs and {PIDS} processes are limited by control groups below {folders}"
    return (
        f"memory and {PIDS} processes are checked every {WATCH_SECONDS:g} s, and what hides from the check is not limited: no control "
        "group with memory, cpu and pids can be made here (VERBATIM_CGROUP)"
    )


class Resources:
    """The limits of the runtime `name`."""

    def __init__(self, spec: RuntimeSpec, name: str, where: Sequence[Hierarchy]) -> None:
        self._spec = spec
        self._groups = [(hierarchy, hierarchy.folder / name) for hierarchy in where]

    @property
    def by_the_kernel(self) -> bool:
        """Whether the kernel enforces them, for all commands together."""
        return bool(self._groups)

    @property
    def groups(self) -> list[Path]:
        return [group for _, group in self._groups]

    def make(self) -> None:
        """Raises `OSError`."""
        for hierarchy, group in self._groups:
            group.mkdir()
            for file, value in hierarchy.files:
                if file not in _OPTIONAL or (group / file).exists():
                    (group / file).write_text(value(self._spec))

    def hold(self, pid: int) -> None:
        """Puts a process under the limits that has not started its command yet."""
        for _, group in self._groups:
            (group / "cgroup.procs").write_text(str(pid))
        if self._spec.disk_mb is not None:
            size = self._spec.disk_mb << 20
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, size))
        resource.prlimit(pid, resource.RLIMIT_CORE, (0, 0))
        if not self._groups:
            os.sched_setaffinity(pid, self._choose_cores())

    def _choose_cores(self) -> list[int]:
        """As many as the spec allows, different ones for each command."""
        cores = sorted(os.sched_getaffinity(0))
        first = next(_turn)
        return [cores[(first + each) % len(cores)] for each in range(min(len(cores), math.ceil(self._spec.cpus)))]

    async def watch(self, list_pids: Callable[[], Iterable[int]], kill: Callable[[], None]) -> None:
        """Calls `kill` and returns when the processes exceed the limits; returns at once if the kernel enforces them."""
        while not self._groups:
            await asyncio.sleep(WATCH_SECONDS)
            # In a thread: on a machine with many processes the check takes too long for the event loop.
            if await asyncio.to_thread(self._is_exceeded, list_pids):
                kill()
                return

    def _is_exceeded(self, list_pids: Callable[[], Iterable[int]]) -> bool:
        """Counts threads first: measuring the memory of very many processes is slow."""
        pids = list(list_pids())
        return processes.count_threads(pids) > PIDS or processes.measure_memory(pids) > self._spec.memory_mb << 20

    async def remove(self) -> None:
        await remove_groups(self.groups)


async def remove_groups(groups: Iterable[Path]) -> None:
    """Kills every process in the groups and removes them."""
    deadline = time.monotonic() + _REMOVAL_SECONDS
    for group in groups:
        while group.exists():
            with suppress(OSError):
                processes.send_signal(int(pid) for pid in (group / "cgroup.procs").read_text().split())
            try:
                group.rmdir()
            except OSError:
                if time.monotonic() > deadline:
                    break
                await asyncio.sleep(0.05)
