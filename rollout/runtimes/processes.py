"""The machine's processes, from /proc: which belong together, what they use, and signals to all of them."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import time
import weakref
from collections import defaultdict
from collections.abc import Iterable, Sequence, Set
from contextlib import suppress
from pathlib import Path

_PROC = Path("/proc")
_BECOMING_SECONDS, _LOOK_SECONDS = 0.3, 0.001
_STOPPED_TRIES = 1000
_MEMORY_FILE = "/memfd:"
"""Prefix of the names of files that memfd_create made."""


def list_pids() -> list[int]:
    return [int(entry.name) for entry in os.scandir(_PROC) if entry.name.isdigit()]


def find_parent(pid: int) -> int | None:
    """None if the process has ended, even if it has not been waited for yet."""
    state, number = _read_state(pid)
    return None if state in "ZX" else number


def _read_state(pid: int) -> tuple[str, int]:
    """Its state as a letter, and its parent."""
    with suppress(OSError):
        state, number = _read_stat(pid)[:2]
        return state, int(number)
    return "X", 0


def _read_stat(pid: int) -> list[str]:
    """The fields after the program's name, which may hold anything. Raises `OSError`."""
    with open(f"{_PROC}/{pid}/stat", encoding="utf-8", errors="replace") as file:
        return file.read().rpartition(")")[2].split()


def find_descendants(roots: Iterable[int]) -> list[int]:
    """The processes below `roots`. One whose parent has ended is below the process that adopted it."""
    children = defaultdict(list)
    for pid in list_pids():
        if (number := find_parent(pid)) is not None:
            children[number].append(pid)
    found: list[int] = []
    pending = list(roots)
    while pending:
        below = children.pop(pending.pop(), [])
        found += below
        pending += below
    return found


def list_session(leader: int) -> list[int]:
    """The other processes of the session, even if its leader has ended."""
    return [pid for pid in list_pids() if pid != leader and find_parent(pid) is not None and find_session(pid) == leader]


def find_session(pid: int) -> int | None:
    """The leader of its session; None if the process is gone."""
    with suppress(OSError):
        return os.getsid(pid)
    return None


def read_namespace(pid: int, kind: str) -> str | None:
    """A name of its namespace of that kind (`pid`, `net`), the same for all its members."""
    with suppress(OSError):
        return os.readlink(f"{_PROC}/{pid}/ns/{kind}")
    return None


def has_filter(pid: int) -> bool:
    """Whether a system call filter holds it."""
    with suppress(OSError):
        return "Seccomp:\t2" in Path(f"{_PROC}/{pid}/status").read_text(errors="replace").splitlines()
    return False


def find_output_pipes(pid: int) -> set[str]:
    """The names of the pipes that its stdout and stderr go to."""
    return {name for number in (1, 2) if (name := _read_link(f"{_PROC}/{pid}/fd/{number}")).startswith("pipe:")}


def find_writers(names: Set[str], among: Iterable[int] | None = None) -> list[int]:
    """The processes that have one of these files open for writing."""
    found = []
    for pid in list_pids() if among is None else among:
        with suppress(OSError), os.scandir(_PROC / str(pid) / "fd") as entries:
            if any(_read_link(entry.path) in names and _is_writable(entry) for entry in entries):
                found.append(pid)
    return found


def _is_writable(entry: os.DirEntry[str]) -> bool:
    return bool(entry.stat(follow_symlinks=False).st_mode & stat.S_IWUSR)


def _read_link(path: str) -> str:
    with suppress(OSError):
        return os.readlink(path)
    return ""


def find_by_variable(name: bytes, value: bytes, among: Iterable[int]) -> list[int]:
    """The processes started with that variable. Those in the middle of an exec are looked at again, for a moment that they all share: a
    process can hide its variables for good, and many that do must not hold up the caller."""
    found, unsure = _split_by_variable(name, value, among)
    end = time.monotonic() + _BECOMING_SECONDS
    while unsure and time.monotonic() < end:
        time.sleep(_LOOK_SECONDS)
        more, unsure = _split_by_variable(name, value, unsure)
        found += more
    return found


def _split_by_variable(name: bytes, value: bytes, among: Iterable[int]) -> tuple[list[int], list[int]]:
    """Those with the variable, and those of which it is not known yet."""
    seen = {pid: read_environment(pid) for pid in among}
    found = [pid for pid, env in seen.items() if env is not None and env.get(name) == value]
    return found, [pid for pid, env in seen.items() if env is None]


def read_environment(pid: int) -> dict[bytes, bytes] | None:
    """The variables it was started with; empty if they cannot be read, None in the middle of an exec."""
    place, content = _PROC / str(pid), b""
    with suppress(OSError):
        # During an exec neither variables nor arguments show; a kernel thread, which has neither, has no executable.
        if not (content := (place / "environ").read_bytes()) and os.readlink(place / "exe"):
            if not (place / "cmdline").read_bytes():
                return None
            content = (place / "environ").read_bytes()
    pairs = (entry.partition(b"=") for entry in content.split(b"\0"))
    return {name: value for name, _, value in pairs if name}


