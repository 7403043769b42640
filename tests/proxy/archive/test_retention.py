"""What retention may delete, and that the archive holds it first: on a real Redis, with several processes at it."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from proxy.archive.folder import ArchiveReader, ArchiveWriter, read_table
from proxy.errors import StoreUnavailable
from proxy.retention import Retention, collect
from proxy.settings import Settings
from proxy.store import keys
from proxy.store.connection import StoreConnection
from proxy.store.service import RetentionStore
from tests.proxy.api.test_control_api import Service, running
from tests.support.engine.scripted_engine import ScriptedEngine
from tests.support.service.redis_server import RedisServer, SharedRedis, Store
from tests.support.service.verbatim_process import Serving, wait_until


@dataclass
class Keeper:
    """A service and its retention, which looks when it is told to."""

    service: Service
    retention: Retention
    folder: Path
    connection: StoreConnection

    @property
    def wrote(self) -> bool:
        return self.folder.joinpath("manifest.json").exists()

    @property
    def archived(self) -> list[str]:
        return [session.state["session_id"] for session in ArchiveReader(self.folder).sessions()]

    async def listed(self) -> set[str]:
        states, _ = await self.service.services.sessions.listing.load_page(status=None, group_id=None, limit=1000, cursor=None)
        return {state.info.session_id for state in states}

    async def nothing_is_left(self) -> bool:
        return not await self.listed()

    async def ack_all(self) -> None:
        while lease := await self.service.lease(max_groups=100):
            assert (await self.service.trainer.post(f"/batches/{lease['lease_id']}/ack")).status_code == 200


async def keeper(stack: AsyncExitStack, url: str, folder: Path, retention: Mapping[str, Any] = {}, **options: Any) -> Keeper:
    retention = {"archive_dir": folder, "seconds": 0.001, **retention}
    service = await stack.enter_async_context(running(url, retention=retention, **options))
    connection = StoreConnection(url)
    stack.push_async_callback(connection.close)
    return Keeper(service, Retention(service.services, RetentionStore(connection)), folder, connection)


async def test_old_sessions_that_were_delivered_go_into_the_archive_and_out_of_the_store(
    redis_url: str, tmp_path: Path
) -> None:
    async with AsyncExitStack() as stack:
        kept = await keeper(stack, redis_url, tmp_path)
        for name in ("a", "b"):
            await kept.service.finished(name, group_id="g", group_size=2)
        rows = (await kept.service.admin.get("/sessions/a/trajectories")).json()["trajectories"]
        await kept.ack_all()
        cleared = await kept.retention.run_once()
        assert (cleared.archived, cleared.deleted, kept.archived, await kept.listed()) == (2, 2, ["a", "b"], set())
        archived = read_table(tmp_path / "trajectories-000000.parquet")
        assert {name: archived[0][name] for name in rows[0]} | {
            "metadata": {},
            "media": json.loads(archived[0]["media"]),
            "logprob_modes": json.loads(archived[0]["logprob_modes"]),
        } == rows[0]
        assert (await kept.retention.run_once()).deleted == 0


async def test_what_the_service_does_not_train_is_not_trained_in_the_archive(redis_url: str, tmp_path: Path) -> None:
    """Of a call whose logprobs were of another mode: once its rows were archived as if they were trained."""
    async with AsyncExitStack() as stack:
        kept = await keeper(stack, redis_url, tmp_path, train_logprob_modes=["processed"])
        await kept.service.finished("a")
        told = (await kept.service.admin.get("/sessions/a/trajectories")).json()["accounting"]
        assert told["sampled_tokens"] > 0 == told["exported_tokens"]
        assert (await kept.retention.run_once()).ids == ["a"]
        (session,) = read_table(tmp_path / "sessions-000000.parquet")
        archived = {name: session[name] for name in told}
        assert {**archived, "quarantined": json.loads(archived["quarantined"])} == told


async def test_what_a_trainer_may_still_be_given_stays_whatever_its_age(redis_url: str, tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        kept = await keeper(stack, redis_url, tmp_path, group={"max_deliveries": 1})
        service = kept.service
        await service.finished("dead")
        lease = await service.lease()
        assert lease is not None
        await service.trainer.post(f"/batches/{lease['lease_id']}/nack")
        assert await service.lease() is None, "it is a dead letter now"
        await service.finished("leased")
        assert await service.lease() is not None
        await service.finished("ready")
        await service.finished("waits-for-its-group", group_id="g", group_size=2)
        await service.session("open", 7)
        await service.session("waits-for-its-reward", 7, group_id="h")
        await service.close("waits-for-its-reward")
        names = await kept.listed()
        assert (await kept.retention.run_once()).deleted == 0
        assert await kept.listed() == names and len(names) == 6


async def test_what_nobody_waits_for_goes(redis_url: str, tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        kept = await keeper(stack, redis_url, tmp_path)
        await kept.service.session("failed", 7)
        await kept.service.close("failed", "failed")
        await kept.service.session("never-rewarded", 7)
        await kept.service.close("never-rewarded")
        assert (await kept.retention.run_once()).deleted == 2
        late = await kept.service.admin.post("/sessions/failed/reward", json={"reward": 1.0})
        assert late.status_code == 404


async def test_a_session_that_was_exported_before_its_reward_keeps_it(redis_url: str, tmp_path: Path) -> None:
    """Into the service's own archive: what was there counted as archived, the session was deleted, and its reward was nowhere."""
    async with AsyncExitStack() as stack:
        kept = await keeper(stack, redis_url, tmp_path / "archive")
        await kept.service.session("late", 7)
        await kept.service.close("late")
        state = await kept.service.services.sessions.load("late")
        assert state is not None
        with ArchiveWriter(kept.folder) as writer:
            writer.add(await collect(kept.service.services, state))
            writer.flush()
        assert (await kept.service.admin.post("/sessions/late/reward", json={"reward": 0.25})).status_code == 200
        await kept.ack_all()
        for _ in range(2):
            assert (await kept.retention.run_once()).deleted == 0
        kept.folder.rename(tmp_path / "moved")
        assert (await kept.retention.run_once()).ids == ["late"]
        assert [session.state["reward"] for session in ArchiveReader(kept.folder).sessions()] == [0.25]


