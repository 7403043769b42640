"""The rollout service's keys on their way from one server of a cluster to another: no script ever sees half of them."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from redis.crc import key_slot

from proxy.errors import StoreUnavailable
from proxy.store.connection import StoreConnection
from proxy.store.tasks import keys
from proxy.store.tasks.tasks import TaskStore
from tests.support.runtimes.rollout_stores import WELL, Stores, a_task
from tests.support.service.redis_server import RedisCluster, moving_slot, running_cluster

SLOT = key_slot(keys.BASE.encode())


@pytest.fixture(scope="module")
def cluster() -> Iterator[RedisCluster]:
    with running_cluster() as running:
        yield running


async def test_scripts_wait_while_the_slot_moves_and_reads_do_not(cluster: RedisCluster) -> None:
    wire = StoreConnection(cluster.url, timeout_seconds=20.0)
    connection = wire
    stores = Stores(connection, TaskStore(connection))
    try:
        await stores.submit("old", num_samples=3)
        node = stores.node("a")
        first = await node.must_take()
        with moving_slot(cluster, SLOT) as move:
            assert move(move(0) // 2), "some keys are on either side"
            before = await stores.tasks.load_rollouts("old")
            for step in (
                stores.tasks.submit(a_task("new"), b"d", time.time()),
                node.take(),
                node.work.conclude(first.attempt, WELL, time.time()),
                stores.tasks.cancel("old", time.time()),
            ):
                with pytest.raises(StoreUnavailable):
                    await step
            assert await stores.tasks.load_rollouts("old") == before
        await stores.submit("new")
        await node.end(first.attempt)
        assert [(await node.must_take()).attempt.task_id for _ in range(3)] == ["old", "old", "new"]
        assert len(await stores.tasks.cancel("old", time.time())) == 2
    finally:
        await wire.close()
