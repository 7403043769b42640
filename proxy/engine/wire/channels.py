"""HTTP connections to engines: a Channel carries one request after another, Channels keeps the idle ones. An answer that is wanted
whole is one future (WholeResponse), one that is read as it arrives an EngineResponse.

They do what a call needs and no more. A general client spends several times as
long on a request in Python, and every call makes three requests. There is no limit on the number of connections.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import math
import socket
import ssl
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from contextvars import Context
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Protocol
from urllib.parse import unquote, urlsplit

import httptools
import msgspec
from aiohappyeyeballs import AddrInfoType, start_connection

from proxy.timeline import ENGINE, TIMELINE

SocketFactory = Callable[[AddrInfoType], socket.socket]

_NEXT_SECONDS = 0.25
"""How long one address of a host is tried before the next is tried as well (RFC 8305)."""

_BUFFERED_BYTES = 1 << 20
"""How much of an answer may be unread before the channel stops reading."""

_REST_SECONDS = 1.0
"""How long the unread rest of an answer may take to arrive."""


_NO_HEADERS: Mapping[str, str] = {}
_CLOSE = "close"
_JSON = "Content-Type: application/json\r\n"


class ChannelError(Exception):
    """A request without a complete answer."""


class CannotConnect(ChannelError):
    """No connection was made, so the request was not sent."""


class ConnectTimeout(ChannelError):
    """No connection was made in time."""


class Unanswered(ChannelError):
    """The engine closed the connection before it answered."""


class BrokenOff(ChannelError):
    """The answer ended early, or is not HTTP."""


class Receiver(Protocol):
    """What takes one answer. `status` is 0 until it is known; `waits`: nothing is read until its reader has caught up, so that a silence is
    not the engine's. One that `streams` is told the status and gets the body as it arrives; `finish` and `fail` give the rest of it."""

    status: int
    waits: bool
    streams: bool

    def set_status(self, status: int, headers: Mapping[bytes, bytes]) -> None: ...
    def add_body(self, body: bytes) -> None: ...
    def finish(self, body: bytes) -> None: ...
    def fail(self, error: Exception, body: bytes = b"") -> None: ...


