"""The real apptainer: that of PATH, or what .ci/apptainer puts into .cache, with an image that is a folder."""

from __future__ import annotations

import fcntl
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from contract.tasks import RuntimeSpec
from rollout.runtimes.container.apptainer import ApptainerKind
from rollout.runtimes.settings import RuntimeSettings
from tests import ROOT
from tests.support.machine import require, unavailable
from tests.support.runtimes.container_image import debian
from tests.support.runtimes.runtime_places import GRACE_SECONDS, Place

_CACHE = ROOT / ".cache"
_IMAGE = _CACHE / "apptainer-image"


def installed() -> str:
    """Its command."""
    if os.geteuid() != 0:
        unavailable("instances need root here")
    return require("apptainer")


def image(command: str) -> Path:
    """Debian with python3, as apptainer makes its images; it is there when this returns."""
    _CACHE.mkdir(exist_ok=True)
    with (_CACHE / "apptainer-image.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not _IMAGE.exists():
            _make(command, debian())
    return _IMAGE


def _make(command: str, archive: Path) -> None:
    with tempfile.TemporaryDirectory(dir=_CACHE) as folder:
        root, made, definition = Path(folder, "root"), Path(folder, "made"), Path(folder, "definition")
        root.mkdir()
        subprocess.run(["tar", "-C", str(root), "--exclude=./dev/*", "-xf", str(archive)], check=True)
        definition.write_text(f"Bootstrap: localimage\nFrom: {root}\n")
        line = [command, "--silent", "build", "--sandbox", str(made), str(definition)]
        done = subprocess.run(line, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"apptainer build: {done.stdout[-2000:]}{done.stderr[-2000:]}"
        made.rename(_IMAGE)


def in_real_instances(folder: Path, **settings: Any) -> Place:
    command = installed()
    kept = {"apptainer_command": command, "apptainer_dir": folder / "instances", "apptainer_root": "allowed"}
    spec = RuntimeSpec(kind="apptainer", image=str(image(command)), memory_mb=256)
    return Place(ApptainerKind(RuntimeSettings(**{**kept, **settings}), grace_seconds=GRACE_SECONDS), spec)
