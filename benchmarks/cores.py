"""Which core does what: the process under test has one of its own where there are two; load, upstream and store share the rest."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from functools import cache
from typing import Literal

Side = Literal["tested", "load"]


def cores(side: Side) -> list[int]:
    """The cores of one side; all of them where there is only one."""
    there = _available()
    if len(there) < 2:
        return there
    return there[:1] if side == "tested" else there[1:]


@cache
def _available() -> list[int]:
    """Asked once, before this process is held to some of them."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def pin_this_process(side: Side) -> None:
    """For a load that is made here and not by a process of its own."""
    if chosen := cores(side):
        os.sched_setaffinity(0, chosen)


def pinned(argv: Sequence[str], side: Side | None) -> list[str]:
    """The command held to its side's cores; as it is where that cannot be done, or for no side."""
    binary, chosen = shutil.which("taskset"), cores(side) if side else []
    if binary is None or not chosen:
        return list(argv)
    return [binary, "--cpu-list", ",".join(map(str, chosen)), *argv]


def described(alone: bool) -> str:
    """A sentence for the results; `alone`: a contender was held to a core of its own where that can be done."""
    tested, load = cores("tested"), cores("load")
    if not alone or shutil.which("taskset") is None or tested == load:
        return "nothing pinned"
    return f"each contender on core {tested[0]}; load generator, upstream and Redis on {', '.join(map(str, load))}"
