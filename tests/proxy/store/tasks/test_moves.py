"""The rollout service's keys on their way from one server of a cluster to another: no script ever sees half of them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from redis.crc import key_slot

from proxy.errors import StoreUnavailable
from proxy.store.connection import StoreConnection
from proxy.store.tasks import keys
from proxy.store.tasks.tasks import TaskStore
from tests.support.runtimes.rollout_stores import WELL, Stores, a_task
from tests.support.service.redis_server import RedisCluster, RedisServer, ask, running_cluster

SLOT = key_slot(keys.BASE.encode())


@pytest.fixture(scope="module")
def cluster() -> Iterator[RedisCluster]:
    with running_cluster() as running:
        yield running


def node_id(server: RedisServer) -> bytes:
    found: bytes = ask(server, "CLUSTER", "MYID")
    return found


@contextmanager
def moving(cluster: RedisCluster) -> Iterator[list[bytes]]:
    """The slot is on its way; keys of it that have not been moved yet, which are moved at the end."""
    source = next(server for server in cluster.primaries if ask(server, "CLUSTER", "COUNTKEYSINSLOT", SLOT))
    target = next(server for server in cluster.primaries if server is not source)
    ask(target, "CLUSTER", "SETSLOT", SLOT, "IMPORTING", node_id(source))
    ask(source, "CLUSTER", "SETSLOT", SLOT, "MIGRATING", node_id(target))
    left = sorted(ask(source, "CLUSTER", "GETKEYSINSLOT", SLOT, 1000))
    half = len(left) // 2
    for key in left[:half]:
        ask(source, "MIGRATE", "127.0.0.1", target.port, key, 0, 5000)
    yield left[half:]
    for key in left[half:]:
        ask(source, "MIGRATE", "127.0.0.1", target.port, key, 0, 5000)
    for server in (target, source, *cluster.primaries):
        ask(server, "CLUSTER", "SETSLOT", SLOT, "NODE", node_id(target))


async def test_scripts_wait_while_the_slot_moves_and_reads_do_not(cluster: RedisCluster) -> None:
    wire = StoreConnection(cluster.url, timeout_seconds=20.0)
    connection = wire
    stores = Stores(connection, TaskStore(connection))
    try:
        await stores.submit("old", num_samples=3)
        node = stores.node("a")
        first = await node.must_take()
        with moving(cluster) as left:
            assert left, "some keys are on either side"
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
