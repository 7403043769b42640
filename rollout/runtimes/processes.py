"""The processes of the machine as /proc tells them: which belong together, and signals to all of them."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence, Set
from contextlib import suppress
from pathlib import Path

_PROC = Path("/proc")
_BECOMING_SECONDS, _LOOK_SECONDS = 0.3, 0.001
_STOPPED_TRIES = 1000
_MEMORY_FILE = "/memfd:"
"""What the names of files begin with that memfd_create made."""


def running() -> list[int]:
    return [int(entry.name) for entry in os.scandir(_PROC) if entry.name.isdigit()]


def parent(pid: int) -> int | None:
    """None: it has ended, even where nobody has waited for it yet."""
    state, number = _state(pid)
    return None if state in "ZX" else number


def _state(pid: int) -> tuple[str, int]:
    """Its state as a letter, and its parent."""
    with suppress(OSError), open(f"{_PROC}/{pid}/stat", encoding="utf-8", errors="replace") as file:
        state, number = file.read().rpartition(")")[2].split()[:2]
        return state, int(number)
    return "X", 0


def descendants(roots: Iterable[int]) -> list[int]:
    """What runs below `roots`, without these. A process whose parent has ended is below whoever took it over."""
    children = defaultdict(list)
    for pid in running():
        if (number := parent(pid)) is not None:
            children[number].append(pid)
    found: list[int] = []
    wanted = list(roots)
    while wanted:
        below = children.pop(wanted.pop(), [])
        found += below
        wanted += below
    return found


def pipes(pid: int) -> set[str]:
    """Names of the pipes to which it writes its output."""
    return {name for number in (1, 2) if (name := _opened(f"{_PROC}/{pid}/fd/{number}")).startswith("pipe:")}


def holding(names: Set[str], among: Iterable[int] | None = None) -> list[int]:
    """What has one of these open for writing; None: among all that runs."""
    found = []
    for pid in running() if among is None else among:
        with suppress(OSError), os.scandir(_PROC / str(pid) / "fd") as entries:
            if any(_opened(entry.path) in names and _written(entry) for entry in entries):
                found.append(pid)
    return found


def _written(entry: os.DirEntry[str]) -> bool:
    return bool(entry.stat(follow_symlinks=False).st_mode & stat.S_IWUSR)


def _opened(path: str) -> str:
    with suppress(OSError):
        return os.readlink(path)
    return ""


def of_session(leader: int) -> list[int]:
    """What runs in the session of that number, also when its leader has ended."""
    return [pid for pid in running() if pid != leader and parent(pid) is not None and session(pid) == leader]


def session(pid: int) -> int | None:
    """The leader of its session; None: it is gone."""
    with suppress(OSError):
        return os.getsid(pid)
    return None


def started_with(name: bytes, value: bytes, among: Iterable[int]) -> list[int]:
    """Which of these have that variable. Those that are just becoming another program are looked at again, all of them together for a
    moment: a process may have done away with what it shows, and many such must not keep whoever looks."""
    found, unsure = _sorted_by(name, value, among)
    end = time.monotonic() + _BECOMING_SECONDS
    while unsure and time.monotonic() < end:
        time.sleep(_LOOK_SECONDS)
        more, unsure = _sorted_by(name, value, unsure)
        found += more
    return found


def _sorted_by(name: bytes, value: bytes, among: Iterable[int]) -> tuple[list[int], list[int]]:
    """Those with the variable, and those of which it cannot be said yet."""
    seen = {pid: environment(pid) for pid in among}
    found = [pid for pid, env in seen.items() if env is not None and env.get(name) == value]
    return found, [pid for pid, env in seen.items() if env is None]


def environment(pid: int) -> dict[bytes, bytes] | None:
    """What it was started with; empty where that is not to be seen, None while it is just becoming another program."""
    place, content = _PROC / str(pid), b""
    with suppress(OSError):
        # Neither is to be seen then; a thread of the kernel, which has neither, has no program.
        if not (content := (place / "environ").read_bytes()) and os.readlink(place / "exe"):
            if not (place / "cmdline").read_bytes():
                return None
            content = (place / "environ").read_bytes()
    pairs = (entry.partition(b"=") for entry in content.split(b"\0"))
    return {name: value for name, _, value in pairs if name}


def namespace(pid: int, kind: str) -> str | None:
    """A name of its namespace of that kind (`pid`, `net`), the same for all in it."""
    with suppress(OSError):
        return os.readlink(f"{_PROC}/{pid}/ns/{kind}")
    return None


def threads(pids: Iterable[int]) -> int:
    """How many they have together, each process at least one."""
    total = 0
    for pid in pids:
        with suppress(OSError), open(f"{_PROC}/{pid}/stat", encoding="utf-8", errors="replace") as file:
            total += int(file.read().rpartition(")")[2].split()[17])
    return total


def memory_bytes(pids: Sequence[int]) -> int:
    """Memory that is theirs: of their processes, where pages that several share count once in sum, and of files in memory that they have
    open, mapped or not."""
    files: dict[tuple[int, int], int] = {}
    for pid in pids:
        files |= _files_in_memory(pid)
    return sum(_own_bytes(pid, files=bool(files)) for pid in pids) + sum(files.values())


def _own_bytes(pid: int, *, files: bool) -> int:
    """`files`: those in memory are counted elsewhere."""
    with suppress(OSError, StopIteration, ValueError, KeyError):
        lines = (_PROC / str(pid) / "smaps_rollup").read_text().splitlines()
        fields = dict(line.split()[:2] for line in lines[1:])
        mapped = _mapped_bytes(pid) if files else 0
        return max(0, 1024 * (int(fields["Pss_Anon:"]) + int(fields["Pss_Shmem:"])) - mapped)
    return 0


def _mapped_bytes(pid: int) -> int:
    """Of files in memory, as a part of the process's shared memory."""
    total, counted = 0, False
    with open(f"{_PROC}/{pid}/smaps", encoding="utf-8", errors="replace") as file:
        for line in file:
            if not line[0].isupper():
                counted = _MEMORY_FILE in line
            elif counted and line.startswith("Pss:"):
                total += 1024 * int(line.split()[1])
            elif counted and line.startswith("Anonymous:"):
                # Pages of a private mapping that it has changed are its own.
                total -= 1024 * int(line.split()[1])
    return total


