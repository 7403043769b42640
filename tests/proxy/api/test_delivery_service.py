"""Leases over HTTP: waiting that costs the store nothing, fair shares, marks, large batches, back-pressure. On a real Redis."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Any

import pytest

from proxy.api.admission import reclaim_places
from proxy.settings import Settings
from proxy.store.groups import GroupDefaults
from proxy.store.service import WeightState
from reconstruct.codec import decode, encode
from reconstruct.spans import Span
from tests.proxy.api.test_control_api import Service, running, said
from tests.support.service.redis_server import RedisServer, Store
from tests.support.service.running_service import ADMIN, TRAINER, RunningService, hanging_up, wait_until
from tests.support.sessions.recorded_calls import record
from trainer_client import TrainerClient

NO_ENGINE = "http://127.0.0.1:9"
ALL_USABLE = GroupDefaults("require_all")


async def finish(url: str, service: RunningService, *session_ids: str, sampled: int = 3, **fields: Any) -> None:
    """Sessions of one call each, closed with reward 1; each a group of its own unless `fields` say otherwise."""
    store = Store.at(url)
    for session_id in session_ids:
        created = await asyncio.to_thread(service.request, "POST", "/sessions", json={"session_id": session_id, **fields})
        assert created.status_code == 201, created.text
        made = record(f"{session_id}-c", session_id, prompt=[1, 2], sampled=[7] * sampled)
        await store.sessions.commit(session_id, f"{session_id}-c", {f"{session_id}-c": made})
        body = {"status": "completed", "reward": 1.0}
        closed = await asyncio.to_thread(service.request, "POST", f"/sessions/{session_id}/close", json=body)
        assert closed.status_code == 200, closed.text
    await store.connection.close()


def finished(url: str, service: RunningService, *session_ids: str, **fields: Any) -> None:
    asyncio.run(finish(url, service, *session_ids, **fields))


def calls_of(server: RedisServer, command: str | None = None) -> int:
    """How often the server ran a command, or any, also from within scripts."""
    with server.client() as client:
        stats: dict[str, Any] = client.info("commandstats")
    return sum(each["calls"] for name, each in stats.items() if command in (None, name.removeprefix("cmdstat_")))


async def test_waiting_trainers_cost_the_store_next_to_nothing(redis_url: str, redis_server: RedisServer) -> None:
    """Three waiting requests at two processes: one blocking read each, and a look by themselves every few seconds."""
    async with running(redis_url) as one, running(redis_url) as two:
        places = {"a": one, "b": one, "c": two}
        waiting = [asyncio.create_task(at.lease(wait_seconds=60, consumer=name)) for name, at in places.items()]
        while await claimed(redis_url) != set(places) or reading(redis_server) < 2:
            await asyncio.sleep(0.01)
        asked, commands, reads = calls_of(redis_server, "evalsha"), calls_of(redis_server), calls_of(redis_server, "xread")
        await asyncio.sleep(1.2)
        assert calls_of(redis_server, "evalsha") - asked <= 8, "asking 4 times a second would be 14"
        assert calls_of(redis_server) - commands <= 75, "with what the scripts do"
        assert calls_of(redis_server, "xread") - reads <= 4
        assert not any(task.done() for task in waiting)
        await one.finished("s0")
        await one.finished("s1")
        await one.finished("s2")
        batches = await asyncio.wait_for(asyncio.gather(*waiting), 60)
    assert sorted(batch["groups"][0]["group_id"] for batch in batches if batch) == ["s0", "s1", "s2"]


def reading(server: RedisServer) -> int:
    """How many connections wait for news."""
    with server.client() as client:
        return int(client.info("clients")["blocked_clients"])


async def test_a_waiting_lease_whose_news_were_lost_looks_by_itself(
    service: Service, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def deaf(self: Any) -> None:
        await asyncio.sleep(3600)

    monkeypatch.setattr("proxy.api.batches.RECHECK_SECONDS", 0.3)
    monkeypatch.setattr("proxy.store.arrivals.Arrivals._read", deaf)
    waiting = asyncio.create_task(service.lease(wait_seconds=600, consumer="deaf"))
    while await claimed(redis_url) != {"deaf"}:
        await asyncio.sleep(0.01)
    await service.finished("s0")
    assert await asyncio.wait_for(waiting, 60) is not None


def test_who_hangs_up_while_waiting_leaves_its_place_and_loses_no_group(redis_url: str) -> None:
    with RunningService(NO_ENGINE, redis_url) as service:
        body = {"wait_seconds": 3600, "consumer": "gone", "lease_seconds": 3600}
        with hanging_up(f"{service.url}/batches/lease", body, TRAINER):
            wait_until(lambda: claims(redis_url) == {"gone"}, 120, "it waits")
        wait_until(lambda: claims(redis_url) == set(), 120, "its claim is gone")
        finished(redis_url, service, "s0")
        with TrainerClient(service.url, TRAINER, consumer="here") as client:
            batch = client.lease(wait_seconds=30)
            assert batch is not None
            batch.ack()


def claims(url: str) -> set[str]:
    return asyncio.run(claimed(url))


async def claimed(url: str) -> set[str]:
    """The consumers that wait."""
    store = Store.at(url)
    found = await store.connection.execute("HKEYS", "vb:{delivery}:claims")
    await store.connection.close()
    return {name.decode() for name in found}


async def test_stale_groups_are_dropped_and_counted_where_that_is_set(redis_url: str) -> None:
    async with running(redis_url, group={"stale": "drop"}) as service:
        await service.finished("old", version=1)
        await service.services.weights.advance(WeightState(5))
        assert await service.lease(max_staleness=1) is None
        assert await service.lease() is None
        page = (await service.admin.get("/metrics")).text
    assert 'verbatim_groups_total{state="stale_dropped"} 1.0' in page
    assert 'verbatim_store_groups{state="dropped"} 1.0' in page


def test_the_trainers_client_knows_a_stale_group(redis_url: str) -> None:
    with RunningService(NO_ENGINE, redis_url, group={"stale": "flag"}) as service:
        finished(redis_url, service, "s0")
        asyncio.run(advance(redis_url, 5))
        with TrainerClient(service.url, TRAINER) as client, client.lease(max_staleness=1) as batch:
            assert [group.stale for group in batch.groups] == [True]
            assert batch.staleness.tolist() == [5]


async def advance(url: str, version: int) -> None:
    store = Store.at(url)
    await store.weights.advance(WeightState(version))
    await store.connection.close()


async def test_the_rollout_side_waits_while_too_many_groups_are_undelivered(redis_url: str) -> None:
    async with running(redis_url, admission={"undelivered_groups": 2}) as service:
        group: dict[str, Any] = {"group_id": "g", "group_size": 2}
        await service.finished("a1", **group)
        await service.session("b", 7)
        refused = await service.admin.post("/sessions", json={"session_id": "c"})
        assert said(refused)[:2] == (429, "backpressure")
        assert int(refused.headers["retry-after"]) >= 1
        assert (await service.admin.get("/sessions/c")).status_code == 404
        await service.finished("a2", **group)
        page = (await service.admin.get("/metrics")).text
        assert "verbatim_backpressure_total 1.0" in page
        assert 'verbatim_store_groups{state="ready"} 1.0' in page
        assert 'verbatim_store_groups{state="opened"} 1.0' in page
        assert await service.lease() is not None
        await service.session("c", 7)


async def test_a_session_id_that_is_taken_does_not_cost_its_group_its_place(redis_url: str) -> None:
    async with running(redis_url, admission={"undelivered_groups": 1}) as service:
        await service.session("s0", group_id="g", group_size=2)
        assert said(await service.admin.post("/sessions", json={"session_id": "s0", "group_id": "g"}))[0] == 409
        assert said(await service.admin.post("/sessions", json={"session_id": "other"}))[0] == 429
        await service.session("s1", group_id="g", group_size=2)
        assert (await service.admin.delete("/sessions/s0")).status_code == 204
        assert (await service.admin.delete("/sessions/s1")).status_code == 204
        await service.session("other")


async def test_a_place_whose_process_died_before_the_session_was_there_is_free_again(redis_url: str) -> None:
    async with running(redis_url, admission={"undelivered_groups": 2}) as service:
        now = time.time()
        for session_id in ("died", "opened"):
            assert (await service.services.delivery.admit(f"s:{session_id}", session_id, 2, ALL_USABLE, now)).noted
        await service.session("opened", 7)
        assert said(await service.admin.post("/sessions", json={"session_id": "next"}))[0] == 429
        assert await reclaim_places(service.services) == 0, "it may be on its way"
        assert await reclaim_places(service.services, older_than_seconds=0.0) == 1
        await service.session("next", 7)
        assert said(await service.admin.post("/sessions", json={"session_id": "another"}))[0] == 429
        assert await service.services.delivery.find_unconfirmed(now) == [], "what is there is not looked for again"


async def admit_long_ago(url: str, session_id: str) -> None:
    store = Store.at(url)
    assert (await store.delivery.admit(f"s:{session_id}", session_id, 1, ALL_USABLE, time.time() - 60)).noted
    await store.connection.close()


@pytest.fixture
def swept_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proxy.api.closing.SWEEP_SECONDS", 0.2)


def test_the_running_service_looks_for_places_that_nobody_holds(redis_url: str, swept_often: None) -> None:
    with RunningService(NO_ENGINE, redis_url, admission={"undelivered_groups": 1}, session_idle_seconds=3600) as service:
        asyncio.run(admit_long_ago(redis_url, "died"))
        assert service.request("POST", "/sessions", json={}).status_code == 429
        wait_until(lambda: service.request("POST", "/sessions", json={}).status_code == 201, 60, "its place is free")


def test_a_group_that_nobody_completes_is_given_up_by_the_running_service(redis_url: str, swept_often: None) -> None:
    with RunningService(NO_ENGINE, redis_url, group={"timeout_seconds": 0.2}) as service:
        finished(redis_url, service, "s0", group_id="g", group_size=2)

        def dead() -> list[Any]:
            letters: list[Any] = service.request("GET", "/batches/dead").json()["dead_letters"]
            return letters

        wait_until(lambda: bool(dead()), 60, "the group was given up")
        assert dead()[0]["reason"].startswith("incomplete: ")


@pytest.fixture
async def service(redis_url: str) -> Any:
    async with running(redis_url) as made:
        yield made


# Freshness.


async def test_no_group_is_begun_that_would_be_too_old_when_it_is_leased(redis_url: str) -> None:
    """Two groups a version, at most one version behind, two proxies: four groups are let in, and two more per push."""
    rules: dict[str, Any] = {"admission": {"groups_per_version": 2, "staleness": 1}}
    async with running(redis_url, **rules) as one, running(redis_url, **rules) as two:
        for number in range(4):
            await (one, two)[number % 2].finished(f"s{number}")
        for service in (one, two):
            refused = await service.admin.post("/sessions", json={"session_id": "more"})
            assert said(refused)[:2] == (429, "backpressure")
            assert "2 versions behind" in refused.json()["error"]["message"]
            assert int(refused.headers["retry-after"]) >= 1
        batch = await one.lease(max_groups=2)
        assert batch is not None
        assert said(await two.admin.post("/sessions", json={"session_id": "more"}))[0] == 429, (
            "those leased are not in the weights"
        )
        await one.trainer.post(f"/batches/{batch['lease_id']}/ack")
        page = (await two.admin.get("/metrics")).text
        assert "verbatim_admission_versions_ahead 2.0" in page
        assert 'verbatim_groups_total{state="refused_stale"} 3.0' in page
        await one.services.weights.advance(WeightState(1))
        assert "verbatim_admission_versions_ahead 1.0" in (await one.admin.get("/metrics")).text
        await two.session("more", 7)
        await one.session("still", 7)
        assert said(await one.admin.post("/sessions", json={"session_id": "too"}))[0] == 429


async def test_a_session_is_held_until_it_may_be_opened(
    redis_url: str, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("proxy.api.admission.RETRY_SECONDS", 0.02)

    async def asked_again(times: int = 5) -> None:
        goal = calls_of(redis_server, "evalsha") + times
        while calls_of(redis_server, "evalsha") < goal:
            await asyncio.sleep(0.01)

    rules: dict[str, Any] = {"admission": {"groups_per_version": 1, "staleness": 0, "hold_seconds": 600}}
    async with running(redis_url, **rules) as service:
        await service.finished("s0")
        held = asyncio.create_task(service.admin.post("/sessions", json={"session_id": "s1"}))
        batch = await service.lease(wait_seconds=60)
        assert batch is not None
        await asked_again()
        await service.services.weights.advance(WeightState(1))
        await asked_again()
        assert not held.done(), "under a lease that is not over it is not known whether the new weights hold the group"
        await service.trainer.post(f"/batches/{batch['lease_id']}/ack")
        assert (await asyncio.wait_for(held, 60)).status_code == 201
        assert (await service.services.delivery.load_totals())["refused_stale"] == 1, "counted once, however long it was held"


def test_a_held_session_whose_caller_hung_up_is_not_opened(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proxy.api.admission.RETRY_SECONDS", 0.05)
    rules: dict[str, Any] = {"admission": {"groups_per_version": 1, "staleness": 0, "hold_seconds": 600}}
    with RunningService(NO_ENGINE, redis_url, **rules) as service:
        finished(redis_url, service, "s0")

        def page_has(line: str) -> bool:
            return line in service.request("GET", "/metrics").text

        with hanging_up(f"{service.url}/sessions", {"session_id": "s1"}, ADMIN):
            wait_until(lambda: page_has('state="refused_stale"} 1.0'), 60, "the session was held")
        wait_until(lambda: page_has("verbatim_backpressure_total 1.0"), 60, "the service noticed that its caller hung up")
        assert service.request("GET", "/sessions/s1").status_code == 404


@pytest.mark.parametrize("half", ["staleness", "groups_per_version"])
def test_a_staleness_without_the_size_of_a_version_is_refused(half: str) -> None:
    with pytest.raises(ValueError, match=r"admission\.groups_per_version"):
        Settings.model_validate({"admission": {half: 1}})


async def test_a_rollout_that_went_on_across_versions_is_as_old_as_its_oldest_span(redis_url: str) -> None:
    """Sampled under 3, then 5. Under version 5 it is two versions behind, not none."""
    async with running(redis_url) as service:
        await service.session("s0")
        call = decode(record("c1", "s0", prompt=[1, 2], sampled=[7, 8, 9]))
        spans = (Span(3, 0, 1), Span(5, 1, 3))
        made = replace(call, node=replace(call.node, spans=spans))
        await service.services.sessions.commit("s0", "c1", {"c1": encode(made)})
        service.services.sessions.note_answered("s0", ["c1"], delivered=True)
        await service.close("s0", "completed", reward=1.0)
        await service.services.weights.advance(WeightState(5))
        assert await service.lease(max_staleness=1) is None
        batch = await service.lease(max_staleness=2)
    assert batch is not None
    assert batch["groups"][0]["trajectories"][0]["weight_versions"] == [[3, 2, 3], [5, 3, 5]]
