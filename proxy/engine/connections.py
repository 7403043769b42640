"""The connections to engines: no cap on their number, kept alive between calls, and broken when the other machine is gone."""

from __future__ import annotations

import socket

import aiohttp

from proxy.engine.channels import Channels
from proxy.settings import Settings
from proxy.tracing import carried

_IDLE_SECONDS = 4.0
"""How long an idle connection is kept: vLLM's server closes it after 5 seconds, and a request sent into that would be lost."""

_PROBE_AFTER_SECONDS = 30
_PROBE_EVERY_SECONDS = 10
_PROBES = 3


def open_connections(settings: Settings) -> aiohttp.ClientSession:
    """The session for everything but calls: probes, models, weights. With the engines' API key."""
    key = settings.engine_api_key
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_SECONDS, socket_factory=_probing_socket),
        headers={"Authorization": f"Bearer {key.get_secret_value()}"} if key else None,
        timeout=aiohttp.ClientTimeout(
            total=None, sock_connect=settings.engine_connect_seconds, sock_read=settings.engine_timeout_seconds
        ),
    )


def open_channels(settings: Settings) -> Channels:
    """The connections that calls go over, with the same key and the same patience."""
    key = settings.engine_api_key
    return Channels(
        key.get_secret_value() if key else None,
        connect_seconds=settings.engine_connect_seconds,
        read_seconds=settings.engine_timeout_seconds,
        idle_seconds=_IDLE_SECONDS,
        socket_factory=_probing_socket,
        carried=carried if settings.trace_endpoint is not None else None,
    )


def _probing_socket(address: aiohttp.AddrInfoType) -> socket.socket:
    family, kind, protocol, *_ = address
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    _probe(made)
    return made


def _probe(made: socket.socket) -> None:
    """Let the socket ask its other end for a sign of life: a machine that vanished breaks the call within a minute or so, where an
    engine that thinks for an hour does not."""
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    longest_seconds = _PROBE_AFTER_SECONDS + _PROBES * _PROBE_EVERY_SECONDS
    # Not every system has all of them. The last is for what was sent and never acknowledged, when no probe is sent.
    for name, value in (
        ("TCP_KEEPIDLE", _PROBE_AFTER_SECONDS),
        ("TCP_KEEPINTVL", _PROBE_EVERY_SECONDS),
        ("TCP_KEEPCNT", _PROBES),
        ("TCP_USER_TIMEOUT", longest_seconds * 1000),
    ):
        if hasattr(socket, name):
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
