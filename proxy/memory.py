"""How much memory this process may use: the machine's, or less where a container's limit is lower."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

SESSION_SHARE = 4
"""Sessions may take one part in so many of the memory, unless settings say otherwise."""


def find_session_bytes(processes: int) -> int:
    """The memory for the sessions of one of so many processes of this machine or container."""
    return find_memory_bytes() // SESSION_SHARE // processes


def find_memory_bytes(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int:
    """The lowest of the machine's memory and the limits of the control groups around this process, of either version."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([machine, *_find_limits(root, own)])


def _find_limits(root: Path, own: Path) -> Iterator[int]:
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        top, name = (root / "memory", "memory.limit_in_bytes") if controllers else (root, "memory.max")
        folder = top / group.lstrip("/")
        # A container sees its own group as the top, whatever its path says.
        for each in (folder, *folder.parents):
            if each.is_relative_to(top):
                yield from _read_limit(each / name)


def _read_limit(file: Path) -> Iterator[int]:
    """Nothing where there is no limit, which is written as "max", or as a number beyond any memory."""
    try:
        text = file.read_text().strip()
    except OSError:
        return
    if text.isdecimal():
        yield int(text)
