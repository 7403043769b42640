"""One process on the node's machine, run to its end: stdin, stdout, stderr, a time limit, and the end of everything it started."""

from __future__ import annotations

import asyncio
import errno
import re
import shlex
import signal
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol, Self

from rollout.runtimes import processes
from rollout.runtimes.base import GRACE_SECONDS, KEPT_BYTES, Executed, Logs, RuntimeFailed, describe_os_error

_CHUNK_BYTES = 1 << 16
_LOOK_SECONDS = 0.5
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

Signal = Callable[[int], None]
"""Sends a signal to everything that the command started; SIGKILL leaves nothing of it."""


class CannotPass(Exception):
    """The system does not accept the arguments: they are too long or hold a null byte."""

    def to_executed(self) -> Executed:
        """The result that a shell reports."""
        return Executed(126, b"", f"{self}\n".encode())


class Sink(Protocol):
    """Consumes one output stream."""

    def feed(self, data: bytes) -> None:
        """Raises `RuntimeFailed` if it accepts no more; the command is then killed."""

    def get_tail(self) -> bytes: ...


@dataclass(frozen=True, slots=True)
class ExecLimits:
    """`stdout` None keeps the last `KEPT_BYTES` and writes the log."""

    timeout_seconds: float
    logs: Logs | None = None
    grace_seconds: float = GRACE_SECONDS
    stdout: Sink | None = None


@dataclass(frozen=True, slots=True)
class HeldCommand:
    """A command that waits for `release`. `pid` is the process that will become it or start it; `send` reaches everything it starts, and
    `list_pids` lists that; `find_failure` says after its end what broke that was not the command."""

    process: Process
    pid: int
    release: Callable[[], None]
    send: Signal
    list_pids: Callable[[], list[int]]
    find_failure: Callable[[Executed], Awaitable[str | None]]


@asynccontextmanager
async def start_process(
    argv: Sequence[str], *, env: Mapping[str, str], cwd: Path | str = "/", pass_fds: Sequence[int] = ()
) -> AsyncIterator[Process]:
    """A process in its own session, which has ended when the block is left. A caller cancelled during the start is cancelled inside
    the block. Raises `RuntimeFailed`, `CannotPass`."""
    starting = asyncio.ensure_future(
        asyncio.create_subprocess_exec(
            *argv, stdin=PIPE, stdout=PIPE, stderr=PIPE, env=env, cwd=cwd, pass_fds=pass_fds, start_new_session=True
        )
    )
    cancelled = await wait_settled(starting)
    try:
        process = starting.result()
    except (OSError, ValueError) as error:
        if isinstance(error, ValueError) or error.errno == errno.E2BIG:
            raise CannotPass(f"the command cannot be passed on: {error}") from error
        raise RuntimeFailed(f"{argv[0]} could not be started: {error}") from error
    try:
        if cancelled and (task := asyncio.current_task()) is not None:
            # It may have started others already, which only the block knows how to end. They would hold its output open, and waiting for
            # a process includes waiting for the end of its pipes.
            task.uncancel()
            task.cancel()
        yield process
    finally:
        if process.returncode is None:
            processes.kill_tree(process.pid)
        await process.wait()


async def find_failure(argv: Sequence[str]) -> str | None:
    """What a small program of the node's own wrote to stderr, if it failed."""
    process = await asyncio.create_subprocess_exec(*argv, stderr=PIPE)
    _, stderr = await process.communicate()
    return stderr.decode(errors="replace").strip() if process.returncode else None


async def finish_process(process: Process, stdin: bytes, limits: ExecLimits, send: Signal) -> Executed:
    """Runs the process to its end, as `run_bounded` does."""
    return await run_bounded(lambda stdout, stderr: _follow(process, stdin, stdout, stderr, send), limits, send)


async def run_bounded(follow: Callable[[Sink, Sink], Coroutine[Any, Any, int]], limits: ExecLimits, send: Signal) -> Executed:
    """Follows a command to its end. On timeout, and when the caller is cancelled, `send` gets SIGTERM and, after the grace time, SIGKILL.

    `follow` feeds stdout and stderr to the two sinks and returns the exit code when the command has ended, at the latest soon after
    SIGKILL."""
    begun = time.monotonic()
    timed_out = False
    with ExitStack() as stack:
        logs = limits.logs
        paths = (logs.stdout, logs.stderr) if logs else (None, None)
        bound = logs.bound_bytes if logs else 0
        outputs = [stack.enter_context(OutputTail(KEPT_BYTES, path, bound)) for path in paths]
        stdout, stderr = limits.stdout or outputs[0], outputs[1]
        end = asyncio.ensure_future(follow(stdout, stderr))
        try:
            done, _ = await asyncio.wait({end}, timeout=limits.timeout_seconds)
            timed_out = not done
        finally:
            await _end(end, send, limits.grace_seconds)
        code = end.result()
    seconds = time.monotonic() - begun
    return Executed(code if code >= 0 else 128 - code, stdout.get_tail(), stderr.get_tail(), timed_out, seconds)


