"""How connections to engines are opened: key, TLS, timeouts, and sockets that notice a machine that vanished."""

from __future__ import annotations

import socket
import ssl

import aiohttp

from proxy.engine.apis.probe import trace_connections
from proxy.engine.wire.channels import Channels
from proxy.engine.wire.tls import build_client_tls
from proxy.limits import USUAL, ProcessLimits
from proxy.settings import Settings, find_collector
from proxy.timeline import carried

_IDLE_SECONDS = 4.0
"""vLLM's server closes an idle connection after 5 seconds, and a request sent at that moment would be lost."""

_PROBE_AFTER_SECONDS = 30
_PROBE_EVERY_SECONDS = 10
_PROBES = 3


def open_session(settings: Settings, limits: ProcessLimits = USUAL) -> aiohttp.ClientSession:
    """A session for probes or weights, with the engines' API key and no limit on connections."""
    key = settings.find_engine_key()
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(
            limit=0, keepalive_timeout=_IDLE_SECONDS, socket_factory=_make_socket, ssl=_build_tls(settings) or True
        ),
        headers={"Authorization": f"Bearer {key}"} if key else None,
        timeout=aiohttp.ClientTimeout(
            total=None, sock_connect=settings.engine_connect_seconds, sock_read=limits.engine_timeout_seconds
        ),
        trace_configs=[trace_connections()],
    )


def open_channels(settings: Settings, limits: ProcessLimits = USUAL) -> Channels:
    """The connections for calls, with the same key and timeouts."""
    return Channels(
        settings.find_engine_key(),
        connect_seconds=settings.engine_connect_seconds,
        read_seconds=limits.engine_timeout_seconds,
        idle_seconds=_IDLE_SECONDS,
        socket_factory=_make_socket,
        trace_headers=carried if find_collector() is not None else None,
        session_header=settings.engine_router.session_header,
        tls=_build_tls(settings),
    )


def _build_tls(settings: Settings) -> ssl.SSLContext | None:
    return build_client_tls(settings.engine_ca_file, settings.engine_client_cert)


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
