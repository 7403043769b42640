"""The engines that were added at run time, in Redis: every process sees them, and a restart keeps them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from proxy.errors import Conflict
from proxy.store.connection import StoreConnection
from proxy.store.keys import ENGINES
from proxy.store.packing import pack_versioned, unpack_versioned


@dataclass(frozen=True, slots=True)
class StoredEngine:
    """`name` is what it is removed by; `url` may be a name to watch; `added_at` in epoch seconds. `models`: names under which it was
    declared to serve."""

    name: str
    url: str
    policy: str
    added_at: float
    models: tuple[str, ...] = ()


class EngineStore(Protocol):
    """Every method raises `StoreUnavailable`."""

    async def engines(self) -> list[StoredEngine]:
        """In the order in which they were added."""
        ...

    async def add(self, engine: StoredEngine) -> StoredEngine:
        """What is stored under its name: repeating an addition is a no-op. Raises Conflict when another URL or policy is."""
        ...

    async def remove(self, name: str) -> bool:
        """False when there is none of that name."""
        ...


class RedisEngineStore:
    """Implements `EngineStore`."""

    def __init__(self, connection: StoreConnection) -> None:
        self._redis = connection

    async def engines(self) -> list[StoredEngine]:
        blobs = await self._redis.execute("HVALS", ENGINES)
        return sorted(
            (unpack_versioned(blob, StoredEngine) for blob in blobs), key=lambda engine: (engine.added_at, engine.name)
        )

    async def add(self, engine: StoredEngine) -> StoredEngine:
        if await self._redis.execute("HSETNX", ENGINES, engine.name, pack_versioned(engine)):
            return engine
        blob = await self._redis.execute("HGET", ENGINES, engine.name)
        if blob is None:
            return await self.add(engine)
        stored = unpack_versioned(blob, StoredEngine)
        if (stored.url, stored.policy, stored.models) != (engine.url, engine.policy, engine.models):
            of = f"the policy {stored.policy!r}" if stored.policy else "the default policy"
            as_ = f", as {', '.join(stored.models)}" if stored.models else ""
            raise Conflict(f"engine {engine.name} is there already: {stored.url} of {of}{as_}", param="url")
        return stored

    async def remove(self, name: str) -> bool:
        return bool(await self._redis.execute("HDEL", ENGINES, name))
