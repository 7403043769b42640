"""EnginePool: the replicas, who of them serves, and the gate that holds calls while weights change.

Every replica has one watch task, which finds the engine at start, notices its death and its return, and asks the keeper
(`WeightUpdater`) on each visit whether the replica's weights are known and current. A replica serves when it answers and the
keeper lets it; `reason` says why it does not. A session stays on one replica (rendezvous hashing), so that the engine's prefix
cache helps, and moves only when that replica stops serving.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from typing import Protocol

import aiohttp

from proxy.engine.replica import Replica, contact, replica_at
from proxy.errors import EngineUnavailable, VerbatimError
from proxy.settings import Settings

__all__ = ["EnginePool", "Replica", "WeightKeeper"]

log = logging.getLogger(__name__)

WATCH_SECONDS = 2.0
RETRY_SECONDS = 1.0
_IDLE_SECONDS = 4.0
"""How long an idle connection is kept: vLLM's server closes it after 5 seconds, and a request sent into that would be lost."""

_PROBE_AFTER_SECONDS = 30
_PROBE_EVERY_SECONDS = 10
_PROBES = 3


class WeightKeeper(Protocol):
    async def admit(self, replica: Replica) -> None:
        """Return once the replica's weights are the pool's current ones and `weight_version` says so.

        Raises VerbatimError with the reason it must not serve."""
        ...


class EnginePool:
    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._http: aiohttp.ClientSession | None = None
        self._watches: list[asyncio.Task[None]] = []
        self._wake: dict[str, asyncio.Event] = {}
        self._open = asyncio.Event()
        self._open.set()
        self._holds = 0
        self._stopping = False
        self.keeper: WeightKeeper | None = None
        self.replicas: list[Replica] = []
        for url in settings.engine:
            replica = replica_at(url)
            if all(replica.name != other.name for other in self.replicas):
                self.replicas.append(replica)

    @property
    def http(self) -> aiohttp.ClientSession:
        """The session that all traffic to engines goes through: no cap on connections, kept alive, authorised."""
        if self._http is None:
            raise RuntimeError("EnginePool.start() comes first")
        return self._http

    async def start(self) -> None:
        """Begin watching. Waits for a first answer of every replica, at most `engine_connect_seconds`; never fails."""
        self._http = _open_session(self._settings)
        first = [asyncio.Event() for _ in self.replicas]
        for replica, visited in zip(self.replicas, first, strict=True):
            self._wake[replica.name] = asyncio.Event()
            self._watches.append(asyncio.create_task(self._watch(replica, visited)))
        if first:
            waits = [asyncio.create_task(visited.wait()) for visited in first]
            _, late = await asyncio.wait(waits, timeout=self._settings.engine_connect_seconds)
            for task in late:
                task.cancel()

    async def stop(self) -> None:
        self._stopping = True
        for wake in self._wake.values():
            wake.set()
        for task in self._watches:
            task.cancel()
        await asyncio.gather(*self._watches, return_exceptions=True)
        self._watches.clear()
        if self._http is not None:
            await self._http.close()

    def of(self, policy: str) -> list[Replica]:
        """The replicas of one policy, serving or not; "" is the default one."""
        return [replica for replica in self.replicas if replica.policy == policy]

    def pick(self, session_id: str) -> Replica:
        """The replica that serves this session. Raises EngineUnavailable with every replica's reason."""
        serving = [replica for replica in self.replicas if replica.healthy]
        if not serving:
            raise EngineUnavailable(f"no engine can take the call: {self.ready()[1]}")
        return max(serving, key=lambda replica: _weight(session_id, replica.name))

    def ready(self) -> tuple[bool, str]:
        """Whether a replica serves, and if none does, why."""
        if any(replica.healthy for replica in self.replicas):
            return True, ""
        if not self.replicas:
            return False, "no engine is configured"
        return False, "; ".join(f"{replica.name}: {replica.reason}" for replica in self.replicas)

    async def models(self) -> list[str]:
        """The models that serving replicas name, in order, each once."""
        return list(dict.fromkeys(model for replica in self.replicas if replica.healthy for model in replica.models))

    def mark_failed(self, replica: Replica, reason: str) -> None:
        """Stop sending calls there; its watch looks at once whether it answers again."""
        self._down(replica, reason)
        if replica.name in self._wake:
            self._wake[replica.name].set()

    def mark_serving(self, replica: Replica) -> None:
        """Its weights were just made current: send calls there again."""
        self._up(replica)

    async def admitted(self) -> None:
        """Wait until no weight update holds calls back."""
        await self._open.wait()

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Inside, calls that arrive wait in `admitted`; those in flight go on."""
        self._holds += 1
        self._open.clear()
        try:
            yield
        finally:
            self._holds -= 1
            if self._holds == 0:
                self._open.set()

    async def _watch(self, replica: Replica, visited: asyncio.Event) -> None:
        wake = self._wake[replica.name]
        # Not only until cancelled: before Python 3.12 asyncio.wait_for, which redis-py sends with, can swallow a cancellation.
        while not self._stopping:
            wake.clear()
            await self._visit(replica)
            visited.set()
            try:
                async with asyncio.timeout(WATCH_SECONDS if replica.healthy else RETRY_SECONDS):
                    await wake.wait()
            except TimeoutError:
                continue
            # Woken by a failed call: a moment's pause, so that calls failing in a row do not become a busy loop.
            await asyncio.sleep(RETRY_SECONDS / 4)

    async def _visit(self, replica: Replica) -> None:
        try:
            await contact(self.http, replica, self._settings.engine_api)
        except EngineUnavailable as error:
            replica.alive = False
            self._down(replica, error.message)
            return
        replica.alive = True
        try:
            if self.keeper is not None:
                await self.keeper.admit(replica)
        except VerbatimError as error:
            self._down(replica, error.message)
        except Exception:
            log.exception("engine %s: the check of its weights failed", replica.name)
            self._down(replica, "the check of its weights failed; the log says why")
        else:
            self._up(replica)

    def _up(self, replica: Replica) -> None:
        if not replica.healthy:
            log.info("engine %s serves (%s, weights %s)", replica.name, replica.api, replica.weight_version)
        replica.healthy, replica.reason = True, ""

    def _down(self, replica: Replica, reason: str) -> None:
        if replica.healthy or replica.reason != reason:
            log.warning("engine %s does not serve: %s", replica.name, reason)
        replica.healthy, replica.reason = False, reason


def _open_session(settings: Settings) -> aiohttp.ClientSession:
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


def _weight(session_id: str, name: str) -> bytes:
    return blake2b(f"{session_id}\0{name}".encode(), digest_size=8).digest()
