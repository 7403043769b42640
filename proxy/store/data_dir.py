"""The data directory of an embedded store: locked by one service at a time, its append-only file mended and explained, its log.

Redis before 7 keeps one file, `appendonly.aof`; newer ones and Valkey keep a folder of parts, to which they move that file.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import time
from pathlib import Path
from typing import BinaryIO

from proxy.store.programs import Program, StoreStartError

log = logging.getLogger(__name__)

APPEND_ONLY_FILE = "appendonly.aof"
PARTS = "appendonlydir"
LOG_NAME = "redis.log"
LOG_BYTES = 16 * 2**20
"""A longer log is put aside at the next start, as redis.log.1."""
LOCK_NAME = "verbatim.lock"
HANDOVER_SECONDS = 10.0
"""How long the server of a killed service may take to end."""
CHECKSUM_BYTES = 8
"""A file that ends in a snapshot ends in its checksum, which may be zeros."""
BLOCK_BYTES = 2**16


class DataDir:
    """The data directory: created, checked to be writable, and locked by one service at a time.

    The store's server inherits the lock, so when a service is killed the lock lasts until its server has ended, and two never append
    to one file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self._lock: int | None = None
        self._logged = 0
        """Where in the log the last start begins."""

    @property
    def parted(self) -> bool:
        """Whether the append-only file is a folder of parts."""
        return (self.path / PARTS).is_dir()

    def list_files(self) -> list[Path]:
        """The files of the append-only file, oldest first."""
        parts = sorted((self.path / PARTS).glob("*.aof"), key=lambda part: (int("0" + part.name.split(".")[2]), part.name))
        return parts or [path for path in (self.path / APPEND_ONLY_FILE,) if path.exists()]

    def mend(self) -> None:
        """Cuts off zeros at the end of the append-only file, which a power cut leaves where a file grew but its data was not written.
        No command ends in a zero, so nothing that was answered for is lost with them; the server refuses to start before them."""
        for path in self.list_files()[-1:]:
            size, zeros = path.stat().st_size, _count_zeros(path)
            if zeros <= CHECKSUM_BYTES:
                continue
            os.truncate(path, size - zeros)
            log.warning(
                "%s ended in %d zero bytes, as a power cut leaves them: they were cut off, and what the disk had not written "
                "before the cut is lost",
                path,
                zeros,
            )

    def open_log(self) -> BinaryIO:
        """The server's log, to append to."""
        path = self.path / LOG_NAME
        if path.exists() and path.stat().st_size > LOG_BYTES:
            path.replace(path.with_name(f"{LOG_NAME}.1"))
        file = path.open("ab")
        self._logged = file.tell()
        return file

    def read_truncation(self) -> str:
        """What the server has said of an incomplete command at the end of its file since its start, or nothing."""
        said = [line for line in self._read_log() if "truncat" in line.lower() and "enabled" not in line]
        return "; ".join(line.rpartition("# ")[2].strip("! ") for line in said)

    def explain_end(self, program: Program) -> str:
        """Why the server ended at its start, in a sentence."""
        lines = self._read_log() or ["it logged nothing"]
        why = f"{program.name} ended at its start: {lines[-1].strip()} (see {self.path / LOG_NAME})"
        if "append only file" not in lines[-1].lower():
            return why
        product = program.product.lower()
        check = f"bash -c 'exec -a {product}-check-aof {program.path} --fix {self.list_files()[-1]}'"
        return f"{why}; copy {self.path}, then cut the file at its fault, and lose what is behind that, with: {check}"

    def _read_log(self) -> list[str]:
        with (self.path / LOG_NAME).open("rb") as file:
            file.seek(self._logged)
            return file.read().decode(errors="replace").strip().splitlines()

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
                raise StoreStartError(f"the data directory {self.path} is still in use by the server of a service that ended")
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


def _count_zeros(path: Path) -> int:
    """How many zero bytes it ends in."""
    with path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        for start in range(end - BLOCK_BYTES, -BLOCK_BYTES, -BLOCK_BYTES):
            file.seek(max(start, 0))
            block = file.read(BLOCK_BYTES + min(start, 0))
            if kept := block.rstrip(b"\0"):
                return end - max(start, 0) - len(kept)
    return end