class Channel(asyncio.Protocol):
    """`on_idle` is called when the connection can carry another request. The engine may be silent for `read_seconds` (0: for ever)."""

    def __init__(self, on_idle: Callable[[Channel], None], read_seconds: float) -> None:
        self.lost = False
        self.idle_since = 0.0
        self._on_idle = on_idle
        self._read_seconds = read_seconds or math.inf
        self.loop = asyncio.get_running_loop()
        self._headers: dict[bytes, bytes] = {}
        self._bodies: list[bytes] = []
        # The parser takes these down without entering Python. What arrives together is passed on at once.
        self.on_header = self._headers.__setitem__
        self.on_body = self._bodies.append
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport
        self._receiver: Receiver | None = None
        self._heard_at = 0.0
        self._until = math.inf
        self._timer: asyncio.TimerHandle | None = None

    def ask(self, data: bytes, receiver: Receiver, seconds: float = 0.0) -> None:
        """Send a request, whose answer the receiver gets: within `seconds`, if they are not 0."""
        if self._receiver is not None:
            raise RuntimeError("the connection has not finished its last request")
        self._receiver = receiver
        self._headers.clear()
        self._heard_at = self.loop.time()
        self._until = self._heard_at + seconds if seconds else math.inf
        self._transport.write(data)
        due = min(self._heard_at + self._read_seconds, self._until)
        if self._timer is None or self._timer.when() > due:
            self._watch(due)

    def pause_reading(self) -> None:
        if not self.lost:
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        if not self.lost:
            self._transport.resume_reading()

    def close(self) -> None:
        """Hang up."""
        self.lost = True
        self._transport.abort()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._heard_at = self.loop.time()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            if self._receiver is not None:
                self._receiver.fail(BrokenOff(f"the engine's answer is not HTTP: {error}"), self._take_body())
            self.close()
        if self._bodies and self._receiver is not None and self._receiver.streams:
            body = b"".join(self._bodies)
            self._bodies.clear()
            self._receiver.add_body(body)

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        # It holds this, and without it this goes at once.
        del self._parser
        if self._timer is not None:
            self._timer.cancel()
        receiver, self._receiver = self._receiver, None
        if receiver is None:
            return
        if exc is None and receiver.status and not {b"content-length", b"transfer-encoding"} & _lower(self._headers).keys():
            # It ends with its connection.
            receiver.finish(self._take_body())
            return
        reason = str(exc) if exc else "the engine closed the connection"
        receiver.fail(BrokenOff(reason) if receiver.status else Unanswered(reason), self._take_body())

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if self._receiver is None:
            # An answer without a request: later answers could not be matched either.
            self.close()
        elif status < 200:
            # Informational answers precede the real one.
            self._headers.clear()
        elif status == 200 and not self._receiver.streams:
            self._receiver.status = status
        else:
            self._receiver.set_status(status, self._headers)

    def _take_body(self) -> bytes:
        """What has arrived and was not given to a receiver."""
        body = b"".join(self._bodies)
        self._bodies.clear()
        return body

    def on_message_complete(self) -> None:
        receiver = self._receiver
        if receiver is None or not receiver.status:
            return
        self._receiver = None
        body = b"".join(self._bodies)
        self._bodies.clear()
        receiver.finish(body)
        # An engine may refuse a request of which it has only a part; another one cannot follow that.
        was_sent = not self._transport.get_write_buffer_size()
        if self._parser.should_keep_alive() and was_sent and not self.lost:
            self.idle_since = self._heard_at
            self._on_idle(self)
        else:
            self.close()

    def _watch(self, due: float) -> None:
        """Look at `due` whether the answer is late. One timer serves all requests of the connection, and keeps no call's context."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self.loop.call_at(due, self._look, context=Context())

    def _look(self) -> None:
        self._timer = None
        if self._receiver is None or self.lost:
            return
        now = self.loop.time()
        if self._receiver.waits:
            self._heard_at = now
        silent = now - self._heard_at >= self._read_seconds
        if not silent and now < self._until:
            self._watch(min(self._heard_at + self._read_seconds, self._until))
            return
        said = f"nothing for {self._read_seconds:g} seconds" if silent else "no whole answer in time"
        self._receiver.fail(TimeoutError(f"the engine sent {said}"), self._take_body())
        self.close()


def _lower(headers: Mapping[bytes, bytes]) -> dict[bytes, bytes]:
    return {name.lower(): value for name, value in headers.items()}


def _retry_after(headers: Mapping[bytes, bytes]) -> str:
    return _lower(headers).get(b"retry-after", b"").decode("latin-1")


class WholeResponse(msgspec.Struct, eq=False):
    """An engine's answer that is wanted whole. It is there when `arrived` is done, which raises what broke it. `retry_after` is of a
    refusal, of which as much of the body counts as came: an engine may hang up while it refuses."""

    arrived: asyncio.Future[None]
    status: int = 0
    retry_after: str = ""
    body: bytes = b""
    waits = streams = False

    def set_status(self, status: int, headers: Mapping[bytes, bytes]) -> None:
        self.status, self.retry_after = status, _retry_after(headers)

    def add_body(self, body: bytes) -> None:
        raise RuntimeError("a whole answer is taken at its end")

    def finish(self, body: bytes) -> None:
        if not self.arrived.done():
            self.body = body
            self.arrived.set_result(None)

    def fail(self, error: Exception, body: bytes = b"") -> None:
        if self.status not in (0, 200):
            self.finish(body)
        elif not self.arrived.done():
            self.arrived.set_exception(error)


class EngineResponse:
    """An engine's answer as it arrives: `status`, `retry_after` of a refusal, and the body, which can be read once, in pieces."""

    streams = True

    def __init__(self, channel: Channel) -> None:
        self.status = 0
        self.retry_after = ""
        self.waits = False
        self._channel = channel
        self._loop = channel.loop
        self._pieces: deque[bytes] = deque()
        self._unread = 0
        self._whole = False
        self._error: Exception | None = None
        self._waiting: asyncio.Future[bool] | None = None
        self._on_piece: Callable[[bytes], bool] | None = None

    async def __aenter__(self) -> EngineResponse:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.leave(failed=kind is not None)

    def leave(self, *, failed: bool) -> None:
        """The reader reads no further."""
        if failed:
            self.close()
        elif not self._whole:
            # The rest is not needed, and after it the connection can be reused.
            self._loop.call_later(_REST_SECONDS, self.close)

    def close(self) -> None:
        """Hang up: the engine sees a disconnected client, a reader gets BrokenOff."""
        if not self._whole:
            self.fail(BrokenOff("the connection was closed"))
            self._channel.close()

    async def wait_for_status(self) -> None:
        """Returns when the status and the headers are there."""
        try:
            while not self.status:
                await self._wait()
        except BaseException:
            self._channel.close()
            raise

    async def read_refusal(self) -> bytes:
        """As much of the body as comes: an engine may hang up while it refuses."""
        taken: list[bytes] = []
        with contextlib.suppress(BrokenOff, TimeoutError):
            while piece := await self.read_piece():
                taken.append(piece)
        return b"".join(taken)

    async def read_piece(self) -> bytes:
        """The part of the body since the last piece, at least a byte; b"" at the end. Raises BrokenOff and TimeoutError."""
        while not self._pieces:
            if self._whole:
                return b""
            await self._wait()
        piece, self._unread = b"".join(self._pieces), 0
        self._pieces.clear()
        self._resume()
        return piece

    async def follow(self, on_piece: Callable[[bytes], bool], seconds: float | None = None) -> bool | None:
        """Call `on_piece` with each piece of the body as it arrives, at once with all that did already; no task wakes for a piece. True
        once it returns False, False at the end of the body, None after `seconds`. Raises as `read_piece`, and what `on_piece` raises."""
        self._on_piece = on_piece
        if self._pieces:
            waiting = b"".join(self._pieces)
            self._pieces.clear()
            self.add_body(waiting)
        self._unread = 0
        self._resume()
        while self._on_piece is not None and not self._whole:
            if not await self._wait(seconds):
                self._on_piece = None
                return None
        if self._on_piece is not None:
            self._on_piece = None
            return False
        if self._error is not None:
            raise self._error
        return True

    def _resume(self) -> None:
        if self.waits:
            self.waits = False
            self._channel.resume_reading()

    async def _wait(self, seconds: float | None = None) -> bool:
        """True when something arrived, False after `seconds`. Raises what ended the answer."""
        if self._error is not None:
            raise self._error
        self._waiting = self._loop.create_future()
        timer = None if seconds is None else self._loop.call_later(seconds, self._wake, False)
        try:
            return await self._waiting
        finally:
            self._waiting = None
            if timer is not None:
                timer.cancel()

    def _wake(self, arrived: bool = True) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(arrived)

    def fail(self, error: Exception, body: bytes = b"") -> None:
        if body and self._error is None:
            self.add_body(body)
        self._error = self._error or error
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(self._error)

    def set_status(self, status: int, headers: Mapping[bytes, bytes]) -> None:
        self.status = status
        if status != 200:
            self.retry_after = _retry_after(headers)
        self._wake()

    def add_body(self, body: bytes) -> None:
        if self._on_piece is not None:
            try:
                if self._on_piece(body):
                    return
            except Exception as error:
                self.fail(error)
            self._on_piece = None
            self._wake()
            return
        self._pieces.append(body)
        self._unread += len(body)
        if self._unread > _BUFFERED_BYTES and not self.waits:
            self.waits = True
            self._channel.pause_reading()
        self._wake()

    def finish(self, body: bytes = b"") -> None:
        if body:
            self.add_body(body)
        # An answer that was given up is not complete just because its connection ends as well.
        if self._error is None:
            self._whole = True
            self._resume()
            self._wake()


