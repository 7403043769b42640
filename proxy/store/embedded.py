"""The embedded store: a Valkey or Redis server as a child process, its append-only file in the data directory.

`proxy.store.programs` chooses the server, `proxy.store.data_dir` looks after the directory.

It listens only on a Unix socket that its user alone may open. It runs in its own session, so that Ctrl-C in the terminal reaches
the service first, and on Linux it ends when the service dies, however that dies. When it ends by itself it is restarted: its file has
everything it acknowledged.

This module syncs the file, once a second. With Redis's own `everysec`, Redis answers before it writes while a sync is running (two
seconds at most), and would lose those answers' records if it died.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Literal
from urllib.parse import quote

from proxy.store.data_dir import APPEND_ONLY_FILE, DataDir
from proxy.store.keys import PROCESSES
from proxy.store.programs import Program, StoreStartError, choose_program

__all__ = ["EmbeddedRedis", "StoreStartError"]

log = logging.getLogger(__name__)

SOCKET_PATH_BYTES = 100
"""A Unix socket's path must be shorter than 108 bytes on Linux and 104 on macOS."""
STOP_SECONDS = 30.0
RESTART_PAUSE_SECONDS = 1.0
SYNC_SECONDS = 1.0

# Runs in the child and becomes redis-server. Not subprocess's preexec_fn, which may deadlock in a process with threads. The parent may
# have died before prctl was called, hence the check after it.
LAUNCH = """
import ctypes, os, signal, sys
parent, binary = int(sys.argv[1]), sys.argv[2]
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)
if os.getppid() != parent:
    sys.exit("the service ended")
os.execv(binary, sys.argv[2:])
"""


class EmbeddedRedis:
    def __init__(self, data_dir: Path | str, fsync: Literal["everysec", "always"] = "everysec") -> None:
        self._dir = DataDir(Path(data_dir))
        self._fsync = fsync
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: Path | None = None
        self._stopping = threading.Event()
        self._watcher: threading.Thread | None = None
        self._syncer: threading.Thread | None = None

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def start(self) -> str:
        """The URL of the running store, once the append-only file is loaded. Blocks. Raises `StoreStartError`.

        The data directory's lock proves that the processes listed in the file have ended: their entries are deleted, and their calls
        dangle.

        Call it on the process's main thread: Linux signals the child when the starting thread ends.
        """
        lock = self._dir.acquire()
        try:
            program = choose_program(parted=self._dir.parted)
            _tell(program)
            self._dir.mend()
            self._socket = _socket_path(self._dir.path)
            with _delay_stop_signals():
                self._process = self._launch(program, lock, self._socket)
            self._await_ready(program, self._process, self._socket)
            _ask(self._socket, f"DEL {PROCESSES}")
        except BaseException:
            # Also on Ctrl-C while it loads: a redis-server left running would keep the data directory locked.
            self.stop()
            raise
        watched = (program, lock, self._socket)
        self._watcher = threading.Thread(target=self._watch, args=watched, name="embedded-redis", daemon=True)
        self._watcher.start()
        if self._fsync == "everysec":
            self._syncer = threading.Thread(target=self._sync, name="embedded-redis-sync", daemon=True)
            self._syncer.start()
        return f"unix://{quote(str(self._socket))}"

    def stop(self) -> None:
        """Ends redis-server, which syncs its file first, then frees the data directory. May be called twice."""
        self._stopping.set()
        _end(self._process)
        while self._watcher is not None and self._watcher.is_alive():
            _end(self._process)  # the watcher may have just started another
            self._watcher.join(0.1)
        if self._syncer is not None:
            self._syncer.join()
        self._process = self._watcher = self._syncer = None
        if self._socket is not None:
            self._socket.unlink(missing_ok=True)
            if self._socket.parent != self._dir.path:
                self._socket.parent.rmdir()
            self._socket = None
        self._dir.release()

    def _launch(self, program: Program, lock: int, path: Path) -> subprocess.Popen[bytes]:
        options = {
            "port": "0",
            "unixsocket": str(path),
            "unixsocketperm": "700",
            "dir": str(self._dir.path),
            "appendonly": "yes",
            "appendfilename": APPEND_ONLY_FILE,
            "appendfsync": "always" if self._fsync == "always" else "no",
            "save": "",
            "daemonize": "no",
        }
        flags = [part for name, value in options.items() for part in (f"--{name}", value)]
        try:
            with self._dir.open_log() as output:
                return subprocess.Popen(
                    [sys.executable, "-S", "-E", "-c", LAUNCH, str(os.getpid()), str(program.path), *flags],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                    pass_fds=(lock,),
                )
        except OSError as error:
            raise StoreStartError(f"the embedded store cannot start: {error}") from error

    def _await_ready(self, program: Program, process: subprocess.Popen[bytes], path: Path) -> None:
        while not _answers(path):
            if process.poll() is not None:
                raise StoreStartError(self._dir.explain_end(program))
            time.sleep(0.02)
        if cut := self._dir.read_truncation():
            log.warning(
                "the append-only file in %s ended in the middle of a command, as after a power cut: %s", self._dir.path, cut
            )

    def _watch(self, program: Program, lock: int, path: Path) -> None:
        while self._process is not None:
            code = self._process.wait()
            if self._stopping.is_set():
                return
            log.error("the embedded store's server ended by itself (exit status %s) and is restarted", code)
            if self._stopping.wait(RESTART_PAUSE_SECONDS):
                return
            try:
                self._process = self._launch(program, lock, path)
            except StoreStartError as error:
                log.error("%s", error.message)

    def _sync(self) -> None:
        """Syncs what the server has written. It syncs by itself when it is stopped. When a sync fails here it is left to the server,
        which refuses records while its own sync fails."""
        synced: dict[int, int] = {}
        reported = False
        while not self._stopping.wait(SYNC_SECONDS):
            try:
                # Opened by name each time: a rewrite replaces files.
                for each in self._dir.list_files():
                    with each.open("rb") as file:
                        found = os.fstat(file.fileno())
                        if synced.get(found.st_ino) != found.st_size:
                            os.fsync(file.fileno())
                            synced[found.st_ino] = found.st_size
            except FileNotFoundError:
                continue  # replaced a moment ago
            except OSError as error:
                if not reported:
                    log.error("the embedded store's file cannot be synced; its server syncs it instead: %s", error)
                reported = True
                # Every time: a restarted server has lost the setting.
                if self._socket is not None:
                    _ask(self._socket, "CONFIG SET appendfsync everysec")


