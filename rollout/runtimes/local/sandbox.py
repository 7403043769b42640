"""One command in a sandbox of bubblewrap (0.5 or newer): namespaces of its own, a read-only system, no privileges, and of the kernel only
the calls that `seccomp` leaves.

It sees the system's programs and libraries, /etc without what only its owner may read, what the machine's settings add, and of its own:
home, workdir, /tmp and /dev/shm, which stay from command to command. /var, /run and everything else are empty and cannot be written:
nothing that it can write lies in memory. All its processes end with it: they are in a process namespace whose first process the kernel
ends with bubblewrap's, and that with the node's.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import stat
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rollout.runtimes import processes
from rollout.runtimes.base import Executed, RuntimeFailed
from rollout.runtimes.command import Held, started
from rollout.runtimes.local.supervisor import BELL

USER = 1000
"""Number of the user and the group inside; whoever the node runs as outside."""
SYSTEM = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32", "etc")
OWN = ("proc", "dev", "sys", "run", "tmp", "var")
"""Folders below / that the sandbox makes itself."""


@dataclass(frozen=True, slots=True)
class View:
    """What a sandbox sees: `own` and `readable` map paths outside to paths inside, writable and not."""

    own: Sequence[tuple[Path, str]]
    readable: Sequence[tuple[Path, str]]
    hidden: Sequence[Path]

    def arguments(self, *, network: bool) -> list[str]:
        """Of bubblewrap."""
        words = ["--unshare-all", "--unshare-user", "--die-with-parent", "--new-session", "--cap-drop", "ALL", "--clearenv"]
        words += ["--uid", str(USER), "--gid", str(USER), "--hostname", "sandbox"]
        words += ["--share-net"] if network else []
        for name in SYSTEM:
            words += _system(Path("/", name))
        words += ["--proc", "/proc", "--dev", "/dev", "--dir", "/run", "--dir", "/var", "--symlink", "../tmp", "/var/tmp"]
        # Where names are looked up, /etc/resolv.conf may be a link into /run.
        words += ["--ro-bind-try", "/run/systemd/resolve", "/run/systemd/resolve"] if network else []
        for path in self.hidden:
            words += (
                ["--tmpfs", str(path), "--remount-ro", str(path)] if path.is_dir() else ["--ro-bind", "/dev/null", str(path)]
            )
        binds = [("--bind", *each) for each in self.own] + [("--ro-bind", *each) for each in self.readable]
        # What is below another comes after it, or would be hidden by it.
        for flag, outside, inside in sorted(binds, key=lambda bind: bind[2].count("/")):
            words += [flag, str(outside), inside]
        return [*words, "--remount-ro", "/dev", "--remount-ro", "/"]


def _system(path: Path) -> list[str]:
    if path.is_symlink():
        return ["--symlink", os.readlink(path), str(path)]
    return ["--ro-bind", str(path), str(path)] if path.is_dir() else []


def private(folder: Path) -> list[Path]:
    """What below `folder` not everybody may read: in the sandbox it would be readable to the node's own user."""
    found, looked_into = [], [str(folder)]
    # Before every command: a `Path` for each of /etc would take longer than the sandbox.
    while looked_into:
        with suppress(OSError), os.scandir(looked_into.pop()) as entries:
            for entry in entries:
                with suppress(OSError):
                    mode = entry.stat(follow_symlinks=False).st_mode
                    needed = stat.S_IROTH | (stat.S_IXOTH if stat.S_ISDIR(mode) else 0)
                    if stat.S_ISLNK(mode):
                        continue
                    if mode & needed != needed:
                        found.append(Path(entry.path))
                    elif stat.S_ISDIR(mode):
                        looked_into.append(entry.path)
    return found


@asynccontextmanager
async def sandboxed(
    program: str,
    arguments: Sequence[str],
    calls: bytes | None,
    argv: Sequence[str],
    env: Mapping[str, str],
    owner: Mapping[str, str],
) -> AsyncIterator[Held]:
    """The command, held before its start. `calls` is the filter of its system calls; `owner` is the environment of bubblewrap itself, by
    which it is found again. Raises `RuntimeFailed` where there can be no sandbox."""
    words = [*arguments, "--chdir", "/"]
    for name, value in env.items():
        words += ["--setenv", name, value]
    status, told = os.pipe()
    block, go = os.pipe()
    ends = [status, told, block, go]
    try:
        passed = [told, block]
        if calls is not None:
            passed.append(_file_of(calls))
            words += ["--seccomp", str(passed[-1])]
        given = _file_of(b"".join(os.fsencode(word) + b"\0" for word in words))
        passed.append(given)
        ends += passed[2:]
        line = [program, "--args", str(given), "--json-status-fd", str(told), "--block-fd", str(block), "--", *argv]
        async with started(line, env=owner, pass_fds=passed) as process:
            for end in passed:
                os.close(end)
                ends.remove(end)
            ends.remove(status)
            async with _Status(status) as reports:
                pid = await reports.child()
                if pid is None:
                    raise RuntimeFailed(f"the sandbox could not be made: {await _words(process)}")
                yield _held(process, pid, partial(os.write, go, b"x"), reports)
    finally:
        for end in ends:
            os.close(end)


def _file_of(content: bytes) -> int:
    """A descriptor from which bubblewrap reads it. Given as arguments, words could be listed by every user of the machine."""
    descriptor = os.memfd_create("given")
    with open(descriptor, "wb", closefd=False) as file:
        file.write(content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def _held(process: asyncio.subprocess.Process, pid: int, release: Any, reports: _Status) -> Held:
    def pids() -> list[int]:
        return processes.descendants([pid]) if process.returncode is None else []

    def send(number: int) -> None:
        if process.returncode is not None:
            return
        if number == signal.SIGKILL:
            # The first process of the namespace takes all others with it.
            reports.killed = True
            processes.send([pid])
        else:
            processes.send(pids(), number)

    async def failure(done: Executed) -> str | None:
        if reports.killed or await reports.ran():
            return None
        return f"the sandbox could not be made: {done.stderr.decode(errors='replace').strip()}"

    return Held(process, pid, release, send, pids, failure)


async def _words(process: asyncio.subprocess.Process) -> str:
    assert process.stderr
    return (await process.stderr.read()).decode(errors="replace").strip()


class _Status:
    """What bubblewrap reports, line by line: first of its child, in the end of the exit code, if the command was started. The descriptor
    is its own from the beginning: closed by two, the second close would hit whatever has the number then."""

    def __init__(self, descriptor: int) -> None:
        self._file = os.fdopen(descriptor, "rb", buffering=0)
        self._reader = asyncio.StreamReader()
        self.killed = False

    async def __aenter__(self) -> _Status:
        loop = asyncio.get_running_loop()
        try:
            self._transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(self._reader), self._file)
        except BaseException:
            self._file.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self._transport.close()

    async def child(self) -> int | None:
        line = await self._reader.readline()
        return int(json.loads(line)["child-pid"]) if line else None

    async def ran(self) -> bool:
        """Asked after the end: whether the command was started."""
        return b"exit-code" in await self._reader.read()


# One command with no sandbox: the node's user on the node's machine. Only the supervisor sees to it that all it starts ends with it.


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
