"""One output stream of a command as it comes: its last bytes are kept, its beginning goes to a log file."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from rollout.runtimes.base import DiskFull, RuntimeFailed, no_room


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
