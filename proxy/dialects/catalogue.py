"""The dialects there are: the built-in ones, and those that installed packages add under the entry-point group `verbatim.dialects`.

An entry point names a subclass of `proxy.dialects.base.Dialect` that is made without arguments. Built-in ones are entry points too, but
listed here: the metadata of an editable install or of a plain checkout may be older than the code.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points

from proxy.dialects.base import REQUIRED, Dialect

GROUP = "verbatim.dialects"

_BUILT_IN = {
    "chat": "proxy.dialects.chat:ChatDialect",
    "completions": "proxy.dialects.completions:CompletionsDialect",
    "responses": "proxy.dialects.responses:ResponsesDialect",
    "messages": "proxy.dialects.messages:MessagesDialect",
    "gemini": "proxy.dialects.gemini:GeminiDialect",
}


class BadDialect(RuntimeError):
    """A dialect that an installed package adds cannot be used; the service does not start with it."""


@cache
def dialects() -> Mapping[str, Dialect]:
    """Every dialect by name, loaded once per process. Raises `BadDialect`."""
    found: dict[str, Dialect] = {}
    for point in (*(EntryPoint(name, value, GROUP) for name, value in _BUILT_IN.items()), *entry_points(group=GROUP)):
        dialect = _load(point)
        for other in found.values():
            _check_pair(point, dialect, other)
        found[dialect.name] = dialect
    return found


def base_urls(session_url: str) -> dict[str, str]:
    """What harnesses use as their base URL, by the kind of client."""
    return {dialect.client: session_url + dialect.base_url_suffix for dialect in dialects().values()}


def _load(point: EntryPoint) -> Dialect:
    try:
        dialect = point.load()()
    except Exception as error:
        raise BadDialect(f"the dialect {point.name!r} ({point.value}) cannot be loaded: {error!r}") from error
    if not isinstance(dialect, Dialect) or dialect.name != point.name:
        raise BadDialect(f"the entry point {point.name!r} ({point.value}) must name a subclass of Dialect of that name")
    for endpoint in dialect.endpoints:
        needed = REQUIRED.get(endpoint.action)
        if needed is not None and not isinstance(dialect, needed):
            raise BadDialect(f"the dialect {dialect.name!r} needs the methods of {needed.__name__} to serve {endpoint.path}")
    return dialect


def _check_pair(point: EntryPoint, dialect: Dialect, other: Dialect) -> None:
    """Raise where it would be a matter of order which of the two answers."""
    if dialect.name == other.name:
        raise BadDialect(f"there are two dialects {dialect.name!r}; {point.value} is one of them")
    if dialect.client == other.client and dialect.base_url_suffix != other.base_url_suffix:
        raise BadDialect(f"the dialects {other.name!r} and {dialect.name!r} disagree on the base URL of {dialect.client!r}")
    taken = {(each.method, each.path, each.header) for each in other.endpoints}
    for endpoint in dialect.endpoints:
        if (endpoint.method, endpoint.path, endpoint.header) in taken:
            raise BadDialect(f"the dialects {other.name!r} and {dialect.name!r} both serve {endpoint.method} {endpoint.path}")
