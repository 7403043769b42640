"""Tasks as tests need them, and the stores of the rollout service over an empty Redis, once plain and once as a cluster."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from contract.attempts import AttemptId, NodeState, RolloutState, Room, TakenRollout, Verdict
from contract.tasks import HarnessSpec, RuntimeSpec, Task
from proxy.store.connection import StoreConnection
from proxy.store.tasks import keys
from proxy.store.tasks.tasks import TaskStore, parse_event
from proxy.store.tasks.work import WorkStore
from tests.support.service.redis_server import RedisKind

LEASE = 30.0
ROOM = Room({}, frozenset({"local"}), cpus=64.0, memory_mb=1 << 20)
WELL = Verdict("completed", reward=1.0)


def a_task(task_id: str = "t", **fields: Any) -> Task:
    return Task(**{"task_id": task_id, "instruction": "do it", "harness": HarnessSpec("shell"), **fields})


def sized(cpus: float = 1.0, memory_mb: int = 1024, kind: str = "local") -> RuntimeSpec:
    return RuntimeSpec(kind, cpus=cpus, memory_mb=memory_mb)


@dataclass
class Node:
    """A node as the store sees one: its name and its own work store."""

    name: str
    work: WorkStore
    room: Room = ROOM
    lease_seconds: float = 0.0
    held: list[AttemptId] = field(default_factory=list)

    async def take(self, lease_seconds: float = LEASE) -> TakenRollout | None:
        return await self.work.take(self.name, self.room, lease_seconds, time.time())

    async def must_take(self, lease_seconds: float = LEASE) -> TakenRollout:
        taken = await self.take(lease_seconds)
        assert taken is not None, "there was nothing to take"
        return taken

    async def beat(self, *held: AttemptId) -> list[AttemptId]:
        return await self.work.beat(self.state(), held, time.time())

    def state(self) -> NodeState:
        return NodeState(self.name, {}, ["local"], 4.0, 4096, seen_at=time.time(), lease_seconds=self.lease_seconds)

    async def end(self, attempt: AttemptId, verdict: Verdict = WELL) -> None:
        await self.work.conclude(attempt, verdict, time.time())
        await self.work.finish(attempt, time.time())


@dataclass
class Stores:
    connection: StoreConnection
    tasks: TaskStore

    def node(self, name: str, room: Room = ROOM) -> Node:
        return Node(name, WorkStore(self.connection), room)

    async def submit(self, task_id: str = "t", **fields: Any) -> Task:
        task = a_task(task_id, **fields)
        await self.tasks.submit(task, b"digest", time.time())
        return task

    async def rollout(self, task_id: str = "t", index: int = 0) -> RolloutState:
        return (await self.tasks.load_rollouts(task_id))[index]

    async def kinds(self, task_id: str = "t") -> list[str]:
        """Those of all its events so far, in order."""
        key = keys.events(task_id)
        return [parse_event(entry).kind for entry in await self.connection.execute("XRANGE", key, "-", "+", key=key)]


@pytest.fixture
async def stores(redis_kind: RedisKind) -> AsyncIterator[Stores]:
    redis_kind.flushall()
    wire = StoreConnection(redis_kind.url, patience_seconds=10.0)
    connection = wire
    yield Stores(connection, TaskStore(connection))
    await wire.close()


def work_off(redis_url: str, count: int, *verdicts: Verdict) -> None:
    """`count` rollouts are taken and ended, the last ones with `verdicts`."""

    async def work() -> None:
        wire = StoreConnection(redis_url)
        node = Stores(wire, TaskStore(wire)).node("node-1")
        try:
            await node.beat()
            for number in range(count):
                taken = await node.must_take()
                later = number - (count - len(verdicts))
                await node.end(taken.attempt, verdicts[later] if later >= 0 else Verdict("completed", reward=1.0))
        finally:
            await wire.close()

    asyncio.run(work())
