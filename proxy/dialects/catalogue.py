"""The dialects there are: the built-in ones, and those that installed packages add under the entry-point group `verbatim.dialects`.

An entry point names a subclass of `proxy.dialects.base.Dialect` that is made without arguments. All of them are served, so one that is
broken keeps the service from starting.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from contract.plugins import BrokenPlugin, PluginConflict, Plugins, load_plugins
from proxy.dialects.base import REQUIRED, Dialect

_BUILT_IN = {
    "chat": "proxy.dialects.chat:ChatDialect",
    "completions": "proxy.dialects.completions:CompletionsDialect",
    "responses": "proxy.dialects.responses:ResponsesDialect",
    "messages": "proxy.dialects.messages:MessagesDialect",
    "gemini": "proxy.dialects.gemini:GeminiDialect",
}


@cache
def plugins() -> Plugins[Dialect]:
    """Raises `PluginConflict`."""
    return load_plugins("verbatim.dialects", _BUILT_IN, _make)


@cache
def dialects() -> Mapping[str, Dialect]:
    """Every dialect by name, loaded once per process; the built-in ones first. Raises `PluginError`."""
    found: dict[str, Dialect] = {}
    for name in (*_BUILT_IN, *(name for name in plugins().names() if name not in _BUILT_IN)):
        dialect = plugins().load(name)
        for other in found.values():
            _check_pair(dialect, other)
        found[name] = dialect
    return found


def base_urls(session_url: str) -> dict[str, str]:
    """What harnesses use as their base URL, by the kind of client."""
    return {dialect.client: session_url + dialect.base_url_suffix for dialect in dialects().values()}


def _make(name: str, made_by: Any) -> Dialect:
    dialect = made_by()
    if not isinstance(dialect, Dialect) or dialect.name != name:
        raise BrokenPlugin("it must name a subclass of Dialect of that name")
    for endpoint in dialect.endpoints:
        needed = REQUIRED.get(endpoint.action)
        if needed is not None and not isinstance(dialect, needed):
            raise BrokenPlugin(f"it needs the methods of {needed.__name__} to serve {endpoint.path}")
    return dialect


def _check_pair(dialect: Dialect, other: Dialect) -> None:
    """Raise where it would be a matter of order which of the two answers."""
    if dialect.client == other.client and dialect.base_url_suffix != other.base_url_suffix:
        raise PluginConflict(f"the dialects {other.name!r} and {dialect.name!r} disagree on the base URL of {dialect.client!r}")
    taken = {(each.method, each.path, each.header) for each in other.endpoints}
    for endpoint in dialect.endpoints:
        if (endpoint.method, endpoint.path, endpoint.header) in taken:
            raise PluginConflict(
                f"the dialects {other.name!r} and {dialect.name!r} both serve {endpoint.method} {endpoint.path}"
            )
