"""Folders of the node in which runtimes have their files: how they are made and how they go."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path

from rollout.runtimes.base import RuntimeFailed


def owned(folder: Path, variable: str) -> None:
    """Makes the folder, for the node's user alone. Raises `RuntimeFailed` when it is another user's, or a link of another user's, who
    could then change what runs; `variable` names another place. Raises `OSError`."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if folder.stat().st_uid != os.geteuid() or folder.lstat().st_uid not in (0, os.geteuid()):
        raise RuntimeFailed(f"{folder} belongs to another user; set {variable} to a folder of the node's own")


def deleted(folder: Path) -> None:
    """Removes it with all that is in it, also with folders that their owner may not enter. Nothing of the runtime runs any more."""
    for root, names, _ in os.walk(folder):
        for name in names:
            path = os.path.join(root, name)
            if not os.path.islink(path):
                with suppress(OSError):
                    os.chmod(path, 0o700)
    shutil.rmtree(folder, ignore_errors=True)
