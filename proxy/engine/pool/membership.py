"""Membership: which replicas the pool should have, from the settings, engines added at run time, and watched names.

A watched name (`dns://vllm.default.svc:8000`) stands for every address it resolves to, as with a Kubernetes headless service. A store
or resolver that does not answer changes nothing: the last known state holds, and probes tell which replicas are alive.
"""

from __future__ import annotations

import asyncio
import logging
import re
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from proxy.engine.replica import Replica
from proxy.errors import StoreUnavailable
from proxy.store.keys import StoredValueError
from proxy.store.service import EngineStore

log = logging.getLogger(__name__)

Resolver = Callable[[str, int], Awaitable[Sequence[str]]]
"""(name, port) -> its addresses as text. Raises OSError if the name cannot be resolved now."""

RESOLVE_SECONDS = 5.0
_ROUTES = (
    *("/v1/chat/completions", "/v1/completions", "/v1/models", "/inference/v1/generate", "/generate"),
    *("/chat/completions", "/completions"),
)
_POLICY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/+-]{0,199}")


def engine_url(text: str) -> str:
    """`text` without surrounding blanks, trailing slash and /v1."""
    return text.strip().rstrip("/").removesuffix("/v1").rstrip("/")


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """The value of --engine: a URL or a name to watch, and the policy its replicas belong to.

    `name` is its name in lists: host, port and path of a URL, `dns:` with host and port of a watched name. `models` are the names its
    engines were declared to serve."""

    url: str
    policy: str = ""
    models: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        parts = urlsplit(self.url)
        return f"{'dns:' if self.is_watched else ''}{parts.netloc}{parts.path}"

    @property
    def is_watched(self) -> bool:
        return self.url.startswith("dns://")

    def __str__(self) -> str:
        return f"{self.policy}={self.url}" if self.policy else self.url


def replica_at(url: str) -> Replica:
    """A replica not yet contacted. `url` may end in a slash or /v1; the name is its host, port and path."""
    base = engine_url(url)
    return Replica(name=EngineSpec(base).name or base, url=base)


@dataclass(frozen=True, slots=True)
class ReplicaAddress:
    """A replica the pool should have. `source`: settings, api or the watched name."""

    url: str
    policy: str
    source: str

    @property
    def name(self) -> str:
        return EngineSpec(self.url).name


def parse_engine(text: str, policy: str = "") -> EngineSpec:
    """Parses URL, NAME=URL, dns://name:port or NAME=dns://name:port, without a trailing slash or /v1. Raises ValueError with what is
    wrong; the message does not repeat the text."""
    named, separator, rest = text.strip().partition("=")
    if separator and "://" not in named:
        if policy and policy != named:
            raise ValueError(f"it names the policy {named!r}, not {policy!r}")
        return parse_engine(rest, _check_policy(named))
    if policy:
        _check_policy(policy)
    url = engine_url(text)
    _check_url(url)
    return EngineSpec(url, policy)


def _check_policy(policy: str) -> str:
    if not _POLICY.fullmatch(policy):
        raise ValueError(f"{policy!r} cannot be the name of a policy")
    return policy


def _check_url(url: str) -> None:
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https", "dns") and parts.hostname and (parts.port is None or parts.port > 0)
    except ValueError:
        usable = False
    if not usable:
        raise ValueError("it is not a URL like http://127.0.0.1:8000")
    if (route := next((route for route in _ROUTES if parts.path.endswith(route)), None)) is not None:
        raise ValueError(f"an engine is named without {route}")
    if "@" in parts.netloc:
        # Logs, errors and lists name engines by their URL.
        raise ValueError("it must not hold a password")
    if parts.scheme == "dns" and (parts.port is None or parts.path):
        raise ValueError("a name to watch is dns://NAME:PORT")


async def resolve_with_system(name: str, port: int) -> Sequence[str]:
    """All addresses that this machine's resolver returns."""
    found = await asyncio.get_running_loop().getaddrinfo(name, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[4][0]) for address in found))


class Membership:
    """The members as known at the last `refresh`."""

    def __init__(
        self,
        engines: Sequence[str],
        store: EngineStore | None,
        resolver: Resolver,
        models: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        """`models`: by policy, the model names that the settings declare for its engines."""
        self.fixed = tuple(parse_engine(engine) for engine in engines)
        self._models = {model: policy for policy, names in (models or {}).items() for model in names}
        self._store = store
        self._resolver = resolver
        self._addresses: dict[str, Sequence[str]] = {}
        self.specs: tuple[EngineSpec, ...] = self.fixed
        self.declared: Mapping[str, str] = self._models
        """The policy of every declared model; the settings win over added engines."""

    def members(self) -> list[ReplicaAddress]:
        """Each name once: settings win over added engines, and single addresses over watched names."""
        found: dict[str, ReplicaAddress] = {}
        for watched in (False, True):
            for spec in self.specs:
                if spec.is_watched == watched:
                    for member in self._members_of(spec):
                        found.setdefault(member.name, member)
        return list(found.values())

    async def refresh(self) -> None:
        """Ask the store and the resolver. Does not raise if they fail."""
        if self._store is not None:
            try:
                stored = await self._store.engines()
                added = tuple(EngineSpec(engine.url, engine.policy, engine.models) for engine in stored)
                self.specs = (*self.fixed, *added)
                self.declared = {model: spec.policy for spec in added for model in spec.models} | self._models
            except StoreUnavailable as error:
                log.debug("cannot read the added engines: %s", error.message)
            except StoredValueError as error:
                log.warning("cannot read the added engines: %s", error)
        await asyncio.gather(*(self._resolve(spec.url) for spec in self.specs if spec.is_watched))

    def _members_of(self, spec: EngineSpec) -> list[ReplicaAddress]:
        if not spec.is_watched:
            return [ReplicaAddress(spec.url, spec.policy, "settings" if spec in self.fixed else "api")]
        port = urlsplit(spec.url).port
        addresses = self._addresses.get(spec.url, ())
        return [
            ReplicaAddress(f"http://{f'[{address}]' if ':' in address else address}:{port}", spec.policy, spec.url)
            for address in addresses
        ]

    async def _resolve(self, url: str) -> None:
        parts = urlsplit(url)
        try:
            async with asyncio.timeout(RESOLVE_SECONDS):
                self._addresses[url] = await self._resolver(str(parts.hostname), int(parts.port or 0))
        except (TimeoutError, OSError) as error:
            if not self._addresses.get(url):
                log.warning("engines at %s: cannot resolve the name: %s", url, error or "no answer in time")
