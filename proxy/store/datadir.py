"""The data directory of the embedded store: made, proven writable, and held by one service at a time.

The lock is inherited by the redis-server that works in the directory. When a service is killed, its lock thus lasts until its
Redis has ended too, and no second Redis ever appends to the same file.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from pathlib import Path

from proxy.errors import VerbatimError

LOCK_NAME = "verbatim.lock"
HANDOVER_SECONDS = 10.0
"""How long the Redis of a killed service may take to end."""


class StoreStartError(VerbatimError):
    """The embedded store cannot start; the message is one sentence for the person at the terminal."""

    code = "store_start_failed"


class DataDir:
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
            self._hold(lock)
        except BaseException:
            # Ctrl-C while it waits too: nobody else knows the descriptor.
            os.close(lock)
            raise
        self._lock = lock
        return lock

    def release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _hold(self, lock: int) -> None:
        deadline = time.monotonic() + HANDOVER_SECONDS
        while not self._try(lock):
            holder = _holder(lock)
            if _alive(holder):
                raise StoreStartError(f"the data directory {self.path} is in use by another service (process {holder})")
            if time.monotonic() > deadline:
                raise StoreStartError(
                    f"the data directory {self.path} is still in use by the redis-server of a service that ended"
                )
            time.sleep(0.05)
        os.ftruncate(lock, 0)
        os.pwrite(lock, str(os.getpid()).encode(), 0)

    def _try(self, lock: int) -> bool:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                return False
            raise StoreStartError(f"the data directory {self.path} cannot be locked: {error.strerror}") from error
        return True


def _holder(lock: int) -> int:
    written = os.pread(lock, 32, 0)
    return int(written) if written.isdigit() else 0


def _alive(process: int) -> bool:
    """False for 0, which is read between another service's taking the lock and its writing its id there."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return process > 0