async def _follow(process: Process, stdin: bytes, stdout: Sink, stderr: Sink, send: Signal) -> int:
    assert process.stdin and process.stdout and process.stderr
    streams = asyncio.gather(
        _write(process.stdin, stdin),
        _read(process.stdout, stdout, send),
        _read(process.stderr, stderr, send),
        return_exceptions=True,
    )
    while not streams.done():
        await asyncio.wait({streams}, timeout=_LOOK_SECONDS)
        if process.returncode is not None and not streams.done():
            # The command ended, but something it hid from its reaper still holds its output: nothing may stay.
            send(signal.SIGKILL)
    results = streams.result()
    code = await process.wait()
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return code


async def _write(stream: asyncio.StreamWriter, data: bytes) -> None:
    # A command need not read its stdin.
    with suppress(BrokenPipeError, ConnectionResetError):
        # In one piece, a large archive would block the event loop while it is copied.
        for start in range(0, len(data), _CHUNK_BYTES):
            stream.write(data[start : start + _CHUNK_BYTES])
            await stream.drain()
    stream.close()


async def _read(stream: asyncio.StreamReader, output: Sink, send: Signal) -> None:
    """Reads to the end even if the log cannot be written: only then has everything ended."""
    failure: RuntimeFailed | None = None
    while data := await stream.read(_CHUNK_BYTES):
        try:
            output.feed(data)
        except RuntimeFailed as error:
            failure = failure or error
            send(signal.SIGKILL)
    if failure is not None:
        raise failure


async def _end(end: asyncio.Future[int], send: Signal, grace_seconds: float) -> None:
    """Returns when the command and everything it started have ended; a second cancellation kills them at once."""
    try:
        if not end.done():
            send(signal.SIGTERM)
            await asyncio.wait({end}, timeout=grace_seconds)
    finally:
        send(signal.SIGKILL)
        if await wait_settled(end):
            raise asyncio.CancelledError


async def wait_settled(future: asyncio.Future[Any]) -> bool:
    """Waits until the future is done, even while the caller is being cancelled; returns whether it was cancelled."""
    cancelled = False
    while not future.done():
        try:
            await asyncio.wait({future})
        except asyncio.CancelledError:
            cancelled = True
    return cancelled


# Arguments and variables


def wrap_in_shell(workdir: str, argv: Sequence[str]) -> list[str]:
    """argv, started by a shell in `workdir`, with the shell's exit codes 126 and 127. Raises `CannotPass`."""
    check_argv(argv)
    return ["/bin/sh", "-c", 'cd "$1" || exit 126; shift; exec "$@"', "sh", workdir, *argv]


def check_argv(argv: Sequence[str]) -> None:
    """Raises `CannotPass`."""
    if not argv or any("\0" in word for word in argv):
        raise CannotPass("the command is empty or holds a null byte")


def merge_variables(*layers: Mapping[str, str]) -> dict[str, str]:
    """The variables of all layers; later ones win. Raises `CannotPass`."""
    env = {name: value for layer in layers for name, value in layer.items()}
    for name, value in env.items():
        if not name or "=" in name or "\0" in name + value:
            raise CannotPass(f"{name!r} cannot be an environment variable with that value")
    return env


def render_exports(env: Mapping[str, str]) -> list[str]:
    """Shell lines that set the variables. Raises `CannotPass`."""
    for name in env:
        if not _NAME.fullmatch(name):
            raise CannotPass(f"{name!r} is not a variable name that a shell can set")
    return [f"export {name}={shlex.quote(value)}" for name, value in env.items()]


# Output


class OutputTail:
    """One output stream: keeps its end in memory (at most `2 * kept_bytes` while it runs) and writes its beginning to a log file. Used in a
    `with` block."""

    def __init__(self, kept_bytes: int, log: Path | None = None, bound_bytes: int = 0) -> None:
        self._kept_bytes = kept_bytes
        self._kept = bytearray()
        self._path = log
        self._bound_bytes = bound_bytes
        self._cut_bytes = 0
        self._file: BinaryIO | None = None

    def __enter__(self) -> Self:
        if self._path is not None:
            with self._translate_errors():
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._file = self._path.open("ab")
                self._bound_bytes -= self._path.stat().st_size
        return self

    def feed(self, data: bytes) -> None:
        """Raises `DiskFull` or `RuntimeFailed` if the log cannot be written."""
        self._kept += data
        if len(self._kept) > 2 * self._kept_bytes:
            del self._kept[: -self._kept_bytes]
        if self._file is not None:
            logged = data[: max(0, self._bound_bytes)]
            with self._translate_errors():
                self._file.write(logged)
                self._file.flush()
            self._bound_bytes -= len(logged)
            self._cut_bytes += len(data) - len(logged)

    def get_tail(self) -> bytes:
        """The last bytes, at most `kept_bytes`."""
        return bytes(self._kept[-self._kept_bytes :])

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            with self._translate_errors(), self._file:
                if self._cut_bytes:
                    self._file.write(f"\n[{self._cut_bytes} more bytes are not in this log]\n".encode())

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise describe_os_error(f"the log {self._path} cannot be written", error) from error
