"""Folders of the node in which runtimes have their files: how they are made and how they go."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

from rollout.runtimes.base import RuntimeFailed

_ENTERED = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def owned(folder: Path, variable: str) -> None:
    """Makes the folder, for the node's user alone. Raises `RuntimeFailed` when it is another user's, or a link of another user's, who
    could then change what runs; `variable` names another place. Raises `OSError`."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if folder.stat().st_uid != os.geteuid() or folder.lstat().st_uid not in (0, os.geteuid()):
        raise RuntimeFailed(f"{folder} belongs to another user; set {variable} to a folder of the node's own")


def deleted(folder: Path) -> None:
    """Removes it with all that is in it, also with folders that their owner may not enter. Nothing of the runtime runs any more.

    An agent may nest folders deeper than a path is long, a stack high or descriptors are many. So each folder below is moved to the top
    before it is looked into. What cannot be removed stays."""
    with suppress(OSError):
        top = os.open(folder, _ENTERED)
        names = (f"{uuid4().hex}-{number}" for number in itertools.count())
        try:
            while _moved_or_removed(top, top, names):
                pass
        finally:
            os.close(top)
        folder.rmdir()


def _moved_or_removed(top: int, place: int, names: Iterator[str]) -> bool:
    """Whether anything was: of the folder open at `place`, its folders to the one open at `top`, with others of these `names`, and all
    else for good. Those that are at the top already are emptied and removed."""
    any_was = False
    with os.scandir(place) as entries:
        for entry in entries:
            with suppress(OSError):
                if not entry.is_dir(follow_symlinks=False):
                    os.unlink(entry.name, dir_fd=place)
                else:
                    # Who may not write into a folder cannot move it either.
                    os.chmod(entry.name, 0o700, dir_fd=place)
                    if place != top:
                        os.rename(entry.name, next(names), src_dir_fd=place, dst_dir_fd=top)
                    else:
                        any_was |= _emptied(top, entry.name, names)
                        os.rmdir(entry.name, dir_fd=top)
                any_was = True
    return any_was


def _emptied(top: int, name: str, names: Iterator[str]) -> bool:
    place = os.open(name, _ENTERED, dir_fd=top)
    try:
        return _moved_or_removed(top, place, names)
    finally:
        os.close(place)