def count_threads(pids: Iterable[int]) -> int:
    """Their threads together, at least one per process."""
    total = 0
    for pid in pids:
        with suppress(OSError):
            total += int(_read_stat(pid)[17])
    return total


def measure_memory(pids: Sequence[int]) -> int:
    """Bytes of their own memory, pages they share counted once, and of the files in memory that they have open, mapped or not."""
    files: dict[tuple[int, int], int] = {}
    for pid in pids:
        files |= _measure_memory_files(pid)
    return sum(_measure_own(pid, has_files=bool(files)) for pid in pids) + sum(files.values())


def _measure_own(pid: int, *, has_files: bool) -> int:
    """`has_files`: files in memory are counted elsewhere, so mappings of them are left out."""
    with suppress(OSError, StopIteration, ValueError, KeyError):
        lines = (_PROC / str(pid) / "smaps_rollup").read_text().splitlines()
        fields = dict(line.split()[:2] for line in lines[1:])
        mapped = _measure_mapped_files(pid) if has_files else 0
        return max(0, 1024 * (int(fields["Pss_Anon:"]) + int(fields["Pss_Shmem:"])) - mapped)
    return 0


def _measure_mapped_files(pid: int) -> int:
    """The part of its shared memory that maps files in memory."""
    total, counted = 0, False
    with open(f"{_PROC}/{pid}/smaps", encoding="utf-8", errors="replace") as file:
        for line in file:
            if not line[0].isupper():
                counted = _MEMORY_FILE in line
            elif counted and line.startswith("Pss:"):
                total += 1024 * int(line.split()[1])
            elif counted and line.startswith("Anonymous:"):
                # Pages of a private mapping that the process has changed are its own.
                total -= 1024 * int(line.split()[1])
    return total


def _measure_memory_files(pid: int) -> dict[tuple[int, int], int]:
    """Bytes of each that it has open, by device and inode."""
    found = {}
    with suppress(OSError), os.scandir(f"{_PROC}/{pid}/fd") as entries:
        for entry in entries:
            if _read_link(entry.path).startswith(_MEMORY_FILE):
                with suppress(OSError):
                    status = os.stat(entry.path)
                    found[status.st_dev, status.st_ino] = 512 * status.st_blocks
    return found


def send_signal(pids: Iterable[int], number: int = signal.SIGKILL) -> None:
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def kill_tree(root: int) -> None:
    """Kills `root` and everything below it. Stops it first, so that it starts nothing between the look and the kill."""
    send_signal([root], signal.SIGSTOP)
    for _ in range(_STOPPED_TRIES):
        if _read_state(root)[0] in "TtZX":
            break
        time.sleep(0.001)
    send_signal([*find_descendants([root]), root])


# The processes of a container, and which command started each


MARK = "VERBATIM_EXEC"
"""A variable that names the command that a process belongs to."""
_KILL_TRIES, _KILL_SECONDS = 100, 0.01


class ContainerProcesses:
    """The processes in the namespace of `first`, the container's first process, except those of its session: `first` itself and what it
    waits in. runc, crun and our own clients start every command in its own session, and no process can join another's."""

    def __init__(self, first: int, namespace: str) -> None:
        self.first = first
        self._namespace = namespace
        self._session = find_session(first)
        # The kernel reuses the number of a namespace that is gone, so a late kill would hit the first process of a newer container. Held
        # open, the namespace keeps its number.
        with suppress(OSError):
            weakref.finalize(self, os.close, os.open(_PROC / str(first) / "ns" / "pid", os.O_RDONLY | os.O_CLOEXEC))
        self.commands: dict[str, Set[str]] = {}
        """The running commands, by mark, each with the names of the pipes that its output goes to."""

    def send(self, command: str, number: int) -> None:
        send_signal(self._find_started(command), number)

    def kill(self, command: str, tries: int = _KILL_TRIES) -> None:
        """Kills now, and again until nothing is left: a process that forks during one pass is found in the next."""
        if command in self.commands and tries and (left := self._find_started(command)):
            send_signal(left)
            asyncio.get_running_loop().call_later(_KILL_SECONDS, self.kill, command, tries - 1)

    async def kill_rest(self, command: str) -> None:
        """Kills the remaining processes of a command that has ended, and returns once there are none."""
        for _ in range(_KILL_TRIES):
            if not (left := self._find_started(command)):
                return
            send_signal(left)
            await asyncio.sleep(_KILL_SECONDS)

    def _find_started(self, command: str) -> list[int]:
        """What the command started; if no other command runs, also processes whose origin is unknown. One that hides its origin but holds
        a command's output counts as that command's: the command would be waited for."""
        within = [pid for pid in list_pids() if read_namespace(pid, "pid") == self._namespace]
        within = [pid for pid in within if pid != self.first and find_session(pid) not in (None, self._session)]
        within = [pid for pid in within if find_parent(pid) is not None]
        if self.commands.keys() <= {command}:
            return [*within, *find_descendants(within)]
        marked = find_by_variable(MARK.encode(), command.encode(), within)
        writers = find_writers(self.commands.get(command, frozenset()), within)
        return [*marked, *writers, *find_descendants([*marked, *writers])]
