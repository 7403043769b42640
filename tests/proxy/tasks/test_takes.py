"""Takes that wait, over a real Redis: who gets what arrives, what an outage does to leases, and what idle nodes cost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from contract.attempts import Room, TakenRollout
from proxy.errors import StoreUnavailable
from proxy.store.connection import StoreConnection
from proxy.tasks import takes as module
from proxy.tasks.takes import Takes
from tests.support.runtimes.rollout_stores import ROOM, Stores

SECONDS = 60.0


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.02)


@asynccontextmanager
async def taking(connection: StoreConnection) -> AsyncIterator[Takes]:
    takes = Takes(connection, asyncio.Event())
    running = asyncio.create_task(takes.run())
    try:
        yield takes
    finally:
        running.cancel()
        await asyncio.wait([running])


async def take(
    takes: Takes, node: str, *, wait: float = 0.0, lease: float = 3600.0, token: str = "", room: Room = ROOM
) -> TakenRollout | None:
    there = asyncio.create_task(asyncio.Event().wait())
    try:
        gone: Any = there
        return await takes.take(node, room, lease, token, wait, gone)
    finally:
        there.cancel()


async def test_what_arrives_wakes_a_node_that_waits_for_it(stores: Stores) -> None:
    async with taking(stores.connection) as takes:
        waiting = asyncio.create_task(take(takes, "a", wait=SECONDS))
        while not takes._waiting:
            await asyncio.sleep(0)
        await stores.submit()
        taken = await asyncio.wait_for(waiting, SECONDS)
    assert taken is not None and taken.attempt.session_id == "t.0.1"


async def test_each_of_many_waiting_nodes_gets_one_of_what_arrives(stores: Stores) -> None:
    async with taking(stores.connection) as takes:
        waiting = [asyncio.create_task(take(takes, f"n{number}", wait=SECONDS)) for number in range(20)]
        await stores.submit(num_samples=20)
        taken = await asyncio.wait_for(asyncio.gather(*waiting), SECONDS)
    assert {each.attempt.index for each in taken if each is not None} == set(range(20))


async def test_a_caller_that_has_gone_is_handed_nothing(stores: Stores, monkeypatch: pytest.MonkeyPatch) -> None:
    """The old bug: its leaving woke it, it looked once more, and what it was handed had to be put back: the rollout's next attempt."""
    takes, leaves, looked = Takes(stores.connection, asyncio.Event()), asyncio.Event(), asyncio.Event()
    look = takes._look

    async def noted(*asked: Any) -> TakenRollout | None:
        found = await look(*asked)
        looked.set()
        return found

    monkeypatch.setattr(takes, "_look", noted)
    gone: Any = asyncio.create_task(leaves.wait())
    waiting = asyncio.create_task(takes.take("a", ROOM, 3600.0, "", SECONDS, gone))
    await looked.wait()
    await stores.submit()
    leaves.set()
    assert await asyncio.wait_for(waiting, SECONDS) is None
    assert ((state := await stores.rollout()).status, state.attempt) == ("queued", 0)


async def test_no_node_is_robbed_before_the_service_has_had_its_store_for_a_lease(stores: Stores) -> None:
    """All services were away for longer than a lease: the first take would rob live nodes, which could tell nobody that they live."""
    await stores.submit()
    node, patient = stores.node("lives"), stores.node("patient")
    node.lease_seconds, patient.lease_seconds = 0.2, 3600.0
    await node.beat()
    await patient.beat()
    held = await node.must_take()
    # Longer than the lease of the one that has it, and not as long as the longest there is.
    await asyncio.sleep(0.3)
    async with taking(stores.connection) as takes:
        assert await take(takes, "thief", lease=0.2) is None
        assert await node.beat(held.attempt) == []
        assert (await stores.rollout()).node == "lives"


async def test_a_node_that_stays_silent_is_lost_once_the_service_has_had_its_store_for_a_lease(stores: Stores) -> None:
    await stores.submit()
    node = stores.node("dead")
    node.lease_seconds = 0.2
    await node.beat()
    await node.must_take()
    async with taking(stores.connection) as takes:
        taken = await asyncio.wait_for(take(takes, "heir", wait=SECONDS, lease=0.2), SECONDS)
    assert taken is not None and (taken.attempt.index, taken.attempt.attempt) == (0, 2)


async def test_an_outage_of_the_store_begins_the_lease_anew(stores: Stores, monkeypatch: pytest.MonkeyPatch) -> None:
    async with taking(stores.connection) as takes:
        async with asyncio.timeout(SECONDS):
            while not takes.may_recover(0.05):
                await asyncio.sleep(0.01)
        execute = StoreConnection.execute

        async def refuse(*command: Any, **how: Any) -> Any:
            raise StoreUnavailable("Redis is away")

        monkeypatch.setattr(StoreConnection, "execute", refuse)
        async with asyncio.timeout(SECONDS):
            while takes.may_recover(0.0):
                await asyncio.sleep(0.01)
        monkeypatch.setattr(StoreConnection, "execute", execute)
        async with asyncio.timeout(SECONDS):
            while not takes.may_recover(0.0):
                await asyncio.sleep(0.01)
        assert not takes.may_recover(3600.0)


async def test_a_thousand_idle_nodes_send_the_store_a_few_commands_a_look(
    stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.2)
    looks = 0
    look = Takes._look

    async def counted(self: Takes, *args: Any) -> TakenRollout | None:
        nonlocal looks
        looks += 1
        return await look(self, *args)

    monkeypatch.setattr(Takes, "_look", counted)
    async with taking(stores.connection) as takes:
        waiting = [asyncio.create_task(take(takes, f"n{number}", wait=3600.0)) for number in range(1000)]
        async with asyncio.timeout(SECONDS):
            while looks < 1000:
                await asyncio.sleep(0.05)
        began, looks = time.monotonic(), 0
        await asyncio.sleep(1.0)
        rounds = (time.monotonic() - began) / 0.2 + 1
        for each in waiting:
            each.cancel()
        await asyncio.wait(waiting)
    assert looks <= module.LOOKERS * rounds
