"""Tasks over HTTP: against the real service over a real Redis, with nodes that the test plays itself."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from contract.attempts import AttemptId, Verdict
from contract.client import AsyncServiceClient
from proxy.store.connection import StoreConnection
from proxy.store.sessions import SessionStore
from proxy.store.tasks.tasks import TaskStore
from proxy.tasks.sweeper import LONGEST_PAUSE_SECONDS, MOST_TRIES, draw_pause_seconds
from rollout.attempts_client import AttemptsClient, OpenSession
from tests.support.engine.scripted_engine import ScriptedEngine
from tests.support.runtimes.rollout_nodes import key_of
from tests.support.runtimes.rollout_stores import WELL, Stores
from tests.support.service.redis_server import RedisServer, running_redis
from tests.support.service.rollout_service import BODY, read_events, serving_tasks, submit
from tests.support.service.running_service import ADMIN, NODE, TRAINER, RunningService, wait_until
from tests.support.service.scripted_service import Answer, ScriptedService, json_answer

SECONDS = 120.0


@pytest.fixture(scope="module")
def service(redis_server: RedisServer) -> Iterator[RunningService]:
    redis_server.flushall()
    with pytest.MonkeyPatch.context() as environment:
        environment.setattr("proxy.tasks.sweeper.SWEEP_SECONDS", 0.05)
        with serving_tasks(redis_server.url) as running:
            yield running


@asynccontextmanager
async def at(redis_server: RedisServer) -> AsyncIterator[Stores]:
    wire = StoreConnection(redis_server.url)
    connection = wire
    try:
        yield Stores(connection, TaskStore(connection))
    finally:
        await wire.close()


@asynccontextmanager
async def attempts_of(service: RunningService, node: str) -> AsyncIterator[AttemptsClient]:
    """The service as that node asks it."""
    async with AsyncServiceClient(service.url, NODE) as http:
        yield AttemptsClient(http, node, key_of(node))


def get(service: RunningService, path: str, code: int = 200) -> dict[str, Any]:
    answer = service.request("GET", path)
    assert answer.status_code == code, answer.text
    told: dict[str, Any] = answer.json()
    return told


def test_a_task_is_created_once_and_repeating_it_changes_nothing(service: RunningService) -> None:
    first = submit(service, task_id="once", num_samples=2)
    assert (first["status"], first["rollouts"], first["task"]["harness"]["name"]) == ("queued", {"queued": 2}, "pi")
    assert submit(service, 200, task_id="once", num_samples=2) == first == get(service, "/tasks/once")
    error = submit(service, 409, task_id="once", num_samples=3)["error"]
    assert error["code"] == "conflict" and error["param"] == "task_id" and "another body" in error["message"]
    submit(service, 201)


def test_metrics_count_what_waits_and_what_failed(redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    redis_server.flushall()
    monkeypatch.setattr("proxy.tasks.sweeper.SWEEP_SECONDS", 0.05)
    with serving_tasks(redis_server.url) as running:
        submit(running, num_samples=3, labels={"zone": "a"}, priority=7)
        submit(running, task_id="gone", num_samples=2)
        running.request("DELETE", "/tasks/gone")
        wanted = (
            'verbatim_rollouts_waiting{cpus="1",labels="zone=a",memory_mb="1024",priority="7",runtimes="local"} 3.0',
            'verbatim_rollout_failures_total{failure="cancelled"} 2.0',
            'verbatim_tasks_total{status="cancelled"} 1.0',
            'verbatim_rollouts_running{stage="run"} 0.0',
            "verbatim_nodes 0.0",
        )
        wait_until(
            lambda: all(line in running.request("GET", "/metrics").text for line in wanted), SECONDS, "the numbers are shown"
        )


def test_what_is_wrong_with_a_task_is_said_in_the_control_sides_shape(service: RunningService) -> None:
    error = submit(service, 400, harness="nobodys")["error"]
    assert error["code"] == "bad_request" and error["param"] == "harness" and "choose one of" in error["message"]
    answer = service.request("POST", "/tasks", content=b"{" * 1000)
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "bad_request"
    for method, path in (("GET", "/tasks/none"), ("DELETE", "/tasks/none"), ("GET", "/tasks/none/rollouts")):
        answer = service.request(method, path)
        assert answer.status_code == 404 and answer.json()["error"] == {"code": "not_found", "message": "there is no task none"}
    assert service.request("GET", "/tasks/none/events").status_code == 404
    assert get(service, "/tasks?limit=0", 400)["error"]["code"] == "bad_request"
    assert get(service, "/tasks?cursor=x", 400)["error"]["code"] == "bad_request"


@pytest.mark.parametrize(("method", "path"), [("POST", "/tasks"), ("GET", "/tasks"), ("DELETE", "/tasks/x"), ("GET", "/nodes")])
def test_tasks_are_the_admins(service: RunningService, method: str, path: str) -> None:
    assert service.request(method, path, token="wrong").status_code == 401
    assert service.request(method, path, token=TRAINER).status_code == 403


def test_a_body_that_is_too_large_is_refused_before_it_is_read(redis_url: str) -> None:
    with serving_tasks(redis_url, max_body_bytes=1000) as small:
        answer = small.request("POST", "/tasks", json={**BODY, "instruction": "x" * 1000})
        assert answer.status_code == 413 and answer.json()["error"]["code"] == "request_too_large"


def test_tasks_are_listed_in_pages(service: RunningService) -> None:
    for number in range(3):
        submit(service, task_id=f"page{number}", metadata={"number": number})
    page = get(service, "/tasks?limit=2")
    assert [task["task_id"] for task in page["tasks"]] == ["page2", "page1"] and "task" not in page["tasks"][0]
    assert get(service, f"/tasks?limit=1&cursor={page['cursor']}")["tasks"][0]["task_id"] == "page0"
    assert get(service, "/tasks?status=cancelled&limit=1")["tasks"] == []


async def test_a_task_is_watched_from_its_beginning_to_its_end(service: RunningService, redis_server: RedisServer) -> None:
    submit(service, task_id="watched", priority=100)
    told: list[dict[str, Any]] = []
    watching = threading.Thread(target=lambda: told.extend(read_events(service, "watched")))
    watching.start()
    async with at(redis_server) as stores:
        node = stores.node("a")
        taken = await node.must_take()
        assert taken.attempt == AttemptId("watched", 0, 1)
        await node.beat(taken.attempt)
        shown = get(service, "/nodes")
        assert [each["name"] for each in shown["nodes"]] == ["a"] and {"waiting", "priority"} <= set(shown["queues"][0])
        await asyncio.sleep(0.5)
        await node.end(taken.attempt, Verdict("completed", reward=0.25, feedback="nearly"))
    await asyncio.to_thread(watching.join, SECONDS)
    assert not watching.is_alive()
    kinds = ["task.created", "rollout.preparing", "rollout.concluding", "rollout.completed", "task.ended"]
    assert [event["kind"] for event in told] == kinds
    assert told[3]["reward"] == 0.25 and told[4]["status"] == "completed"
    assert [event["kind"] for event in read_events(service, "watched", told[1]["id"])] == kinds[2:]
    (rollout,) = get(service, "/tasks/watched/rollouts")["rollouts"]
    assert (rollout["status"], rollout["node"], rollout["attempt"]) == ("completed", "a", 1)
    assert (rollout["verdict"]["reward"], rollout["verdict"]["feedback"]) == (0.25, "nearly")


def test_a_reader_that_has_seen_everything_is_told_not_to_come_back(service: RunningService) -> None:
    submit(service, task_id="over")
    service.request("DELETE", "/tasks/over")
    last = read_events(service, "over")[-1]["id"]
    headers = {"Authorization": f"Bearer {ADMIN}"}
    answer = httpx.get(f"{service.url}/tasks/over/events", headers={**headers, "Last-Event-ID": last}, timeout=120)
    assert answer.status_code == 204
    answer = httpx.get(f"{service.url}/tasks/over/events", headers={**headers, "Last-Event-ID": "x"}, timeout=120)
    assert answer.status_code == 400


def test_a_watched_task_on_which_nothing_happens_keeps_its_line_alive(service: RunningService) -> None:
    submit(service, task_id="silent")
    headers = {"Authorization": f"Bearer {ADMIN}"}
    with httpx.stream("GET", f"{service.url}/tasks/silent/events", headers=headers, timeout=SECONDS) as response:
        lines = response.iter_lines()
        assert next(line for line in lines if line.startswith(":")) == ": nothing new"


async def test_cancelling_closes_the_sessions_and_wins_over_a_late_result(
    service: RunningService, redis_server: RedisServer
) -> None:
    """Of three rollouts one has closed its session well but was not finished yet, one runs, one has not begun."""
    submit(service, task_id="late", num_samples=3, priority=100)
    async with at(redis_server) as stores, attempts_of(service, "a") as attempts:
        node = stores.node("a")
        late, running = await node.must_take(), await node.must_take()
        for taken in (late, running):
            await attempts.open(taken.attempt, (), "")
        await node.work.conclude(late.attempt, WELL, time.time())
        closed = {"status": "timeout", "reward": WELL.reward}
        assert service.request("POST", "/sessions/late.0.1/close", json=closed).status_code == 200
        cancelled = service.request("DELETE", "/tasks/late").json()
        assert (cancelled["status"], cancelled["cancelled_now"]) == ("cancelled", [0, 1, 2])
    for session_id in ("late.0.1", "late.1.1", "late.2.0"):
        await asyncio.to_thread(wait_until, partial(is_cancelled, service, session_id), SECONDS, "it is closed")
    assert service.request("GET", "/sessions/late.0.1").json()["reward"] is None, "another one in the place of the first"
    dead = "/batches/dead?reason=0 of 3"
    await asyncio.to_thread(wait_until, lambda: get(service, dead)["dead_letters"], SECONDS, "nobody waits for the group")
    assert service.request("DELETE", "/tasks/late").json()["cancelled_now"] == []


@pytest.mark.parametrize("kind", ["open", "token file"])
async def test_the_sweeper_is_let_in_whatever_the_tokens_are(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str
) -> None:
    redis_server.flushall()
    monkeypatch.setattr("proxy.tasks.sweeper.SWEEP_SECONDS", 0.05)
    (tmp_path / "tokens").write_text(f"# of the test\n{ADMIN}\n")
    rule: dict[str, Any] = {"admin_token": None, "trainer_token": None}
    rule |= {"open": True} if kind == "open" else {"admin_token": {"file": tmp_path / "tokens"}}
    with serving_tasks(redis_server.url, **rule) as running:
        submit(running, task_id="t")
        async with at(redis_server) as stores, attempts_of(running, "a") as attempts:
            node = stores.node("a")
            taken = await node.must_take()
            await attempts.open(taken.attempt, (), "")
            await node.work.advance(taken.attempt, "running", time.time(), {"session_id": taken.attempt.session_id})
            await stores.tasks.cancel("t", time.time())
        await asyncio.to_thread(wait_until, lambda: status_of(running, "t.0.1") == "cancelled", SECONDS, "it is closed")


def is_cancelled(service: RunningService, session_id: str) -> bool:
    return status_of(service, session_id) == "cancelled"


def status_of(service: RunningService, session_id: str) -> str | None:
    answer = service.request("GET", f"/sessions/{session_id}")
    return str(answer.json()["status"]) if answer.status_code == 200 else None


async def test_a_tasks_echo_policy_is_that_of_its_sessions(redis_server: RedisServer) -> None:
    """Left out, it is the service's own; an unknown one is refused by name."""
    redis_server.flushall()
    with serving_tasks(redis_server.url, echo_policy="minted") as running:
        assert submit(running, task_id="own", echo_policy="strict")["task"]["echo_policy"] == "strict"
        assert submit(running, task_id="services")["task"]["echo_policy"] is None
        async with at(redis_server) as stores, attempts_of(running, "a") as attempts:
            for _ in range(2):
                taken = await stores.node("a").must_take()
                await attempts.open(taken.attempt, (), "")
        shown = {name: running.request("GET", f"/sessions/{name}.0.1").json()["echo_policy"] for name in ("own", "services")}
        assert shown == {"own": "strict", "services": "minted"}
        refused = running.request("POST", "/tasks", json={"instruction": "x", "harness": "pi", "echo_policy": "loose"})
        assert refused.status_code == 400 and "echo_policy" in refused.json()["error"]["message"]


