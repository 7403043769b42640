"""What the serving processes share in Redis beside sessions and groups: engines, liveness, weight versions, retention, one clock."""

from __future__ import annotations

import uuid
from collections.abc import Collection
from dataclasses import dataclass

from proxy.errors import Conflict, VerbatimError
from proxy.store import keys
from proxy.store.connection import Script, StoreConnection
from proxy.store.keys import CUTS, DELIVERY, ENGINES, PROCESSES, pack_versioned, unpack_versioned

KEPT_CUTS = 1000
BEGINNING = "0-0"
KEPT_WEIGHTS = 1000
"""Length of a policy's history of versions."""


@dataclass(frozen=True, slots=True)
class StoredEngine:
    """An engine added at run time. `url` may be a DNS name to watch; `added_at` in epoch seconds; `models`: the names it was declared to
    serve under."""

    name: str
    url: str
    policy: str
    added_at: float
    models: tuple[str, ...] = ()


class LogOuts:
    """Cookies of the pages that were logged out, by their digest, for as long as they would have lasted."""

    def __init__(self, connection: StoreConnection) -> None:
        self._redis = connection

    async def add(self, digest: bytes, seconds: int) -> None:
        await self._redis.execute("SET", keys.log_out(digest), b"", "EX", seconds)

    async def has(self, digest: bytes) -> bool:
        return bool(await self._redis.execute("EXISTS", keys.log_out(digest)))


class EngineStore:
    """Engines added at run time: every process sees them, and a restart keeps them."""

    def __init__(self, connection: StoreConnection) -> None:
        self._redis = connection

    async def engines(self) -> list[StoredEngine]:
        """In the order of their addition."""
        blobs = await self._redis.execute("HVALS", ENGINES)
        return sorted(
            (unpack_versioned(blob, StoredEngine) for blob in blobs), key=lambda engine: (engine.added_at, engine.name)
        )

    async def add(self, engine: StoredEngine) -> StoredEngine:
        """The engine stored under that name. Repeating an addition is a no-op; another URL, policy or models raise Conflict."""
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
        """False when there is none of that name."""
        return bool(await self._redis.execute("HDEL", ENGINES, name))


class PeerStore:
    """Which serving processes live, and whose calls they must end. The latter is a stream, not a channel: a process that lost its
    connection for a moment reads it afterwards, and in a cluster it is one key like any other."""

    def __init__(self, connection: StoreConnection) -> None:
        self._redis = connection

    async def beat(self, process: str, seconds: float) -> None:
        """The process counts as alive for `seconds`."""
        await self._redis.run(Script.read("beat"), (PROCESSES,), (process, repr(seconds)))

    async def leave(self, process: str) -> None:
        """The process has ended with no call in flight."""
        await self._redis.execute("ZREM", PROCESSES, process)

    async def find_alive(self, processes: Collection[str]) -> set[str]:
        """Those of `processes` that are alive."""
        if not processes:
            return set()
        return {process.decode() for process in await self._redis.run(Script.read("alive"), (PROCESSES,), tuple(processes))}

    async def request_cut(self, session_id: str) -> None:
        """Asks every process to end its calls of the session."""
        await self._redis.run(Script.read("ask_to_cut"), (CUTS,), (session_id, KEPT_CUTS))

    async def read_cuts(self, after: str, wait_seconds: float) -> tuple[list[str], str]:
        """Sessions to cut since the mark `after` ("" at first), and the next mark. Waits for the first, for `wait_seconds` at most."""
        wait = max(1, int(min(wait_seconds, self._redis.timeout_seconds / 2) * 1000))
        read = await self._redis.execute("XREAD", "BLOCK", wait, "STREAMS", CUTS, after or BEGINNING, key=CUTS)
        if not read:
            return [], after
        ((_, entries),) = read
        return [fields[b"s"].decode() for _, fields in entries], entries[-1][0].decode()


@dataclass(frozen=True, slots=True)
class WeightState:
    version: int = 0
    path: str | None = None
    kind: str = "full"
    updated_at: float = 0.0
    mode: str = "keep"
    """Of an adapter: whether every process cuts its calls of earlier versions ("abort")."""
    root: str | None = None
    """What the weights are: a digest over all tensors; see `contract.deltas`. None if they were pushed without digests."""


