"""HeadFirst: a transport that sends the head of an answer together with what follows it.

uvicorn writes the head by itself, and uvloop sends every write at once: two calls into the system where one will do, and a client
that is woken twice.
"""

from __future__ import annotations

import asyncio
from typing import Any

_HEAD = b"HTTP/1."


class HeadFirst:
    """`transport` with a head held back until the next write, at most until the loop's next turn. Everything else is the transport's
    own."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._held = b""
        # Asked for with every answer, and looked up through `__getattr__` at five times the cost.
        self.is_closing = transport.is_closing

    def write(self, data: bytes) -> None:
        if self._held:
            held, self._held = self._held, b""
            self._transport.write(held + data)
        elif data.startswith(_HEAD):
            self._held = data
            self._loop.call_soon(self._send)
        else:
            self._transport.write(data)

    def close(self) -> None:
        self._send()
        self._transport.close()

    def get_write_buffer_size(self) -> int:
        self._send()
        return self._transport.get_write_buffer_size()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def _send(self) -> None:
        held, self._held = self._held, b""
        if held and not self._transport.is_closing():
            self._transport.write(held)