async def test_a_tasks_run_is_that_of_its_sessions(redis_server: RedisServer) -> None:
    """Left out, it is the default one; a name that is not plain is refused."""
    redis_server.flushall()
    with serving_tasks(redis_server.url) as running:
        assert submit(running, task_id="own", run="grpo-3")["task"]["run"] == "grpo-3"
        assert submit(running, task_id="none")["task"]["run"] == "default"
        async with at(redis_server) as stores, attempts_of(running, "a") as attempts:
            for _ in range(2):
                taken = await stores.node("a").must_take()
                await attempts.open(taken.attempt, (), "")
        shown = {name: running.request("GET", f"/sessions/{name}.0.1").json()["run"] for name in ("own", "none")}
        assert shown == {"own": "grpo-3", "none": "default"}
        refused = running.request("POST", "/tasks", json={"instruction": "x", "harness": "pi", "run": "<i>"})
        assert refused.status_code == 400 and "run: " in refused.json()["error"]["message"]


async def test_a_tasks_budgets_and_share_of_quarantine_are_those_of_its_sessions(redis_server: RedisServer) -> None:
    """Left out, its sessions have no budget and the service's own share."""
    redis_server.flushall()
    with serving_tasks(redis_server.url) as running:
        spending = {"max_calls": 2, "max_completion_tokens": 300, "max_total_tokens": 4000}
        group = {"max_quarantined_share": 0.25}
        shown = submit(running, task_id="own", budgets={"agent_seconds": 60, **spending}, group=group)["task"]
        assert spending.items() <= shown["budgets"].items() and shown["group"]["max_quarantined_share"] == 0.25
        submit(running, task_id="none")
        async with at(redis_server) as stores, attempts_of(running, "a") as attempts:
            for _ in range(2):
                taken = await stores.node("a").must_take()
                await attempts.open(taken.attempt, (), "")
        own, none = (running.request("GET", f"/sessions/{task}.0.1").json() for task in ("own", "none"))
        assert {name: own[name] for name in spending} == spending
        assert {name: none[name] for name in spending} == dict.fromkeys(spending)
        wire = StoreConnection(redis_server.url)
        kept = [await SessionStore(wire).load(f"{task}.0.1") for task in ("own", "none")]
        await wire.close()
        shares = [state and state.info.max_quarantined_share for state in kept]
        assert shares == [0.25, None]


