"""The engines that were added at run time, in Redis: every process sees them, and a restart keeps them."""

from __future__ import annotations

import uuid
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from proxy.errors import Conflict
from proxy.store import keys
from proxy.store.connection import Script, StoreConnection
from proxy.store.delivery import PRELUDES
from proxy.store.keys import CUTS, DELIVERY, ENGINES, PROCESSES, pack_versioned, unpack_versioned


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


# What the processes that serve tell each other in Redis: that they live, and which sessions' calls are to be ended.
#
# The calls to be ended are a stream and not a channel: who lost its connection for a moment hears of them afterwards, and in a
# cluster it is one key like any other.


KEPT = 1000
BEGINNING = "0-0"

BEAT = Script.read("beat")
ALIVE = Script.read("alive")
ASK_TO_CUT = Script.read("ask_to_cut")


class RedisPeerStore:
    """Implements `proxy.store.service.PeerStore`."""

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


# PeerStore: which processes live, and what they tell each other.


class PeerStore(Protocol):
    async def beat(self, process: str, seconds: float) -> None:
        """Say that the process lives, and will for `seconds`."""
        ...

    async def leave(self, process: str) -> None:
        """It has ended, with nothing under way."""
        ...

    async def alive(self, processes: Collection[str]) -> set[str]:
        """Those of the processes that live."""
        ...

    async def ask_to_cut(self, session_id: str) -> None:
        """Tell every process to end its calls of the session."""
        ...

    async def to_cut(self, after: str, wait_seconds: float) -> tuple[list[str], str]:
        """Sessions that processes were told to cut since the mark `after` ("" at first), and the next mark. Waits for the first
        one."""
        ...


# The weight versions in Redis, a line per policy: the current one, its history, and the lock that keeps two pushes apart.


ADVANCE = Script.read("advance")
PUSH_LOCK = Script.read("push_lock")
UNLOCK = Script.read("unlock")


class RedisWeightStore:
    """Implements `proxy.store.service.WeightStore`."""

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
        return int(await self._redis.run(PUSH_LOCK, named, (owner, int(seconds * 1000), fence)))

    async def unlock(self, owner: str, policy: str = "") -> None:
        await self._redis.run(UNLOCK, (keys.weights("lock", policy),), (owner,))

    async def identity(self) -> str:
        await self._redis.execute("SET", keys.WEIGHTS_IDENTITY, uuid.uuid4().hex, "NX")
        return str((await self._redis.execute("GET", keys.WEIGHTS_IDENTITY)).decode())


# WeightStore: the current weight version of every policy and its history, as the rest of the service sees them.


KEPT_WEIGHTS = 1000
"""How many versions of a policy its history goes back."""


@dataclass(frozen=True, slots=True)
class WeightState:
    version: int = 0
    path: str | None = None
    kind: str = "full"
    updated_at: float = 0.0


class WeightStore(Protocol):
    """Every policy has a version line and a push lock of its own; "" is the default one."""

    async def current(self, policy: str = "") -> WeightState: ...

    async def history(self, policy: str = "", limit: int = 100) -> list[WeightState]:
        """Newest first."""
        ...

    async def advance(self, state: WeightState, policy: str = "", fence: int | None = None) -> None:
        """Make `state` current. Raises `Conflict` unless its version is greater than the current one, and when the push lock was
        given to another owner since it was taken with `fence`."""
        ...

    async def lock(self, owner: str, seconds: float, policy: str = "", fence: int = 0) -> int:
        """Take the push lock: a fencing token greater than every one before, or 0 while another owner holds it.

        With the `fence` that the owner was given, renew it: that fence, or 0 once another owner has had the lock."""
        ...

    async def unlock(self, owner: str, policy: str = "") -> None: ...

    async def identity(self) -> str:
        """What this store is called, the same for good and for every process: tells its services from those of other stores."""
        ...


# What retention asks of Redis: the oldest sessions, what still holds them, how much room is taken, and who may clear it.


STANDINGS = Script.read("standings", *PRELUDES)
MEMORY = Script.read("memory")
LOCK = Script.read("lock")


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


# The one clock of leases, deadlines and retention: Redis's.
#
# Services on several machines have clocks of their own, and one that is two hours ahead would take what another's trainer has leased.
# A cluster has several servers; the clock is that of the one which holds the groups and leases.


class RedisClock:
    def __init__(self, connection: StoreConnection) -> None:
        self._redis = connection

    async def now(self) -> float:
        """Epoch seconds. Raises StoreUnavailable."""
        seconds, microseconds = await self._redis.execute("TIME", key=DELIVERY[0])
        return int(seconds) + int(microseconds) / 1e6
