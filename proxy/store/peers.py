"""What the processes that serve tell each other in Redis: that they live, and which sessions' calls are to be ended.

The calls to be ended are a stream and not a channel: who lost its connection for a moment hears of them afterwards, and in a
cluster it is one key like any other.
"""

from __future__ import annotations

from collections.abc import Collection

from proxy.store.connection import Script, StoreConnection
from proxy.store.keys import CUTS, PROCESSES

KEPT = 1000
BEGINNING = "0-0"

BEAT = Script.read("beat")
ALIVE = Script.read("alive")
ASK_TO_CUT = Script.read("ask_to_cut")


class RedisPeerStore:
    """Implements `proxy.store.peer_store.PeerStore`."""

    def __init__(self, connection: StoreConnection) -> None:
        self._redis = connection

    async def beat(self, process: str, seconds: float) -> None:
        await self._redis.run(BEAT, (PROCESSES,), (process, repr(seconds)))

    async def leave(self, process: str) -> None:
        await self._redis.execute("ZREM", PROCESSES, process)

    async def alive(self, processes: Collection[str]) -> set[str]:
        if not processes:
            return set()
        return {process.decode() for process in await self._redis.run(ALIVE, (PROCESSES,), tuple(processes))}

    async def ask_to_cut(self, session_id: str) -> None:
        await self._redis.run(ASK_TO_CUT, (CUTS,), (session_id, KEPT))

    async def to_cut(self, after: str, wait_seconds: float) -> tuple[list[str], str]:
        wait = max(1, int(min(wait_seconds, self._redis.timeout_seconds / 2) * 1000))
        read = await self._redis.execute("XREAD", "BLOCK", wait, "STREAMS", CUTS, after or BEGINNING, key=CUTS)
        if not read:
            return [], after
        ((_, entries),) = read
        return [fields[b"s"].decode() for _, fields in entries], entries[-1][0].decode()