async def test_a_task_that_is_stopped_early_gives_a_trainer_the_samples_it_wanted(redis_server: RedisServer) -> None:
    """Of four rollouts two do well, one runs and one has not begun: the trainer gets the two, though the service's own rule is to
    wait for all."""
    redis_server.flushall()
    with ScriptedEngine("qwen3") as engine, serving_tasks(redis_server.url, engine.url) as running:
        made = submit(running, task_id="early", num_samples=4, early_stop_usable_samples=2)
        assert made["task"]["group"] == {
            "policy": "allow_partial",
            "minimum": 2,
            "zero_variance": None,
            "max_quarantined_share": None,
        }
        async with at(redis_server) as stores, attempts_of(running, "a") as attempts:
            node = stores.node("a")
            taken = [await node.must_take() for _ in range(3)]
            opened = [await attempts.open(each.attempt, (), "") for each in taken]
            for each, session in zip(taken[:2], opened[:2], strict=True):
                await asyncio.to_thread(one_call, session)
                await attempts.finish(each.attempt, WELL)
        assert get(running, "/tasks/early")["status"] == "completed"
        lease = await asyncio.to_thread(leased, running)
        (group,) = lease["groups"]
        assert group["group_id"] == "early"
        assert {row["session_id"] for row in group["trajectories"]} == {"early.0.1", "early.1.1"}
        assert status_of(running, "early.2.1") == status_of(running, "early.3.0") == "cancelled"


