"""What only a store of several servers can do wrong: slots that move, primaries that die, masters that are replaced."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from urllib.parse import quote

import pytest
import redis
from redis.crc import key_slot

from proxy.errors import StoreUnavailable
from proxy.store import keys
from proxy.store.cluster import REDIRECTS
from proxy.store.connection import StoreConnection
from proxy.store.node import Address
from proxy.store.states import Intent, SessionInfo
from tests.support.service.redis_server import (
    SLOW,
    RedisCluster,
    RedisServer,
    SharedRedis,
    Store,
    ask,
    free_port,
    info,
    moving_slot,
    running_cluster,
    running_redis,
    running_sentinel,
)
from tests.support.service.verbatim_process import verbatim


def intent(call_id: str) -> Intent:
    return Intent(call_id, None, b"digest", "replica", 1.0)


@pytest.fixture(scope="module")
def cluster(shared_redis: SharedRedis) -> RedisCluster:
    return shared_redis.cluster


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that is told to try again does so soon."""
    monkeypatch.setattr("proxy.store.cluster.TRY_AGAIN_SECONDS", 0.005)


@pytest.fixture
async def stored(cluster: RedisCluster) -> AsyncIterator[Store]:
    cluster.flushall()
    async with opened(cluster.url) as store:
        yield store


@asynccontextmanager
async def opened(url: str, **options: float) -> AsyncIterator[Store]:
    store = Store.at(url, **options)
    try:
        yield store
    finally:
        await store.connection.close()


async def one_call(store: Store, session_id: str, call: int = 0) -> int:
    """Begin and commit call number `call`; the session's number of calls."""
    begun = await store.sessions.begin(session_id, call, intent(f"c{call}"))
    assert begun.accepted, begun
    return await store.sessions.commit(session_id, f"c{call}", {f"c{call}": f"record {call}".encode()})


def holder(cluster: RedisCluster, session_id: str) -> RedisServer:
    slot = slot_of(session_id)
    for first, last, primary, *_ in ask(cluster.primaries[0], "CLUSTER", "SLOTS"):
        if first <= slot <= last:
            return next(server for server in (*cluster.primaries, *cluster.replicas) if server.port == primary[1])
    raise AssertionError(f"nobody holds slot {slot}")


def followed(cluster: RedisCluster, session_id: str) -> tuple[RedisServer, RedisServer]:
    """The session's primary and its replica, once that has all that was written there."""
    primary = holder(cluster, session_id)
    replica = cluster.replicas[cluster.primaries.index(primary)]
    until(lambda: offset(replica) == offset(primary))
    return primary, replica


def slot_of(session_id: str) -> int:
    return key_slot(keys.state(session_id).encode())


async def test_sessions_are_spread_over_all_servers_and_found_again(cluster: RedisCluster, stored: Store) -> None:
    ids = [f"s{number}" for number in range(60)]
    for number, session_id in enumerate(ids):
        await stored.sessions.create(SessionInfo(session_id, b"hash", 100.0 + number, group_id="g"))
        assert await one_call(stored, session_id) == 1
    for server in cluster.primaries:
        assert sum(key.endswith(b":calls") for key in server.all_keys()) > 5
    listed, _ = await stored.sessions.listing.load_page(status=None, group_id="g", limit=100, cursor=None)
    assert [state.info.session_id for state in listed] == ids[::-1]
    assert [state.calls for state in listed] == [1] * 60


async def test_a_closed_store_looks_for_no_other_server_of_the_cluster(cluster: RedisCluster) -> None:
    """A call that is under way when it is closed finds its server gone, and asks the next one that the URL names who holds what."""
    first, second, _ = cluster.primaries
    store = Store.at(f"redis+cluster://127.0.0.1:{first.port},localhost:{second.port}", timeout_seconds=60)
    await store.connection.ping()
    await store.connection.execute("EVAL", "return 1", 1, "k", key="k")
    waiting = asyncio.ensure_future(store.connection.execute("EVAL", SLOW % 200_000, 1, "k", key="k"))
    await asyncio.sleep(0)
    await store.connection.close()
    with pytest.raises(StoreUnavailable, match="closed"):
        await waiting
    for server in cluster.primaries:
        with server.client() as client:
            assert len(client.client_list()) == 1, server


