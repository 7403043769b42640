"""What callers see when Redis is away, full, loading or not what it should be: StoreUnavailable, and soon."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
import redis
import uvloop

from proxy.errors import StoreUnavailable
from proxy.store.connection import Script, StoreConnection
from proxy.store.groups import GroupDefaults, GroupMember
from proxy.store.node import StoreServer
from proxy.store.service import WeightState
from proxy.store.states import Intent, SessionInfo
from tests.support.service.redis_server import RedisServer, Store, free_port, running_redis, wait_until_it_answers

INTENT = Intent("c9", None, b"", "r", 1.0)
INFO = SessionInfo("new", b"hash", 1.0)

WRITES: dict[str, Callable[[Store], Awaitable[object]]] = {
    "create": lambda store: store.sessions.create(INFO),
    "begin": lambda store: store.sessions.begin("s", 1, INTENT),
    "commit": lambda store: store.sessions.commit("s", "c9", {"c9": b"x" * 100}),
    "set_reward": lambda store: store.sessions.set_reward("s", 1.0, {}, {}, {"why": "x" * 65536}),
    "advance": lambda store: store.weights.advance(WeightState(7)),
}
ENDS: dict[str, Callable[[Store], Awaitable[object]]] = {
    "drop_intent": lambda store: store.sessions.drop_intent("s", "c1"),
    "settle_answers": lambda store: store.sessions.settle_answers("s"),
    "ask_to_cut": lambda store: store.peers.request_cut("s"),
    "announce": lambda store: store.delivery.announce("s", None, 1.0),
    "begin_close": lambda store: store.sessions.begin_close("s"),
    "small set_reward": lambda store: store.sessions.set_reward("s", 1.0, {}, {}, {}),
    "close": lambda store: store.sessions.close("s", "completed", 1.0, None, 1.0),
    "fill": lambda store: store.delivery.fill("g2", 1, GroupMember("s2", True, 1.0, 1, 0), GroupDefaults(), 1.0),
    "mark_leased": lambda store: store.sessions.mark_leased("s"),
    "tend": lambda store: store.delivery.tend(GroupDefaults(), 0.0, 1.0),
    "withdraw": lambda store: store.delivery.withdraw("s2", GroupDefaults()),
    "delete": lambda store: store.sessions.delete("s"),
}
"""What ends or frees something: refused by a Redis that is away, but not by one that is full."""
READS: dict[str, Callable[[Store], Awaitable[object]]] = {
    "ping": lambda store: store.sessions.ping(),
    "load": lambda store: store.sessions.load("s"),
    "records": lambda store: store.sessions.load_records("s"),
    "listing": lambda store: store.sessions.listing.load_page(status=None, group_id=None, limit=10, cursor=None),
    "counts": lambda store: store.delivery.count_groups(),
    "current": lambda store: store.weights.current(),
}


@asynccontextmanager
async def filled(server: RedisServer, **options: float) -> AsyncIterator[Store]:
    """A store with session s of one call, and every script loaded."""
    store = Store.at(server.url, **options)
    try:
        await store.sessions.create(SessionInfo("s", b"hash", 1.0))
        await store.sessions.begin("s", 0, Intent("c0", None, b"", "r", 1.0))
        await store.sessions.commit("s", "c0", {"c0": b"zero"})
        yield store
    finally:
        await store.connection.close()


async def test_a_stopped_redis_is_unavailable_at_once_and_used_again_when_it_is_back() -> None:
    with running_redis() as server:
        async with filled(server, timeout_seconds=60.0) as store:
            server.stop()
            async with asyncio.timeout(30):
                for act in (WRITES | ENDS | READS).values():
                    with pytest.raises(StoreUnavailable, match=f"127.0.0.1:{server.port}"):
                        await act(store)
            with running_redis(port=server.port):
                await WRITES["create"](store)


async def test_a_redis_that_is_down_at_the_start_is_used_when_it_comes() -> None:
    port = free_port()
    store = Store.at(f"redis://127.0.0.1:{port}")
    with pytest.raises(StoreUnavailable):
        await store.sessions.ping()
    with running_redis(port=port):
        await store.sessions.ping()
    await store.connection.close()


async def test_a_full_redis_takes_no_write_and_none_is_half_done() -> None:
    with running_redis() as server:
        async with filled(server) as store:
            with server.client() as client:
                before = client.dbsize()
                client.config_set("maxmemory", 1)
                for name, act in WRITES.items():
                    with pytest.raises(StoreUnavailable, match=r"OOM|OutOfMemory"):
                        await act(store)
                    assert client.dbsize() == before, name
                assert await store.sessions.load_records("s") == [b"zero"]
                assert await store.sessions.load_intents("s") == []
                with pytest.raises(StoreUnavailable, match="maxmemory"):
                    await store.sessions.ping()
                client.config_set("maxmemory", 0)
            await store.sessions.ping()
            assert await store.sessions.commit("s", "c9", {"c9": b"x"}) == 2


async def test_a_full_redis_takes_what_ends_or_frees_something() -> None:
    """Sessions stayed `closing`, and nothing could be deleted to make room."""
    with running_redis() as server:
        async with filled(server) as store:
            with server.client() as client:
                client.config_set("maxmemory", 1)
                for act in ENDS.values():
                    await act(store)
                assert await store.sessions.load("s") is None


async def test_a_redis_that_cannot_write_to_its_disk_or_is_a_replica_is_unavailable() -> None:
    with running_redis() as server:
        async with filled(server) as store:
            with server.client() as client:
                client.config_set("min-replicas-to-write", 1)
                with pytest.raises(StoreUnavailable, match="NOREPLICAS"):
                    await WRITES["commit"](store)
                client.config_set("min-replicas-to-write", 0)
                client.replicaof("127.0.0.1", str(free_port()))
                with pytest.raises(StoreUnavailable, match=r"READONLY|ReadOnly"):
                    await WRITES["commit"](store)


async def test_a_redis_that_hangs_is_unavailable_after_the_deadline_and_asked_once() -> None:
    with running_redis() as server:
        async with filled(server, timeout_seconds=60.0) as store:
            before = scripts_run(server)
            server.process.send_signal(signal.SIGSTOP)
            try:
                store.connection.timeout_seconds = 0.3
                with pytest.raises(StoreUnavailable, match=r"did not answer within 0\.3 s"):
                    await WRITES["commit"](store)
            finally:
                server.process.send_signal(signal.SIGCONT)
            store.connection.timeout_seconds = 60.0
            wait_until_it_answers(server)
            assert await store.sessions.commit("s", "c9", {"c9": b"x" * 100}) == 2, "whether or not the first one arrived"
            assert scripts_run(server) <= before + 2


def scripts_run(server: RedisServer) -> int:
    with server.client() as client:
        stats = client.info("commandstats")
    return sum(stats.get(f"cmdstat_{name}", {"calls": 0})["calls"] for name in ("eval", "evalsha"))


async def test_scripts_are_loaded_again_after_redis_forgot_them() -> None:
    with running_redis() as server:
        async with filled(server) as store:
            with server.client() as client:
                client.script_flush()
            assert await store.sessions.commit("s", "c9", {"c9": b"x"}) == 2


async def test_a_wrong_password_is_unavailable_and_never_shown() -> None:
    with running_redis() as server:
        with server.client() as client:
            client.config_set("requirepass", "right")
        connection = StoreConnection(f"redis://:wrong-secret@127.0.0.1:{server.port}")
        with pytest.raises(StoreUnavailable) as refused:
            await connection.ping()
        assert "wrong-secret" not in refused.value.message
        await connection.close()


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_a_loop_that_stood_still_while_it_connected_has_not_been_refused(redis_url: str, loop: str) -> None:
    """The server had answered long since when the time was up."""

    async def ask() -> None:
        node = StoreServer(redis_url, max_connections=1, connect_seconds=0.1)
        asking = asyncio.ensure_future(node.send(None, [("PING",)]))
        await asyncio.sleep(0)
        time.sleep(0.2)  # noqa: ASYNC251 - it is what stands still
        await asking
        await node.close()

    asyncio.run(ask()) if loop == "asyncio" else uvloop.run(ask())


async def test_a_server_that_takes_no_connection_is_given_up() -> None:
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        with socket.create_connection(full.getsockname()):
            node = StoreServer(f"redis://127.0.0.1:{full.getsockname()[1]}", max_connections=1, connect_seconds=0.1)
            with pytest.raises(redis.TimeoutError, match="connecting"):
                await node.send(None, [("PING",)])
            await node.close()


async def test_more_concurrent_commands_than_connections_wait_in_line(redis_url: str) -> None:
    connection = StoreConnection(redis_url, max_connections=2)
    answers = await asyncio.gather(*(connection.execute("ECHO", str(i)) for i in range(100)))
    assert answers == [str(i).encode() for i in range(100)]
    await connection.close()


async def test_a_fault_in_a_script_is_not_hidden_as_unavailability(redis_url: str) -> None:
    connection = StoreConnection(redis_url)
    with pytest.raises(redis.ResponseError):
        await connection.run(Script(b"return redis.call('NOSUCHCOMMAND')", "0" * 40), ())
    await connection.close()


async def test_a_redis_without_an_append_only_file_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with running_redis("--appendonly", "no") as server:
        connection = StoreConnection(server.url)
        with caplog.at_level(logging.WARNING):
            await connection.ping()
        await connection.close()
    assert "keeps no append-only file" in caplog.text


async def test_a_script_waits_for_no_connection(redis_url: str) -> None:
    """It shares one with the others. 500 calls at once went to Redis by 64, and what held the connections held them up."""
    connection = StoreConnection(redis_url, max_connections=1, timeout_seconds=60.0)
    await connection.ping()
    waiting = asyncio.ensure_future(connection.execute("BLPOP", "a-list", 0))
    while not connection._free.locked():
        await asyncio.sleep(0)
    script = Script(b"return redis.call('RPUSH', KEYS[1], ARGV[1])", "0" * 40)
    assert await connection.run(script, ("a-list",), ("word",)) == 1
    assert await waiting == (b"a-list", b"word")
    await connection.close()
