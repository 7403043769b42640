"""Which network addresses a connection may be made to: an operator's allow-list, judged by the address itself and never by its spelling."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

PUBLIC = "public"
"""The entry of an allow-list that stands for all public addresses."""
NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
TUNNELS = tuple(map(ipaddress.IPv6Network, ("::/96", "64:ff9b:1::/48", "2001::/32", "2002::/16", "fec0::/10")))
"""IPv6 networks whose addresses lead to IPv4 or to a site's own; not each Python version says that they are not global."""

_NAME = re.compile(r"(?=.{1,253}\Z)[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?(\.[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?)*\.?")


class AllowList:
    """What may be connected to: networks, host names (whatever their address) and `public`. Raises ValueError for any other entry."""

    def __init__(self, entries: Sequence[str]) -> None:
        self._public = PUBLIC in entries
        self._names: set[str] = set()
        self._networks: list[ipaddress.IPv4Network | ipaddress.IPv6Network] = []
        for entry in entries:
            if entry == PUBLIC:
                continue
            try:
                self._networks.append(ipaddress.ip_network(entry))
            except ValueError as error:
                # The last label of a name is no number: what looks like a network and is none must not count as a name.
                if not _NAME.fullmatch(entry.lower()) or entry.rstrip(".").rpartition(".")[2].isdecimal():
                    raise ValueError(f"{entry!r} is no network (10.0.0.0/8), no host name and not '{PUBLIC}'") from error
                self._names.add(entry.lower().rstrip("."))

    def has_name(self, host: str) -> bool:
        return host.lower().rstrip(".") in self._names

    def admits(self, address: str) -> bool:
        """Whether a connection to the address may be made."""
        try:
            found = unwrap(ipaddress.ip_address(address))
        except ValueError:
            return False
        return (self._public and is_public(found)) or any(found in network for network in self._networks)


def unwrap(address: Address) -> Address:
    """The IPv4 address that an IPv6 address stands for where that is where its packets go: mapped, or translated by NAT64."""
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return address.ipv4_mapped
        if address in NAT64:
            return ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF)
    return address


def is_public(address: Address) -> bool:
    if isinstance(address, ipaddress.IPv6Address) and any(address in network for network in TUNNELS):
        return False
    return address.is_global and not address.is_multicast