def _tell(program: Program) -> None:
    """One line that says which server it is, a warning if it has known holes."""
    if not program.holes:
        log.info("the embedded store runs on %s", program.name)
        return
    log.warning(
        "the embedded store runs on %s, which has known holes (%s): install a current valkey-server or redis-server "
        "(Debian: apt-get install valkey-server), which is taken from the PATH at the next start",
        program.name,
        program.holes,
    )


@contextmanager
def _delay_stop_signals() -> Iterator[None]:
    """Delays SIGINT and SIGTERM: a handler that raised between a process's start and the assignment of its `Popen` would leave it running.

    Blocking the signals in this thread does not help: another thread (numpy starts some) would receive them, and Python would still run
    the handler here.
    """
    delayed: list[int] = []
    handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
    try:
        # Python runs handlers only in the main thread.
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                if callable(handler := signal.getsignal(number)):
                    handlers[number] = handler
                    signal.signal(number, lambda number, _: delayed.append(number))
        yield
    finally:
        for each, handler in handlers.items():
            signal.signal(each, handler)
        for each in delayed:
            signal.raise_signal(each)


def _socket_path(data_dir: Path) -> Path:
    """In the data directory, or in a private temporary folder if that path is too long or its file system has no sockets."""
    path = data_dir / "redis.sock"
    if len(os.fsencode(path)) > SOCKET_PATH_BYTES:
        return Path(tempfile.mkdtemp(prefix="verbatim-")) / "redis.sock"
    path.unlink(missing_ok=True)
    try:
        with socket.socket(socket.AF_UNIX) as probe:
            probe.bind(str(path))
        path.unlink()
    except OSError:
        return Path(tempfile.mkdtemp(prefix="verbatim-")) / "redis.sock"
    return path


def _end(process: subprocess.Popen[bytes] | None) -> None:
    if process is None or process.poll() is not None:
        return
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        log.error("the embedded redis-server did not end within %.0f s and is killed", STOP_SECONDS)
        process.kill()
        process.wait()


def _answers(path: Path) -> bool:
    """Whether a Redis at this socket takes commands; False while it loads its file."""
    return _ask(path, "PING").startswith(b"+PONG")


def _ask(path: Path, command: str) -> bytes:
    """The raw answer, empty if there is none."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.settimeout(1.0)
            client.connect(str(path))
            client.sendall(f"{command}\r\n".encode())
            return client.recv(64)
    except OSError:
        return b""