async def test_all_keys_of_a_session_are_in_one_slot_and_go_with_it(cluster: RedisCluster, stored: Store) -> None:
    await stored.sessions.create(SessionInfo("kept", b"hash", 1.0))
    before = cluster.all_keys()
    await stored.sessions.create(SessionInfo("s", b"hash", 2.0, group_id="g"))
    await one_call(stored, "s")
    await stored.sessions.begin("s", 1, intent("left"))
    stored.sessions.note_answered("s", ["c0"], delivered=True)
    await stored.sessions.begin("s", 1, intent("carries it"))
    await stored.sessions.commit("s", "c1", {"c1": b"record 1"})
    own = {key for key in cluster.all_keys() - before if b"{s:s}" in key}
    assert len(own) == 6
    assert {key_slot(key) for key in own} == {slot_of("s")}
    await stored.sessions.delete("s")
    assert cluster.all_keys() == before


@pytest.mark.parametrize("scheme", ["redis://", "redis+cluster://"])
async def test_one_node_is_enough_to_find_the_others(cluster: RedisCluster, scheme: str) -> None:
    cluster.flushall()
    async with opened(f"{scheme}127.0.0.1:{cluster.primaries[1].port}") as store:
        for number in range(12):
            await store.sessions.create(SessionInfo(f"s{number}", b"hash", 1.0))
            assert await one_call(store, f"s{number}") == 1
        await store.sessions.ping()


async def test_a_node_that_is_down_at_the_start_is_passed_over(cluster: RedisCluster) -> None:
    async with opened(f"redis+cluster://127.0.0.1:{free_port()},127.0.0.1:{cluster.primaries[2].port}") as store:
        await store.sessions.ping()


async def test_records_are_read_and_calls_wait_while_the_slot_of_their_session_moves(
    cluster: RedisCluster, stored: Store, impatient: None
) -> None:
    """For one key the old server answers ASK; over several connections, so that ASKING must go over the same one as its command.
    A script is refused with TRYAGAIN while a key of it is on the other side, or nowhere. Later both answer MOVED."""
    await stored.sessions.create(SessionInfo("s", b"hash", 1.0))
    assert await one_call(stored, "s") == 1
    calls = 1
    for _ in range(3):
        with moving_slot(cluster, slot_of("s")) as move:
            move(1)
            with pytest.raises(StoreUnavailable, match="TRYAGAIN"):
                await stored.sessions.begin("s", calls, intent("between"))
            move(100)
            read = await asyncio.gather(*(stored.sessions.load_records("s") for _ in range(30)))
            assert read == [[f"record {number}".encode() for number in range(calls)]] * 30
        for _ in range(5):
            calls = await one_call(stored, "s", calls)
    assert calls == 16
    assert await stored.sessions.load_intents("s") == []


async def test_a_commit_outlasts_the_move_of_its_slot(cluster: RedisCluster, impatient: None) -> None:
    cluster.flushall()
    async with opened(cluster.url, patience_seconds=60.0) as store:
        await store.sessions.create(SessionInfo("s", b"hash", 1.0))
        await store.sessions.begin("s", 0, intent("c0"))
        with moving_slot(cluster, slot_of("s")) as move:
            move(1)
            refused = told_to_try_again(cluster)
            commit = asyncio.create_task(store.sessions.commit("s", "c0", {"c0": b"zero"}))
            while told_to_try_again(cluster) <= refused + 2 * REDIRECTS and not commit.done():
                await asyncio.sleep(0.01)
            assert not commit.done()
        assert await commit == 1
        assert await store.sessions.load_records("s") == [b"zero"]


def told_to_try_again(cluster: RedisCluster) -> int:
    """How many commands its servers have refused with TRYAGAIN."""
    found = (re.search(rb"errorstat_TRYAGAIN:count=(\d+)", info(server, "errorstats")) for server in cluster.primaries)
    return sum(int(each[1]) for each in found if each)


async def test_without_one_of_its_servers_a_cluster_is_unavailable_until_it_is_back(cluster: RedisCluster) -> None:
    cluster.flushall()
    async with opened(cluster.url, timeout_seconds=60.0, patience_seconds=60.0) as store:
        for number in range(6):
            await store.sessions.create(SessionInfo(f"s{number}", b"hash", 1.0))
        lost = holder(cluster, "s0")
        elsewhere = next(f"e{number}" for number in count() if holder(cluster, f"e{number}") is not lost)
        await store.sessions.create(SessionInfo(elsewhere, b"hash", 1.0))
        await store.sessions.begin(elsewhere, 0, intent("c0"))
        with node_timeout(cluster, 0.5):
            lost.process.send_signal(signal.SIGSTOP)
            try:
                for server in cluster.primaries:
                    if server is not lost:
                        until(partial(in_state, server, b"fail"))
                store.connection.timeout_seconds = 0.3
                commit = asyncio.create_task(store.sessions.commit(elsewhere, "c0", {"c0": b"record 0"}))
                for number in range(6):
                    with pytest.raises(StoreUnavailable):
                        await store.sessions.begin(f"s{number}", 0, intent("c0"))
                with pytest.raises(StoreUnavailable):
                    await store.sessions.ping()
                assert not commit.done()
            finally:
                lost.process.send_signal(signal.SIGCONT)
            for server in cluster.primaries:
                until(partial(in_state, server, b"ok"))
        store.connection.timeout_seconds = 60.0
        await recovered(store)
        assert await commit == 1
        for number in range(6):
            assert await one_call(store, f"s{number}") == 1