class WeightStore:
    """Every policy has its own version line and push lock; "" is the default policy."""

    def __init__(self, connection: StoreConnection) -> None:
        self._redis = connection

    async def current(self, policy: str = "") -> WeightState:
        blob = await self._redis.execute("GET", keys.weights("current", policy))
        return WeightState() if blob is None else unpack_versioned(blob, WeightState)

    async def history(self, policy: str = "", limit: int = 100) -> list[WeightState]:
        """Newest first."""
        blobs = await self._redis.execute("LRANGE", keys.weights("history", policy), 0, limit - 1)
        return [unpack_versioned(blob, WeightState) for blob in blobs]

    async def advance(self, state: WeightState, policy: str = "", fence: int | None = None) -> None:
        """Makes `state` current. Raises `Conflict` unless its version is greater than the current one, and when another owner has had the
        push lock since it was taken with `fence`."""
        named = (keys.weights("current", policy), keys.weights("history", policy), keys.weights("fence", policy))
        args = (state.version, pack_versioned(state), KEPT_WEIGHTS, fence or 0)
        outcome, *detail = await self._redis.run(Script.read("advance"), named, args)
        if outcome < 0:
            raise Conflict(f"another process has taken over since the push of version {state.version} began", param="version")
        if outcome == 0:
            raise Conflict(f"weight version {state.version} is not greater than the current {detail[0]}", param="version")

    async def lock(self, owner: str, seconds: float, policy: str = "", fence: int = 0) -> int:
        """Takes the push lock. Returns a fencing token greater than all before it, or 0 while another owner holds the lock.

        With the `fence` that the owner was given it renews the lock: returns that fence, or 0 once another owner has had the lock."""
        named = (keys.weights("lock", policy), keys.weights("fence", policy))
        return int(await self._redis.run(Script.read("push_lock"), named, (owner, int(seconds * 1000), fence)))

    async def read_owner(self, policy: str = "") -> str:
        """Who holds the push lock; "" if nobody does."""
        return (await self._redis.execute("GET", keys.weights("lock", policy)) or b"").decode()

    async def unlock(self, owner: str, policy: str = "") -> None:
        await self._redis.run(Script.read("unlock"), (keys.weights("lock", policy),), (owner,))

    async def identity(self) -> str:
        """The store's name, the same for good in every process: tells its services from those of other stores."""
        await self._redis.execute("SET", keys.WEIGHTS_IDENTITY, uuid.uuid4().hex, "NX")
        return str((await self._redis.execute("GET", keys.WEIGHTS_IDENTITY)).decode())


class RetentionStore:
    """What retention asks: the oldest sessions, what still holds them, the memory in use, and the right to clear it."""

    def __init__(self, connection: StoreConnection) -> None:
        self._redis = connection

    async def list_oldest(self, cursor: str | None, limit: int) -> list[str]:
        """Listing members behind `cursor`, oldest first; see `keys.parse_member`."""
        after = "-" if cursor is None else f"({cursor}"
        found = await self._redis.execute("ZRANGEBYLEX", keys.SESSIONS, after, "+", "LIMIT", 0, limit)
        return [member.decode() for member in found]

    async def measure_memory(self) -> int:
        """Memory in use, summed over the primaries of a cluster."""
        return sum(int(facts["used_memory"]) for facts in await self._redis.read_info())

    async def measure_session(self, session_id: str) -> int:
        return int(await self._redis.run(Script.read("memory"), keys.session(session_id)))

    async def lock(self, owner: str, seconds: float) -> bool:
        """Takes or renews the right to clear; False while another owner has it."""
        return bool(await self._redis.run(Script.read("lock"), (keys.RETENTION_LOCK,), (owner, int(seconds * 1000))))

    async def unlock(self, owner: str) -> None:
        await self._redis.run(Script.read("unlock"), (keys.RETENTION_LOCK,), (owner,))


LEVEL = 1
"""What this build can serve: one more for each change that an older build would serve wrongly without noticing."""
LEAST_LEVEL = 1
"""What a build has to reach to serve a store that this one has served."""


class NewerStore(VerbatimError):
    """A newer build has served the store, which this one would use wrongly without noticing."""

    code = "newer_store"


async def check_level(connection: StoreConnection) -> None:
    """Raises NewerStore. The store keeps what later builds have to reach."""
    args = (LEVEL, LEAST_LEVEL)
    if least := int(await connection.run(Script.read("level"), (keys.LEVEL,), args, patient=True)):
        raise NewerStore(
            f"a newer verbatim has served this store: it asks for level {least} and this build has {LEVEL}, which would serve its "
            "sessions wrongly; install the newer one, or restore a copy from before it"
        )


class RedisClock:
    """The one clock of leases, deadlines and retention: that of the server that holds the groups, or the tasks. Clocks of
    services on several machines differ, and one two hours ahead would end other trainers' leases."""

    def __init__(self, connection: StoreConnection, key: str = DELIVERY[0]) -> None:
        """`key` is one of what the clock is for: it says which server of a cluster."""
        self._redis = connection
        self._key = key

    async def now(self) -> float:
        """Epoch seconds. Raises StoreUnavailable."""
        seconds, microseconds = await self._redis.execute("TIME", key=self._key)
        return int(seconds) + int(microseconds) / 1e6
