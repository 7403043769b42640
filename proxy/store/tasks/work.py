"""Rollouts in Redis, as a node sees them: taken, kept alive, advanced step by step, concluded."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from contract.attempts import AttemptId, FailureRecord, NodeState, Room, Status, Superseded, TakenRollout, Verdict
from contract.tasks import Task
from proxy.store.connection import Argument, StoreConnection
from proxy.store.keys import pack_versioned
from proxy.store.service import RedisClock
from proxy.store.tasks import keys
from proxy.store.tasks.tasks import REPORTED, parse_hash, parse_rollout
from proxy.store.tasks.values import unpack_checked

BLOCK_SECONDS = 5.0
SHUN_SECONDS = 30.0
"""How long a rollout that failed on a node is left to other nodes, if there are any."""
HOLD_SECONDS = 15.0
"""How long only rollouts of groups that have begun are taken once another gave way to them: until all that the service holds back had
time to do so."""


class WorkStore:
    """For one node, or for a server that recovers what lost nodes left. Every method may raise `StoreUnavailable`; those that name an
    attempt raise `Superseded` when it is no longer the rollout's.

    Every step carries the name of the node that took the rollout: if Redis lost its last second and gave the same attempt to another
    node, this node's steps are refused."""

    def __init__(self, connection: StoreConnection, node: str = "") -> None:
        """`node` took what the steps are about; `take` sets it."""
        self._redis = connection
        self._clock = RedisClock(connection, keys.ARRIVALS)
        self.node = node
        self._arrival: str | None = None

    async def now(self) -> float:
        return await self._clock.now()

    async def take(self, node: str, room: Room, lease_seconds: float, now: float, token: str = "") -> TakenRollout | None:
        """The waiting rollout of the greatest priority that the node has room for, or one whose node was lost: silent for `lease_seconds`
        and for its own lease. None when there is none. Lost rollouts out of attempts, or whose task fails lost nodes, are ended.
        `token`: of this request; repeated with it, it gives the same rollout as long as the node has that one."""
        self.node = node
        wanted = {
            "labels": dict(room.labels),
            "runtimes": sorted(room.runtimes),
            "cpus": room.cpus,
            "memory_mb": room.memory_mb,
        }
        return await self._take(node, json.dumps(wanted), lease_seconds, now, token)

    async def recover(self, server: str, silent_seconds: float, now: float) -> TakenRollout | None:
        """A rollout with a verdict that no node took over within `silent_seconds` of its node's last beat, to be finished here. Ends those
        out of attempts, or whose task fails lost nodes; the others keep waiting for a node."""
        return await self._take(server, "", silent_seconds, now, "")

    async def wait(self, seconds: float) -> None:
        """Returns when there may be a rollout to take, after `seconds` at the latest."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        if self._arrival is None:
            self._arrival = await self._read_newest_arrival()
            return
        while (left := deadline - loop.time()) > 0:
            block = max(1, int(min(left, BLOCK_SECONDS, self._redis.timeout_seconds / 2) * 1000))
            command = ("XREAD", "BLOCK", block, "STREAMS", keys.ARRIVALS, self._arrival)
            if read := await self._redis.execute(*command, key=keys.ARRIVALS):
                self._arrival = read[0][1][-1][0].decode()
                return

    async def beat(self, state: NodeState, held: Sequence[AttemptId], now: float) -> list[AttemptId]:
        """Renews the leases. Returns those of `held` that the node no longer has and must stop."""
        named = [part for attempt in held for part in (attempt.task_id, attempt.index, attempt.attempt)]
        lost = await self._run("beat", state.name, pack_versioned(state), repr(now), *named)
        return [held[place] for place in lost]

    async def advance(self, attempt: AttemptId, status: Status, now: float, fields: Mapping[str, Any]) -> None:
        """The rollout reached `status`; `fields` are those of `RolloutState` known now. Raises `Superseded`."""
        if unknown := set(fields) - set(REPORTED):
            raise ValueError(f"a node reports {', '.join(REPORTED)} of a rollout, not {', '.join(sorted(unknown))}")
        reported = [part for name, value in fields.items() for part in (name, msgspec.msgpack.encode(value))]
        self._require(attempt, await self._step("advance", attempt, status, repr(now), *reported))

    async def conclude(self, attempt: AttemptId, verdict: Verdict, now: float) -> None:
        """Fixes the verdict. Raises `Superseded`."""
        reward = "" if verdict.reward is None else repr(float(verdict.reward))
        failure = verdict.failure.failure.value if verdict.failure else ""
        rest = (repr(now), pack_versioned(verdict), verdict.status, int(verdict.usable), reward, failure)
        self._require(attempt, await self._step("conclude", attempt, *rest, durable=True))

    async def finish(self, attempt: AttemptId, now: float) -> None:
        """The session is closed with the verdict: the rollout ends. Ends the task with its last rollout, and stops its other rollouts early
        once enough are usable. Raises `Superseded`."""
        self._require(attempt, await self._step("finish", attempt, repr(now), durable=True))

    async def give_up(
        self, attempt: AttemptId, failure: FailureRecord, now: float, *, retry: bool, spared: bool = False
    ) -> bool:
        """The attempt failed and its session is deleted. True: the rollout is queued again. False: conclude it as failed, since its
        attempts are used up; a `spared` attempt does not count. Raises `Superseded`."""
        if not retry:
            return False
        record = (failure.failure.value, pack_versioned(failure), SHUN_SECONDS, int(spared))
        became = await self._step("give_up", attempt, repr(now), *record, durable=True)
        self._require(attempt, became != b"lost")
        return bool(became == b"again")

    async def put_back(self, attempt: AttemptId, now: float) -> None:
        """The node ends before the harness started: queued again, without using up an attempt. Raises `Superseded`."""
        self._require(attempt, await self._step("put_back", attempt, repr(now), durable=True))

    async def give_way(self, attempt: AttemptId, now: float) -> bool:
        """The service lets no group begin, and this rollout would begin one. True: a rollout that this node could take waits for a place
        in a group that has begun, so this one is queued again, without using up an attempt; nodes first take those. Raises
        `Superseded`."""
        became = await self._step("give_way", attempt, repr(now), HOLD_SECONDS, durable=True)
        self._require(attempt, became != b"lost")
        return bool(became == b"queued")

    async def claim_name(self, key: bytes, *, may_inherit: bool) -> bool:
        """Whether the node's name belongs to this key: it has it, or nobody does from now on. `may_inherit`: also the name of a node that
        was silent for its lease, and for a minute."""
        return bool(await self._run("claim_name", self.node, key, repr(await self.now()), int(may_inherit)))

    async def leave(self) -> None:
        """The node has ended and holds nothing."""
        await self._run("leave", self.node)

    async def _take(self, node: str, room: str, lease_seconds: float, now: float, token: str) -> TakenRollout | None:
        lease = max(1, int(lease_seconds * 1000))
        taken = await self._run("take", node, room, lease, repr(now), token or uuid.uuid4().hex, durable=True)
        if taken is None:
            return None
        task_id, index, attempt = taken[0].decode(), int(taken[1]), int(taken[2])
        state = parse_rollout(task_id, index, parse_hash(taken[5]))
        return TakenRollout(AttemptId(task_id, index, attempt), unpack_checked(taken[4], Task), state, bool(taken[3]))

    async def _read_newest_arrival(self) -> str:
        entries = await self._redis.execute("XREVRANGE", keys.ARRIVALS, "+", "-", "COUNT", 1)
        return str(entries[0][0].decode()) if entries else "0-0"

    async def _step(self, script: str, attempt: AttemptId, *args: Argument, durable: bool = False) -> Any:
        named = (attempt.task_id, attempt.index, attempt.attempt, self.node)
        return await self._run(script, *named, *args, durable=durable)

    def _require(self, attempt: AttemptId, held: Any) -> None:
        if not held:
            raise Superseded(f"attempt {attempt.attempt} of rollout {attempt.index} of task {attempt.task_id} was superseded")

    async def _run(self, script: str, *args: Argument, durable: bool = False) -> Any:
        return await self._redis.run(keys.read_script(script), keys.DECLARED, args, durable=durable, patient=durable)
