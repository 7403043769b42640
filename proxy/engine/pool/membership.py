"""Membership: where replicas come from. Settings, the engines that were added at run time, and names that are watched.

A name (`dns://vllm.default.svc:8000`) stands for every address it resolves to, as that of a Kubernetes headless service does. A
store or a resolver that does not answer changes nothing: what was known last holds, and the replicas' own probes say who lives.
"""

from __future__ import annotations

import asyncio
import logging
import re
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from proxy.errors import StoreUnavailable
from proxy.store.keys import StoredValueError
from proxy.store.service import EngineStore

log = logging.getLogger(__name__)

Resolver = Callable[[str, int], Awaitable[Sequence[str]]]
"""(name, port) -> its addresses as text. Raises OSError when the name cannot be resolved now."""

RESOLVE_SECONDS = 5.0
_ROUTES = ("/v1/chat/completions", "/v1/completions", "/v1/models", "/inference/v1/generate", "/generate")
_POLICY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/+-]{0,199}")


def engine_url(text: str) -> str:
    """`text` without blanks around it, a trailing slash or /v1: what routes are put behind."""
    return text.strip().rstrip("/").removesuffix("/v1").rstrip("/")


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """What stands behind --engine: a URL, or a name to watch, and the policy its replicas belong to.

    `name` is what it is called in lists: host, port and path of a URL, `dns:` and host and port of a watched name. `models` are names
    under which its engines serve, where they were declared."""

    url: str
    policy: str = ""
    models: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        parts = urlsplit(self.url)
        return f"{'dns:' if self.watched else ''}{parts.netloc}{parts.path}"

    @property
    def watched(self) -> bool:
        return self.url.startswith("dns://")

    def __str__(self) -> str:
        return f"{self.policy}={self.url}" if self.policy else self.url


@dataclass(frozen=True, slots=True)
class Member:
    """A replica that the pool should have."""

    url: str
    policy: str
    source: str

    @property
    def name(self) -> str:
        return EngineSpec(self.url).name


def engine_spec(text: str, policy: str = "") -> EngineSpec:
    """`text` as URL, NAME=URL, dns://name:port or NAME=dns://name:port. A trailing slash or /v1 is left out. Raises ValueError
    with what is wrong, without the text."""
    named, separator, rest = text.strip().partition("=")
    if separator and "://" not in named:
        if policy and policy != named:
            raise ValueError(f"it names the policy {named!r}, not {policy!r}")
        return engine_spec(rest, _checked_name(named))
    if policy:
        _checked_name(policy)
    url = engine_url(text)
    _check(url)
    return EngineSpec(url, policy)


def _checked_name(policy: str) -> str:
    if not _POLICY.fullmatch(policy):
        raise ValueError(f"{policy!r} cannot be the name of a policy")
    return policy


def _check(url: str) -> None:
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
        # Engines are called by their URL in logs, errors and lists.
        raise ValueError("it must not hold a password")
    if parts.scheme == "dns" and (parts.port is None or parts.path):
        raise ValueError("a name to watch is dns://NAME:PORT")


async def system_resolver(name: str, port: int) -> Sequence[str]:
    """Every address that this machine's resolver knows."""
    found = await asyncio.get_running_loop().getaddrinfo(name, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[4][0]) for address in found))


class Membership:
    """What the pool should hold, as far as is known; `refresh` asks again."""

    def __init__(
        self,
        engines: Sequence[str],
        store: EngineStore | None,
        resolver: Resolver,
        models: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        """`models`: by policy, the names under which its engines serve, as far as the settings declare them."""
        self.fixed = tuple(engine_spec(engine) for engine in engines)
        self._models = {model: policy for policy, names in (models or {}).items() for model in names}
        self._store = store
        self._resolver = resolver
        self._added: tuple[EngineSpec, ...] = ()
        self._addresses: dict[str, Sequence[str]] = {}

    @property
    def specs(self) -> tuple[EngineSpec, ...]:
        return (*self.fixed, *self._added)

    @property
    def declared(self) -> dict[str, str]:
        """The policy of every model that was declared for one; the settings come before what was added."""
        return {model: spec.policy for spec in self._added for model in spec.models} | self._models

    def members(self) -> list[Member]:
        """Each name once: what the settings say comes before what was added, and an address alone before one of a watched name."""
        found: dict[str, Member] = {}
        for watched in (False, True):
            for spec in self.specs:
                if spec.watched == watched:
                    for member in self._members_of(spec):
                        found.setdefault(member.name, member)
        return list(found.values())

    async def refresh(self) -> None:
        """Ask the store and the resolver. Never raises for what they cannot say."""
        if self._store is not None:
            try:
                stored = await self._store.engines()
                self._added = tuple(EngineSpec(engine.url, engine.policy, engine.models) for engine in stored)
            except StoreUnavailable as error:
                log.debug("the engines that were added cannot be read: %s", error.message)
            except StoredValueError as error:
                log.warning("the engines that were added cannot be read: %s", error)
        await asyncio.gather(*(self._resolve(spec.url) for spec in self.specs if spec.watched))

    def _members_of(self, spec: EngineSpec) -> list[Member]:
        if not spec.watched:
            return [Member(spec.url, spec.policy, "settings" if spec in self.fixed else "api")]
        port = urlsplit(spec.url).port
        addresses = self._addresses.get(spec.url, ())
        return [Member(f"http://{_bracketed(address)}:{port}", spec.policy, spec.url) for address in addresses]

    async def _resolve(self, url: str) -> None:
        parts = urlsplit(url)
        try:
            async with asyncio.timeout(RESOLVE_SECONDS):
                self._addresses[url] = await self._resolver(str(parts.hostname), int(parts.port or 0))
        except (TimeoutError, OSError) as error:
            if not self._addresses.get(url):
                log.warning("engines at %s: the name cannot be resolved: %s", url, error or "no answer in time")


def _bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address else address
