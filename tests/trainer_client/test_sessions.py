"""Sessions of an agent of one's own: against the real service, and against a scripted one where the wire is what it is about."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from contract.errors import NoAnswer, ResourceConflict
from tests.support.engine.scripted_engine import ScriptedEngine
from tests.support.service.redis_server import RedisServer
from tests.support.service.running_service import ADMIN, RunningService
from tests.support.service.scripted_service import Answer, ScriptedService, error_answer, json_answer
from trainer_client import AsyncSessions, Sessions, TrainerClient
from trainer_client.sessions import OpenedSession

Block = Callable[[OpenedSession], None]
Rollout = Callable[..., OpenedSession]
OPENED = json_answer({"session_id": "s", "api_key": "k", "base_urls": {"openai": "o", "anthropic": "a", "gemini": "g"}}, 201)
CLOSED = json_answer({"status": "completed", "error": None})


@pytest.fixture(scope="module")
def service(redis_server: RedisServer) -> Iterator[RunningService]:
    redis_server.flushall()
    with ScriptedEngine("qwen3") as engine, RunningService(engine.url, redis_server.url) as running:
        yield running


def in_a_block(url: str, block: Block, **fields: Any) -> OpenedSession:
    with Sessions(url, ADMIN, retry_seconds=20) as sessions, sessions.open(**fields) as session:
        block(session)
    return session


def in_an_async_block(url: str, block: Block, **fields: Any) -> OpenedSession:
    async def run() -> OpenedSession:
        async with AsyncSessions(url, ADMIN, retry_seconds=20) as sessions:
            async with await sessions.open(**fields) as session:
                await asyncio.to_thread(block, session)
            return session

    return asyncio.run(run())


@pytest.fixture(params=[in_a_block, in_an_async_block])
def rollout(request: pytest.FixtureRequest) -> Rollout:
    made: Rollout = request.param
    return made


def call_model(session: OpenedSession) -> None:
    """An agent that reads its environment."""
    variables = session.environment
    answer = httpx.post(
        f"{variables['OPENAI_BASE_URL']}/chat/completions",
        json={"model": "policy", "messages": [{"role": "user", "content": "q"}]},
        headers={"Authorization": f"Bearer {variables['OPENAI_API_KEY']}"},
        timeout=120,
    )
    assert answer.status_code == 200, answer.text


def work(session: OpenedSession) -> None:
    call_model(session)
    session.reward = 1.0


def stored(service: RunningService, session: OpenedSession) -> dict[str, Any]:
    state: dict[str, Any] = service.request("GET", f"/sessions/{session.session_id}").json()
    return state


def test_a_block_is_a_session_with_its_reward_and_a_trainer_gets_its_rows(service: RunningService, rollout: Rollout) -> None:
    group = f"g-{rollout.__name__}"
    ended = [rollout(service.url, work, group_id=group, group_size=2, metadata={"part": part}) for part in (0, 1)]
    assert [each.status for each in ended] == ["completed", "completed"]
    assert {stored(service, each)["metadata"]["part"] for each in ended} == {0, 1}
    with TrainerClient(service.url, ADMIN) as trainer:
        batch = trainer.lease()
        assert batch is not None
        with batch:
            assert [each.group_id for each in batch.groups] == [group]
            assert {row.session_id for row in batch.rows} == {each.session_id for each in ended}


def raise_error(error: BaseException) -> Block:
    def block(session: OpenedSession) -> None:
        work(session)
        raise error

    return block


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (TimeoutError("too long"), "timeout"),
        (subprocess.TimeoutExpired("agent", 5), "timeout"),
        (ValueError("no such file"), "failed"),
        (KeyboardInterrupt(), "cancelled"),
    ],
)
def test_a_session_ends_as_its_block_does(service: RunningService, error: BaseException, status: str) -> None:
    with Sessions(service.url, ADMIN) as sessions:
        with pytest.raises(type(error)), sessions.open() as session:
            raise_error(error)(session)
        state = stored(service, session)
        assert (session.status, state["status"], state["reward"]) == (status, status, 1.0)
        assert state["error"].startswith(type(error).__name__)


async def test_a_cancelled_task_cancels_its_session(service: RunningService) -> None:
    begun = asyncio.Event()

    async def run(sessions: AsyncSessions) -> None:
        async with await sessions.open(session_id="cancelled"):
            begun.set()
            await asyncio.Event().wait()

    async with AsyncSessions(service.url, ADMIN) as sessions:
        task = asyncio.create_task(run(sessions))
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert service.request("GET", "/sessions/cancelled").json()["status"] == "cancelled"


def test_a_block_without_a_call_fails_its_session(
    service: RunningService, rollout: Rollout, caplog: pytest.LogCaptureFixture
) -> None:
    def idle(session: OpenedSession) -> None:
        session.reward = 1.0

    session = rollout(service.url, idle)
    state = stored(service, session)
    assert (session.status, state["status"], state["reward"]) == ("failed", "failed", None)
    assert state["error"].startswith("no_calls: ") and "was never called" in caplog.text


def test_a_reward_that_is_no_number_fails_the_session(service: RunningService, rollout: Rollout) -> None:
    def work_badly(session: OpenedSession) -> None:
        work(session)
        session.reward = float("nan")

    session = rollout(service.url, work_badly)
    assert (session.status, session.error) == ("failed", "the reward is nan")
    assert stored(service, session)["reward"] is None


async def test_a_close_says_the_group_and_the_task_of_a_session_that_was_opened_without(service: RunningService) -> None:
    said: dict[str, Any] = {"group_id": "late", "group_size": 2, "task_id": "t"}
    with Sessions(service.url, ADMIN) as sessions, sessions.open() as session:
        call_model(session)
        await asyncio.to_thread(session.close, reward=1.0, **said)
    async with AsyncSessions(service.url, ADMIN) as opened, await opened.open() as other:
        await asyncio.to_thread(call_model, other)
        await other.close(reward=0.0, **said)
    for each, reward in ((session, 1.0), (other, 0.0)):
        state = stored(service, each)
        assert {name: state[name] for name in ("status", "reward", *said)} == {"status": "completed", "reward": reward, **said}
    with TrainerClient(service.url, ADMIN) as trainer, trainer.lease(max_groups=9) or pytest.fail("nothing is leased") as batch:
        assert [len(each.trajectories) for each in batch.groups if each.group_id == "late"] == [2]


def test_calls_and_rows_are_those_of_the_session(service: RunningService) -> None:
    with Sessions(service.url, ADMIN) as sessions, sessions.open() as session:
        call_model(session)
        (call,) = session.calls()
        (row,) = session.rows("per_call")
        assert row.token_ids.tolist() == call["prompt_ids"] + call["completion_ids"]
        assert row.loss_mask.sum() == len(call["completion_ids"])


async def test_calls_and_rows_are_read_in_a_loop_too(service: RunningService) -> None:
    async with AsyncSessions(service.url, ADMIN) as sessions, await sessions.open() as session:
        await asyncio.to_thread(call_model, session)
        assert [row.call_ids for row in await session.rows()] == [(call["call_id"],) for call in await session.calls()]


# The wire


def test_a_session_that_is_held_back_is_asked_for_until_it_opens(scripted_server: ScriptedService, rollout: Rollout) -> None:
    scripted = scripted_server.reset()
    held = error_answer(429, "backpressure", "2 groups wait", retry_after="0")
    scripted.script("POST /sessions", held, held, held, OPENED)
    scripted.script("POST /sessions/s/close", CLOSED)
    assert rollout(scripted.url, lambda session: None).status == "completed"
    assert scripted.paths() == ["/sessions"] * 4 + ["/sessions/s/close"]


def test_a_session_whose_answer_is_lost_is_deleted_and_another_opened(
    scripted_server: ScriptedService, rollout: Rollout
) -> None:
    """Nobody has its key, and its group would wait for it."""
    scripted = scripted_server.reset()
    scripted.script("POST /sessions", Answer(drop=True), OPENED)
    scripted.script("POST /sessions/s/close", CLOSED)
    rollout(scripted.url, lambda session: None, group_id="g")
    lost, deleted, opened, _ = scripted.received
    assert (deleted.method, deleted.path) == ("DELETE", f"/sessions/{lost.body['session_id']}")
    assert opened.body["session_id"] != lost.body["session_id"] and opened.body["group_id"] == "g"


def test_a_session_of_a_chosen_id_whose_answer_is_lost_is_left_as_it_is(
    scripted_server: ScriptedService, rollout: Rollout
) -> None:
    scripted = scripted_server.reset()
    scripted.script("POST /sessions", Answer(drop=True))
    with pytest.raises(NoAnswer):
        rollout(scripted.url, lambda session: None, session_id="mine")
    assert scripted.paths() == ["/sessions"]


def test_a_close_that_fails_does_not_hide_the_blocks_own_error(scripted_server: ScriptedService, rollout: Rollout) -> None:
    scripted = scripted_server.reset()
    scripted.script("POST /sessions", OPENED)
    scripted.script("POST /sessions/s/close", error_answer(409, "conflict", "it is closed as timeout"))

    def crash(session: OpenedSession) -> None:
        raise ValueError("the agent crashed")

    with pytest.raises(ValueError, match="the agent crashed") as error:
        rollout(scripted.url, crash)
    assert any("could not be closed" in note for note in error.value.__notes__)
    with pytest.raises(ResourceConflict, match="closed as timeout"):
        rollout(scripted.url, lambda session: None)
