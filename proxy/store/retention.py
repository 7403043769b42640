"""What retention asks of Redis: the oldest sessions, what still holds them, how much room is taken, and who may clear it."""

from __future__ import annotations

from collections.abc import Sequence

from proxy.store import keys
from proxy.store.connection import Script, StoreConnection
from proxy.store.delivery import PRELUDES

STANDINGS = Script.read("standings", *PRELUDES)
MEMORY = Script.read("memory")
LOCK = Script.read("lock")
UNLOCK = Script.read("unlock")


class RedisRetentionStore:
    def __init__(self, connection: StoreConnection) -> None:
        self._redis = connection

    async def oldest(self, cursor: str | None, limit: int) -> list[str]:
        """Members of the listing behind `cursor`, oldest first; `keys.listed` gives their session ids."""
        after = "-" if cursor is None else f"({cursor}"
        found = await self._redis.execute("ZRANGEBYLEX", keys.SESSIONS, after, "+", "LIMIT", 0, limit)
        return [member.decode() for member in found]

    async def standings(self, session_ids: Sequence[str]) -> list[str]:
        """Per session: announced (on its way into its group), its group's status, or none."""
        found = await self._redis.run(STANDINGS, keys.DELIVERY, tuple(session_ids))
        return [standing.decode() for standing in found]

    async def is_leased(self, session_id: str) -> bool:
        """Whether the session was ever handed to a trainer, and its reward is fixed."""
        return bool(await self._redis.execute("HEXISTS", keys.state(session_id), "leased"))

    async def used_bytes(self) -> int:
        """Memory that Redis uses, in a cluster that of all nodes asked."""
        answer = await self._redis.execute("INFO", "memory")
        nodes = [answer] if "used_memory" in answer else answer.values()
        return sum(int(node["used_memory"]) for node in nodes)

    async def session_bytes(self, session_id: str) -> int:
        named = (keys.state, keys.calls, keys.index, keys.intents, keys.delivered)
        return int(await self._redis.run(MEMORY, tuple(key(session_id) for key in named)))

    async def lock(self, owner: str, seconds: float) -> bool:
        """Take or renew the one right to clear; False while another has it."""
        return bool(await self._redis.run(LOCK, (keys.RETENTION_LOCK,), (owner, int(seconds * 1000))))

    async def unlock(self, owner: str) -> None:
        await self._redis.run(UNLOCK, (keys.RETENTION_LOCK,), (owner,))
