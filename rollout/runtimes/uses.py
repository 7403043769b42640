"""When what is kept for later runtimes was last used, and what of it may go: all but so many, the longest unused first, none in use.

Of each there is a file in a folder of the machine, whose time of change is the last use and on which who uses it has a lock: the system
ends that with the process.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rollout.runtimes.folders import owned

YOUNG_SECONDS = 600.0
"""What was used since then may be about to be used again: between the look whether it is there and the lock."""


class Uses:
    """`most` are kept; `variable` names another place for the folder. Raises `OSError`."""

    def __init__(self, folder: Path, most: int, variable: str) -> None:
        self._folder = folder
        self._most = most
        self._variable = variable

    def note(self, name: str) -> None:
        """It is used now. Raises `RuntimeFailed` where the folder is another user's."""
        owned(self._folder, self._variable)
        (self._folder / name).touch(mode=0o600)

    def hold(self, name: str) -> int:
        """A descriptor: until it is closed, by whomever, what it names is in use. Raises `RuntimeFailed` as `note` does."""
        owned(self._folder, self._variable)
        while True:
            descriptor = os.open(self._folder / name, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            if self._is_at(name, descriptor):
                os.utime(descriptor)
                return descriptor
            # While the lock was waited for it was removed: a lock on a file without a name keeps nothing.
            os.close(descriptor)

    def _is_at(self, name: str, descriptor: int) -> bool:
        with suppress(FileNotFoundError):
            return os.path.samestat((self._folder / name).stat(), os.fstat(descriptor))
        return False

    def too_many(self) -> Iterator[str]:
        """One after the other what is to be removed, as long as there are more than the bound: the longest unused first, none that is
        young. Of those that then are not removed others take the place."""
        used = {}
        for entry in os.scandir(self._folder) if self._folder.is_dir() else ():
            with suppress(FileNotFoundError):
                used[entry.name] = entry.stat().st_mtime
        left = len(used)
        for name in sorted(used, key=lambda name: used[name]):
            if left > self._most and self._old(name):
                yield name
                left -= not (self._folder / name).exists()

    def _old(self, name: str) -> bool:
        with suppress(FileNotFoundError):
            return (self._folder / name).stat().st_mtime < time.time() - YOUNG_SECONDS
        return False

    @contextmanager
    def alone(self, name: str) -> Iterator[bool]:
        """In the block nobody begins to use it; False: somebody does, or has just done so."""
        descriptor = os.open(self._folder / name, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield self._old(name)
        finally:
            os.close(descriptor)

    def forget(self, name: str) -> None:
        """It is gone."""
        (self._folder / name).unlink(missing_ok=True)
