"""The control side over HTTP, on a real Redis. Calls are recorded into the store directly; the engines are scripted."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, fields
from typing import Any

import httpx
import msgpack
import numpy as np
import pytest
from fastapi import FastAPI
from pydantic import SecretStr

from contract.sessions import NewSession, OpeningFields, SettledFields
from proxy.api import batches
from proxy.api.closing import delete_session, finish_announced, reward_session
from proxy.api.requests import install_error_handlers
from proxy.app import build_control_router, build_services
from proxy.auth import key_opens
from proxy.errors import EngineUnavailable
from proxy.services import Services
from proxy.settings import GivenToken, Settings
from proxy.store import keys
from proxy.store.connection import StoreConnection
from proxy.store.delivery import CloseRequest
from proxy.store.keys import SCHEMA, pack
from proxy.store.service import WeightState
from proxy.store.states import Intent
from reconstruct.roles import RoleRule
from tests.support.sessions.recorded_calls import record


@dataclass
class ScriptedPool:
    """Says whether an engine serves."""

    answer: tuple[bool, str] = (True, "")
    policy_names: set[str] = field(default_factory=set)
    replicas: list[Any] = field(default_factory=list)

    def ready(self) -> tuple[bool, str]:
        return self.answer

    def release(self, session_id: str) -> None:
        pass


@dataclass
class ScriptedUpdater:
    """Takes pushes and remembers them."""

    pushes: list[tuple[int, str, str, str]] = field(default_factory=list)
    failure: Exception | None = None

    async def push(self, version: int, path: str, kind: str, mode: str, *, policy: str, **_: Any) -> dict[str, Any]:
        assert policy == ""
        if self.failure is not None:
            raise self.failure
        self.pushes.append((version, path, kind, mode))
        return {"applied": True, "version": version, "replicas": {}}

    async def status(self) -> dict[str, Any]:
        return {"current": {"version": 3}}


@dataclass
class Service:
    services: Services
    admin: httpx.AsyncClient
    trainer: httpx.AsyncClient
    pool: ScriptedPool
    updater: ScriptedUpdater

    async def session(self, session_id: str, *sampled: int, version: int = 0, **fields: Any) -> str:
        """A session with one call of prompt 1, 2 that sampled these ids, and whose reply was delivered; its key."""
        created = await self.admin.post("/sessions", json={"session_id": session_id, **fields})
        assert created.status_code == 201, created.text
        if sampled:
            made = record(f"{session_id}-c1", session_id, prompt=[1, 2], sampled=list(sampled), version=version)
            await self.services.sessions.commit(session_id, f"{session_id}-c1", {f"{session_id}-c1": made})
            self.services.sessions.note_answered(session_id, [f"{session_id}-c1"], delivered=True)
        key: str = created.json()["api_key"]
        return key

    async def close(self, session_id: str, status: str = "completed", **fields: Any) -> httpx.Response:
        return await self.admin.post(f"/sessions/{session_id}/close", json={"status": status, **fields})

    async def finished(self, session_id: str, *sampled: int, reward: float = 1.0, **fields: Any) -> None:
        await self.session(session_id, *(sampled or (7, 8, 9)), **fields)
        closed = await self.close(session_id, reward=reward)
        assert closed.status_code == 200, closed.text

    async def lease(self, **body: Any) -> dict[str, Any] | None:
        response = await self.trainer.post("/batches/lease", json=body)
        assert response.status_code in (200, 204), response.text
        return response.json() if response.status_code == 200 else None


@asynccontextmanager
async def running(url: str, **options: Any) -> AsyncIterator[Service]:
    settings = Settings(
        admin_token=GivenToken(token=SecretStr("admin")), trainer_token=GivenToken(token=SecretStr("trainer")), **options
    )
    connection = StoreConnection(url)
    services = build_services(settings, connection)
    pool, updater = ScriptedPool(), ScriptedUpdater()
    services.pool, services.updater = pool, updater  # type: ignore[assignment]
    app = FastAPI()
    app.state.services = services
    install_error_handlers(app)
    app.routes.extend(build_control_router().routes)

    def client(token: str) -> httpx.AsyncClient:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        headers = {"authorization": f"Bearer {token}"}
        return httpx.AsyncClient(transport=transport, base_url="http://service:8700", headers=headers)

    async with client("admin") as admin, client("trainer") as trainer:
        try:
            yield Service(services, admin, trainer, pool, updater)
        finally:
            await connection.close()


@pytest.fixture
async def service(redis_url: str) -> AsyncIterator[Service]:
    async with running(redis_url, scorers={"teacher": {}, "later": {"at": "demand"}}) as made:
        yield made


def said(response: httpx.Response) -> tuple[int, str, str]:
    error = response.json()["error"]
    return response.status_code, error["code"], error["message"]


EACH_FIELD: dict[str, Any] = {
    **{
        "session_id": "s1",
        "task_id": "t",
        "group_id": "g",
        "group_size": 3,
        "metadata": {"a": [1]},
        "project": "p",
        "trained": True,
    },
    **{"sampling": {"seed": 7, "top_p": 0.5}, "echo_policy": "minted", "role_rules": [{"role": "side", "text": "title"}]},
    **{"group_policy": "allow_partial", "group_minimum": 2, "zero_variance": "drop", "max_quarantined_share": 0.25},
    **{"group_replacements": False, "max_calls": 3, "max_completion_tokens": 40, "max_total_tokens": 500, "replay": None},
    "run": "grpo-3",
    "scores": ["teacher"],
    "lookahead": {"n": 2, "choose": "http", "model": None, "url": "http://judge/", "roles": ["main"], "timeout_seconds": 5.0},
}


async def test_every_field_that_a_session_is_opened_with_is_stored_and_is_shown_unless_it_is_its_groups(
    service: Service,
) -> None:
    assert EACH_FIELD.keys() == {each.name for each in fields(NewSession)}
    assert (await service.admin.post("/sessions", json=EACH_FIELD)).status_code == 201
    shown = (await service.admin.get("/sessions/s1")).json()
    hidden = {each.name for each in fields(OpeningFields)} - {each.name for each in fields(SettledFields)}
    assert {name: shown[name] for name in EACH_FIELD.keys() - hidden} == {
        name: value for name, value in EACH_FIELD.items() if name not in hidden
    }
    assert not hidden & shown.keys()
    stored = await service.services.sessions.load("s1")
    assert stored is not None
    assert {name: getattr(stored.info, name) for name in hidden - {"role_rules"}} == {
        name: EACH_FIELD[name] for name in hidden - {"role_rules"}
    }
    assert stored.info.role_rules == (RoleRule("side", text="title"),)


async def test_a_new_session_answers_with_its_key_and_the_urls_for_each_dialect(service: Service) -> None:
    response = await service.admin.post("/sessions", json={"session_id": "s1", "metadata": {"a": 1}, "sampling": {"seed": 7}})
    assert response.status_code == 201
    body = response.json()
    assert body["session_id"] == "s1"
    assert body["base_urls"] == {
        "openai": "http://service:8700/s/s1/v1",
        "anthropic": "http://service:8700/s/s1",
        "gemini": "http://service:8700/s/s1",
    }
    state = await service.services.sessions.load("s1")
    assert state is not None
    assert key_opens(body["api_key"], state.info.key_hash)
    assert (state.info.sampling, state.info.metadata) == ({"seed": 7}, {"a": 1})


async def test_base_urls_use_the_public_url_when_there_is_one(redis_url: str) -> None:
    async with running(redis_url, public_url="https://verbatim.example/rl/") as service:
        body = (await service.admin.post("/sessions")).json()
    assert body["base_urls"]["openai"] == f"https://verbatim.example/rl/s/{body['session_id']}/v1"


async def test_a_session_id_is_taken_once(service: Service) -> None:
    await service.session("s1")
    status, code, message = said(await service.admin.post("/sessions", json={"session_id": "s1"}))
    assert (status, code) == (409, "conflict")
    assert "s1" in message


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (b"{", "JSON"),
        (b'{"session_id": "a/b"}', "session_id"),
        (b'{"session_id": ".."}', "session_id"),
        (b'{"sesion_id": "a"}', "sesion_id"),
        (b'{"group_size": "4", "group_id": "g"}', "group_size"),
        (b'{"group_size": 0, "group_id": "g"}', "group_size"),
        (b'{"group_size": 2}', "group_size"),
        (b'{"sampling": {"temperature": -1}}', "sampling.temperature"),
        (b'{"sampling": {"stop": ["x"]}}', "sampling.stop"),
        (b'{"metadata": {"a": 1%s}}' % (b"0" * 30), "metadata"),
        (b"[1]", "object"),
        (b'{"metadata": {"a": "\xff"}}', "JSON"),
    ],
)
async def test_a_body_that_breaks_a_rule_is_a_400_that_names_it(service: Service, body: bytes, problem: str) -> None:
    status, code, message = said(await service.admin.post("/sessions", content=body))
    assert (status, code) == (400, "bad_request")
    assert problem in message, message


async def test_an_unknown_session_path_and_method_answer_in_the_same_shape(service: Service) -> None:
    for method, path in (
        ("GET", "/sessions/nope"),
        ("DELETE", "/sessions/nope"),
        ("GET", "/sessions/nope/calls"),
        ("GET", "/sessions/nope/trajectories"),
        ("GET", "/nowhere"),
    ):
        assert said(await service.admin.request(method, path))[:2] == (404, "not_found"), path
    assert said(await service.admin.post("/sessions/nope/reward", json={"reward": 1}))[:2] == (404, "not_found")
    assert said(await service.close("nope"))[:2] == (404, "not_found")
    assert said(await service.admin.put("/sessions"))[:2] == (405, "method_not_allowed")
    assert await service.services.delivery.find_announced(time.time() + 60) == []


async def test_sessions_are_listed_newest_first_with_filters_and_a_cursor(service: Service) -> None:
    for i in range(5):
        await service.session(f"s{i}", group_id="g" if i < 2 else None)
    await service.close("s3", "failed", error="broke")
    page = (await service.admin.get("/sessions", params={"limit": 2})).json()
    assert [each["session_id"] for each in page["sessions"]] == ["s4", "s3"]
    rest = (await service.admin.get("/sessions", params={"cursor": page["cursor"]})).json()
    assert [each["session_id"] for each in rest["sessions"]] == ["s2", "s1", "s0"]
    assert rest["cursor"] is None
    group = (await service.admin.get("/sessions", params={"group_id": "g"})).json()
    assert [each["session_id"] for each in group["sessions"]] == ["s1", "s0"]
    (failed,) = (await service.admin.get("/sessions", params={"status": "failed"})).json()["sessions"]
    assert (failed["session_id"], failed["error"]) == ("s3", "broke")
    assert said(await service.admin.get("/sessions", params={"status": "gone"}))[0] == 400
    assert said(await service.admin.get("/sessions", params={"limit": 0}))[0] == 400


async def test_calls_and_trajectories_come_as_json_msgpack_and_packed(service: Service) -> None:
    await service.session("s1", 7, 8, 9, version=4, task_id="t")
    calls, rows = "/sessions/s1/calls", "/sessions/s1/trajectories"
    plain = (await service.admin.get(calls)).json()
    (call,) = plain["calls"]
    assert plain["cursor"] is None
    assert (call["call_id"], call["prompt_ids"], call["completion_ids"]) == ("s1-c1", [1, 2], [7, 8, 9])
    assert (call["logprobs"], call["weight_versions"], call["delivered"]) == ([-0.5] * 3, [[4, 0, 3]], True)

    answer = (await service.admin.get(rows)).json()
    assert answer["accounting"] == {
        "sampled_tokens": 3,
        "exported_tokens": 3,
        "quarantined": [],
        "dangling_calls": 0,
        "complete": True,
        "replayed_tokens": 0,
    }
    (row,) = answer["trajectories"]
    assert (row["token_ids"], row["loss_mask"]) == ([1, 2, 7, 8, 9], [0, 0, 1, 1, 1])
    assert (row["logprobs"], row["weight_versions"], row["task_id"]) == ([0, 0, -0.5, -0.5, -0.5], [[4, 2, 5]], "t")

    same = await service.admin.get(rows, headers={"accept": "application/msgpack"})
    assert same.headers["content-type"] == "application/msgpack"
    assert msgpack.unpackb(same.content) == answer
    packed = await service.admin.get(rows, headers={"accept": "application/msgpack;arrays=packed"})
    assert packed.headers["content-type"] == "application/msgpack;arrays=packed"
    (row,) = msgpack.unpackb(packed.content)["trajectories"]
    assert np.frombuffer(row["token_ids"], "<i4").tolist() == [1, 2, 7, 8, 9]
    assert np.frombuffer(row["loss_mask"], "i1").tolist() == [0, 0, 1, 1, 1]
    assert np.frombuffer(row["logprobs"], "<f4").tolist() == [0, 0, -0.5, -0.5, -0.5]
    assert said(await service.admin.get(rows, params={"builder": "best"}))[0] == 400
    assert said(await service.admin.get(calls, params={"cursor": "x"}))[0] == 400


async def test_a_closed_session_takes_no_other_status(service: Service) -> None:
    await service.session("s1", 7)
    first = await service.close("s1", reward=0.5)
    assert (first.json()["status"], first.json()["reward"]) == ("completed", 0.5)
    assert (await service.close("s1", reward=0.5)).json() == first.json()
    assert said(await service.close("s1", "failed"))[:2] == (409, "conflict")
    assert said(await service.close("s1", "open"))[0] == 400


async def test_a_lease_carries_the_rows_of_a_group_with_the_version_and_is_acknowledged(service: Service) -> None:
    for i, reward in enumerate((0.0, 1.0)):
        await service.finished(f"s{i}", 7, 8, reward=reward, version=5, group_id="g", group_size=2, task_id="t")
    await service.services.weights.advance(WeightState(6))
    before = time.time()
    batch = await service.lease(max_groups=4, lease_seconds=120, consumer="me")
    assert batch is not None
    assert set(batch) == {"lease_id", "expires_at", "weight_version", "weight_versions", "groups"}
    assert (batch["weight_version"], batch["weight_versions"]) == (6, {"": 6})
    assert before + 119 < batch["expires_at"] < time.time() + 121
    (group,) = batch["groups"]
    assert group["group_id"] == "g"
    assert [(row["session_id"], row["reward"]) for row in group["trajectories"]] == [("s0", 0.0), ("s1", 1.0)]
    shown = (await service.admin.get("/sessions/s0/trajectories")).json()["trajectories"]
    assert group["trajectories"][0] == shown[0], "the same row, with the same trajectory_id, as the session shows"
    acked = await service.trainer.post(f"/batches/{batch['lease_id']}/ack")
    assert acked.json() == {"lease_id": batch["lease_id"], "groups": ["g"]}
    assert await service.lease() is None


async def test_a_lease_without_a_body_takes_one_group(service: Service) -> None:
    await service.finished("s0")
    await service.finished("s1")
    response = await service.trainer.post("/batches/lease")
    assert [group["group_id"] for group in response.json()["groups"]] == ["s0"]


async def test_packed_leases_carry_the_same_rows(service: Service) -> None:
    await service.finished("s0", 7, 8)
    headers = {"accept": "application/msgpack;arrays=packed"}
    response = await service.trainer.post("/batches/lease", json={}, headers=headers)
    (row,) = msgpack.unpackb(response.content)["groups"][0]["trajectories"]
    assert np.frombuffer(row["token_ids"], "<i4").tolist() == [1, 2, 7, 8]


async def test_a_batch_given_back_or_expired_comes_again(service: Service) -> None:
    await service.finished("s0")
    first = await service.lease()
    assert first is not None
    assert (await service.trainer.post(f"/batches/{first['lease_id']}/nack")).json()["groups"] == ["s0"]
    second = await service.lease(lease_seconds=0.05)
    assert second is not None
    assert second["groups"] == first["groups"]
    third = await service.lease(wait_seconds=60)
    assert third is not None
    assert third["groups"] == first["groups"]
    assert said(await service.trainer.post(f"/batches/{second['lease_id']}/ack"))[:2] == (409, "conflict")
    longer = await service.trainer.post(f"/batches/{third['lease_id']}/extend", json={"lease_seconds": 1000})
    assert longer.json()["expires_at"] > third["expires_at"]
    assert said(await service.trainer.post("/batches/nope/extend"))[:2] == (404, "not_found")


async def test_max_staleness_passes_over_rows_whose_oldest_token_is_too_old(service: Service) -> None:
    await service.finished("old", version=3)
    await service.finished("new", version=5)
    await service.services.weights.advance(WeightState(6))
    batch = await service.lease(max_groups=9, max_staleness=1)
    assert batch is not None and [group["group_id"] for group in batch["groups"]] == ["new"]
    assert (await service.trainer.get("/batches")).json()["groups"]["stale"] == 1
    batch = await service.lease(max_groups=9, max_staleness=3)
    assert batch is not None and [group["group_id"] for group in batch["groups"]] == ["old"]


async def test_a_waiting_lease_is_answered_as_soon_as_a_group_is_ready(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the process that filled it and by another one, long before either looks again by itself."""
    monkeypatch.setattr(batches, "RECHECK_SECONDS", 300.0)
    async with running(redis_url) as here, running(redis_url) as there:
        for name, service in (("s0", here), ("s1", there)):
            waiting = asyncio.create_task(service.lease(wait_seconds=300))
            await asyncio.sleep(0.1)
            assert not waiting.done()
            await here.finished(name)
            assert await asyncio.wait_for(waiting, 30) is not None


