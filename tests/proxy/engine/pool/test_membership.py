"""Where replicas come from: settings, the store, and names that are resolved again and again by a resolver the test speaks for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from proxy.engine.pool.membership import EngineSpec, Membership, parse_engine, resolve_with_system
from proxy.engine.pool.placement import Placement
from proxy.engine.pool.pool import EnginePool
from proxy.engine.pool.seats import Caller
from proxy.engine.replica import Replica
from proxy.errors import Conflict, EngineUnavailable
from proxy.limits import ProcessLimits
from proxy.settings import Settings
from proxy.store.connection import StoreConnection
from proxy.store.keys import ENGINES
from proxy.store.service import EngineStore, StoredEngine
from proxy.timeline import CancelScope, Timeline
from tests.support.engine.scripted_engine import Fail, ScriptedEngine
from tests.support.engine.weight_fixtures import until
from tests.support.service.redis_server import Store


@dataclass
class Names:
    """A resolver: what each name stands for now; one it does not know cannot be resolved."""

    addresses: dict[str, Sequence[str]] = field(default_factory=dict)
    asked: list[tuple[str, int]] = field(default_factory=list)

    async def __call__(self, name: str, port: int) -> Sequence[str]:
        self.asked.append((name, port))
        if name not in self.addresses:
            raise OSError("Name or service not known")
        return self.addresses[name]


@asynccontextmanager
async def pool_of(
    *engines: str, resolver: Any = resolve_with_system, store: EngineStore | None = None
) -> AsyncIterator[EnginePool]:
    pool = EnginePool(Settings(engine=list(engines)), store, resolver, limits=ProcessLimits(engine_watch_seconds=0.05))
    await pool.start()
    try:
        yield pool
    finally:
        await pool.stop()


@pytest.mark.parametrize(
    ("text", "url", "policy", "name"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000", "", "127.0.0.1:8000"),
        (" http://host/base/v1/ ", "http://host/base", "", "host/base"),
        ("judge=http://host:1", "http://host:1", "judge", "host:1"),
        ("Qwen/Qwen3-0.6B=https://host", "https://host", "Qwen/Qwen3-0.6B", "host"),
        ("http://host:1/?a=b", "http://host:1/?a=b", "", "host:1/"),
        ("dns://vllm.default.svc:8000", "dns://vllm.default.svc:8000", "", "dns:vllm.default.svc:8000"),
        ("judge=dns://vllm:8000/", "dns://vllm:8000", "judge", "dns:vllm:8000"),
    ],
)
def test_an_engine_is_named_in_one_word(text: str, url: str, policy: str, name: str) -> None:
    spec = parse_engine(text)
    assert (spec.url, spec.policy, spec.name) == (url, policy, name)
    assert parse_engine(str(spec)) == spec


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("localhost:8000", "not a URL like"),
        ("ftp://host", "not a URL like"),
        ("http://host:99999", "not a URL like"),
        ("judge=", "not a URL like"),
        ("judge=http://host:8000/v1/chat/completions/", "without /v1/chat/completions"),
        ("=http://host", "'' cannot be the name of a policy"),
        ("a b=http://host", "'a b' cannot be the name of a policy"),
        ("http://user:secret@host", "must not hold a password"),
        ("dns://vllm", "dns://NAME:PORT"),
        ("dns://vllm:8000/path", "dns://NAME:PORT"),
    ],
)
def test_what_names_no_engine_is_refused(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parse_engine(text)


def test_a_policy_that_is_said_twice_must_be_the_same() -> None:
    assert parse_engine("judge=http://host", "judge") == EngineSpec("http://host", "judge")
    with pytest.raises(ValueError, match="names the policy 'judge', not 'critic'"):
        parse_engine("judge=http://host", "critic")


async def test_every_address_of_a_name_is_a_replica_and_the_last_answer_holds_while_there_is_none() -> None:
    names = Names({"vllm": ["10.0.0.1", "10.0.0.2", "fd00::3"]})
    membership = Membership(["judge=dns://vllm:8000"], None, names)
    await membership.refresh()
    found = [(member.name, member.policy, member.source) for member in membership.members()]
    assert found == [
        ("10.0.0.1:8000", "judge", "dns://vllm:8000"),
        ("10.0.0.2:8000", "judge", "dns://vllm:8000"),
        ("[fd00::3]:8000", "judge", "dns://vllm:8000"),
    ]
    del names.addresses["vllm"]
    await membership.refresh()
    assert len(membership.members()) == 3
    names.addresses["vllm"] = ["10.0.0.2"]
    await membership.refresh()
    assert [member.name for member in membership.members()] == ["10.0.0.2:8000"]
    assert names.asked == [("vllm", 8000)] * 3


async def test_an_address_that_is_given_twice_is_one_replica_the_settings_first() -> None:
    names = Names({"vllm": ["10.0.0.1"]})
    membership = Membership(["dns://vllm:8000", "judge=http://10.0.0.1:8000"], None, names)
    await membership.refresh()
    assert [(member.name, member.policy) for member in membership.members()] == [("10.0.0.1:8000", "judge")]


async def test_localhost_is_a_name_that_can_be_watched() -> None:
    with ScriptedEngine() as engine:
        async with pool_of(f"dns://localhost:{engine.port}") as pool:
            await until(lambda: pool.ready()[0], "an address of localhost answers")
            assert pool.pick("s").url == engine.url


async def test_a_name_that_nobody_knows_is_no_error_until_it_is_known() -> None:
    names = Names()
    with ScriptedEngine() as engine:
        async with pool_of(f"dns://vllm:{engine.port}", resolver=names) as pool:
            with pytest.raises(EngineUnavailable, match=r"no address of dns://vllm:\d+ is known yet"):
                pool.pick("s")
            names.addresses["vllm"] = ["127.0.0.1"]
            await until(lambda: pool.ready()[0], "the name was resolved again")


async def never() -> None:
    pass


async def test_a_replica_whose_address_is_gone_takes_no_new_call_and_ends_those_it_has() -> None:
    names = Names({"vllm": ["127.0.0.1"]})
    with ScriptedEngine() as engine:
        async with pool_of(f"dns://vllm:{engine.port}", resolver=names) as pool:
            await until(lambda: pool.ready()[0], "it serves")

            async def sample(replica: Replica) -> Replica:
                names.addresses["vllm"] = []
                await until(lambda: replica.draining, "its address is gone")
                assert (pool.draining, pool.replicas, replica.in_flight) == ([replica], [], 1)
                async with pool.http.session.get(f"{replica.url}/v1/models") as response:
                    assert response.status == 200
                with pytest.raises(EngineUnavailable, match="no address"):
                    pool.pick("s")
                return replica

            placement = Placement(pool, "policy", Caller("s", never), CancelScope("s", "c"), Timeline())
            replica = await placement.run(sample)
            assert (pool.draining, replica.in_flight) == ([], 0)
            probes = len(engine.received)
            names.addresses["vllm"] = ["127.0.0.1"]
            await until(lambda: pool.ready()[0], "its address is back")
            assert pool.replicas[0] is not replica and len(engine.received) > probes


@pytest.fixture
async def connection(redis_url: str) -> AsyncIterator[StoreConnection]:
    made = StoreConnection(redis_url)
    yield made
    await made.close()


@pytest.fixture
def engines(connection: StoreConnection) -> EngineStore:
    return EngineStore(connection)


def stored(name: str, policy: str = "", added_at: float = 1.0) -> StoredEngine:
    return StoredEngine(name, f"http://{name}", policy, added_at)


async def test_engines_are_stored_once_and_listed_as_they_came(engines: EngineStore) -> None:
    assert await engines.engines() == []
    late, early = stored("a:1", added_at=2.0), stored("b:1", "judge")
    assert await engines.add(late) == late
    assert await engines.add(early) == early
    assert await engines.add(stored("a:1", added_at=9.0)) == late
    assert await engines.engines() == [early, late]
    with pytest.raises(Conflict, match="a:1 is there already: http://a:1 of the default policy"):
        await engines.add(stored("a:1", "judge"))
    assert await engines.remove("a:1")
    assert not await engines.remove("a:1")
    assert await engines.engines() == [early]


async def test_the_store_holds_engines_on_a_cluster_too(store: Store) -> None:
    engines = EngineStore(store.connection)
    await engines.add(stored("a:1"))
    assert await engines.engines() == [stored("a:1")]


async def test_every_process_follows_the_store_and_one_that_cannot_read_it_keeps_what_it_has(
    engines: EngineStore, connection: StoreConnection
) -> None:
    with ScriptedEngine() as first, ScriptedEngine() as second:
        async with pool_of(first.url, store=engines) as one, pool_of(first.url, store=engines) as other:
            added = StoredEngine(f"127.0.0.1:{second.port}", second.url, "judge", 1.0)
            await engines.add(added)
            for pool in (one, other):
                await until(lambda: len(serving(pool)) == 2, "it joined")  # noqa: B023
                assert pool.pick("s", "judge").url == second.url
            # A value that this build cannot read.
            await connection.execute("HSET", ENGINES, "broken", b"\xc1")
            await asyncio.sleep(0.2)
            assert len(serving(one)) == 2
            await connection.execute("HDEL", ENGINES, "broken")
            await engines.remove(added.name)
            for pool in (one, other):
                await until(lambda: len(serving(pool)) == 1, "it left")  # noqa: B023


def serving(pool: EnginePool) -> list[str]:
    return [replica.name for replica in pool.replicas if replica.healthy]


async def test_only_refused_connections_take_the_last_replica_out_at_once() -> None:
    """A call that breaks may be chance; the one replica there is goes on, a second one takes over after three."""
    with ScriptedEngine() as first, ScriptedEngine() as second:
        async with pool_of(first.url) as pool:
            (alone,) = pool.replicas
            for _ in range(5):
                pool.fail_call(alone, "calls break off", refused=False)
            assert alone.healthy
            pool.fail_call(alone, "cannot connect", refused=True)
            assert not alone.healthy and alone.reason == "cannot connect"
        async with pool_of(first.url, second.url) as pool:
            failing = pool.pick("s")
            assert [failing.healthy for _ in range(3) if pool.fail_call(failing, "broken", refused=False) is None] == [
                True,
                True,
                False,
            ]
            assert pool.pick("s") is not failing


async def test_one_probe_that_fails_is_chance_three_in_a_row_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proxy.engine.pool.standing.RETRY_SECONDS", 0.02)
    monkeypatch.setattr("proxy.engine.pool.standing.WATCH_SECONDS", 0.02)
    with ScriptedEngine() as engine:
        async with pool_of(engine.url) as pool:
            (replica,) = pool.replicas
            engine.fault("/health", Fail(503))
            seen = engine.paths().count("/health")
            await until(lambda: engine.paths().count("/health") >= seen + 3, "it failed, and the next ones were good")
            assert replica.healthy
            engine.fault("/health", *[Fail(503)] * 10_000)
            await until(lambda: not replica.healthy, "three failed")
            assert "GET /health answered HTTP 503" in replica.reason
            engine.reset()
            await until(lambda: replica.healthy, "it answers again")


async def test_a_replica_that_keeps_failing_has_to_answer_several_probes_before_it_serves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("proxy.engine.pool.standing.RETRY_SECONDS", 0.02)
    with ScriptedEngine() as engine:
        async with pool_of(engine.url) as pool:
            (replica,) = pool.replicas
            pool.fail_call(replica, "cannot connect", refused=True)
            await until(lambda: replica.healthy, "one good probe")
            pool.fail_call(replica, "cannot connect", refused=True)
            reasons = {replica.reason}
            while not replica.healthy:
                await asyncio.sleep(0)
                reasons.add(replica.reason)
            assert {reason.partition(";")[2].partition(" more")[0].strip() for reason in reasons} >= {"2", "1"}
