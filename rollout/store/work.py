"""Rollouts in Redis, as a node sees them: taken, kept alive, brought on step by step, concluded."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from rollout.attempts import AttemptId, FailureRecord, Status, Superseded, Verdict
from rollout.store import keys
from rollout.store.base import NodeState, Room, Taken, decode, encode
from rollout.store.keys import Argument, Connection, Script, now
from rollout.store.tasks import TOLD, fields_of, rollout_state
from rollout.task import Task

BLOCK_SECONDS = 5.0
SHUN_SECONDS = 30.0
"""How long a rollout that failed on a node is left to others, where there are any."""

TAKE = Script.read("take")
BEAT = Script.read("beat")
ADVANCE = Script.read("advance")
CONCLUDE = Script.read("conclude")
FINISH = Script.read("finish")
GIVE_UP = Script.read("give_up")
PUT_BACK = Script.read("put_back")
LEAVE = Script.read("leave")


class RedisWorkStore:
    """Implements `rollout.store.base.WorkStore`, for one node, or for a server that clears up behind lost ones.

    The name with which it took a rollout goes with every step of that, so that a step counts for its own node alone also where
    Redis came back without its last second and has given the same attempt to another."""

    def __init__(self, connection: Connection) -> None:
        self._redis = connection
        self._node = ""
        self._arrival: str | None = None

    async def now(self) -> float:
        return await now(self._redis)

    async def take(self, node: str, room: Room, lease_seconds: float, now: float) -> Taken | None:
        self._node = node
        told = {"labels": dict(room.labels), "runtimes": sorted(room.runtimes), "cpus": room.cpus, "memory_mb": room.memory_mb}
        return await self._take(node, json.dumps(told), lease_seconds, now)

    async def recover(self, server: str, silent_seconds: float, now: float) -> Taken | None:
        """What no node took over `silent_seconds` after its node's last sign of life: a rollout whose verdict stands, to be finished
        here. Those whose policy or attempts are at their end are ended; the others go on waiting for a node."""
        return await self._take(server, "", silent_seconds, now)

    async def wait(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        if self._arrival is None:
            self._arrival = await self._newest_arrival()
            return
        while (left := deadline - loop.time()) > 0:
            block = max(1, int(min(left, BLOCK_SECONDS, self._redis.timeout_seconds / 2) * 1000))
            asked = ("XREAD", "BLOCK", block, "STREAMS", keys.ARRIVALS, self._arrival)
            if read := await self._redis.execute(*asked, key=keys.ARRIVALS):
                self._arrival = read[0][1][-1][0].decode()
                return

    async def beat(self, state: NodeState, held: Sequence[AttemptId], now: float) -> list[AttemptId]:
        named = [part for attempt in held for part in (attempt.task_id, attempt.index, attempt.attempt)]
        lost = await self._run(BEAT, state.name, encode(state), repr(now), *named)
        return [held[place] for place in lost]

    async def advance(self, attempt: AttemptId, status: Status, now: float, fields: Mapping[str, Any]) -> None:
        if unknown := set(fields) - set(TOLD):
            raise ValueError(f"a node tells {', '.join(TOLD)} of a rollout, not {', '.join(sorted(unknown))}")
        told = [part for name, value in fields.items() for part in (name, msgspec.msgpack.encode(value))]
        self._check(attempt, await self._step(ADVANCE, attempt, status, repr(now), *told))

    async def conclude(self, attempt: AttemptId, verdict: Verdict, now: float) -> None:
        reward = "" if verdict.reward is None else repr(float(verdict.reward))
        failure = verdict.failure.failure.value if verdict.failure else ""
        rest = (repr(now), encode(verdict), verdict.status, int(verdict.usable), reward, failure)
        self._check(attempt, await self._step(CONCLUDE, attempt, *rest, durable=True))

    async def finish(self, attempt: AttemptId, now: float) -> None:
        self._check(attempt, await self._step(FINISH, attempt, repr(now), durable=True))

    async def give_up(
        self, attempt: AttemptId, failure: FailureRecord, now: float, *, retry: bool, spared: bool = False
    ) -> bool:
        if not retry:
            return False
        record = (failure.failure.value, encode(failure), SHUN_SECONDS, int(spared))
        became = await self._step(GIVE_UP, attempt, repr(now), *record, durable=True)
        self._check(attempt, became != b"lost")
        return bool(became == b"again")

    async def put_back(self, attempt: AttemptId, now: float) -> None:
        self._check(attempt, await self._step(PUT_BACK, attempt, repr(now), durable=True))

    async def leave(self, node: str) -> None:
        await self._run(LEAVE, node)

    async def _take(self, node: str, room: str, lease_seconds: float, now: float) -> Taken | None:
        lease = max(1, int(lease_seconds * 1000))
        taken = await self._run(TAKE, node, room, lease, repr(now), uuid.uuid4().hex, durable=True)
        if taken is None:
            return None
        task_id, index, attempt = taken[0].decode(), int(taken[1]), int(taken[2])
        state = rollout_state(task_id, index, fields_of(taken[5]))
        return Taken(AttemptId(task_id, index, attempt), decode(taken[4], Task), state, bool(taken[3]))

    async def _newest_arrival(self) -> str:
        entries = await self._redis.execute("XREVRANGE", keys.ARRIVALS, "+", "-", "COUNT", 1, key=keys.ARRIVALS)
        return str(entries[0][0].decode()) if entries else "0-0"

    async def _step(self, script: Script, attempt: AttemptId, *args: Argument, durable: bool = False) -> Any:
        named = (attempt.task_id, attempt.index, attempt.attempt, self._node)
        return await self._run(script, *named, *args, durable=durable)

    def _check(self, attempt: AttemptId, held: Any) -> None:
        if not held:
            raise Superseded(f"rollout {attempt.index} of task {attempt.task_id} is no more that of attempt {attempt.attempt}")

    async def _run(self, script: Script, *args: Argument, durable: bool = False) -> Any:
        return await self._redis.run(script, keys.DECLARED, args, durable=durable)