async def test_a_lease_waits_no_longer_than_asked(service: Service) -> None:
    started = time.monotonic()
    assert await service.lease(wait_seconds=0.3) is None
    assert 0.3 <= time.monotonic() - started < 30.0


async def test_a_completed_session_is_delivered_when_its_late_reward_arrives(service: Service) -> None:
    await service.session("s0", 7)
    await service.close("s0")
    assert await service.lease() is None
    state = await service.admin.post("/sessions/s0/reward", json={"reward": 0.25, "metadata": {"judge": "late"}})
    assert (state.json()["reward"], state.json()["reward_metadata"]) == (0.25, {"judge": "late"})
    batch = await service.lease()
    assert batch is not None
    assert batch["groups"][0]["trajectories"][0]["reward"] == 0.25
    assert said(await service.admin.post("/sessions/s0/reward", json={"reward": 1}))[:2] == (409, "conflict")


@pytest.mark.parametrize("body", [b'{"reward": NaN}', b'{"reward": "1"}', b'{"reward": null}', b"{}", b'{"reward": 1e999}'])
async def test_a_reward_is_a_finite_number(service: Service, body: bytes) -> None:
    await service.session("s0")
    assert said(await service.admin.post("/sessions/s0/reward", content=body))[0] == 400


async def test_a_session_that_failed_or_sampled_nothing_is_no_usable_member(redis_url: str) -> None:
    async with running(redis_url, group={"policy": "allow_partial", "minimum": 1}) as service:
        group: dict[str, Any] = {"group_id": "g", "group_size": 3}
        await service.finished("good", **group)
        await service.session("empty", **group)
        await service.close("empty", "timeout", reward=1.0)
        await service.session("failed", 7, **group)
        await service.close("failed", "failed", reward=1.0)
        batch = await service.lease()
    assert batch is not None
    assert [row["session_id"] for row in batch["groups"][0]["trajectories"]] == ["good"]


