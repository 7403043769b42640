"""The rollout service's client of sessions: against the real service, and against one that loses answers."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import msgpack
import pytest

from contract.errors import NoAnswer, ResourceConflict, ResourceNotFound, ServiceError
from contract.tasks import HarnessSpec, Task
from reconstruct.roles import RoleRule
from rollout.course import open_member
from rollout.sessions import Sessions
from tests.support.engine.scripted_engine import ScriptedEngine
from tests.support.engine.scripted_fixtures import Running, both_paths
from tests.support.service.redis_server import RedisServer
from tests.support.service.running_service import ADMIN, RunningService
from tests.support.service.scripted_service import Answer, ScriptedService, error_answer, json_answer, serving

MADE = {"session_id": "t.0.1", "api_key": "key", "base_urls": {"openai": "http://x/v1", "anthropic": "a", "gemini": "g"}}


@pytest.fixture(scope="module")
def running(redis_server: RedisServer) -> Iterator[Running]:
    with both_paths(redis_server) as made:
        yield made


@pytest.fixture(scope="module")
def scripted() -> Iterator[ScriptedService]:
    with serving(ScriptedService()) as made:
        yield made


async def test_a_session_is_opened_called_rewarded_and_closed(token_service: RunningService, engine: ScriptedEngine) -> None:
    async with Sessions(token_service.url, ADMIN) as sessions:
        opened = await sessions.create("life.0.1", task_id="life", group_id="life", group_size=2, metadata={"index": 0})
        assert opened.base_urls["openai"].endswith("/s/life.0.1/v1") and opened.api_key not in repr(opened)
        async with httpx.AsyncClient(timeout=120) as harness:
            answer = await harness.post(
                f"{opened.base_urls['openai']}/chat/completions",
                headers={"authorization": f"Bearer {opened.api_key}"},
                json={"model": "policy", "messages": [{"role": "user", "content": "hello"}]},
            )
        assert answer.status_code == 200
        (call,) = await sessions.list_calls("life.0.1")
        assert call["status"] == "finished" and "completion_ids" not in call
        await sessions.reward("life.0.1", 0.5, metadata={"feedback": "half of it"})
        await sessions.close_session("life.0.1", "completed")
        await sessions.close_session("life.0.1", "completed")
        kept = await sessions.load("life.0.1")
        assert (kept["status"], kept["reward"], kept["group_size"]) == ("completed", 0.5, 2)
        with pytest.raises(ResourceConflict):
            await sessions.close_session("life.0.1", "failed")
        assert await sessions.delete("life.0.1") and not await sessions.delete("life.0.1")
        with pytest.raises(ResourceNotFound):
            await sessions.load("life.0.1")


async def test_what_a_definition_says_of_its_harness_goes_with_the_session_of_a_rollout(
    token_service: RunningService, engine: ScriptedEngine
) -> None:
    task = Task("Do.", HarnessSpec("pi"), task_id="asides")
    async with Sessions(token_service.url, ADMIN) as sessions, httpx.AsyncClient(timeout=120) as harness:
        opened = await open_member(sessions, task, 0, "asides.0.1", (RoleRule("side", tools=False),))
        answer = await harness.post(
            f"{opened.base_urls['openai']}/chat/completions",
            headers={"authorization": f"Bearer {opened.api_key}"},
            json={"model": "policy", "messages": [{"role": "user", "content": "hello"}]},
        )
        assert answer.status_code == 200
        (call,) = await sessions.list_calls("asides.0.1")
        assert (call["role"], call["role_source"]) == ("side", "declared")


async def test_a_session_that_is_there_already_is_left_alone(token_service: RunningService) -> None:
    async with Sessions(token_service.url, ADMIN) as sessions:
        await sessions.create("taken", metadata={"whose": "another's"})
        with pytest.raises(ResourceConflict, match="already"):
            await sessions.create("taken")
        assert (await sessions.load("taken"))["metadata"] == {"whose": "another's"}


async def test_more_calls_than_a_page_come_in_order(scripted: ScriptedService) -> None:
    """Here a page of one call, so that there are three."""
    pages = [{"calls": [{"call_id": str(n), "prompt_ids": b""}], "cursor": None if n == 2 else str(n)} for n in range(3)]
    scripted.reset().script("GET /sessions/s/calls", *(Answer(content=msgpack.packb(page)) for page in pages))
    async with Sessions(scripted.url, ADMIN) as sessions:
        assert await sessions.list_calls("s") == [{"call_id": "0"}, {"call_id": "1"}, {"call_id": "2"}]


async def test_a_session_held_back_is_asked_for_again_however_long_it_takes(scripted: ScriptedService) -> None:
    held = error_answer(429, "backpressure", "trainers are behind", retry_after="0.1")
    scripted.reset().script("POST /sessions", held, held, held, json_answer(MADE, 201))
    async with Sessions(scripted.url, ADMIN, retry_seconds=0.05) as sessions:
        assert (await sessions.create("t.0.1")).api_key == "key"
    assert len(scripted.received) == 4


async def test_a_session_whose_answer_was_lost_is_made_anew(scripted: ScriptedService) -> None:
    """The key of the first one went with the answer."""
    scripted.reset().script(
        "POST /sessions", Answer(drop=True), error_answer(409, "conflict", "there is one"), json_answer(MADE, 201)
    )
    scripted.script("DELETE /sessions/t.0.1", Answer(status=204))
    async with Sessions(scripted.url, ADMIN) as sessions:
        assert (await sessions.create("t.0.1")).api_key == "key"
    assert [request.method for request in scripted.received] == ["POST", "POST", "DELETE", "POST"]


async def test_what_may_pass_is_tried_again_and_what_may_not_is_told_at_once(scripted: ScriptedService) -> None:
    busy = error_answer(503, "store_unavailable", "Redis is loading", retry_after="0.1")
    scripted.reset().script("POST /sessions/s/close", busy, Answer(drop=True), json_answer({}))
    scripted.script("POST /sessions/s/reward", error_answer(400, "bad_request", "reward: it is not finite"))
    async with Sessions(scripted.url, ADMIN) as sessions:
        await sessions.close_session("s", "failed", error="it crashed")
        assert scripted.received[-1].body == {"status": "failed", "error": "it crashed"}
        with pytest.raises(ServiceError, match="reward: it is not finite"):
            await sessions.reward("s", 1.0)
    assert len(scripted.received) == 4


async def test_a_service_that_stays_away_is_named(scripted: ScriptedService) -> None:
    async with Sessions("http://127.0.0.1:9", ADMIN, retry_seconds=0.1) as sessions:
        with pytest.raises(NoAnswer, match=r"POST http://127\.0\.0\.1:9/sessions: no answer"):
            await sessions.create("t.0.1")