def _files_in_memory(pid: int) -> dict[tuple[int, int], int]:
    """Bytes of each that it has open, by its device and number."""
    found = {}
    with suppress(OSError), os.scandir(f"{_PROC}/{pid}/fd") as entries:
        for entry in entries:
            if _opened(entry.path).startswith(_MEMORY_FILE):
                with suppress(OSError):
                    told = os.stat(entry.path)
                    found[told.st_dev, told.st_ino] = 512 * told.st_blocks
    return found


def send(pids: Iterable[int], number: int = signal.SIGKILL) -> None:
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def kill_tree(root: int) -> None:
    """Kills `root` and all below it. It is stopped before, so that it starts nothing between the look and the kill."""
    send([root], signal.SIGSTOP)
    for _ in range(_STOPPED_TRIES):
        if _state(root)[0] in "TtZX":
            break
        time.sleep(0.001)
    send([*descendants([root]), root])


# The processes of a container on the node's own machine, and which of its commands started each.


MARK = "VERBATIM_EXEC"
"""A variable of every command: which one it is, to tell the processes of several apart."""
_KILL_TRIES, _KILL_SECONDS = 100, 0.01


class ContainerProcesses:
    """Those in the process namespace of `first`, the container's first process, except those of its session: `first` itself and what it
    waits in. runc, crun and a node's own clients start every command in a session of its own, and no process can join another's."""

    def __init__(self, first: int, namespace: str) -> None:
        self.first = first
        self._namespace = namespace
        self._session = session(first)
        self.commands: dict[str, Set[str]] = {}
        """Those that run, with the names of the pipes to which each writes its output."""

    def send(self, command: str, number: int) -> None:
        send(self._started_by(command), number)

    def kill(self, command: str, tries: int = _KILL_TRIES) -> None:
        """Now, and again until nothing is left: what forks while it is looked for is found the next time."""
        if command in self.commands and tries and (left := self._started_by(command)):
            send(left)
            asyncio.get_running_loop().call_later(_KILL_SECONDS, self.kill, command, tries - 1)

    async def nothing_left(self, command: str) -> None:
        """Returns when it has killed all that is left of it."""
        for _ in range(_KILL_TRIES):
            if not (left := self._started_by(command)):
                return
            send(left)
            await asyncio.sleep(_KILL_SECONDS)

    def _started_by(self, command: str) -> list[int]:
        """Processes of the container that a command started; with it those that nobody can be told to have started, when no other
        command runs. One that hides who started it, but holds a command's output, is that one's: it would be waited for."""
        within = [pid for pid in running() if namespace(pid, "pid") == self._namespace]
        within = [pid for pid in within if pid != self.first and session(pid) not in (None, self._session)]
        within = [pid for pid in within if parent(pid) is not None]
        if self.commands.keys() <= {command}:
            return [*within, *descendants(within)]
        marked = started_with(MARK.encode(), command.encode(), within)
        held = holding(self.commands.get(command, frozenset()), within)
        return [*marked, *held, *descendants([*marked, *held])]