async def test_a_session_without_a_call_is_not_completed_and_stays_open(service: Service) -> None:
    """An agent with a wrong key ended at once, with a reward, and counted as one that did its work."""
    await service.session("s0")
    for reward in (None, 1.0):
        status, code, message = said(await service.close("s0", reward=reward))
        assert (status, code) == (409, "no_calls") and "close it as failed" in message
    state = (await service.admin.get("/sessions/s0")).json()
    assert (state["status"], state["reward"]) == ("open", None)
    assert (await service.close("s0", "failed", error="no_calls")).json()["status"] == "failed"


async def test_a_session_whose_only_call_is_in_flight_may_be_completed(service: Service) -> None:
    await service.session("s0")
    await service.services.sessions.begin("s0", 0, Intent("c1", None, b"", "a", 1.0))
    assert (await service.close("s0", reward=1.0)).json()["status"] == "completed"


async def test_a_session_named_like_a_group_stays_out_of_it(service: Service) -> None:
    await service.finished("g", reward=0.5)
    await service.finished("s1", group_id="g", group_size=2)
    batch = await service.lease(max_groups=9)
    assert batch is not None
    assert [[row["session_id"] for row in group["trajectories"]] for group in batch["groups"]] == [["g"]]


async def test_a_session_is_deleted_unless_a_trainer_holds_it(service: Service) -> None:
    await service.finished("s0")
    await service.finished("s1")
    batch = await service.lease()
    assert batch is not None
    assert said(await service.admin.delete("/sessions/s0"))[:2] == (409, "conflict")
    assert (await service.admin.delete("/sessions/s1")).status_code == 204
    assert said(await service.admin.get("/sessions/s1"))[0] == 404
    await service.trainer.post(f"/batches/{batch['lease_id']}/ack")
    assert (await service.admin.delete("/sessions/s0")).status_code == 204
    assert await service.lease() is None