def one_call(session: OpenSession) -> None:
    answer = httpx.post(
        f"{session.base_urls['openai']}/chat/completions",
        headers={"authorization": f"Bearer {session.api_key}"},
        json={"model": "policy", "messages": [{"role": "user", "content": "hello"}]},
        timeout=SECONDS,
    )
    assert answer.status_code == 200, answer.text


def leased(service: RunningService) -> dict[str, Any]:
    """The next batch, however long it takes."""
    answer = service.request("POST", "/batches/lease", TRAINER, json={"wait_seconds": 25})
    while answer.status_code == 204:
        answer = service.request("POST", "/batches/lease", TRAINER, json={"wait_seconds": 25})
    told: dict[str, Any] = answer.json()
    return told


async def test_sessions_of_attempts_that_lost_their_node_are_deleted(
    service: RunningService, redis_server: RedisServer
) -> None:
    submit(service, task_id="lost", priority=100)
    async with at(redis_server) as stores, attempts_of(service, "a") as attempts:
        first = await stores.node("a").must_take()
        await attempts.open(first.attempt, (), "")
        await asyncio.sleep(0.01)
        second = await stores.node("b").must_take(0.001)
        assert second.attempt.attempt == 2
    await asyncio.to_thread(wait_until, lambda: status_of(service, "lost.0.1") is None, SECONDS, "it is deleted")


