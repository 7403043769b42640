"""Eight nodes that die and wake at random, over tasks that are cancelled at random: no rollout is lost, none ends twice, and none is
tried more often than it may.

A node that dies stops beating in the middle of a rollout and comes back later, believing that the rollout is still its own. What
a step of it may do is decided by a seed and not by time: the lease has run out whenever the script of a run says "dead", because
then the others take with a lease of nothing.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

import pytest

from contract.attempts import ENDED, AttemptId, Failure, FailureRecord, Superseded, TakenRollout, Verdict
from proxy.store.tasks import keys
from proxy.store.tasks.tasks import parse_event
from rollout.attempts import RETRIED
from tests.support.runtimes.rollout_stores import ROOM, Node, Stores

NODES = 8
MOST_ATTEMPTS = 3
STEPS: tuple[Literal["ready", "running", "evaluating"], ...] = ("ready", "running", "evaluating")
BROKEN = FailureRecord(Failure.NODE_FAILED, "the disk is full")


@dataclass
class World:
    """What everybody has seen happen. `ended` counts the ends that a node was told are its doing."""

    stores: Stores
    dice: random.Random
    ended: Counter[tuple[str, int]] = field(default_factory=Counter)
    attempts: set[AttemptId] = field(default_factory=set)
    spared: Counter[tuple[str, int]] = field(default_factory=Counter)
    concluded: dict[AttemptId, str] = field(default_factory=dict)


class StressedNode:
    def __init__(self, name: str, world: World) -> None:
        self.node: Node = world.stores.node(name, ROOM)
        self.world = world
        self.asleep: list[TakenRollout] = []

    async def run(self) -> None:
        """Until nothing is left that anybody could take."""
        idle = 0
        while idle < 3:
            if self.asleep and self.world.dice.random() < 0.5:
                await self.wake()
            # A lease of a millisecond: whoever holds a rollout at this moment may be taken for dead by others.
            deadly = self.world.dice.random() < 0.2
            taken = await self.node.take(0.001 if deadly else 60.0)
            idle = 0 if taken else idle + 1
            if taken is None:
                await asyncio.sleep(0.01)
                continue
            await self.work(taken)
        while self.asleep:
            await self.wake()

    async def work(self, taken: TakenRollout) -> None:
        if taken.resumed:
            await self.told(self.node.work.finish(taken.attempt, time.time()))
            return
        assert taken.attempt not in self.world.attempts, "an attempt is one node's alone"
        self.world.attempts.add(taken.attempt)
        for step in STEPS:
            if await self.interrupted(taken, step):
                return
            if not await self.told(self.node.work.advance(taken.attempt, step, time.time(), {})):
                return
            if self.world.dice.random() < 0.1:
                await self.node.beat(taken.attempt)
        await self.conclude(taken)

    async def interrupted(self, taken: TakenRollout, step: str) -> bool:
        """Whether the rollout is out of its hands: it fell asleep over it, put it back or gave it up."""
        what = self.world.dice.random()
        where = (taken.attempt.task_id, taken.attempt.index)
        if what < 0.08:
            self.asleep.append(taken)
            return True
        if what < 0.12 and step == "ready":
            if await self.told(self.node.work.put_back(taken.attempt, time.time())):
                self.world.spared[where] += 1
            return True
        if what < 0.18:
            try:
                again = await self.node.work.give_up(taken.attempt, BROKEN, time.time(), retry=True)
            except Superseded:
                return True
            if not again:
                await self.conclude(taken, Verdict("failed", failure=BROKEN))
            return True
        return False

    async def conclude(self, taken: TakenRollout, verdict: Verdict | None = None) -> None:
        dice = self.world.dice
        verdict = verdict or dice.choice([Verdict("completed", dice.random()), Verdict("failed"), Verdict("timeout", 0.0)])
        if not await self.told(self.node.work.conclude(taken.attempt, verdict, time.time())):
            return
        self.world.concluded[taken.attempt] = verdict.status
        if dice.random() < 0.1:
            # It dies between verdict and end: somebody else, or itself when it wakes, finishes it.
            self.asleep.append(taken)
            return
        await self.told(self.node.work.finish(taken.attempt, time.time()))

    async def wake(self) -> None:
        """It goes on where it was, as if no time had passed."""
        taken = self.asleep.pop(self.world.dice.randrange(len(self.asleep)))
        await self.conclude(taken)

    async def told(self, step: object) -> bool:
        try:
            await step  # type: ignore[misc]
        except Superseded:
            return False
        return True


async def cancel_some(world: World, names: list[str]) -> None:
    for name in names:
        await asyncio.sleep(world.dice.random() * 0.05)
        for state in await world.stores.tasks.cancel(name, time.time()):
            assert state.status not in ENDED


async def ended_events(stores: Stores, task_id: str) -> Counter[int]:
    key = keys.events(task_id)
    told = [parse_event(entry) for entry in await stores.connection.execute("XRANGE", key, "-", "+", key=key)]
    assert sum(each.kind == "task.ended" for each in told) == 1
    return Counter(each.data["index"] for each in told if each.kind.removeprefix("rollout.") in ENDED)


@pytest.mark.parametrize("seed", range(4))
async def test_nothing_is_lost_or_doubled_while_nodes_die_and_tasks_are_cancelled(stores: Stores, seed: int) -> None:
    dice = random.Random(seed)
    world = World(stores, dice)
    tasks = [f"t{number}" for number in range(6)]
    for number, name in enumerate(tasks):
        await stores.submit(
            name,
            num_samples=12,
            priority=dice.randrange(3),
            max_attempts=MOST_ATTEMPTS,
            usable_samples=5 if number % 3 == 0 else None,
            on_lost_node="fail" if number == 5 else "retry",
        )
    nodes = [StressedNode(f"n{number}", world) for number in range(NODES)]
    await asyncio.gather(*(node.run() for node in nodes), cancel_some(world, tasks[1:3]))
    # Those who woke last may have left something behind: one more node that everybody else is dead for clears up.
    last = stores.node("last")
    while taken := await last.take(0.001):
        if not taken.resumed:
            world.attempts.add(taken.attempt)
            await last.work.conclude(taken.attempt, Verdict("completed", 1.0), time.time())
        await last.work.finish(taken.attempt, time.time())
        await asyncio.sleep(0.002)
    await check(world, tasks)
    totals = await stores.tasks.load_totals()
    assert totals["failure:node_lost"] and totals["failure:node_failed"], "nodes were lost, and rollouts given up"


async def check(world: World, tasks: list[str]) -> None:
    for name in tasks:
        state = await world.stores.tasks.load(name)
        assert state.status in (("completed", "cancelled") if name in tasks[1:3] else ("completed",))
        assert await ended_events(world.stores, name) == Counter(range(12)), "each rollout ends just once"
        usable = 0
        for rollout in await world.stores.tasks.load_rollouts(name):
            assert rollout.status in ENDED and rollout.verdict is not None
            assert rollout.status == rollout.verdict.status
            usable += rollout.verdict.usable
            spared = world.spared[(name, rollout.index)]
            assert rollout.attempt - spared <= MOST_ATTEMPTS
            assert len(rollout.failures) <= rollout.attempt - spared
            assert all(failure.failure in RETRIED for failure in rollout.failures)
        assert state.counts.usable == usable
        assert sum(state.counts.by_status.values()) == 12
    assert await world.stores.tasks.count_waiting() == {}