@contextmanager
def node_timeout(cluster: RedisCluster, seconds: float) -> Iterator[None]:
    """How long a node may be away before the others give it up, inside."""
    (_, usual) = ask(cluster.primaries[0], "CONFIG", "GET", "cluster-node-timeout")
    for server in cluster.primaries:
        ask(server, "CONFIG", "SET", "cluster-node-timeout", int(seconds * 1000))
    try:
        yield
    finally:
        for server in cluster.primaries:
            ask(server, "CONFIG", "SET", "cluster-node-timeout", int(usual))


async def recovered(store: Store, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while True:
        try:
            await store.sessions.ping()
            await store.sessions.listing.load_page(status=None, group_id=None, limit=10, cursor=None)
            return
        except StoreUnavailable:
            assert time.monotonic() < deadline, f"not within {seconds} s"
            await asyncio.sleep(0.05)


async def test_commits_survive_the_death_of_their_primary_over_connections_from_before_and_after() -> None:
    with running_cluster(replicated=True) as cluster:
        async with opened(cluster.url, wait_replicas=1) as store:
            await store.sessions.create(SessionInfo("s", b"hash", 1.0))
            assert await one_call(store, "s") == 1
        async with opened(cluster.url, patience_seconds=60.0) as old, opened(cluster.url, patience_seconds=60.0) as new:
            for call in range(1, 20):
                await one_call(old, "s", call)
            for call in (20, 21):
                begun = await old.sessions.begin("s", 20, intent(f"c{call}"))
                assert begun.accepted
            primary, replica = followed(cluster, "s")
            primary.kill()
            commits = [
                asyncio.create_task(store.sessions.commit("s", f"c{call}", {f"c{call}": b"late"}))
                for call, store in ((20, old), (21, new))
            ]
            await asyncio.wait(commits, timeout=0.2)
            assert not any(commit.done() for commit in commits)
            # As the others elect it to do once they have missed its primary for long enough.
            ask(replica, "CLUSTER", "FAILOVER", "TAKEOVER")
            assert sorted(await asyncio.gather(*commits)) == [21, 22]
            await recovered(old)
            assert await new.sessions.load_records("s") == [
                *(f"record {call}".encode() for call in range(20)),
                b"late",
                b"late",
            ]
            assert await one_call(old, "s", 22) == 23


@contextmanager
def replicated() -> Iterator[tuple[RedisServer, RedisServer]]:
    """A master and its replica."""
    with running_redis() as master, running_redis() as replica:
        ask(replica, "REPLICAOF", "127.0.0.1", master.port)
        until(lambda: b"master_link_status:up" in info(replica))
        yield master, replica


async def test_a_commit_waits_for_the_replicas_that_the_settings_ask_for() -> None:
    with replicated() as (master, replica):
        options = {"wait_replicas": 1, "timeout_seconds": 2.0}
        async with opened(master.url, **options) as store:
            await store.sessions.create(SessionInfo("s", b"hash", 1.0))
            await one_call(store, "s")
            with replica.client() as client:
                assert client.llen(keys.calls("s")) == 1, "it is there when the commit returns"
            replica.process.send_signal(signal.SIGSTOP)
            try:
                await store.sessions.begin("s", 1, intent("c1"))
                refused = await asyncio.gather(
                    store.sessions.commit("s", "c1", {"c1": b"one"}),
                    store.sessions.commit("s", "c1", {"c1": b"one"}),
                    store.sessions.close("s", "completed", 1.0, None, 2.0),
                    return_exceptions=True,
                )
                for error in refused:
                    assert isinstance(error, StoreUnavailable) and "only 0 of 1 replicas" in error.message, refused
            finally:
                replica.process.send_signal(signal.SIGCONT)
            assert await store.sessions.commit("s", "c1", {"c1": b"one"}) == 2
            with replica.client() as client:
                assert client.llen(keys.calls("s")) == 2


if "VERBATIM_TEST_REDIS" in os.environ:
    # WAITAOF needs Redis 7.2, and the one that is installed for the tests is older.

    async def test_a_commit_waits_for_the_disk_where_the_redis_can_say_so() -> None:
        with running_redis() as server:
            assert version(server) >= (7, 2), "WAITAOF is younger than this redis-server"
            async with opened(server.url, wait_aof=True) as store:
                await store.sessions.create(SessionInfo("s", b"hash", 1.0))
                for call in range(20):
                    await one_call(store, "s", call)
                synced = re.search(rb"cmdstat_waitaof:calls=(\d+)", info(server, "commandstats"))
                assert synced is not None and int(synced[1]) >= 20
                ask(server, "CONFIG", "SET", "appendonly", "no")
                begun = await store.sessions.begin("s", 20, intent("c20"))
                assert begun.accepted
                with pytest.raises(StoreUnavailable):
                    await store.sessions.commit("s", "c20", {"c20": b"x"})


def version(server: RedisServer) -> tuple[int, ...]:
    found = re.search(rb"redis_version:(\d+)\.(\d+)", info(server))
    assert found is not None
    return int(found[1]), int(found[2])


@pytest.mark.parametrize("wait", ['{"replicas": 1}', '{"aof": true}'])
def test_the_embedded_redis_cannot_wait_and_the_service_says_so(wait: str, tmp_path: Path) -> None:
    done = verbatim("serve", "--engine", "http://127.0.0.1:9", "--data-dir", str(tmp_path), VERBATIM_REDIS_WAIT=wait)
    assert done.returncode == 2
    assert "--fsync always" in done.stderr


def test_a_redis_of_ones_own_is_not_told_when_to_sync() -> None:
    done = verbatim("serve", "--engine", "http://127.0.0.1:9", "--redis", "redis://127.0.0.1:9", "--fsync", "always")
    assert done.returncode == 2
    assert "appendfsync always" in done.stderr


def test_a_redis_url_that_makes_no_sense_is_said_in_one_sentence() -> None:
    for url in ("redis+cluster://a/3", "redis://a/0?tiemout=3"):
        done = verbatim("serve", "--engine", "http://127.0.0.1:9", "--redis", url)
        assert done.returncode == 2
        assert ("database 0" if "cluster" in url else "'tiemout' is not an option of a connection") in done.stderr
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("redis://a?max_connections=3", "'max_connections' is not an option"),
        ("redis+sentinel://a/b?nothing=1", "'nothing' is not an option"),
        ("redis://a?socket_timeout=soon", "socket_timeout"),
        ("redis://a?ssl_ca_certs=/etc/hosts", "need rediss://"),
        ("rediss://a?ssl_ca_certs=/none/ca.pem", "ssl_ca_certs names /none/ca.pem, which is not there"),
        ("rediss+cluster://a?ssl_keyfile=/none/key.pem", "ssl_keyfile names /none/key.pem"),
    ],
)
def test_options_of_a_redis_url_are_checked_and_files_named(options: str, says: str) -> None:
    """They ended in a traceback, at the first command."""
    with pytest.raises(ValueError, match=re.escape(says)):
        StoreConnection(options)


