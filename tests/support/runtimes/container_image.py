"""An image for containers without a registry: a minimal Debian with python3, made once and kept in .cache."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from tests import ROOT
from tests.support.machine import require, unavailable

IMAGE = "localhost/verbatim-test:bookworm-1"
ENGINE = "podman"
FLAGS = ("--runtime", "runc")
"""crun refuses a machine with both versions of control groups."""
RUN_FLAGS = ("--ulimit", "nofile=1024:1024", "--ulimit", "nproc=1024:1024")
"""podman's own defaults are greater than what some machines let root set."""
_CACHE = ROOT / ".cache"
_ARCHIVE = _CACHE / f"{IMAGE.partition(':')[2]}.tar"


def container_image() -> str:
    """The image's name; it is there when this returns."""
    if os.geteuid() != 0:
        unavailable("containers need root")
    for command in (ENGINE, "runc"):
        require(command)
    _CACHE.mkdir(exist_ok=True)
    with (_CACHE / "container-image.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if subprocess.run([ENGINE, "image", "exists", IMAGE], check=False).returncode != 0:
            subprocess.run([ENGINE, "import", "--quiet", str(debian()), IMAGE], check=True, capture_output=True)
    return IMAGE


def debian() -> Path:
    """The files of the image, as an archive."""
    _CACHE.mkdir(exist_ok=True)
    with (_CACHE / "archive.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not _ARCHIVE.exists():
            _make_archive()
    return _ARCHIVE


def _make_archive() -> None:
    if shutil.which("debootstrap") is None:
        unavailable("debootstrap is not installed")
    with tempfile.TemporaryDirectory(dir=_CACHE) as folder:
        root, archive = Path(folder, "root"), Path(folder, "archive")
        line = ["debootstrap", "--variant=minbase", "--include=python3", "bookworm", str(root)]
        made = subprocess.run(line, capture_output=True, text=True, check=False)
        assert made.returncode == 0, f"debootstrap: {made.stdout[-2000:]}{made.stderr[-2000:]}"
        subprocess.run(["tar", "-C", str(root), "--exclude=./var/cache/apt", "-cf", str(archive), "."], check=True)
        archive.rename(_ARCHIVE)