@dataclass(frozen=True, slots=True)
class _Target:
    """The server of a URL, and its part of a request's head."""

    host: str
    port: int
    tls: bool
    path: bytes
    lines: bytes


class Channels:
    """`key` is the engines' API key; `socket_factory` makes the socket for an address; `trace_headers` gives headers for each request.
    An idle connection is kept `idle_seconds`. `session_header` is the header in which each request that
    is made for a call carries its session's id, "" for none. `tls` None: the system's authorities."""

    def __init__(
        self,
        key: str | None,
        *,
        connect_seconds: float,
        read_seconds: float,
        idle_seconds: float,
        socket_factory: SocketFactory,
        trace_headers: Callable[[], Mapping[str, str]] | None = None,
        session_header: str = "",
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.session_header = session_header
        self._key = f"Authorization: Bearer {key}\r\n".encode() if key else b""
        self._connect_seconds = connect_seconds
        self._read_seconds = read_seconds
        self._idle_seconds = idle_seconds
        self._socket_factory = socket_factory
        self._trace_headers = trace_headers
        self._idle: dict[tuple[str, int, bool], list[Channel]] = {}
        self._connected: weakref.WeakSet[Channel] = weakref.WeakSet()
        self._tls = tls
        self._open = True

    @property
    def idle(self) -> list[Channel]:
        """The connections without a request."""
        return [channel for channels in self._idle.values() for channel in channels]

    async def post(self, url: str, body: bytes, headers: Mapping[str, str] = _NO_HEADERS) -> EngineResponse:
        """Post a body, JSON if the headers do not name another type. With the header "Connection: close" over a new connection. Returns
        once the status is there.

        Raises ChannelError, and TimeoutError after too long a silence."""
        target = _target(url)
        channel = self._take_idle(target, headers) or await self._connect(target, headers)
        answer = EngineResponse(channel)
        channel.ask(self._format(b"POST", target, body, headers), answer)
        await answer.wait_for_status()
        return answer

    async def ask(
        self, url: str, body: bytes | None, headers: Mapping[str, str] = _NO_HEADERS, seconds: float = 0.0
    ) -> WholeResponse:
        """The whole answer, within `seconds` after the request is sent if they are not 0. As `post`; a GET where there is no body. The
        running task's call counts it as a wait for its engine."""
        since, target = time.perf_counter(), _target(url)
        try:
            channel = self._take_idle(target, headers) or await self._connect(target, headers)
            answer = WholeResponse(channel.loop.create_future())
            channel.ask(self._format(b"GET" if body is None else b"POST", target, body, headers), answer, seconds)
            try:
                await answer.arrived
            except BaseException:
                channel.close()
                raise
            return answer
        finally:
            TIMELINE.get().end_wait(ENGINE, since)

    def close(self) -> None:
        """Hang up everywhere, also where the rest of an answer is still to come that nobody reads."""
        self._open = False
        for channel in list(self._connected):
            channel.close()
        self._idle.clear()

    def _format(self, method: bytes, target: _Target, body: bytes | None, headers: Mapping[str, str]) -> bytes:
        """The request, as it is sent."""
        authorized = b"" if b"\nAuthorization:" in target.lines else self._key
        lines = list(map("%s: %s\r\n".__mod__, headers.items()))
        if body is not None:
            lines.append(f"Content-Length: {len(body)}\r\n" + ("" if "Content-Type" in headers else _JSON))
        if self.session_header and (session_id := TIMELINE.get().session_id):
            lines.append(f"{self.session_header}: {session_id}\r\n")
        if self._trace_headers is not None:
            lines += map("%s: %s\r\n".__mod__, self._trace_headers().items())
        lines.append("\r\n")
        return b"".join((method, b" ", target.path, target.lines, authorized, "".join(lines).encode("latin-1"), body or b""))

    def _take_idle(self, target: _Target, headers: Mapping[str, str]) -> Channel | None:
        """The most recently used connection that is still good; none where a new one is wanted."""
        if headers.get("Connection") == _CLOSE:
            return None
        channels = self._idle.get((target.host, target.port, target.tls))
        while channels:
            channel = channels.pop()
            if not channel.lost and channel.idle_since > channel.loop.time() - self._idle_seconds:
                return channel
            channel.close()
        return None

    async def _connect(self, target: _Target, headers: Mapping[str, str]) -> Channel:
        # After a request that says so nothing may be sent, also where the engine leaves the connection open.
        then = Channel.close if headers.get("Connection") == _CLOSE else partial(self._keep, target)
        try:
            async with asyncio.timeout(self._connect_seconds or None):
                channel = await self._dial(target, lambda: Channel(then, self._read_seconds))
        except TimeoutError as error:
            raise ConnectTimeout(f"no connection within {self._connect_seconds:g} seconds") from error
        except OSError as error:
            raise CannotConnect(error.strerror or str(error)) from error
        except RuntimeError as error:
            # uvloop raises this for some sockets.
            raise CannotConnect(str(error)) from error
        self._connected.add(channel)
        return channel

    async def _dial(self, target: _Target, make: Callable[[], Channel]) -> Channel:
        """A connection to the first of the host's addresses that accepts one. Raises OSError."""
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM)
        dialled = await start_connection(found, happy_eyeballs_delay=_NEXT_SECONDS, socket_factory=self._socket_factory)
        tls, name = (self._tls_context(), target.host) if target.tls else (None, None)
        try:
            _, channel = await loop.create_connection(make, sock=dialled, ssl=tls, server_hostname=name)
        except BaseException:
            dialled.close()
            raise
        return channel

    def _tls_context(self) -> ssl.SSLContext:
        if self._tls is None:
            self._tls = ssl.create_default_context()
        return self._tls

    def _keep(self, target: _Target, channel: Channel) -> None:
        if not self._open:
            channel.close()
            return
        channels = self._idle.setdefault((target.host, target.port, target.tls), [])
        channels.append(channel)
        oldest = asyncio.get_running_loop().time() - self._idle_seconds
        # The most recently used are taken first, so the oldest are in front.
        while channels and (channels[0].idle_since <= oldest or channels[0].lost):
            channels.pop(0).close()


@lru_cache(maxsize=1024)
def _target(url: str) -> _Target:
    parts = urlsplit(url)
    tls = parts.scheme == "https"
    try:
        host, port = parts.hostname or "", parts.port or (443 if tls else 80)
    except ValueError as error:
        raise CannotConnect(f"'{url}' is not an address") from error
    if parts.scheme not in ("http", "https") or not host:
        raise CannotConnect(f"'{url}' is not an address")
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    named = parts.netloc.rpartition("@")[2]
    lines = f" HTTP/1.1\r\nHost: {named}\r\nAccept: */*\r\n"
    if parts.username is not None:
        known = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        lines += f"Authorization: Basic {base64.b64encode(known.encode()).decode()}\r\n"
    return _Target(host, port, tls, path.encode("latin-1", "replace"), lines.encode("latin-1", "replace"))
