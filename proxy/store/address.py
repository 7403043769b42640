"""Where the store is: one URL for a single Redis, a Redis Cluster, or a Redis that Sentinels watch.

    redis://[user:password@]host:port/db              one server (or any node of a cluster, which is noticed)
    redis+cluster://host:port[,host:port…]            a cluster, found through any of its nodes
    redis+sentinel://host:port[,…]/service[/db]       the master of that service, as the Sentinels name it
    unix:///path, unix://folder/path                  one server on a Unix socket; the second is relative to the working directory

`rediss` instead of `redis` is TLS. What stands after `?` (for example `ssl_ca_certs=/path`) goes to every connection; a user and
password are those of the Redis servers.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal
from urllib.parse import SplitResult, quote, unquote, urlsplit

Kind = Literal["single", "cluster", "sentinel"]
Place = tuple[str, int]
"""Host and port."""

_PORTS = {"single": 6379, "cluster": 6379, "sentinel": 26379}


@dataclass(frozen=True, slots=True)
class Address:
    """`name` is the address without credentials, for messages."""

    kind: Kind
    url: str
    name: str
    places: tuple[Place, ...] = ()
    service: str = ""
    db: str = ""

    @classmethod
    def parse(cls, url: str) -> Address:
        """Raises ValueError for what is no such URL."""
        parts = urlsplit(url)
        scheme, _, kind = parts.scheme.partition("+")
        if kind not in ("", "cluster", "sentinel") or scheme not in ("redis", "rediss", "unix") or (kind and scheme == "unix"):
            raise ValueError("it begins with redis://, rediss://, redis+cluster://, redis+sentinel:// or unix://")
        if not kind:
            if scheme == "unix":
                return _socket(parts)
            return cls("single", url, _bare(parts), _places(parts, "single"))
        if kind == "cluster":
            _require(parts.path in ("", "/", "/0"), "a cluster has the one database 0")
            return cls("cluster", url, _bare(parts), _places(parts, "cluster"))
        service, _, db = parts.path.strip("/").partition("/")
        _require(bool(service), "redis+sentinel:// ends in the name of the service: redis+sentinel://host:26379/mymaster")
        return cls("sentinel", url, f"{_bare(parts)}/{service}", _places(parts, "sentinel"), service, db)

    def server(self, place: Place) -> str:
        """The redis:// URL of one Redis server that is reached as this address says."""
        parts = urlsplit(self.url)
        login, at, _ = parts.netloc.rpartition("@")
        return _joined(parts, f"{login}{at}{_netloc(place)}", f"/{self.db}" if self.db else "")

    def sentinel(self, place: Place) -> str:
        """The same of a Sentinel, which has neither users nor databases."""
        return _joined(urlsplit(self.url), _netloc(place), "")


def _socket(parts: SplitResult) -> Address:
    """What stands before the first slash is a folder: elsewhere it would be a host, which a socket has none of."""
    login, at, folder = parts.netloc.rpartition("@")
    _require(bool(folder + parts.path), "unix:// is followed by the path of a socket")
    path = os.path.abspath(unquote(folder + parts.path))
    query = f"?{parts.query}" if parts.query else ""
    return Address("single", f"unix://{login}{at}{quote(path)}{query}", path)


def _joined(parts: SplitResult, netloc: str, path: str) -> str:
    return SplitResult(parts.scheme.partition("+")[0], netloc, path, parts.query, "").geturl()


def _netloc(place: Place) -> str:
    host, port = place
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _bare(parts: SplitResult) -> str:
    return parts.netloc.rpartition("@")[2]


def _places(parts: SplitResult, kind: Kind) -> tuple[Place, ...]:
    hosts = [urlsplit(f"//{host}") for host in _bare(parts).split(",")]
    _require(all(host.hostname for host in hosts), "each of its nodes is host:port, with commas between them")
    return tuple((host.hostname or "", host.port or _PORTS[kind]) for host in hosts)


def _require(holds: bool, rule: str) -> None:
    if not holds:
        raise ValueError(rule)
