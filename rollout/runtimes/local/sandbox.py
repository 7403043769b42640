"""One command on the node's machine, in a bubblewrap (0.5 or newer) sandbox or under a supervisor alone.

The sandbox has its own namespaces, a read-only system, no privileges, and of the kernel only the calls that `seccomp` allows. It sees
the system's programs and libraries, /etc without what only its owner may read, what the machine's settings add, and its own home, workdir,
/tmp and /dev/shm, which persist from command to command. /var, /run and everything else are empty and read-only: no writable place is in
memory. All its processes end with it: they live in a process namespace whose first process the kernel kills with bubblewrap's, and
bubblewrap with the node.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import stat
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rollout.runtimes import processes
from rollout.runtimes.base import Executed, RuntimeFailed
from rollout.runtimes.command import HeldCommand, start_process
from rollout.runtimes.local.supervisor import BELL

USER = 1000
"""Number of the user and the group inside; outside it is the node's own user."""
SYSTEM = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32", "etc")
OWN = ("proc", "dev", "sys", "run", "tmp", "var")
"""Folders below / that the sandbox makes itself."""
_SUPERVISOR = Path(__file__).with_name("supervisor.py")


@dataclass(frozen=True, slots=True)
class View:
    """What a sandbox sees: `own` (writable) and `readable` pair paths outside with paths inside; `hidden` are paths inside."""

    own: Sequence[tuple[Path, str]]
    readable: Sequence[tuple[Path, str]]
    hidden: Sequence[Path]

    def make_arguments(self, *, network: bool) -> list[str]:
        """For bubblewrap."""
        words = ["--unshare-all", "--unshare-user", "--die-with-parent", "--new-session", "--cap-drop", "ALL", "--clearenv"]
        words += ["--uid", str(USER), "--gid", str(USER), "--hostname", "sandbox"]
        words += ["--share-net"] if network else []
        words += bind_system()
        words += ["--proc", "/proc", "--dev", "/dev", "--dir", "/run", "--dir", "/var", "--symlink", "../tmp", "/var/tmp"]
        # /etc/resolv.conf may be a link into /run.
        words += ["--ro-bind-try", "/run/systemd/resolve", "/run/systemd/resolve"] if network else []
        for path in self.hidden:
            words += (
                ["--tmpfs", str(path), "--remount-ro", str(path)] if path.is_dir() else ["--ro-bind", "/dev/null", str(path)]
            )
        binds = [("--bind", *each) for each in self.own] + [("--ro-bind", *each) for each in self.readable]
        # A bind below another must come after it, or it would be hidden.
        for flag, outside, inside in sorted(binds, key=lambda bind: bind[2].count("/")):
            words += [flag, str(outside), inside]
        return [*words, "--remount-ro", "/dev", "--remount-ro", "/"]


def bind_system() -> list[str]:
    """For bubblewrap: what every sandbox sees of the system. Not all of /: a mount that goes away meanwhile would fail it."""
    words: list[str] = []
    for path in (Path("/", name) for name in SYSTEM):
        if path.is_symlink():
            words += ["--symlink", os.readlink(path), str(path)]
        elif path.is_dir():
            words += ["--ro-bind", str(path), str(path)]
    return words


def find_private(folder: Path) -> list[Path]:
    """The paths below `folder` that not everybody may read: a sandbox, which has the node's own user, could read them."""
    found, pending = [], [str(folder)]
    # Runs before every command: a `Path` for each file of /etc would take longer than the sandbox.
    while pending:
        with suppress(OSError), os.scandir(pending.pop()) as entries:
            for entry in entries:
                with suppress(OSError):
                    mode = entry.stat(follow_symlinks=False).st_mode
                    needed = stat.S_IROTH | (stat.S_IXOTH if stat.S_ISDIR(mode) else 0)
                    if stat.S_ISLNK(mode):
                        continue
                    if mode & needed != needed:
                        found.append(Path(entry.path))
                    elif stat.S_ISDIR(mode):
                        pending.append(entry.path)
    return found


