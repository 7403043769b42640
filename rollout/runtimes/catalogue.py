"""The kinds of runtimes: the built-in ones, and those that installed packages register under the entry point group `GROUP`.

An entry point is `name = module:Class`; the class is a `RuntimeKind` whose constructor takes a `RuntimeSettings` or None.
"""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import cast

from rollout.runtimes.base import BadRuntime, RuntimeKind
from rollout.runtimes.settings import RuntimeSettings

GROUP = "verbatim.runtimes"

_BUILT_IN = {
    "apptainer": "rollout.runtimes.container.apptainer:ApptainerKind",
    "docker": "rollout.runtimes.container.runtime:ContainerKind",
    "kubernetes": "rollout.runtimes.kubernetes.runtime:KubernetesKind",
    "local": "rollout.runtimes.local.runtime:LocalKind",
}


def list_names() -> list[str]:
    return sorted(_find_entry_points())


def load(name: str, settings: RuntimeSettings | None = None) -> RuntimeKind:
    """The kind of that name; `settings` None are those of the environment. Raises `BadRuntime`."""
    points = _find_entry_points().get(name)
    if points is None:
        raise BadRuntime(f"there is no runtime {name!r}: choose one of {', '.join(list_names())}")
    if len(points) > 1:
        raise BadRuntime(f"there are several runtimes {name!r}: {', '.join(point.value for point in points)}")
    try:
        return cast(RuntimeKind, points[0].load()(settings))
    except BadRuntime:
        raise
    except Exception as error:
        raise BadRuntime(f"the runtime {points[0].value} cannot be loaded: {type(error).__name__}: {error}") from error


def load_all() -> None:
    """Import every kind now: another install may take this one's place while the process runs. What cannot be loaded fails where it is
    named."""
    for name in list_names():
        with suppress(BadRuntime):
            load(name)


@cache
def _find_entry_points() -> dict[str, list[EntryPoint]]:
    """By name. Cached: finding them reads the metadata of every installed package."""
    found: dict[str, list[EntryPoint]] = {}
    for point in [*(EntryPoint(name, value, GROUP) for name, value in _BUILT_IN.items()), *entry_points(group=GROUP)]:
        if point.value not in [other.value for other in found.setdefault(point.name, [])]:
            found[point.name].append(point)
    return found
