"""One command of the node's machine, run to its end: stdin, stdout, stderr, a time limit, and the end of all it started."""

from __future__ import annotations

import asyncio
import errno
import re
import shlex
import signal
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Protocol, Self

from rollout.runtimes import processes
from rollout.runtimes.base import GRACE_SECONDS, KEPT_BYTES, DiskFull, Executed, Logs, RuntimeFailed, no_room

_CHUNK_BYTES = 1 << 16
_LOOK_SECONDS = 0.5
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

Signal = Callable[[int], None]
"""Sends a signal to everything that the command started; SIGKILL leaves nothing of it."""


class CannotPass(Exception):
    """The system takes no such arguments: they are too long, or hold a null byte."""

    def executed(self) -> Executed:
        """As a shell tells it."""
        return Executed(126, b"", f"{self}\n".encode())


def shell(workdir: str, argv: Sequence[str]) -> list[str]:
    """argv as a shell starts it in `workdir`, with its exit codes 126 and 127. Raises `CannotPass`."""
    if not argv or any("\0" in word for word in argv):
        raise CannotPass("the command is empty or holds a null byte")
    return ["/bin/sh", "-c", 'cd "$1" || exit 126; shift; exec "$@"', "sh", workdir, *argv]


def variables(*layers: Mapping[str, str] | None) -> dict[str, str]:
    """The environment that the layers make, later ones first. Raises `CannotPass`."""
    env = {name: value for layer in layers for name, value in (layer or {}).items()}
    for name, value in env.items():
        if not name or "=" in name or "\0" in name + value:
            raise CannotPass(f"{name!r} cannot be an environment variable with that value")
    return env


def exports(env: Mapping[str, str]) -> list[str]:
    """Lines with which a shell sets the variables. Raises `CannotPass`."""
    for name in env:
        if not _NAME.fullmatch(name):
            raise CannotPass(f"{name!r} is no name of a variable that a shell can set")
    return [f"export {name}={shlex.quote(value)}" for name, value in env.items()]


class Sink(Protocol):
    """What takes a stream in place of `Output`."""

    def feed(self, data: bytes) -> None:
        """Raises `RuntimeFailed` when it takes no more; then the command is killed."""

    def kept(self) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Limits:
    """What one command may take."""

    timeout_seconds: float
    logs: Logs | None = None
    grace_seconds: float = GRACE_SECONDS
    stdout: Sink | None = None
    """None: the last `KEPT_BYTES`, and the log."""


@dataclass(frozen=True, slots=True)
class Held:
    """A command that is ready and waits for `release`. `pid` is the process that will become it or start it, `send` reaches all that
    it starts, `pids` lists them, `failure` says after its end what broke that was not the command."""

    process: Process
    pid: int
    release: Callable[[], None]
    send: Signal
    pids: Callable[[], list[int]]
    failure: Callable[[Executed], Awaitable[str | None]]


@asynccontextmanager
async def started(
    argv: Sequence[str], *, env: Mapping[str, str], cwd: Path | str = "/", pass_fds: Sequence[int] = ()
) -> AsyncIterator[Process]:
    """A process in a session of its own, which has ended when the block is left. A caller who is cancelled while it starts is cancelled
    within the block. Raises `RuntimeFailed`, `CannotPass`."""
    begun = asyncio.ensure_future(
        asyncio.create_subprocess_exec(
            *argv, stdin=PIPE, stdout=PIPE, stderr=PIPE, env=env, cwd=cwd, pass_fds=pass_fds, start_new_session=True
        )
    )
    cancelled = await settled(begun)
    try:
        process = begun.result()
    except (OSError, ValueError) as error:
        if isinstance(error, ValueError) or error.errno == errno.E2BIG:
            raise CannotPass(f"the command cannot be passed on: {error}") from error
        raise RuntimeFailed(f"{argv[0]} could not be started: {error}") from error
    try:
        if cancelled and (task := asyncio.current_task()) is not None:
            # It may have started others already, which only the block knows how to end. They would hold its output, and to wait for a
            # process is to wait for the end of its pipes, too.
            task.uncancel()
            task.cancel()
        yield process
    finally:
        if process.returncode is None:
            processes.kill_tree(process.pid)
        await process.wait()


async def finished(process: Process, stdin: bytes, limits: Limits, send: Signal) -> Executed:
    """What the process did. When time is up, and when the caller is cancelled, `send` gets SIGTERM and, after the grace time,
    SIGKILL."""
    return await followed(lambda stdout, stderr: _followed(process, stdin, stdout, stderr, send), limits, send)


