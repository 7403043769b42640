"""Which endpoint of which dialect a request is for. Exact: a path that is not listed here belongs to no dialect.

| method | path, after an optional /s/{session} | dialect | action |
|---|---|---|---|
| POST | /v1/chat/completions, /v1/completions, /v1/responses, /v1/messages | chat, completions, responses, messages | call |
| POST | /v1beta/models/{model}:generateContent and :streamGenerateContent (also /v1, /v1alpha) | gemini | call |
| POST | /v1/messages/count_tokens, /v1/responses/input_tokens, /v1beta/models/{model}:countTokens | messages, responses, gemini | count |
| GET | /v1/responses/{response} and /v1/responses/{response}/input_items | responses | stored, items |
| GET | /v1/models, /v1/models/{model} | chat; messages by `anthropic-version`, gemini by `x-goog-api-key` | models, model |
| GET | /v1beta/models, /v1beta/models/{model} | gemini | models, model |
| HEAD | all of them, and what clients knock at before their first call | | probe |

A client that is given a base URL of another vendor's kind says /v1 twice or not at all, and some end paths with a slash: these are the
same endpoints.

A WebSocket upgrade is an endpoint of its own: it is answered 426, so that a client that tries it falls back at once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from proxy.errors import NotFound, RequestError


class MethodNotAllowed(RequestError):
    status = 405
    code = "method_not_allowed"


class UpgradeRefused(RequestError):
    status = 426
    code = "upgrade_refused"


@dataclass(frozen=True, slots=True)
class Route:
    """`session` is the one the path names; `path` holds the path's other names."""

    session: str | None
    dialect: str
    action: str
    path: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Endpoint:
    method: str
    dialect: str
    action: str
    pattern: re.Pattern[str]


def _endpoint(method: str, dialect: str, action: str, pattern: str) -> _Endpoint:
    return _Endpoint(method, dialect, action, re.compile(rf"(?:/s/(?P<session>[^/]+))?{pattern}/?\Z"))


_V1 = r"(?:/v1){0,2}"
_GOOGLE = r"(?:/v1(?:beta|alpha)?){0,2}/models/(?P<model>[^:]+)"
_GOOGLES = r"(?:/v1(?:beta|alpha)?)?/v1(?:beta|alpha)/models"
_ENDPOINTS = (
    _endpoint("POST", "chat", "call", _V1 + "/chat/completions"),
    _endpoint("POST", "responses", "call", _V1 + "/responses"),
    _endpoint("POST", "messages", "call", _V1 + "/messages"),
    _endpoint("POST", "gemini", "call", _GOOGLE + ":(?P<method>generateContent|streamGenerateContent)"),
    _endpoint("POST", "completions", "call", _V1 + "/completions"),
    _endpoint("POST", "messages", "count", _V1 + "/messages/count_tokens"),
    _endpoint("POST", "responses", "count", _V1 + "/responses/input_tokens"),
    _endpoint("POST", "gemini", "count", _GOOGLE + ":countTokens"),
    _endpoint("GET", "responses", "stored", _V1 + "/responses/(?P<response>[^/]+)"),
    _endpoint("GET", "responses", "items", _V1 + "/responses/(?P<response>[^/]+)/input_items"),
    _endpoint("GET", "chat", "models", _V1 + "/models"),
    _endpoint("GET", "chat", "model", _V1 + "/models/(?P<model>[^:]+?)"),
    _endpoint("GET", "gemini", "models", _GOOGLES),
    _endpoint("GET", "gemini", "model", _GOOGLES + "/(?P<model>[^:]+?)"),
)

_OURS = re.compile(
    r"/s/[^/]+(?:/|\Z)|/v1(?:beta|alpha)?/|/(?:chat/completions|completions|responses|messages|models)(?:/|\Z)|/api/hello\Z"
)
"""Paths of the harness side; all others are the control side's."""

_KNOCKS = re.compile(r"(?:/s/[^/]+)?(?:/|/v1/?|/v1beta/?|/api/hello)?\Z")
"""Base URLs, and the path at which Claude Code looks whether anyone is there."""


def is_harness(method: str, path: str) -> bool:
    return bool(_OURS.match(path)) or (method == "HEAD" and path == "/")


def dialect_of(path: str) -> str:
    """The dialect in whose shape an error at this path is expected, whether or not there is such an endpoint."""
    rest = re.sub(r"\A/s/[^/]+", "", path)
    if rest.startswith(("/v1beta/", "/v1alpha/")) or re.match(_GOOGLE + ":", rest):
        return "gemini"
    named = re.match(_V1 + "/(messages|responses)", rest)
    return named[1] if named else "chat"


def find(method: str, path: str, headers: Mapping[str, str]) -> Route:
    """Raises NotFound for an unknown path, MethodNotAllowed and UpgradeRefused; header names are lower case."""
    if "websocket" in headers.get("upgrade", "").lower():
        raise UpgradeRefused("this service speaks HTTP and server-sent events, no WebSocket")
    allowed = []
    for endpoint in _ENDPOINTS:
        match = endpoint.pattern.match(path)
        if match is None:
            continue
        allowed.append(endpoint.method)
        if method == endpoint.method:
            return _route(endpoint, match, headers)
    if method in ("GET", "HEAD") and (_KNOCKS.match(path) or (method == "HEAD" and allowed)):
        return Route(None, dialect_of(path), "probe")
    if allowed:
        raise MethodNotAllowed(f"{path} takes {' or '.join(allowed)}, not {method}")
    raise NotFound(f"{method} {path} is not an endpoint of this service")


def _route(endpoint: _Endpoint, match: re.Match[str], headers: Mapping[str, str]) -> Route:
    names = {name: value for name, value in match.groupdict().items() if value is not None}
    session = names.pop("session", None)
    lists = endpoint.action in ("models", "model")
    dialect = _lister(headers) if lists and endpoint.dialect == "chat" else endpoint.dialect
    return Route(session, dialect, endpoint.action, names)


def _lister(headers: Mapping[str, str]) -> str:
    """Whose list of models is meant at the path that three vendors share."""
    if "anthropic-version" in headers:
        return "messages"
    return "gemini" if "x-goog-api-key" in headers else "chat"