def test_options_that_connections_take_are_left_to_them() -> None:
    for url in ("redis://a?health_check_interval=3", "rediss://a?ssl_cert_reqs=none&ssl_ca_certs=/etc/hosts", "unix:///s?db=1"):
        assert Address.parse(url).url.endswith(url.partition("?")[2])


async def test_settings_that_the_redis_cannot_keep_are_said_at_the_start() -> None:
    with running_redis() as server:
        async with opened(server.url, wait_replicas=1) as store:
            with pytest.raises(StoreUnavailable, match=r"has 0 replicas; redis_wait asks for 1"):
                await store.sessions.ping()
        async with opened(server.url, wait_aof=True) as store:
            if version(server) < (7, 2):
                with pytest.raises(StoreUnavailable, match=r"knows no WAITAOF.*appendfsync always"):
                    await store.sessions.ping()
            else:
                await store.sessions.ping()
        ask(server, "CONFIG", "SET", "appendonly", "no")
        async with opened(server.url, wait_aof=True) as store:
            with pytest.raises(StoreUnavailable, match=r"which redis_wait needs"):
                await store.sessions.ping()


async def test_sentinels_lead_to_the_new_master() -> None:
    with replicated() as (master, replica):
        with running_sentinel(master) as sentinel:
            until(lambda: b"slaves=1" in info(sentinel))
            url = f"redis+sentinel://127.0.0.1:{free_port()},127.0.0.1:{sentinel.port}/store"
            async with opened(url, patience_seconds=60.0) as store:
                await store.sessions.create(SessionInfo("s", b"hash", 1.0))
                await one_call(store, "s")
                await store.sessions.begin("s", 1, intent("c1"))
                until(lambda: offset(replica) == offset(master))
                master.kill()
                assert await store.sessions.commit("s", "c1", {"c1": b"one"}) == 2
                assert await one_call(store, "s", 2) == 3
                with replica.client() as client:
                    assert client.llen(keys.calls("s")) == 3
        async with opened(f"redis+sentinel://127.0.0.1:{sentinel.port}/other") as store:
            with pytest.raises(StoreUnavailable, match="No master found for 'other'"):
                await store.sessions.ping()


