"""What every kind of runtime checks of a spec."""

from __future__ import annotations

import math
import posixpath
from collections.abc import Iterable

from rollout.runtimes.base import BadRuntime
from rollout.task import RuntimeSpec


def check_common(spec: RuntimeSpec) -> None:
    """Raises `BadRuntime` for what no kind takes."""
    if not (math.isfinite(spec.cpus) and spec.cpus >= 0.01):
        raise BadRuntime(f"cpus: {spec.cpus} is not a number of at least 0.01")
    if spec.memory_mb < 16:
        raise BadRuntime(f"memory_mb: {spec.memory_mb} is less than 16")
    if spec.disk_mb is not None and spec.disk_mb < 1:
        raise BadRuntime(f"disk_mb: {spec.disk_mb} is less than 1")
    if spec.network not in ("proxy", "full"):
        raise BadRuntime(f"network cannot be {spec.network!r}: choose proxy or full")


def check_options(spec: RuntimeSpec, known: Iterable[str]) -> None:
    for name in spec.options:
        if name not in known:
            raise BadRuntime(f"options: {spec.kind} has no {name!r} (known: {', '.join(known) or 'none'})")


def check_path(what: str, path: str) -> str:
    """The path, which is absolute, normal and not /."""
    if not path.startswith("/") or posixpath.normpath(path) != path or path in ("/", "//") or "\0" in path:
        raise BadRuntime(f"{what}: {path!r} is not an absolute path other than /, without . or .. in it")
    return path