async def test_a_session_stays_until_it_is_old(redis_url: str, tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        kept = await keeper(stack, redis_url, tmp_path, {"seconds": 3600})
        await kept.service.finished("a")
        await kept.ack_all()
        assert (await kept.retention.run_once()).deleted == 0 and await kept.listed() == {"a"}
        assert not kept.wrote


async def settle_memory(connection: StoreConnection, most: int) -> None:
    """Returns when Redis has given back what it held for connections, down to `most` bytes, and what other tests deleted."""
    while True:
        (facts,) = await connection.read_info()
        if int(facts["mem_clients_normal"]) <= most and int(facts["lazyfree_pending_objects"]) == 0:
            return
        await asyncio.sleep(0.05)


async def test_the_oldest_go_first_until_the_store_is_small_enough(redis_url: str, tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        kept = await keeper(stack, redis_url, tmp_path, {"seconds": None, "bytes": 10**12})
        big = list(range(1, 50_001))
        for at in range(6):
            await kept.service.finished(f"s{at}", *big)
        await kept.service.session("s6", *big)
        await kept.ack_all()
        assert (await kept.retention.run_once()).deleted == 0
        store = RetentionStore(kept.connection)
        each = await store.measure_session("s0")
        assert each > 400_000
        await settle_memory(kept.connection, each // 3)
        limit = await store.measure_memory() - 2 * each - each // 2
        settings = kept.service.services.settings
        settings.retention = settings.retention.model_copy(update={"bytes": limit})
        assert (await kept.retention.run_once()).ids == ["s0", "s1", "s2"]
        # What is deleted is given back by a thread of Redis, a little later.
        while await store.measure_memory() > limit:
            await asyncio.sleep(0.05)
        assert (await kept.retention.run_once()).ids == []
        assert kept.archived == ["s0", "s1", "s2"]


async def test_without_an_archive_sessions_are_only_deleted_when_that_was_asked_for(redis_url: str, tmp_path: Path) -> None:
    for limit in ({"seconds": 1}, {"bytes": 1}):
        with pytest.raises(ValidationError, match="say where they are archived"):
            Settings.model_validate({"retention": limit})
    async with AsyncExitStack() as stack:
        kept = await keeper(stack, redis_url, tmp_path, {"archive_dir": None, "without_archive": True})
        await kept.service.finished("a")
        await kept.ack_all()
        cleared = await kept.retention.run_once()
        assert (cleared.archived, cleared.deleted, await kept.listed()) == (0, 1, set())


async def until(happened: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(60):
        while not await happened():
            await asyncio.sleep(0.01)


async def test_many_processes_archive_each_session_once(redis_url: str, tmp_path: Path) -> None:
    """Four services clear at the same time while sessions are closed and acknowledged."""
    async with AsyncExitStack() as stack:
        keepers = [await keeper(stack, redis_url, tmp_path) for _ in range(4)]
        ended = False

        async def clear(kept: Keeper) -> int:
            deleted = 0
            while not ended:
                deleted += (await kept.retention.run_once()).deleted
                await asyncio.sleep(0.005)
            return deleted

        clearing = [asyncio.create_task(clear(kept)) for kept in keepers]
        for at in range(40):
            await keepers[at % 4].service.finished(f"s{at}")
            if at % 5 == 4:
                await keepers[0].ack_all()
        await until(keepers[0].nothing_is_left)
        ended = True
        assert sum(await asyncio.gather(*clearing)) == 40
        assert Counter(keepers[0].archived) == Counter(f"s{at}" for at in range(40))


async def test_a_process_that_died_before_it_deleted_leaves_that_to_the_next(redis_url: str, tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        kept = await keeper(stack, redis_url, tmp_path)
        await kept.service.finished("a")
        await kept.ack_all()
        state = await kept.service.services.sessions.load("a")
        assert state is not None
        with ArchiveWriter(tmp_path) as writer:
            writer.add(await collect(kept.service.services, state))
            writer.flush()
        cleared = await kept.retention.run_once()
        assert (cleared.archived, cleared.deleted, kept.archived) == (0, 1, ["a"])


async def test_an_archive_that_cannot_be_written_keeps_everything(
    redis_url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "manifest.json").write_text(json.dumps({"schema": "of something else"}))
    async with AsyncExitStack() as stack:
        kept = await keeper(stack, redis_url, tmp_path)
        await kept.service.finished("a")
        await kept.ack_all()
        running_on = asyncio.create_task(kept.retention.run())

        async def failed_twice() -> bool:
            return caplog.text.count("the archive cannot be written") == 2

        await until(failed_twice)
        assert not running_on.done() and await kept.listed() == {"a"}
        running_on.cancel()


class Losing(RetentionStore):
    """Its lock goes to another process after it was held so many times."""

    held = 0

    async def lock(self, owner: str, seconds: float) -> bool:
        self.held -= 1
        return self.held >= 0 and await super().lock(owner, seconds)


@pytest.mark.parametrize("held", range(5))
async def test_a_round_that_loses_its_lock_ends_and_the_next_one_goes_on(redis_url: str, tmp_path: Path, held: int) -> None:
    async with AsyncExitStack() as stack:
        kept = await keeper(stack, redis_url, tmp_path)
        for name in ("a", "b"):
            await kept.service.finished(name)
        await kept.ack_all()
        store = Losing(kept.connection)
        store.held = held
        assert (await Retention(kept.service.services, store).run_once()).deleted == (1 if held == 4 else 0)
        await kept.retention.run_once()
        assert (kept.archived, await kept.listed()) == (["a", "b"], set())


async def metric(kept: Keeper, line: str) -> float | None:
    """The value behind this name and its labels, None where it is not shown."""
    page = (await kept.service.admin.get("/metrics")).text
    found = [each.rpartition(" ")[2] for each in page.splitlines() if each.rpartition(" ")[0] == line]
    return float(found[0]) if found else None


async def test_what_is_archived_and_deleted_is_counted(redis_url: str, tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        kept = await keeper(stack, redis_url, tmp_path)
        for name in ("a", "b", "c"):
            await kept.service.finished(name)
        await kept.ack_all()
        await kept.retention.run_once()
        assert await metric(kept, 'verbatim_retained_sessions_total{step="archived"}') == 3
        assert await metric(kept, 'verbatim_retained_sessions_total{step="deleted"}') == 3


async def test_a_round_that_archives_nothing_counts_nothing(redis_url: str, tmp_path: Path) -> None:
    """It lost its lock when the sessions were read, before their part was written."""
    async with AsyncExitStack() as stack:
        kept = await keeper(stack, redis_url, tmp_path)
        await kept.service.finished("a")
        await kept.ack_all()
        store = Losing(kept.connection)
        store.held = 1
        assert (await Retention(kept.service.services, store).run_once()).archived == 0
        assert await metric(kept, 'verbatim_retained_sessions_total{step="archived"}') is None


async def test_the_age_of_the_last_look_grows_while_the_archive_cannot_be_written(redis_url: str, tmp_path: Path) -> None:
    age = 'verbatim_sweep_age_seconds{sweep="retention"}'
    async with AsyncExitStack() as stack:
        kept = await keeper(stack, redis_url, tmp_path)
        assert await metric(kept, age) is None, "it has not begun"
        await kept.service.finished("a")
        await kept.ack_all()
        (tmp_path / "manifest.json").write_text(json.dumps({"schema": "of something else"}))

        async def look_seconds() -> float:
            return await metric(kept, age) or 0.0

        async def grown() -> bool:
            return await look_seconds() > 0.2

        async def fallen() -> bool:
            return await kept.nothing_is_left() and await look_seconds() < before

        began = time.monotonic()
        running_on = asyncio.create_task(kept.retention.run())
        await until(grown)
        before = await look_seconds()
        assert before <= time.monotonic() - began
        (tmp_path / "manifest.json").unlink()
        await until(fallen)
        running_on.cancel()


async def test_nothing_is_done_while_another_process_is_at_it(redis_url: str, tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        kept = await keeper(stack, redis_url, tmp_path)
        await kept.service.finished("a")
        await kept.ack_all()
        assert await RetentionStore(kept.connection).lock("another process", 60)
        assert (await kept.retention.run_once()).deleted == 0
        assert await kept.listed() == {"a"} and not kept.wrote


async def test_the_store_tells_what_holds_a_session_and_its_size(store: Store) -> None:
    """On a plain Redis and on a cluster."""
    retention = RetentionStore(store.connection)
    assert await store.delivery.load_standings(["a", "b"]) == ["none", "none"]
    await store.delivery.announce("a", None, 1.0)
    assert await store.delivery.load_standings(["a", "b"]) == ["announced", "none"]
    assert await retention.measure_memory() > 100_000
    assert await retention.measure_session("a") == 0
    assert await retention.lock("x", 5) and not await retention.lock("y", 5)
    await retention.unlock("x")
    assert await retention.lock("y", 5)


async def test_the_memory_of_a_cluster_is_that_of_all_its_servers(shared_redis: SharedRedis) -> None:
    """Only one server was asked: a cluster of three kept three times what `bytes` allows."""
    cluster = shared_redis.cluster
    cluster.flushall()
    store = Store.at(cluster.url, timeout_seconds=60.0)
    each = [used_memory(server) for server in cluster.primaries]
    assert await RetentionStore(store.connection).measure_memory() > 0.9 * sum(each) > 1.5 * max(each)
    await store.connection.close()


def used_memory(server: RedisServer) -> int:
    with server.client() as client:
        return int(client.info("memory")["used_memory"])


async def test_a_look_that_failed_is_tried_again(redis_url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with AsyncExitStack() as stack:
        kept = await keeper(stack, redis_url, tmp_path)
        await kept.service.finished("a")
        await kept.ack_all()
        info = await kept.connection.execute("HGET", keys.state("a"), "info")
        await kept.connection.execute("HSET", keys.state("a"), "info", b"of no build")
        running_on = asyncio.create_task(kept.retention.run())

        async def failed() -> bool:
            return "retention failed" in caplog.text

        await until(failed)
        await kept.connection.execute("HSET", keys.state("a"), "info", info)
        await until(kept.nothing_is_left)
        running_on.cancel()
        assert kept.archived == ["a"]


async def test_a_lost_store_is_waited_for(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        kept = await keeper(stack, "redis://127.0.0.1:1", tmp_path)
        with pytest.raises(StoreUnavailable):
            await kept.retention.run_once()


def test_a_service_with_retention_archives_by_itself(redis_server: RedisServer, redis_url: str, tmp_path: Path) -> None:
    variables: dict[str, Any] = {"VERBATIM_RETENTION": json.dumps({"archive_dir": str(tmp_path / "archive"), "seconds": 0.1})}
    with (
        ScriptedEngine("qwen3") as engine,
        Serving("--engine", engine.url, "--redis", redis_url, data_dir=tmp_path / "data", **variables) as serving,
    ):
        created = serving.request("POST", "/sessions", json={"session_id": "a"})
        body = {"model": "policy", "messages": [{"role": "user", "content": "hello"}]}
        key = created.json()["api_key"]
        assert serving.request("POST", "/s/a/v1/chat/completions", key, json=body).status_code == 200
        assert serving.request("POST", "/sessions/a/close", json={"status": "completed"}).status_code == 200
        wait_until(lambda: serving.request("GET", "/sessions/a").status_code == 404, 120, "the session is gone")
        (session,) = ArchiveReader(tmp_path / "archive").sessions()
        assert (session.state["session_id"], len(session.records)) == ("a", 1)