async def test_a_group_that_this_build_cannot_read_goes_to_the_dead_letters_and_the_next_is_leased(
    service: Service, redis_url: str
) -> None:
    """A damaged value, or one of a newer build, used to fail every lease: the group was given back to the head of the line."""
    for name in ("broken", "newer", "good"):
        await service.finished(name)
    connection = StoreConnection(redis_url)
    await connection.execute("HSET", keys.intents("broken"), "c", b"\x93\x01")
    await connection.execute("HSET", keys.state("newer"), "info", pack((SCHEMA + 1, {})))
    await connection.close()
    batch = await service.lease(max_groups=3)
    assert batch is not None and [group["group_id"] for group in batch["groups"]] == ["good"]
    overview = (await service.trainer.get("/batches")).json()
    reasons = {letter["group_id"]: letter["reason"] for letter in overview["dead_letters"]}
    assert reasons.keys() == {"broken", "newer"}
    assert "cannot be read" in reasons["broken"] and f"has schema {SCHEMA + 1}" in reasons["newer"]


async def test_a_group_whose_session_vanished_goes_to_the_dead_letters_and_the_next_is_leased(service: Service) -> None:
    await service.finished("gone")
    await service.finished("good")
    await service.services.sessions.delete("gone")
    batch = await service.lease()
    assert batch is not None and [group["group_id"] for group in batch["groups"]] == ["good"]
    overview = (await service.trainer.get("/batches")).json()
    (letter,) = overview["dead_letters"]
    assert (letter["group_id"], letter["session_ids"], letter["reason"]) == ("gone", ["gone"], "session gone was deleted")
    assert overview["groups"]["dead"] == 1


