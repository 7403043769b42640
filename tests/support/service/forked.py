"""`verbatim` as a process of its own that need not import anything: forked off a server that has imported it all.

`ForkedVerbatim(args, ...)` is a `subprocess.Popen` in every way that shows: its own arguments, environment, folder, standard streams,
session, signals and exit code. The imports, up to two seconds of CPU, are done once per process that runs tests.

The server is `python -m tests.support.service.forked`. Over its standard input, a socket, it gets four descriptors per program: a channel
and the program's standard streams. The program reads its order from the channel as JSON; the server writes the process id there, and
later the exit status.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import errno
import functools
import gc
import importlib
import inspect
import io
import json
import multiprocessing.popen_fork
import multiprocessing.util
import os
import pkgutil
import selectors
import signal
import socket
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tests import ROOT

ALSO = ("proxy.app", "proxy.tasks.router", "rollout.node", "trainer_client")
"""Imported by the server besides all of `cli`."""
HURRIED = (
    "cli.generation.rounds.POLL_SECONDS",
    "cli.node.LOOK_SECONDS",
    "cli.run_exports.POLL_SECONDS",
    "cli.tasks.POLL_SECONDS",
    "proxy.engine.pool.standing.RETRY_SECONDS",
    "rollout.node.LOOK_SECONDS",
)
"""Seconds between two looks at something: programs look ten times as often as they would."""
DIES_WITH_PARENT = 1
"""PR_SET_PDEATHSIG of prctl(2)."""

Order = dict[str, Any]
"""argv, env, cwd and new_session of a program."""


class Forked(subprocess.Popen[Any]):
    """A program forked off the server that `python -m MODULE` is; takes what `subprocess.Popen` takes of standard streams, `env`, `cwd`
    and `start_new_session`."""

    module: str
    _close_pipe_fds: Callable[..., None]
    _handle_exitstatus: Callable[[int], None]
    _waitpid_lock: threading.Lock

    @classmethod
    def run(
        cls, args: Sequence[str], *, env: Mapping[str, str] | None = None, timeout_seconds: float = 240.0
    ) -> subprocess.CompletedProcess[str]:
        """The finished program with its output as text. It has nothing to read."""
        streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        with cls(args, env=env, text=True, **streams) as process:
            try:
                stdout, stderr = process.communicate(timeout=timeout_seconds)
            finally:
                process.kill()
        return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)

    @classmethod
    def forking_env(cls) -> dict[str, str]:
        """Variables under which `python -m ...` is forked off the same server, whichever process starts it."""
        path = os.pathsep.join([str(ROOT / "tests" / "support" / "service" / "forks"), str(ROOT)])
        return {"TESTS_FORK_OFF": _server(cls.module).name, "PYTHONPATH": path}

    def _execute_child(self, *given: Any) -> None:
        # Its parameters differ a little from one Python to the next.
        told = dict(zip(_parameters(), given, strict=True))
        pipes = [told[name] for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")]
        streams = [number if pipe == -1 else pipe for number, pipe in enumerate((pipes[0], pipes[3], pipes[5]))]
        order = {
            "argv": list(told["args"]),
            "env": dict(os.environ if told["env"] is None else told["env"]),
            "cwd": os.fspath(told["cwd"] or os.getcwd()),
            "new_session": bool(told["start_new_session"]),
        }
        self._channel, theirs = socket.socketpair()
        with theirs:
            _server(self.module).send([theirs.fileno(), *streams])
        self._channel.sendall(json.dumps(order).encode() + b"\n")
        self._answers = self._channel.makefile("rb")
        self.pid = int(self._answers.readline())
        self._child_created = True
        self._close_pipe_fds(*pipes)

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        """(process id, status), or (0, 0) while it runs."""
        if self.returncode is not None:
            return self.pid, 0
        if wait_flags & os.WNOHANG and not _readable(self._channel):
            return 0, 0
        status = self._answers.readline()
        self._answers.close()
        self._channel.close()
        return self.pid, int(status or signal.SIGKILL)

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        if self.returncode is None and self._waitpid_lock.acquire(False):
            try:
                if self.returncode is None:
                    pid, status = self._try_wait(os.WNOHANG)
                    if pid:
                        self._handle_exitstatus(status)
            finally:
                self._waitpid_lock.release()
        return self.returncode


class ForkedVerbatim(Forked):
    """`verbatim ARGS...` started."""

    module = "tests.support.service.forked"

    def __init__(self, args: Sequence[str], **popen: Any) -> None:
        super().__init__(["verbatim", *args], **popen)


@functools.cache
def _parameters() -> tuple[str, ...]:
    return tuple(inspect.signature(subprocess.Popen._execute_child).parameters)[1:]  # type: ignore[attr-defined]


def _readable(channel: socket.socket) -> bool:
    with selectors.DefaultSelector() as selector:
        selector.register(channel, selectors.EVENT_READ)
        return bool(selector.select(0))


class _Server:
    """The process that programs are forked off. It ends with the one that started it, and they with it."""

    def __init__(self, module: str) -> None:
        self._orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._one_at_a_time = threading.Lock()
        self._named = False
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module],
                cwd=ROOT,
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )

    @property
    def name(self) -> str:
        """The name of the socket where other processes order programs. Waits until it is there."""
        if not self._named:
            self._orders.recv(1)
            self._named = True
        return _name(self._process.pid)

    def send(self, descriptors: list[int]) -> None:
        with self._one_at_a_time:
            socket.send_fds(self._orders, [b"."], descriptors)


_servers: dict[str, _Server] = {}
_starting = threading.Lock()


def _server(module: str) -> _Server:
    """One for all threads."""
    with _starting:
        if module not in _servers:
            _servers[module] = _Server(module)
        return _servers[module]


def _name(pid: int) -> str:
    return f"verbatim-tests-{pid}"


def await_order(orders: socket.socket, at_end: Callable[[int], None] = lambda pid: None) -> Order:
    """Be the server. Returns in each program that is forked off, with its order; the server leaves by SystemExit when its tests are
    over. `at_end` is called with the process id of each program that has ended."""
    try:
        return _Forking(orders, at_end).serve()
    except OSError as failed:
        if failed.errno != errno.ECONNRESET:
            raise
        sys.exit()


class _Forking:
    def __init__(self, orders: socket.socket, at_end: Callable[[int], None]) -> None:
        self._orders = orders
        self._at_end = at_end
        self._others = socket.socket(socket.AF_UNIX)
        self._others.bind(f"\0{_name(os.getpid())}")
        self._others.listen()
        self._events = selectors.DefaultSelector()
        self._events.register(self._orders, selectors.EVENT_READ, self._take_order)
        self._events.register(self._others, selectors.EVENT_READ, self._accept_order)
        orders.sendall(b".")

    def serve(self) -> Order:
        while True:
            # One event at a time: handling it may make another one void.
            order: Order | None = self._events.select()[0][0].data()
            if order is not None:
                return order

    def _take_order(self) -> Order | None:
        _, passed, _, _ = socket.recv_fds(self._orders, 1, 4)
        if not passed:
            sys.exit()
        return self._fork(passed)

    def _accept_order(self) -> Order | None:
        """From a process that stands for the program: it passes the standard streams, and a pipe that ends with it."""
        asking, _ = self._others.accept()
        _, (*streams, life), _, _ = socket.recv_fds(asking, 1, 4)
        return self._fork([asking.detach(), *streams], life)

    def _fork(self, passed: list[int], life: int | None = None) -> Order | None:
        if (pid := os.fork()) == 0:
            # Closed with their objects, they would close what has their numbers by then: one is the program's standard input.
            self._orders.detach()
            self._others.detach()
            self._events.close()
            return _become(passed)
        channel, *streams = passed
        for descriptor in streams:
            os.close(descriptor)
        answers = socket.socket(fileno=channel)
        _tell(answers, pid)
        watch = os.pidfd_open(pid)
        self._events.register(watch, selectors.EVENT_READ, functools.partial(self._reap, pid, watch, answers, life))
        if life is not None:
            self._events.register(life, selectors.EVENT_READ, functools.partial(self._kill, pid, life))
        return None

    def _kill(self, pid: int, life: int) -> None:
        self._events.unregister(life)
        os.kill(pid, signal.SIGKILL)

    def _reap(self, pid: int, watch: int, answers: socket.socket, life: int | None) -> None:
        self._events.unregister(watch)
        os.close(watch)
        if life is not None:
            if life in self._events.get_map():
                self._events.unregister(life)
            os.close(life)
        status = os.waitpid(pid, 0)[1]
        self._at_end(pid)
        _tell(answers, status)
        answers.close()


def _tell(channel: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):
        channel.sendall(b"%d\n" % number)


def _become(passed: list[int]) -> Order:
    """In the child: it is the program from here on."""
    ctypes.CDLL(None).prctl(DIES_WITH_PARENT, signal.SIGKILL)
    with open(passed[0], "rb", buffering=0, closefd=False) as channel:
        order: Order = json.loads(channel.readline())
    for target, descriptor in enumerate(passed[1:]):
        os.dup2(descriptor, target)
    os.closerange(3, 1 << 16)
    if order["new_session"]:
        os.setsid()
    os.environ.clear()
    os.environ.update(order["env"])
    os.chdir(order["cwd"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    sys.stdin, sys.stdout, sys.stderr = open(0), _writer(1), _writer(2, line_buffering=True)  # noqa: SIM115
    return order


def _writer(descriptor: int, *, line_buffering: bool = False) -> io.TextIOWrapper:
    errors = "backslashreplace" if descriptor == 2 else None
    raw = open(descriptor, "wb", closefd=False)  # noqa: SIM115
    return io.TextIOWrapper(raw, errors=errors, line_buffering=line_buffering or os.isatty(descriptor))


class _Workers(multiprocessing.popen_fork.Popen):
    """Workers of `verbatim serve` as they are when Python is started for each of them, but that nothing is imported again: a worker has
    its arguments, the end of a pipe that closes with its parent, and no other descriptor or handler of a signal."""

    def _launch(self, process: Any) -> None:
        _, listeners, status, _ = process._args
        until_its_end, ended = os.pipe()
        until_the_parents, parents = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            kept = {*(each.fileno() for each in listeners), status.fileno(), ended, until_the_parents}
            for descriptor in set(map(int, os.listdir("/proc/self/fd"))) - kept - {0, 1, 2}:
                with contextlib.suppress(OSError):
                    os.close(descriptor)
            code = 1
            try:
                code = process._bootstrap(parent_sentinel=until_the_parents)
            finally:
                os._exit(code)
        for descriptor in (ended, until_the_parents):
            os.close(descriptor)
        self.finalizer = multiprocessing.util.Finalize(self, multiprocessing.util.close_fds, (until_its_end, parents))  # type: ignore[attr-defined]
        self.sentinel = until_its_end


def _fork_workers() -> None:
    workers = sys.modules["cli.serving.workers"]
    context = multiprocessing.get_context("fork")
    process = type("Worker", (context.Process,), {"_Popen": staticmethod(_Workers)})
    workers._spawn = types.SimpleNamespace(Pipe=context.Pipe, Process=process)  # type: ignore[attr-defined]


def _run(arguments: Sequence[str]) -> None:
    """Run the program. When it ends in order, do what an interpreter does at its end, but do not free its objects: that takes a second."""
    from cli.main import main

    if "TESTS_START_WORKERS" not in os.environ:
        _fork_workers()
    sys.argv = [str(ROOT / "cli" / "main.py"), *arguments]
    # What multiprocessing and the usage line take the program's name from.
    program, module = sys.modules["__main__"], sys.modules["cli.main"]
    program.__spec__, program.__package__ = module.__spec__, module.__package__
    try:
        main()
    except SystemExit as left:
        if isinstance(left.code, str):
            raise
        code = left.code or 0
    else:
        code = 0
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def _import_all() -> None:
    import cli

    for name in (*ALSO, *(module.name for module in pkgutil.walk_packages(cli.__path__, "cli."))):
        importlib.import_module(name)
    for module, _, name in (path.rpartition(".") for path in HURRIED):
        setattr(sys.modules[module], name, getattr(sys.modules[module], name) / 10)
    assert threading.active_count() == 1, "a process with threads cannot be forked"
    gc.collect()
    gc.freeze()


if __name__ == "__main__":
    _import_all()
    argv = await_order(socket.socket(fileno=0))["argv"]
    # `python -m cli.main ARGS...` where another process started it: see `forking_env`.
    _run(argv[3:] if argv[1:3] == ["-m", "cli.main"] else argv[1:])
