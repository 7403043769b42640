"""The plug-ins of an entry-point group: built-in ones, and those that installed packages add.

A name stands for one plug-in. If two distributions give it to different objects, or one takes a built-in name, nothing of the group can be
used, and the process does not start. Equal values are one plug-in: an editable install beside its source lists everything twice.

    PluginError             one sentence for whoever installs packages
    ├── PluginConflict      a name comes twice
    ├── UnknownPlugin       nothing has that name; the names are listed
    └── BrokenPlugin        it cannot be imported, or is not what the group asks for
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, TypeVar

log = logging.getLogger(__name__)
T = TypeVar("T")


class PluginError(ValueError):
    pass


class PluginConflict(PluginError):
    pass


class UnknownPlugin(PluginError):
    pass


class BrokenPlugin(PluginError):
    pass


class Plugins(Generic[T]):
    """The plug-ins of one group by name. None is imported before it is loaded, and each is loaded once."""

    def __init__(self, noun: str, points: Mapping[str, EntryPoint], check: Callable[[str, Any], T]) -> None:
        self._noun, self._points, self._check = noun, points, check
        self._loaded: dict[str, T] = {}

    def names(self) -> list[str]:
        """The names that `load` knows, sorted."""
        return sorted(self._points)

    def load(self, name: str) -> T:
        """The plug-in, always the same object. Raises `UnknownPlugin` and `BrokenPlugin`."""
        if name not in self._loaded:
            # Of two threads that load it at once, both get the same.
            self._loaded.setdefault(name, self._load(name))
        return self._loaded[name]

    def load_all(self) -> dict[str, T]:
        """Every plug-in that works, by name. One that is broken is a warning here, and an error where it is asked for by name."""
        return dict(self._load_working())

    def _load_working(self) -> Iterator[tuple[str, T]]:
        for name in self.names():
            try:
                yield name, self.load(name)
            except BrokenPlugin as error:
                log.warning("%s", error)

    def _load(self, name: str) -> T:
        point = self._points.get(name)
        if point is None:
            raise UnknownPlugin(f"there is no {self._noun} {name!r}: choose one of {', '.join(self.names())}")
        try:
            return self._check(name, point.load())
        except Exception as error:
            reason = str(error) if isinstance(error, BrokenPlugin) else f"{type(error).__name__}: {error}"
            raise BrokenPlugin(f"the {self._noun} {name!r} ({_describe(point)}) cannot be loaded: {reason}") from error


def load_plugins(group: str, built_in: Mapping[str, str], check: Callable[[str, Any], T]) -> Plugins[T]:
    """The plug-ins of `group`, found now and imported when they are loaded.

    `built_in` are entry points too, from a name to `module:object`, but listed in the code: the metadata of an editable install or of
    a plain checkout may be older. `check` gets a name and the object that its entry point names, and returns what `Plugins.load` gives;
    what it raises says what is wrong with the plug-in. Raises `PluginConflict`.

    Reads the metadata of every installed package, which takes milliseconds: call it once in a process."""
    points: dict[str, EntryPoint] = {}
    noun = group.rpartition(".")[2].removesuffix("s")
    for point in (*(EntryPoint(name, value, group) for name, value in built_in.items()), *entry_points(group=group)):
        other = points.setdefault(point.name, point)
        if other.value != point.value:
            raise PluginConflict(
                f"two packages give the {noun} {point.name!r}: {_describe(other)} and {_describe(point)}; "
                "uninstall one of them, or rename one's entry point"
            )
    return Plugins(noun, points, check)


def _describe(point: EntryPoint) -> str:
    """Its value and the distribution that brings it."""
    return f"{point.value} of {f'{point.dist.name} {point.dist.version}' if point.dist else 'verbatim-rl'}"