@asynccontextmanager
async def start_sandboxed(
    program: str,
    arguments: Sequence[str],
    calls: bytes | None,
    argv: Sequence[str],
    env: Mapping[str, str],
    owner: Mapping[str, str],
) -> AsyncIterator[HeldCommand]:
    """The command in a sandbox, held before its start. `calls` is its system call filter; `owner` is the environment of bubblewrap itself,
    by which a sweep finds it. Raises `RuntimeFailed` if there can be no sandbox."""
    words = [*arguments, "--chdir", "/"]
    for name, value in env.items():
        words += ["--setenv", name, value]
    status, report = os.pipe()
    block, go = os.pipe()
    ends = [status, report, block, go]
    try:
        passed = [report, block]
        if calls is not None:
            passed.append(_make_file(calls))
            words += ["--seccomp", str(passed[-1])]
        given = _make_file(b"".join(os.fsencode(word) + b"\0" for word in words))
        passed.append(given)
        ends += passed[2:]
        line = [program, "--args", str(given), "--json-status-fd", str(report), "--block-fd", str(block), "--", *argv]
        async with start_process(line, env=owner, pass_fds=passed) as process:
            for end in passed:
                os.close(end)
                ends.remove(end)
            ends.remove(status)
            async with _Status(status) as reports:
                pid = await reports.read_child()
                if pid is None:
                    raise RuntimeFailed(f"the sandbox could not be made: {await _read_stderr(process)}")
                yield _hold_sandboxed(process, pid, go, reports)
    finally:
        for end in ends:
            os.close(end)


def _make_file(content: bytes) -> int:
    """A descriptor from which bubblewrap reads the content. Every user of the machine could list words given as arguments."""
    descriptor = os.memfd_create("given")
    with open(descriptor, "wb", closefd=False) as file:
        file.write(content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def _hold_sandboxed(process: Process, pid: int, go: int, reports: _Status) -> HeldCommand:
    def list_pids() -> list[int]:
        return processes.find_descendants([pid]) if process.returncode is None else []

    def send(number: int) -> None:
        if process.returncode is not None:
            return
        if number == signal.SIGKILL:
            # The first process of the namespace takes all others with it.
            reports.killed = True
            processes.send_signal([pid])
        else:
            processes.send_signal(list_pids(), number)

    async def find_failure(done: Executed) -> str | None:
        if reports.killed or await reports.has_run():
            return None
        return f"the sandbox could not be made: {done.explain_failure()}"

    return HeldCommand(process, pid, partial(_release, go), send, list_pids, find_failure)


async def _read_stderr(process: Process) -> str:
    assert process.stderr
    return (await process.stderr.read()).decode(errors="replace").strip()


class _Status:
    """What bubblewrap reports, line by line: first its child, at the end the exit code if the command was started. The descriptor has one
    owner from the beginning: a second close would hit whatever has its number by then."""

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

    async def read_child(self) -> int | None:
        line = await self._reader.readline()
        return int(json.loads(line)["child-pid"]) if line else None

    async def has_run(self) -> bool:
        """After the end: whether the command was started."""
        return b"exit-code" in await self._reader.read()


@asynccontextmanager
async def start_supervised(argv: Sequence[str], env: Mapping[str, str], owner: Mapping[str, str]) -> AsyncIterator[HeldCommand]:
    """The command without a sandbox, as the node's user, held before its start. Only the supervisor sees to it that everything it starts
    ends with it; `owner` marks the supervisor, by which a sweep finds it."""
    hold, go = os.pipe()
    try:
        line = [sys.executable, "-I", "-S", str(_SUPERVISOR), str(hold), *argv]
        async with start_process(line, env={**env, **owner}, pass_fds=(hold,)) as process:
            os.close(hold)
            hold = -1
            yield _hold_supervised(process, go)
    finally:
        os.close(go)
        if hold >= 0:
            os.close(hold)


def _hold_supervised(process: Process, go: int) -> HeldCommand:
    # It waits for its release, so the pipes are still its own.
    outputs = processes.find_output_pipes(process.pid)

    def list_pids() -> list[int]:
        return processes.find_descendants([process.pid]) if process.returncode is None else []

    def send(number: int) -> None:
        if process.returncode is None:
            process.send_signal(BELL if number == signal.SIGKILL else number)
            # A command may have stopped it.
            process.send_signal(signal.SIGCONT)
        elif process.returncode < 0 or not _is_read_whole(process):
            # A command may have killed it. Its session is left then, and whatever left that but still holds the output.
            processes.send_signal({*processes.list_session(process.pid), *processes.find_writers(outputs)}, number)

    async def find_failure(done: Executed) -> str | None:
        return None

    return HeldCommand(process, process.pid, partial(_release, go), send, list_pids, find_failure)


def _is_read_whole(process: Process) -> bool:
    """Whether its output has been closed everywhere."""
    assert process.stdout and process.stderr
    return process.stdout.at_eof() and process.stderr.at_eof()


def _release(go: int) -> None:
    os.write(go, b"x")
