"""The little of ASGI that the path of a call needs: its types, and how a body is sent whole or in parts."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any, Self

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

JSON: Headers = [(b"content-type", b"application/json")]
EXTENSION = "verbatim"
"""The server's extension of a request's scope. Its `flushed` tells whether the answer went out: ASGI's `send` comes back without a
word where the client has gone, and as soon as the answer lies in the server's memory where it has not."""


@dataclass(frozen=True, slots=True)
class Client:
    """Who asked. `flushed`, where the server has it: whether all that was sent went out to a client that was still there, once that
    is known."""

    receive: Receive
    send: Send
    flushed: Callable[[], Awaitable[bool]] | None = None

    @classmethod
    def of(cls, scope: Scope, receive: Receive, send: Send) -> Self:
        return cls(receive, send, (scope.get("extensions") or {}).get(EXTENSION, {}).get("flushed"))


def headers_of(scope: Scope) -> dict[str, str]:
    """By lower-case name; of several of one name the last."""
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}


async def send_whole(send: Send, status: int, headers: Headers, body: bytes) -> None:
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [*headers, length]})
    await send({"type": "http.response.body", "body": body})


async def send_part(send: Send, body: bytes, *, last: bool = False) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": not last})
