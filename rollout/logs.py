"""The logs of attempts on a node: where each writes them, and which are kept."""

from __future__ import annotations

import shutil
import threading
import time
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path

from contract.attempts import AttemptId
from rollout.runtimes.base import Logs

ENTRY_BYTES = 4096
"""What an entry of a folder takes up beside its content."""
SETTLED_SECONDS = 3600.0
"""Logs that a node finds when it starts count as an ended attempt's if nothing was written to them for so long: the folder may be another
node's, too."""


class AttemptLogs:
    """The logs of one attempt: a folder with `<what>.out` and `<what>.err` for prepare, install, agent, evaluate, …"""

    def __init__(self, node: str, root: Path, attempt: AttemptId, prefix: str = "") -> None:
        self._node = node
        self._root = root
        self._attempt = attempt
        self._prefix = prefix
        self.folder = root / attempt.task_id / f"{attempt.index}.{attempt.attempt}"

    def make(self) -> None:
        """Raises OSError."""
        self.folder.mkdir(parents=True, exist_ok=True)

    def of(self, what: str) -> Logs:
        return Logs(self.folder / f"{self._prefix}{what}.out", self.folder / f"{self._prefix}{what}.err")

    def prefixed(self, prefix: str) -> AttemptLogs:
        """The same folder, with `<prefix>-` before every name."""
        return AttemptLogs(self._node, self._root, self._attempt, f"{prefix}-")

    def place(self, what: str = "") -> str:
        """Where a person finds them: `<node>:<path>`."""
        return f"{self._node}:{self.folder / (self._prefix + what) if what else self.folder}"


class KeptLogs:
    """The logs of ended attempts below `root`: the oldest are removed while all together take up more than `bound_bytes`. Both methods
    read and remove files, so call them in a thread."""

    def __init__(self, root: Path, bound_bytes: int) -> None:
        self._root = root
        self._bound_bytes = bound_bytes
        self._sizes: OrderedDict[Path, int] = OrderedDict()
        """The oldest first."""
        self._bytes = 0
        self._lock = threading.Lock()

    def find(self) -> None:
        """Count what earlier processes left."""
        settled = time.time() - SETTLED_SECONDS
        found = sorted((_find_newest(folder), folder) for folder in self._root.glob("*/*") if folder.is_dir())
        with self._lock:
            for written_at, folder in found:
                if written_at < settled:
                    self._count(folder)
            self._remove_oldest()

    def add(self, folder: Path) -> None:
        """Count the logs of an attempt that has ended."""
        with self._lock:
            self._count(folder)
            self._remove_oldest()

    def _count(self, folder: Path) -> None:
        self._sizes[folder] = size = _measure(folder)
        self._bytes += size

    def _remove_oldest(self) -> None:
        while self._sizes and self._bytes > self._bound_bytes:
            folder, size = self._sizes.popitem(last=False)
            self._bytes -= size
            shutil.rmtree(folder, ignore_errors=True)
            with suppress(OSError):
                # The task's own folder, unless other attempts have logs there.
                folder.parent.rmdir()


def _measure(folder: Path) -> int:
    """Bytes that the folder takes up."""
    sizes = [ENTRY_BYTES]
    for entry in folder.glob("*"):
        with suppress(OSError):
            sizes.append(ENTRY_BYTES + entry.lstat().st_size)
    return sum(sizes)


def _find_newest(folder: Path) -> float:
    """When something was last written there, in epoch seconds."""
    times = [0.0]
    for entry in (folder, *folder.glob("*")):
        with suppress(OSError):
            times.append(entry.lstat().st_mtime)
    return max(times)
