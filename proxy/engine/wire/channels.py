"""Channels: the pooled connections to engines. There is no limit on their number; idle ones are kept between calls."""

from __future__ import annotations

import asyncio
import base64
import socket
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from urllib.parse import unquote, urlsplit

import aiohttp
from aiohappyeyeballs import AddrInfoType, start_connection

from proxy.engine.wire.channel import Answer, CannotConnect, Channel, ConnectTimeout
from proxy.settings import Settings
from proxy.timeline import carried

SocketFactory = Callable[[AddrInfoType], socket.socket]

_NEXT_SECONDS = 0.25
"""How long one address of a host is tried before the next is tried as well (RFC 8305)."""


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
    An idle connection is kept `idle_seconds`. `session_header` is the header that carries a session's id, "" for none."""

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
    ) -> None:
        self._session_header = session_header
        self._key = f"Authorization: Bearer {key}\r\n".encode() if key else b""
        self._connect_seconds = connect_seconds
        self._read_seconds = read_seconds
        self._idle_seconds = idle_seconds
        self._socket_factory = socket_factory
        self._trace_headers = trace_headers
        self._idle: dict[tuple[str, int, bool], list[Channel]] = {}
        self._tls: ssl.SSLContext | None = None
        self._open = True

    @property
    def idle(self) -> list[Channel]:
        """The connections without a request."""
        return [channel for channels in self._idle.values() for channel in channels]

    def headers_of(self, session_id: str) -> dict[str, str]:
        """The headers of a sampling request of the session."""
        return {self._session_header: session_id} if self._session_header else {}

    async def post(self, url: str, body: bytes, headers: Mapping[str, str]) -> Answer:
        """Post a body, JSON if the headers do not name another type. With the header "Connection: close" over a new connection.

        Raises ChannelError, and TimeoutError after too long a silence."""
        lines = _lines({"Content-Type": "application/json", **headers})
        more = f"Content-Length: {len(body)}\r\n{lines}\r\n"
        return await self._ask(b"POST", url, more.encode("latin-1"), body, fresh=headers.get("Connection") == "close")

    async def get(self, url: str) -> Answer:
        """As `post`."""
        return await self._ask(b"GET", url, b"\r\n", b"")

    def close(self) -> None:
        self._open = False
        for channel in self.idle:
            channel.close()
        self._idle.clear()

    async def _ask(self, method: bytes, url: str, more: bytes, body: bytes, *, fresh: bool = False) -> Answer:
        target = _target(url)
        channel = (None if fresh else self._take_idle(target)) or await self._connect(target)
        authorized = b"" if b"\nAuthorization:" in target.lines else self._key
        if self._trace_headers is not None:
            authorized += _lines(self._trace_headers()).encode("latin-1")
        head = b"".join((method, b" ", target.path, target.lines, authorized, more))
        return await channel.ask(head, body)

    def _take_idle(self, target: _Target) -> Channel | None:
        """The most recently used connection that is still good."""
        channels = self._idle.get((target.host, target.port, target.tls))
        oldest = asyncio.get_running_loop().time() - self._idle_seconds
        while channels:
            channel = channels.pop()
            if not channel.lost and channel.idle_since > oldest:
                return channel
            channel.close()
        return None

    async def _connect(self, target: _Target) -> Channel:
        try:
            async with asyncio.timeout(self._connect_seconds or None):
                return await self._dial(target, lambda: Channel(partial(self._keep, target), self._read_seconds))
        except TimeoutError as error:
            raise ConnectTimeout(f"no connection within {self._connect_seconds:g} seconds") from error
        except OSError as error:
            raise CannotConnect(error.strerror or str(error)) from error
        except RuntimeError as error:
            # uvloop raises this for some sockets.
            raise CannotConnect(str(error)) from error

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


def _lines(headers: Mapping[str, str]) -> str:
    return "".join(f"{name}: {value}\r\n" for name, value in headers.items())


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


_IDLE_SECONDS = 4.0
"""vLLM's server closes an idle connection after 5 seconds, and a request sent at that moment would be lost."""

_PROBE_AFTER_SECONDS = 30
_PROBE_EVERY_SECONDS = 10
_PROBES = 3


def open_session(settings: Settings) -> aiohttp.ClientSession:
    """The session for probes and weights, with the engines' API key and no limit on connections."""
    key = settings.engine_api_key
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_SECONDS, socket_factory=_make_socket),
        headers={"Authorization": f"Bearer {key.get_secret_value()}"} if key else None,
        timeout=aiohttp.ClientTimeout(
            total=None, sock_connect=settings.engine_connect_seconds, sock_read=settings.engine_timeout_seconds
        ),
    )


def open_channels(settings: Settings) -> Channels:
    """The connections for calls, with the same key and timeouts."""
    key = settings.engine_api_key
    return Channels(
        key.get_secret_value() if key else None,
        connect_seconds=settings.engine_connect_seconds,
        read_seconds=settings.engine_timeout_seconds,
        idle_seconds=_IDLE_SECONDS,
        socket_factory=_make_socket,
        trace_headers=carried if settings.trace_endpoint is not None else None,
        session_header=settings.engine_session_header,
    )


def _make_socket(address: aiohttp.AddrInfoType) -> socket.socket:
    """A socket with keepalive probes: a call to a machine that vanished breaks within a minute or so, and a call to an engine that
    thinks for an hour does not."""
    family, kind, protocol, *_ = address
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    longest_seconds = _PROBE_AFTER_SECONDS + _PROBES * _PROBE_EVERY_SECONDS
    # Not every system has all of these. The last covers sent data that is never acknowledged, during which no probe is sent.
    for name, value in (
        ("TCP_KEEPIDLE", _PROBE_AFTER_SECONDS),
        ("TCP_KEEPINTVL", _PROBE_EVERY_SECONDS),
        ("TCP_KEEPCNT", _PROBES),
        ("TCP_USER_TIMEOUT", longest_seconds * 1000),
    ):
        if hasattr(socket, name):
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return made
