"""The listening socket, opened before anything else so that a taken port is reported first and port 0 is known."""

from __future__ import annotations

import errno
import socket

from cli.refusal import Refusal

BACKLOG = 2048


def listen(host: str, port: int, flag: str = "--port") -> socket.socket:
    """A listening TCP socket on `host`:`port`, which `flag` named. Raises `Refusal` that says why the address cannot be had."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, OverflowError) as error:
        raise Refusal(f"cannot listen on {host}:{port}: {error}") from error
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        # Two sockets with SO_REUSEADDR may both bind one port; only listening settles who has it.
        listener.listen(BACKLOG)
    except (OSError, OverflowError) as error:
        listener.close()
        raise Refusal(_why(host, port, flag, error)) from error
    listener.set_inheritable(False)
    return listener


def _why(host: str, port: int, flag: str, error: Exception) -> str:
    match getattr(error, "errno", None):
        case errno.EADDRINUSE:
            return f"port {port} on {host} is taken by another process: choose another with {flag}, or {flag} 0 for a free one"
        case errno.EACCES:
            return f"port {port} needs more rights than this user has: choose one above 1023 with {flag}"
        case errno.EADDRNOTAVAIL:
            return f"{host} is no address of this machine: choose another with --host"
        case _:
            return f"cannot listen on {host}:{port}: {error}"


def url_of(listener: socket.socket, *, tls: bool = False) -> str:
    """How this machine reaches the listener: http://host:port, with a wildcard address shown as the loopback one."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return f"https://{place}" if tls else f"http://{place}"
