"""The weight versions in Redis, a line per policy: the current one, its history, and the lock that keeps two pushes apart."""

from __future__ import annotations

import uuid

from proxy.errors import Conflict
from proxy.store import keys
from proxy.store.connection import Script, StoreConnection
from proxy.store.packing import pack_versioned, unpack_versioned
from proxy.store.weight_store import KEPT_WEIGHTS, WeightState

ADVANCE = Script.read("advance")
LOCK = Script.read("push_lock")
UNLOCK = Script.read("unlock")


class RedisWeightStore:
    """Implements `proxy.store.weight_store.WeightStore`."""

    def __init__(self, connection: StoreConnection) -> None:
        self._redis = connection

    async def current(self, policy: str = "") -> WeightState:
        blob = await self._redis.execute("GET", keys.weights("current", policy))
        return WeightState() if blob is None else unpack_versioned(blob, WeightState)

    async def history(self, policy: str = "", limit: int = 100) -> list[WeightState]:
        blobs = await self._redis.execute("LRANGE", keys.weights("history", policy), 0, limit - 1)
        return [unpack_versioned(blob, WeightState) for blob in blobs]

    async def advance(self, state: WeightState, policy: str = "", fence: int | None = None) -> None:
        named = (keys.weights("current", policy), keys.weights("history", policy), keys.weights("fence", policy))
        args = (state.version, pack_versioned(state), KEPT_WEIGHTS, fence or 0)
        outcome, *detail = await self._redis.run(ADVANCE, named, args)
        if outcome < 0:
            raise Conflict(f"another process has taken over since the push of version {state.version} began", param="version")
        if outcome == 0:
            raise Conflict(f"weight version {state.version} is not greater than the current {detail[0]}", param="version")

    async def lock(self, owner: str, seconds: float, policy: str = "", fence: int = 0) -> int:
        named = (keys.weights("lock", policy), keys.weights("fence", policy))
        return int(await self._redis.run(LOCK, named, (owner, int(seconds * 1000), fence)))

    async def unlock(self, owner: str, policy: str = "") -> None:
        await self._redis.run(UNLOCK, (keys.weights("lock", policy),), (owner,))

    async def identity(self) -> str:
        await self._redis.execute("SET", keys.WEIGHTS_IDENTITY, uuid.uuid4().hex, "NX")
        return str((await self._redis.execute("GET", keys.WEIGHTS_IDENTITY)).decode())
