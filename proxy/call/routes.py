"""The routing table: which endpoint of which dialect a request is for. Exact: a path that no dialect lists is 404.

The paths of an endpoint may follow `/s/{session}` and may end in a slash. HEAD is answered at every endpoint, and at the paths that
clients probe before their first call. A WebSocket upgrade is answered 426, so that a client that tries it falls back at once.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from proxy.dialects.base import Action, Dialect, Endpoint
from proxy.errors import NotFound, RequestError

_SESSION = r"(?:/s/(?P<session>[^/]+))?"
_DEFAULT = "chat"
"""Whose error shape is used where no other dialect claims the path."""


class MethodNotAllowed(RequestError):
    status = 405
    code = "method_not_allowed"


class UpgradeRefused(RequestError):
    status = 426
    code = "upgrade_refused"


@dataclass(frozen=True, slots=True)
class Route:
    """`session` is the one named in the path; `path` holds the path's other names. `action` None: a probe."""

    session: str | None
    dialect: str
    action: Action | None
    path: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TableEntry:
    pattern: re.Pattern[str]
    dialect: str
    endpoint: Endpoint


class Routes:
    """The table of a set of dialects, built once."""

    def __init__(self, dialects: Iterable[Dialect]) -> None:
        known = list(dialects)
        entries = [TableEntry(_compile(each), dialect.name, each) for dialect in known for each in dialect.endpoints]
        # Calls first, since they are nearly all there is; an endpoint that asks for a header before one at its path that does not.
        self.entries = tuple(sorted(entries, key=lambda entry: (entry.endpoint.action != "call", entry.endpoint.header or "~")))
        self._owned = [(re.compile(each.paths), each.name) for each in known if each.paths and each.name != _DEFAULT]
        self._harness = re.compile("|".join([r"/s/[^/]+(?:/|\Z)", *(each.paths for each in known if each.paths)]))
        probes = "|".join(["/", *(probe for each in known for probe in each.probes)])
        self._probes = re.compile(rf"{_SESSION}(?:{probes})?\Z")

    def is_harness(self, method: str, path: str) -> bool:
        """Whether the path is of the harness side; all others are the control side's."""
        return bool(self._harness.match(path)) or (method == "HEAD" and path == "/")

    def guess_dialect(self, path: str) -> str:
        """The dialect whose error shape a client expects at this path, whether or not there is such an endpoint."""
        rest = re.sub(r"\A/s/[^/]+", "", path)
        return next((name for pattern, name in self._owned if pattern.match(rest)), _DEFAULT)

    def find(self, method: str, path: str, headers: Mapping[str, str]) -> Route:
        """Raises NotFound for an unknown path, MethodNotAllowed and UpgradeRefused. Header names are lower case."""
        if "websocket" in headers.get("upgrade", "").lower():
            raise UpgradeRefused("this service speaks HTTP and server-sent events, not WebSocket")
        allowed: dict[str, None] = {}
        for entry in self.entries:
            match = entry.pattern.match(path)
            endpoint = entry.endpoint
            if match is None or (endpoint.header is not None and endpoint.header not in headers):
                continue
            if method == endpoint.method:
                names = {name: value for name, value in match.groupdict().items() if value is not None}
                return Route(names.pop("session", None), entry.dialect, endpoint.action, {**names, **endpoint.names})
            allowed[endpoint.method] = None
        if method in ("GET", "HEAD") and (self._probes.match(path) or (method == "HEAD" and allowed)):
            return Route(None, self.guess_dialect(path), None)
        if allowed:
            raise MethodNotAllowed(f"{path} takes {' or '.join(allowed)}, not {method}")
        raise NotFound(f"{method} {path} is not an endpoint of this service")


def _compile(endpoint: Endpoint) -> re.Pattern[str]:
    _, _, rest = endpoint.path[1:].partition("/")
    pieces = re.split(r"\{(\w+)\}", f"/{rest}")
    named = [rf"(?P<{name}>{'[^:]+?' if name == 'model' else '[^/]+'})" for name in pieces[1::2]]
    path = "".join(re.escape(text) + name for text, name in zip(pieces[::2], [*named, ""], strict=True))
    return re.compile(f"{_SESSION}{endpoint.versions}{path}/?\\Z")
