"""A client connection with limits on the size of a request's head and on the time to send a request and to read the reply.

uvicorn waits forever for a head, buffers any amount of it, and never gives up a client that does not read its reply. Each of these
lets a client without a key hold the service's memory or sockets. Nor does uvicorn tell whether a reply was sent: its `send` returns
when the last byte is in memory.
"""

from __future__ import annotations

import asyncio
import http
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, cast

from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from proxy.call.http import EXTENSION
from proxy.limits import USUAL

BODY_GRACE_SECONDS = 15.0
"""The application rejects a body that takes too long; this long after that, the connection is cut anyway."""


@dataclass(frozen=True, slots=True)
class HttpTimeouts:
    """The limits. 0 seconds: no limit."""

    header_bytes: int = 64 * 2**10
    """Of one request's head: twice what nginx takes by default, for gateways that add a user's whole token."""
    headers: int = 128
    """As many as Node's and Python's servers take, and a few more."""
    header_seconds: float = 15.0
    body_seconds: float = USUAL.body_timeout_seconds + BODY_GRACE_SECONDS
    write_seconds: float = 120.0
    """How long a client may read nothing of its reply."""


class HttpConnection(HttpToolsProtocol):
    """uvicorn's protocol with limits. `_awaits` is what it waits for: a `request` that has not started, its `head`, its `body`, or
    `nothing` while the reply is sent and until the client sends again."""

    def __init__(self, *args: Any, patience: HttpTimeouts, **more: Any) -> None:
        super().__init__(*args, **more)
        self.app = partial(_run, self.app)
        self._patience = patience
        self._awaits = "request"
        self._awaiting: asyncio.TimerHandle | None = None
        self._writing: asyncio.TimerHandle | None = None
        self._unread_bytes = 0
        self._refused = False
        self._watchers: dict[RequestResponseCycle, Callable[[], None]] = {}
        self._lost = asyncio.Event()
        self._left = False
        """Whether the client closed the connection or was given up."""
        self._flushing: asyncio.Future[bool] | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.transport = cast("asyncio.Transport", HeadFirst(transport, self.loop))
        self._start_timer(self._patience.header_seconds)

    def connection_lost(self, exc: Exception | None) -> None:
        _cancel(self._awaiting)
        _cancel(self._writing)
        self._left = self._left or exc is not None
        self._lost.set()
        self._settle(False)
        super().connection_lost(exc)
        for leave in self._watchers.values():
            leave()

    def eof_received(self) -> None:
        self._left = True
        super().eof_received()

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        if self._awaits == "nothing":
            self._awaits = "request"
        self._unread_bytes += len(data)
        super().data_received(data)
        # Most requests arrive whole and need no timer.
        if self._awaiting is None and self._awaits != "nothing" and not self._refused:
            self._start_timer(self._patience.body_seconds if self._awaits == "body" else self._patience.header_seconds)
        if self._unread_bytes <= self._patience.header_bytes:
            return
        if self._awaits == "head":
            self._refuse(431, f"the head of the request is larger than {self._patience.header_bytes} bytes")
        elif self._awaits == "body":
            # Chunk extensions or trailers, which the parser would buffer without limit.
            self._refuse(431, f"the request has more than {self._patience.header_bytes} bytes beside head and body")

    def on_message_begin(self) -> None:
        # The bytes before may belong to the previous request.
        self._awaits, self._unread_bytes = "head", 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        size = sum(map(len, chain.from_iterable(self.headers))) + len(self.url)
        if size > self._patience.header_bytes:
            self._refuse(431, f"the head of the request is larger than {self._patience.header_bytes} bytes")
        elif len(self.headers) > self._patience.headers:
            self._refuse(431, f"the request has more than {self._patience.headers} headers")
        elif (why := self._find_fault()) is not None:
            self._refuse(400, why)
        else:
            self._awaits, self._unread_bytes = "body", 0
            self._stop_timer()
            # Its task, which starts later, finds what this sets.
            super().on_headers_complete()
            self.scope["extensions"] = {EXTENSION: cast(Any, _Direct(self, self.cycle))}

    def _find_fault(self) -> str | None:
        """What RFC 9112 has a server refuse; the parser takes it."""
        version, hosts = self.parser.get_http_version(), sum(name == b"host" for name, _ in self.headers)
        if version not in ("1.0", "1.1"):
            return "the request line must end in HTTP/1.1"
        if hosts > 1 or (not hosts and version == "1.1"):
            return f"the request has {hosts} Host headers: send one"
        return None

    def on_header(self, name: bytes, value: bytes) -> None:
        # The parser also reports trailers as headers.
        if self._awaits == "head":
            super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        self._unread_bytes = 0
        if not self._refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._awaits, self._unread_bytes = "nothing", 0
        self._stop_timer()
        if not self._refused:
            super().on_message_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._patience.write_seconds:
            self._writing = self.loop.call_later(self._patience.write_seconds, self._give_up)

    def resume_writing(self) -> None:
        _cancel(self._writing)
        super().resume_writing()
        self._settle(not self._left)

    def on_response_complete(self) -> None:
        # Requests may be pipelined: others may still be answered.
        self._watchers = {cycle: leave for cycle, leave in self._watchers.items() if not cycle.response_complete}
        super().on_response_complete()

    def watch(self, cycle: RequestResponseCycle, leave: Callable[[], None]) -> None:
        """Call `leave` when the client disconnects before the request is answered, at once if it has."""
        if self._lost.is_set():
            leave()
        else:
            self._watchers[cycle] = leave

    async def flushed(self) -> bool:
        """Whether everything written so far has left this process while the client was connected; waits until that is known. Bytes
        buffered by the operating system, or by TLS, count as sent."""
        if self._left or self._lost.is_set():
            return False
        if self.transport.get_write_buffer_size():
            self._flushing = self.loop.create_future()
            # A limit of 0 pauses writing at once and resumes it when the buffer is empty. The usual write timeout applies.
            self.transport.set_write_buffer_limits(0)
            return await self._flushing
        if self.transport.is_closing():
            # Closed by this side, or because writing failed: `connection_lost` tells which.
            await self._lost.wait()
        return not self._left

    def _settle(self, flushed: bool) -> None:
        if self._flushing is not None and not self._flushing.done():
            self._flushing.set_result(flushed)

    def _give_up(self) -> None:
        """The client did not read in time."""
        self._left = True
        self.transport.abort()

    def _start_timer(self, seconds: float) -> None:
        _cancel(self._awaiting)
        self._awaiting = self.loop.call_later(seconds, self._time_out) if seconds else None

    def _stop_timer(self) -> None:
        _cancel(self._awaiting)
        self._awaiting = None

    def _time_out(self) -> None:
        """The request did not arrive in time."""
        if self.flow.read_paused:
            # Not the client's fault: this side does not read.
            self._start_timer(self._patience.body_seconds or self._patience.header_seconds)
        elif self._awaits == "head":
            self._refuse(408, "the head of the request did not come in time")
        else:
            self._refused = True
            self.transport.close()

    def _refuse(self, status: int, why: str) -> None:
        """Reject a request that the application never sees, and close."""
        self._refused = True
        if self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete:
            phrase = http.HTTPStatus(status).phrase
            head = f"HTTP/1.1 {status} {phrase}\r\ncontent-type: text/plain; charset=utf-8\r\n"
            self.transport.write(f"{head}content-length: {len(why)}\r\nconnection: close\r\n\r\n{why}".encode())
        self.transport.close()


