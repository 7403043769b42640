"""The installed kinds of engines: entry points of the group `verbatim.engines`, each naming a subclass of `EngineKind`.

This module imports no engine, so that the settings can check a name.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import Any

_GROUP = "verbatim.engines"

_BUILT_IN = (
    EntryPoint("token", "proxy.engine.apis.vllm:VllmTokens", _GROUP),
    EntryPoint("sglang", "proxy.engine.apis.sglang:Sglang", _GROUP),
    EntryPoint("completions", "proxy.engine.apis.completions:VllmCompletions", _GROUP),
    EntryPoint("chat", "proxy.engine.apis.chat:OpenAiChat", _GROUP),
)
"""Listed here as well as a package lists its own, so that a source tree needs no installation."""


def find_kinds() -> dict[str, EntryPoint]:
    """The entry points by name, not loaded; built-in kinds cannot be replaced."""
    return {entry.name: entry for entry in (*entry_points(group=_GROUP), *_BUILT_IN)}


def find_kind(name: str) -> EntryPoint:
    """Raises ValueError for an unknown name."""
    kinds = find_kinds()
    if name not in kinds:
        raise ValueError(f"no kind of engine is named {name!r}; known: auto, {', '.join(sorted(kinds))}")
    return kinds[name]


def load_kind(entry: EntryPoint) -> Any:
    """The `EngineKind` class. Raises ValueError if it cannot be loaded or has another name."""
    try:
        kind = entry.load()
    except Exception as error:
        raise ValueError(f"the kind of engine {entry.name!r} cannot be loaded: {error!r}") from error
    if kind.name != entry.name:
        raise ValueError(f"the kind of engine {entry.name!r} calls itself {kind.name!r}; the names must agree")
    return kind
