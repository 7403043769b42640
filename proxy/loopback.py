"""What is this machine and no other: the addresses an open service may listen on, and whom it then answers without a secret."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from urllib.parse import urlsplit

from proxy.errors import Forbidden


def is_loopback(host: str) -> bool:
    """Whether the name or address is this machine's own and cannot be another's."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_local(headers: Mapping[str, str]) -> None:
    """Raise `Forbidden` unless a request without a secret, to a service that is open to this machine, can have come from a program
    on it.

    A web page that the machine's browser shows reaches loopback too: it says its own address in `Origin`, or, when its name was
    made to point here, in `Host`.
    """
    origin = headers.get("origin")
    for said in (f"//{headers.get('host', '')}", *([origin] if origin is not None else [])):
        if not is_loopback(_host(said)):
            raise Forbidden("this service is open to programs on its own machine alone, not to web pages and other names")


def _host(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""