class _Direct:
    """What `proxy.call.http.DirectWriter` promises, for one request."""

    __slots__ = ("_connection", "_cycle", "flushed")

    def __init__(self, connection: HttpConnection, cycle: RequestResponseCycle) -> None:
        self._connection = connection
        self._cycle = cycle
        self.flushed = connection.flushed

    def on_leave(self, leave: Callable[[], None]) -> None:
        self._connection.watch(self._cycle, leave)

    def write(self, body: bytes) -> None:
        cycle = self._cycle
        if body and cycle.response_started and cycle.chunked_encoding and not (cycle.disconnected or cycle.response_complete):
            self._connection.transport.write(b"%x\r\n%b\r\n" % (len(body), body))
        else:
            self.send({"type": "http.response.body", "body": body, "more_body": True})

    def send(self, message: MutableMapping[str, Any]) -> None:
        """uvicorn's `send` waits only for a client that reads slowly, which the write timeout ends."""
        flow = self._connection.flow
        paused, flow.write_paused = flow.write_paused, False
        try:
            self._cycle.send(cast(Any, message)).send(None)
        except StopIteration:
            pass
        finally:
            flow.write_paused = paused or flow.write_paused


async def _run(app: ASGI3Application, scope: Any, receive: Any, send: Any) -> None:
    try:
        await app(scope, receive, send)
    finally:
        # Its writer holds the connection and the request, and each of these holds the scope.
        scope["extensions"] = {}


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


_HEAD = b"HTTP/1."


class HeadFirst:
    """A transport that sends the head of a reply together with what follows it, at the latest in the loop's next iteration.

    uvicorn writes the head separately and uvloop sends every write at once: two system calls, and a client woken twice."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._held = b""
        # Called for every reply; through `__getattr__` it costs five times as much.
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
