"""The installed kinds of engines: entry points of the group `verbatim.engines`, each naming a subclass of `EngineKind`.

This module imports no engine, so that the settings can check a name.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from contract.plugins import BrokenPlugin, Plugins, load_plugins

_BUILT_IN = {
    "token": "proxy.engine.apis.vllm:VllmTokens",
    "sglang": "proxy.engine.apis.sglang:Sglang",
    "completions": "proxy.engine.apis.completions:VllmCompletions",
    "chat": "proxy.engine.apis.chat:OpenAiChat",
}


@cache
def plugins() -> Plugins[Any]:
    """The `EngineKind` classes. Raises `PluginConflict`."""
    return load_plugins("verbatim.engines", _BUILT_IN, _check)


def _check(name: str, kind: Any) -> Any:
    if kind.name != name:
        raise BrokenPlugin(f"it calls itself {kind.name!r}; the names must agree")
    return kind