async def test_a_master_that_was_demoted_is_left_for_its_successor() -> None:
    """Both live on: the old one keeps its connections and answers READONLY."""
    with replicated() as (master, replica), running_sentinel(master) as sentinel:
        until(lambda: b"slaves=1" in info(sentinel))
        async with opened(f"redis+sentinel://127.0.0.1:{sentinel.port}/store", patience_seconds=60.0) as store:
            await store.sessions.create(SessionInfo("s", b"hash", 1.0))
            await asyncio.gather(*(store.sessions.load("s") for _ in range(20)))
            until(lambda: replaces(sentinel))
            until(lambda: named_master(sentinel) == replica.port)
            # As the Sentinel does after a while.
            ask(master, "REPLICAOF", "127.0.0.1", replica.port)
            assert await store.sessions.commit("s", "c0", {"c0": b"record 0"}) == 1
            assert await one_call(store, "s", 1) == 2
            with replica.client() as client:
                assert client.llen(keys.calls("s")) == 2


def replaces(sentinel: RedisServer) -> bool:
    """Whether it begins to replace its master: it must know the replica well enough."""
    try:
        ask(sentinel, "SENTINEL", "FAILOVER", "store")
    except redis.ResponseError:
        return False
    return True


def named_master(sentinel: RedisServer) -> int:
    return int(ask(sentinel, "SENTINEL", "GET-MASTER-ADDR-BY-NAME", "store")[1])


def offset(server: RedisServer) -> bytes:
    return next(line for line in info(server).splitlines() if line.startswith(b"master_repl_offset"))


def in_state(server: RedisServer, state: bytes) -> bool:
    return b"cluster_state:" + state in ask(server, "CLUSTER", "INFO")


def until(happened: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.02)


def test_an_address_names_its_servers_and_never_its_password(tmp_path: Path) -> None:
    authority = tmp_path / "ca.pem"
    authority.touch()
    address = Address.parse(f"rediss+cluster://me:secret@a:1,b,[::1]:3/?ssl_ca_certs={authority}")
    assert (address.kind, address.places) == ("cluster", (("a", 1), ("b", 6379), ("::1", 3)))
    assert address.name == "a:1,b,[::1]:3"
    assert address.server(("::1", 3)) == f"rediss://me:secret@[::1]:3?ssl_ca_certs={authority}"
    watched = Address.parse("redis+sentinel://:secret@h1,h2:5/mymaster/4")
    assert (watched.places, watched.service, watched.db) == ((("h1", 26379), ("h2", 5)), "mymaster", "4")
    assert watched.server(("m", 7)) == "redis://:secret@m:7/4"
    assert watched.sentinel(("h2", 5)) == "redis://h2:5"
    assert "secret" not in watched.name
    assert Address.parse("redis://:secret@host/3").name == "host"


def test_a_socket_is_named_by_a_path_from_the_root_or_from_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = tmp_path / "a b"
    here.mkdir()
    monkeypatch.chdir(here)
    relative = Address.parse("unix://:secret@verbatim-data/redis.sock?db=3")
    assert relative.name == f"{here}/verbatim-data/redis.sock"
    assert relative.url == f"unix://:secret@{quote(str(here))}/verbatim-data/redis.sock?db=3"
    absolute = Address.parse("unix:///srv/a%20b/redis.sock")
    assert (absolute.url, absolute.name) == ("unix:///srv/a%20b/redis.sock", "/srv/a b/redis.sock")


@pytest.mark.parametrize(
    ("url", "rule"),
    [
        ("http://x", "it begins with"),
        ("unix://", "path of a socket"),
        ("unix+cluster:///a", "it begins with"),
        ("redis+cluster://", "host:port"),
        ("redis+cluster://a,,b", "host:port"),
        ("redis+cluster://a/3", "database 0"),
        ("redis+sentinel://a", "name of the service"),
    ],
)
def test_an_address_that_makes_no_sense_is_refused(url: str, rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        Address.parse(url)