async def test_groups_leased_for_a_caller_who_went_away_are_given_back(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    await service.finished("s0")
    reached, records = asyncio.Event(), service.services.sessions.load_records

    async def slow(session_id: str) -> Sequence[bytes]:
        reached.set()
        await asyncio.sleep(60)
        return await records(session_id)

    monkeypatch.setattr(service.services.sessions, "load_records", slow)
    asking = asyncio.create_task(service.lease())
    await reached.wait()
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    monkeypatch.undo()
    assert await service.lease(wait_seconds=60) is not None


async def close_until(service: Service, step: str, session_id: str) -> None:
    """What the store holds when a process dies in a close after the named step."""
    sessions, delivery = service.services.sessions, service.services.delivery
    await delivery.announce(session_id, CloseRequest("completed", 0.5, None), time.time())
    if step in ("begin_close", "close"):
        await sessions.begin_close(session_id)
    if step == "close":
        await sessions.close(session_id, "completed", 0.5, None, time.time())


@pytest.mark.parametrize("step", ["announce", "begin_close", "close"])
async def test_a_close_cut_short_at_any_step_is_finished_by_the_sweep(service: Service, step: str) -> None:
    await service.session("s0", 7)
    await close_until(service, step, "s0")
    assert await finish_announced(service.services, older_than_seconds=60) == 0, "a close still at work is left alone"
    assert await finish_announced(service.services, older_than_seconds=0) == 1
    assert await finish_announced(service.services, older_than_seconds=0) == 0
    batch = await service.lease(max_groups=9)
    assert batch is not None and len(batch["groups"]) == 1
    assert batch["groups"][0]["trajectories"][0]["reward"] == 0.5


@pytest.mark.parametrize("step", ["announce", "begin_close", "close"])
async def test_a_close_cut_short_may_be_repeated_by_its_caller(service: Service, step: str) -> None:
    await service.session("s0", 7)
    await close_until(service, step, "s0")
    assert (await service.close("s0", reward=0.5)).status_code == 200
    assert await finish_announced(service.services, older_than_seconds=0) == 0
    batch = await service.lease(max_groups=9)
    assert batch is not None and len(batch["groups"]) == 1


DELETE_STEPS = ("announce", "begin_close", "withdraw", "delete")


async def delete_until(service: Service, monkeypatch: pytest.MonkeyPatch, step: str, session_id: str) -> None:
    """What the store holds when a process dies in a delete after the named step: the next one never answers."""
    sessions, delivery = service.services.sessions, service.services.delivery
    following = {
        "announce": (sessions, "begin_close"),
        "begin_close": (delivery, "withdraw"),
        "withdraw": (sessions, "delete"),
        "delete": (delivery, "retract"),
    }
    reached = asyncio.Event()

    async def never(*given: object) -> None:
        reached.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(*following[step], never)
    deleting = asyncio.create_task(delete_session(service.services, session_id))
    await reached.wait()
    deleting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await deleting
    monkeypatch.undo()


@pytest.mark.parametrize("closed", [False, True])
@pytest.mark.parametrize("step", DELETE_STEPS)
async def test_a_delete_cut_short_at_any_step_is_finished_by_the_sweep(
    service: Service, monkeypatch: pytest.MonkeyPatch, step: str, closed: bool
) -> None:
    await (service.finished if closed else service.session)("s0", 7)
    await delete_until(service, monkeypatch, step, "s0")
    assert await finish_announced(service.services, older_than_seconds=60) == 0, "a delete still at work is left alone"
    assert await finish_announced(service.services, older_than_seconds=0) == 1
    assert await finish_announced(service.services, older_than_seconds=0) == 0
    assert (await service.admin.get("/sessions/s0")).status_code == 404
    assert (await service.admin.get("/sessions")).json()["sessions"] == []
    assert await service.lease() is None
    assert sum((await service.services.delivery.count_groups()).values()) == 0


@pytest.mark.parametrize(("inside", "interrupting"), [("delete", "reward"), ("reward", "delete")])
async def test_a_late_reward_does_not_bring_a_session_back_that_is_being_deleted(
    service: Service, monkeypatch: pytest.MonkeyPatch, inside: str, interrupting: str
) -> None:
    """Filled in between the delete's steps or after them, it made a whole group of one session that is gone: a dead letter."""
    await service.finished("s0", 7, group_id="g", group_size=2)
    await service.session("s1", 7, group_id="g", group_size=2)
    await service.close("s1")
    steps: dict[str, Callable[[], Awaitable[Any]]] = {
        "delete": lambda: delete_session(service.services, "s1"),
        "reward": lambda: reward_session(service.services, "s1", 1.0, {}, {}, {}),
    }
    store, name = (service.services.sessions, "delete") if inside == "delete" else (service.services.delivery, "fill")
    last = getattr(store, name)

    async def interrupted(*given: Any) -> Any:
        monkeypatch.undo()
        await steps[interrupting]()
        return await last(*given)

    monkeypatch.setattr(store, name, interrupted)
    await steps[inside]()
    assert {state: number for state, number in (await service.services.delivery.count_groups()).items() if number} == {
        "filling": 1
    }
    await service.finished("s2", 7, group_id="g", group_size=2)
    batch = await service.lease()
    assert batch is not None
    assert [row["session_id"] for row in batch["groups"][0]["trajectories"]] == ["s0", "s2"]


@pytest.mark.parametrize("step", DELETE_STEPS)
async def test_a_delete_cut_short_may_be_repeated_by_its_caller(
    service: Service, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    await service.finished("s0", 7)
    await delete_until(service, monkeypatch, step, "s0")
    assert (await service.admin.delete("/sessions/s0")).status_code == (404 if step == "delete" else 204)
    await finish_announced(service.services, older_than_seconds=0)
    assert await service.services.delivery.find_announced(time.time() + 60) == []
    assert (await service.admin.get("/sessions/s0")).status_code == 404


async def test_a_delete_cut_short_takes_no_later_session_of_the_same_id(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    await service.session("s0", 7)
    await delete_until(service, monkeypatch, "delete", "s0")
    await service.session("s0", 8)
    assert await finish_announced(service.services, older_than_seconds=0) == 1
    assert await service.services.delivery.find_announced(time.time() + 60) == []
    state = (await service.admin.get("/sessions/s0")).json()
    assert (state["status"], state["calls"]) == ("open", 1)


async def test_a_delete_that_a_lease_refuses_is_not_tried_again_when_the_lease_has_ended(service: Service) -> None:
    await service.finished("s0")
    batch = await service.lease()
    assert batch is not None
    assert (await service.admin.delete("/sessions/s0")).status_code == 409
    await service.trainer.post(f"/batches/{batch['lease_id']}/nack")
    assert await finish_announced(service.services, older_than_seconds=0) == 0
    assert await service.lease() is not None


async def test_the_sweep_clears_what_cannot_be_finished(service: Service) -> None:
    await service.session("open", 7)
    await service.services.delivery.announce("open", None, 0.0)
    await service.services.delivery.announce("deleted", CloseRequest("completed"), 0.0)
    assert await finish_announced(service.services, older_than_seconds=0) == 2
    assert await finish_announced(service.services, older_than_seconds=0) == 0
    assert (await service.admin.get("/sessions/open")).json()["status"] == "open"


async def test_a_session_that_cannot_be_read_keeps_the_sweep_from_no_other(service: Service, redis_url: str) -> None:
    for name in ("newer", "s0"):
        await service.session(name, 7)
        await close_until(service, "begin_close", name)
    connection = StoreConnection(redis_url)
    await connection.execute("HSET", keys.state("newer"), "info", pack((99, {})))
    await connection.close()
    assert await finish_announced(service.services, older_than_seconds=0) == 2
    assert (await service.admin.get("/sessions/s0")).json()["status"] == "completed"


async def test_a_crash_between_a_late_reward_and_its_group_is_made_good(service: Service) -> None:
    await service.session("s0", 7)
    await service.close("s0")
    await service.services.delivery.announce("s0", None, time.time())
    await service.services.sessions.set_reward("s0", 0.5, {}, {}, {})
    assert await finish_announced(service.services, older_than_seconds=0) == 1
    assert await service.lease() is not None


async def test_a_dangling_intent_neither_blocks_the_close_nor_the_delivery(service: Service) -> None:
    await service.session("s0", 7)
    await service.services.sessions.begin("s0", 1, Intent("lost", None, b"", "r", 1.0))
    await service.close("s0", reward=1.0)
    calls = (await service.admin.get("/sessions/s0/calls")).json()["calls"]
    assert [call["call_id"] for call in calls] == ["s0-c1", "lost"]
    assert await service.lease() is not None


async def test_a_weight_push_is_handed_to_the_updater(service: Service) -> None:
    pushed = await service.trainer.post("/weights", json={"version": 3, "path": "/w/3"})
    assert pushed.json()["applied"]
    await service.trainer.post("/weights", json={"version": 4, "path": "/w/4", "kind": "lora", "mode": "abort"})
    assert service.updater.pushes == [(3, "/w/3", "full", "keep"), (4, "/w/4", "lora", "abort")]
    assert (await service.trainer.get("/weights")).json() == {"current": {"version": 3}}
    for body in ({"version": -1, "path": "/w"}, {"version": 1}, {"version": 1, "path": "/w", "mode": "now"}):
        assert said(await service.trainer.post("/weights", json=body))[0] == 400


async def test_a_retryable_error_says_when_to_try_again(service: Service) -> None:
    service.updater.failure = EngineUnavailable("no engine serves")
    response = await service.trainer.post("/weights", json={"version": 3, "path": "/w/3"})
    assert said(response) == (503, "engine_unavailable", "no engine serves")
    assert response.headers["retry-after"] == "1"


async def test_an_unexpected_error_tells_the_caller_nothing_of_its_inside(
    service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    service.updater.failure = RuntimeError("a secret")
    response = await service.trainer.post("/weights", json={"version": 3, "path": "/w/3"})
    assert said(response)[:2] == (500, "internal_error")
    assert "secret" not in response.text
    assert "a secret" in caplog.text


async def test_health_is_open_and_readiness_names_what_is_missing(service: Service) -> None:
    service.admin.headers.pop("authorization")
    assert (await service.admin.get("/healthz")).status_code == 200
    assert (await service.admin.get("/readyz")).status_code == 200
    service.pool.answer = (False, "127.0.0.1:1: connection refused")
    response = await service.admin.get("/readyz")
    assert response.status_code == 503
    assert response.json()["reason"] == "no engine serves: 127.0.0.1:1: connection refused"


async def test_without_its_store_the_service_is_alive_not_ready_and_answers_retryable_errors() -> None:
    async with running("redis://127.0.0.1:1") as service:
        assert (await service.admin.get("/healthz")).status_code == 200
        ready = await service.admin.get("/readyz")
        assert ready.status_code == 503
        assert "127.0.0.1:1" in ready.json()["reason"]
        asks: list[Callable[[], Any]] = [
            lambda: service.admin.post("/sessions", json={}),
            lambda: service.admin.get("/sessions"),
            lambda: service.close("s0"),
            lambda: service.trainer.post("/batches/lease"),
            lambda: service.trainer.post("/batches/x/ack"),
        ]
        for ask in asks:
            response = await ask()
            assert said(response)[:2] == (503, "store_unavailable")
            assert response.headers["retry-after"] == "1"