def test_a_callback_is_tried_until_somebody_takes_it(service: RunningService, scripted_server: ScriptedService) -> None:
    scripted_server.reset().script("POST /done", Answer(status=500), Answer(drop=True), json_answer({}))
    submit(service, task_id="told", callback_url=f"{scripted_server.url}/done", metadata={"row": 7})
    service.request("DELETE", "/tasks/told")
    scripted_server.wait_for(lambda: len(scripted_server.received) == 3, SECONDS)
    told = scripted_server.received[2].body
    assert (told["task_id"], told["status"], told["metadata"]) == ("told", "cancelled", {"row": 7})
    assert scripted_server.received[2].headers["idempotency-key"] == "told"
    wait_until(lambda: get(service, "/tasks/told")["callback"]["delivered_at"] is not None, SECONDS, "it is noted")
    assert get(service, "/tasks/told")["callback"]["tries"] == 3


def test_a_callback_that_fails_is_visible(service: RunningService) -> None:
    submit(service, task_id="untold", callback_url="http://127.0.0.1:9/done")
    service.request("DELETE", "/tasks/untold")
    wait_until(lambda: get(service, "/tasks/untold")["callback"]["tries"] >= 1, SECONDS, "it was tried")
    callback = get(service, "/tasks/untold")["callback"]
    assert "Cannot connect to host 127.0.0.1:9" in callback["last_error"] and callback["next_try_at"] > time.time() - SECONDS
    assert callback["delivered_at"] is None


def test_a_callback_to_an_address_that_the_service_may_not_call_is_not_posted(service: RunningService) -> None:
    submit(service, task_id="metadata", callback_url="http://169.254.169.254/latest")
    service.request("DELETE", "/tasks/metadata")
    wait_until(lambda: get(service, "/tasks/metadata")["callback"]["tries"] >= 1, SECONDS, "it was tried")
    reason = "169.254.169.254 is no address that this service may call (VERBATIM_OUTBOUND_ALLOW)"
    assert get(service, "/tasks/metadata")["callback"]["last_error"] == reason


def test_a_callback_that_fails_is_tried_at_ever_greater_intervals() -> None:
    """Up to an hour, and given up in the end: within a day in all."""
    pauses = [draw_pause_seconds(tries) for tries in range(1, MOST_TRIES)]
    assert pauses[0] < 2 and all(after > 1.3 * before for before, after in itertools.pairwise(pauses[:11]))
    assert max(pauses) <= 1.2 * LONGEST_PAUSE_SECONDS == 4320
    assert sum(pauses) < 24 * 3600


async def test_what_is_due_when_a_server_dies_is_done_by_the_next(
    redis_server: RedisServer, scripted_server: ScriptedService
) -> None:
    """The task ended, and nobody was there to tell."""
    scripted_server.reset().script("POST /later", json_answer({}))
    redis_server.flushall()
    async with at(redis_server) as stores:
        await stores.submit("later", callback_url=f"{scripted_server.url}/later")
        node = stores.node("a")
        await node.end((await node.must_take()).attempt)
    with serving_tasks(redis_server.url):
        await asyncio.to_thread(scripted_server.wait_for, lambda: scripted_server.paths() == ["/later"], SECONDS)


async def test_a_server_ends_what_a_lost_node_had_concluded(redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    redis_server.flushall()
    monkeypatch.setattr("proxy.tasks.sweeper.LOST_NODE_SECONDS", 0.01)
    monkeypatch.setattr("proxy.tasks.sweeper.SWEEP_SECONDS", 0.05)
    with serving_tasks(redis_server.url) as running:
        async with at(redis_server) as stores:
            await stores.submit("left")
            node = stores.node("a")
            # Made before the rollout is taken: from then on a server may take the node for lost at any moment.
            made = {"session_id": "left.0.1", "group_id": "left", "task_id": "left"}
            assert running.request("POST", "/sessions", json=made).status_code == 201
            attempt = (await node.must_take()).attempt
            await node.work.conclude(attempt, Verdict("completed", reward=0.5, feedback="half"), time.time())
        await asyncio.to_thread(wait_until, lambda: get(running, "/tasks/left")["status"] == "completed", SECONDS, "it ended")
        session = get(running, "/sessions/left.0.1")
        assert (session["status"], session["reward"]) == ("completed", 0.5)
        assert json.dumps(session["reward_metadata"]) == '{"feedback": "half"}'


def test_tasks_say_when_their_store_is_away() -> None:
    with running_redis() as away, serving_tasks(away.url, redis_retry_seconds=0.1) as running:
        away.stop()
        answer = running.request("POST", "/tasks", json=BODY)
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "store_unavailable"
        assert int(answer.headers["retry-after"]) >= 1
