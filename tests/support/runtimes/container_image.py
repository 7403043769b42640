"""An image for containers without a registry or a network: the packages of this machine's Debian that every Debian has, with
python3; made once and kept in .cache."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path

from tests import ROOT
from tests.support.machine import require, unavailable

IMAGE = "localhost/verbatim-test:debian-3"
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
    with tempfile.TemporaryDirectory(dir=_CACHE) as folder:
        names, archive = Path(folder, "names"), Path(folder, "archive")
        names.write_text("".join(f".{path}\n" for path in _files(_packages())))
        left_out = ("--exclude=./usr/share/doc/*", "--exclude=./usr/share/man/*", "--exclude=./usr/share/locale/*")
        tar = ["tar", "-C", "/", "--no-recursion", "--anchored", *left_out, "-cf", str(archive), "-T", str(names)]
        subprocess.run(tar, check=True)
        # The users of a new Debian: those of this machine are nobody's business.
        users = ["-C", "/usr/share/base-passwd", "--transform=s|[.]master$||;s|^|etc/|", "passwd.master", "group.master"]
        subprocess.run(["tar", "-rf", str(archive), *users], check=True)
        archive.rename(_ARCHIVE)


def _files(packages: Iterable[str]) -> list[str]:
    """Every path that belongs to the packages, each below the real folders that hold it: `/bin` is a link to one."""
    listed = {Path(line) for line in _read("dpkg-query", "--listfiles", *packages).splitlines() if line.startswith("/")}
    # No package has these: they are made when Debian is installed.
    listed |= {Path("/usr/local", folder) for folder in ("", "bin", "lib", "share")}
    real = {path.parent.resolve() / path.name for path in listed}
    return sorted(str(path) for path in real if os.path.lexists(path) and path != Path("/"))


def _packages() -> set[str]:
    """The installed packages that every Debian has, python3, and all that these depend on."""
    depends: dict[str, set[str]] = {}
    """Of a package: what it depends on. Of a name that packages provide: those, too."""
    installed: set[str] = set()
    wanted = {"python3"}
    if shutil.which("dpkg-query") is None:
        unavailable("the image of the containers is made of Debian packages, and dpkg-query is missing")
    fields = ("${Package}", "${Essential}", "${Pre-Depends},${Depends}", "${Provides}")
    for line in _read("dpkg-query", "--show", "--showformat=" + r"\t".join(fields) + r"\n").splitlines():
        package, essential, needed, provided = line.split("\t")
        installed.add(package)
        if essential == "yes":
            wanted.add(package)
        for name in (package, *_names(provided)):
            depends.setdefault(name, set()).update(_names(needed), {package})
    if "python3" not in installed:
        unavailable("the image is made of this machine's Debian packages: python3 is not one of them")
    reached: set[str] = set()
    while wanted:
        reached |= wanted
        wanted = {name for package in wanted for name in depends.get(package, ())} - reached
    return reached & installed


def _read(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _names(relations: str) -> set[str]:
    """The packages that a list of relations names: `a (>= 1), b:any | c` names a, b and c."""
    return {re.split("[ (:]", each.strip())[0] for each in re.split("[,|]", relations) if each.strip()}
