"""The pool's weight version in Redis: the current one, its history, and the lock that keeps two pushes apart."""

from __future__ import annotations

from proxy.errors import Conflict
from proxy.store.base import WeightState
from proxy.store.connection import Script, StoreConnection
from proxy.store.keys import WEIGHTS_CURRENT, WEIGHTS_HISTORY, WEIGHTS_LOCK
from proxy.store.packing import pack_versioned, unpack_versioned

KEPT = 1000

ADVANCE = Script.read("advance")
LOCK = Script.read("lock")
UNLOCK = Script.read("unlock")


class RedisWeightStore:
    """Implements `proxy.store.base.WeightStore`."""

    def __init__(self, connection: StoreConnection) -> None:
        self._redis = connection

    async def current(self) -> WeightState:
        blob = await self._redis.execute("GET", WEIGHTS_CURRENT)
        return WeightState() if blob is None else unpack_versioned(blob, WeightState)

    async def history(self, limit: int = 100) -> list[WeightState]:
        blobs = await self._redis.execute("LRANGE", WEIGHTS_HISTORY, 0, limit - 1)
        return [unpack_versioned(blob, WeightState) for blob in blobs]

    async def advance(self, state: WeightState) -> None:
        args = (state.version, pack_versioned(state), KEPT)
        moved, *detail = await self._redis.run(ADVANCE, (WEIGHTS_CURRENT, WEIGHTS_HISTORY), args)
        if not moved:
            raise Conflict(f"weight version {state.version} is not greater than the current {detail[0]}", param="version")

    async def lock(self, owner: str, seconds: float) -> bool:
        return bool(await self._redis.run(LOCK, (WEIGHTS_LOCK,), (owner, int(seconds * 1000))))

    async def unlock(self, owner: str) -> None:
        await self._redis.run(UNLOCK, (WEIGHTS_LOCK,), (owner,))
