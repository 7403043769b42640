"""The connections to engines: no cap on their number, kept alive between calls, and broken when the other machine is gone."""

from __future__ import annotations

import socket

import aiohttp

from proxy.settings import Settings

_IDLE_SECONDS = 4.0
"""How long an idle connection is kept: vLLM's server closes it after 5 seconds, and a request sent into that would be lost."""

_PROBE_AFTER_SECONDS = 30
_PROBE_EVERY_SECONDS = 10
_PROBES = 3


def open_connections(settings: Settings) -> aiohttp.ClientSession:
    """The session that all traffic to engines goes through, with their API key."""
    key = settings.engine_api_key
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_SECONDS, socket_factory=_probing_socket),
        headers={"Authorization": f"Bearer {key.get_secret_value()}"} if key else None,
        timeout=aiohttp.ClientTimeout(
            total=None, sock_connect=settings.engine_connect_seconds, sock_read=settings.engine_timeout_seconds
        ),
    )


def _probing_socket(address: aiohttp.AddrInfoType) -> socket.socket:
    """A socket that asks its other end for a sign of life: a machine that vanished breaks the call within a minute or so, where an
    engine that thinks for an hour does not."""
    family, kind, protocol, *_ = address
    made = socket.socket(family, kind, protocol)
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
    return made