async def followed(follow: Callable[[Sink, Sink], Coroutine[Any, Any, int]], limits: Limits, send: Signal) -> Executed:
    """What a command did. `follow` feeds its stdout and its stderr to what it is given, and returns its exit code when it has ended:
    soon after `send` got SIGKILL at the latest."""
    begun = time.monotonic()
    timed_out = False
    with ExitStack() as stack:
        logs = limits.logs
        paths = (logs.stdout, logs.stderr) if logs else (None, None)
        bound = logs.bound_bytes if logs else 0
        outputs = [stack.enter_context(Output(KEPT_BYTES, path, bound)) for path in paths]
        stdout, stderr = limits.stdout or outputs[0], outputs[1]
        end = asyncio.ensure_future(follow(stdout, stderr))
        try:
            done, _ = await asyncio.wait({end}, timeout=limits.timeout_seconds)
            timed_out = not done
        finally:
            await _ended(end, send, limits.grace_seconds)
        code = end.result()
    return Executed(code if code >= 0 else 128 - code, stdout.kept(), stderr.kept(), timed_out, time.monotonic() - begun)


async def _followed(process: Process, stdin: bytes, stdout: Sink, stderr: Sink, send: Signal) -> int:
    assert process.stdin and process.stdout and process.stderr
    streams = asyncio.gather(
        _written(process.stdin, stdin),
        _read(process.stdout, stdout, send),
        _read(process.stderr, stderr, send),
        return_exceptions=True,
    )
    while not streams.done():
        await asyncio.wait({streams}, timeout=_LOOK_SECONDS)
        if process.returncode is not None and not streams.done():
            # Nothing of the command is to be left, and something holds its output: what it hid from its reaper.
            send(signal.SIGKILL)
    results = streams.result()
    code = await process.wait()
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return code


async def _written(stream: asyncio.StreamWriter, data: bytes) -> None:
    # A command need not read what it is given.
    with suppress(BrokenPipeError, ConnectionResetError):
        # All at once, the loop would copy a great archive while nothing else of the node goes on.
        for start in range(0, len(data), _CHUNK_BYTES):
            stream.write(data[start : start + _CHUNK_BYTES])
            await stream.drain()
    stream.close()


async def _read(stream: asyncio.StreamReader, output: Sink, send: Signal) -> None:
    """Reads to the end also where the log cannot be written: only then has everything ended."""
    failed: RuntimeFailed | None = None
    while data := await stream.read(_CHUNK_BYTES):
        try:
            output.feed(data)
        except RuntimeFailed as error:
            failed = failed or error
            send(signal.SIGKILL)
    if failed is not None:
        raise failed


async def _ended(end: asyncio.Future[int], send: Signal, grace_seconds: float) -> None:
    """Returns when the command and all it started have ended; a second cancellation kills them at once."""
    try:
        if not end.done():
            send(signal.SIGTERM)
            await asyncio.wait({end}, timeout=grace_seconds)
    finally:
        send(signal.SIGKILL)
        if await settled(end):
            raise asyncio.CancelledError


async def settled(future: asyncio.Future[Any]) -> bool:
    """Returns when it is done, whoever cancels the caller meanwhile; whether somebody did."""
    cancelled = False
    while not future.done():
        try:
            await asyncio.wait({future})
        except asyncio.CancelledError:
            cancelled = True
    return cancelled


# One output stream of a command as it comes: its last bytes are kept, its beginning goes to a log file.


class Output:
    """Fed with what is read. At most `2 * kept_bytes` are held while it runs. Used in a `with` block."""

    def __init__(self, kept_bytes: int, log: Path | None = None, bound_bytes: int = 0) -> None:
        self._kept_bytes = kept_bytes
        self._kept = bytearray()
        self._path = log
        self._bound_bytes = bound_bytes
        self._unlogged_bytes = 0
        self._file: BinaryIO | None = None

    def __enter__(self) -> Self:
        if self._path is not None:
            with _told(self._path):
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._file = self._path.open("ab")
                self._bound_bytes -= self._path.stat().st_size
        return self

    def feed(self, data: bytes) -> None:
        """Raises `DiskFull` or `RuntimeFailed` when the log cannot be written."""
        self._kept += data
        if len(self._kept) > 2 * self._kept_bytes:
            del self._kept[: -self._kept_bytes]
        if self._file is not None and self._path is not None:
            logged = data[: max(0, self._bound_bytes)]
            with _told(self._path):
                self._file.write(logged)
                self._file.flush()
            self._bound_bytes -= len(logged)
            self._unlogged_bytes += len(data) - len(logged)

    def kept(self) -> bytes:
        """The last bytes, `kept_bytes` at most."""
        return bytes(self._kept[-self._kept_bytes :])

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._file is None or self._path is None:
            return
        with _told(self._path), self._file:
            if self._unlogged_bytes:
                self._file.write(f"\n[{self._unlogged_bytes} more bytes are not in this log]\n".encode())


class _told:
    """Translates what the system says of a log file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if isinstance(error, OSError):
            refused = DiskFull if no_room(error) else RuntimeFailed
            raise refused(f"the log {self._path} cannot be written: {error}") from error
