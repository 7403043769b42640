"""Hooks: a feature joins calls at four points, and no fault of it loses or changes a token that was sampled."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from fastapi import APIRouter
from openai import APIStatusError

from proxy.app import Addition
from proxy.call.draft import Draft
from proxy.call.hooks import CallHook, choose_hooks
from proxy.call.phases import NO_HOOKS, Arrival, Sampled
from proxy.dialects.base import Request
from proxy.engine.replica import Replica
from proxy.errors import Conflict, RequestError
from proxy.services import Services
from proxy.store.states import SessionInfo
from tests.support.engine.scripted_engine import ScriptedEngine
from tests.support.service.redis_server import RedisServer
from tests.support.service.running_service import RunningService, Session


class Meddler(CallHook):
    """Does at each point what `does` has for it."""

    of_request = "model"

    def __init__(self) -> None:
        self.does: dict[str, Callable[[Any], Any]] = {}

    def _do(self, point: str, given: Any) -> Any:
        return self.does.get(point, lambda same: same)(given)

    async def admit(self, arrival: Arrival) -> None:
        self._do("admit", arrival)

    async def before_sampling(self, draft: Draft, request: Request, replica: Replica) -> None:
        self._do("before_sampling", request)

    async def after_sampling(self, sampled: Sampled) -> Sampled:
        changed: Sampled = self._do("after_sampling", sampled)
        return changed

    async def before_commit(self, sampled: Sampled) -> None:
        self._do("before_commit", sampled)


Stage = tuple[ScriptedEngine, RunningService, Meddler]


@pytest.fixture(scope="module", params=["token", "chat"])
def stage(request: pytest.FixtureRequest, redis_server: RedisServer) -> Iterator[Stage]:
    meddler = Meddler()

    def add(services: Services) -> Addition:
        services.hooks = (*services.hooks, meddler)
        return Addition(APIRouter(), contextlib.nullcontext)

    with (
        ScriptedEngine("qwen3") as engine,
        RunningService(engine.url, redis_server.url, adding=[add], engine_api=request.param) as service,
    ):
        yield engine, service, meddler


@pytest.fixture
def session(stage: Stage) -> Iterator[Session]:
    _, service, meddler = stage
    yield service.session()
    meddler.does.clear()


def fail(error: Exception) -> Callable[[Any], Any]:
    def raise_it(_: Any) -> Any:
        raise error

    return raise_it


def ask(session: Session, *, stream: bool) -> int:
    """The status that the harness got, 200 for a stream that says its error in an event."""
    try:
        answer = session.ask("hello", stream=stream)
        if stream:
            list(answer)
    except APIStatusError as error:
        return int(error.status_code)
    except Exception as error:
        assert stream, error
    return 200


def add_id(sampled: Sampled) -> Sampled:
    """In the very list."""
    ids = sampled.choices[0].token_ids
    assert ids is not None
    ids.append(7)
    return sampled


def other(**fields: Any) -> Callable[[Sampled], Sampled]:
    def change(sampled: Sampled) -> Sampled:
        choices = tuple(replace(each, **fields) for each in sampled.choices)
        return msgspec.structs.replace(sampled, choices=choices)

    return change


def move_prompt(sampled: Sampled) -> Sampled:
    assert sampled.prompt_ids is not None
    return msgspec.structs.replace(sampled, prompt_ids=np.flip(sampled.prompt_ids))


TAMPERING = {
    "adds an id": add_id,
    "gives other ids": other(token_ids=[1, 2, 3]),
    "gives other logprobs": other(logprobs=[0.0]),
    "forgets the versions": other(spans=()),
    "gives another message": other(message={"role": "assistant", "content": "something else"}),
    "drops the choices": lambda sampled: msgspec.structs.replace(sampled, choices=()),
    "turns the prompt around": move_prompt,
    "fails": fail(RuntimeError("a fault of the hook")),
    "refuses": fail(RequestError("too late")),
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("way", TAMPERING)
def test_what_was_sampled_is_recorded_whatever_a_hook_does_to_it(
    stage: Stage, session: Session, way: str, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    engine, _, meddler = stage
    engine.say("a reply of some words")
    meddler.does["after_sampling"] = TAMPERING[way]
    status = ask(session, stream=stream)
    assert status == (400 if way == "refuses" else 500) or (stream and status == 200)
    (call,) = session.calls
    sampled = engine.generations[-1].sampled[0]
    assert (call["status"], call["completion_ids"]) == ("failed", sampled)
    meddler.does.clear()
    engine.say("the next one")
    session.answer("hello")
    session.close()
    rows, accounting = session.trajectories()
    assert {(item["call_id"], item["reason"]) for item in accounting["quarantined"]} == {(call["call_id"], "not_delivered")}
    assert accounting["dangling_calls"] == 0
    assert len(rows) == 1


def test_a_hook_that_fails_before_the_commit_keeps_no_call_from_being_recorded(stage: Stage, session: Session) -> None:
    engine, _, meddler = stage
    engine.say("a reply")
    meddler.does["before_commit"] = fail(RuntimeError("a fault of the hook"))
    assert ask(session, stream=False) == 500
    (call,) = session.calls
    assert (call["status"], call["completion_ids"]) == ("failed", engine.generations[-1].sampled[0])


@pytest.mark.parametrize("point", ["admit", "before_sampling"])
def test_a_hook_that_refuses_a_call_before_it_is_sampled_leaves_nothing(stage: Stage, session: Session, point: str) -> None:
    engine, _, meddler = stage
    asked = len(engine.generations)
    meddler.does[point] = fail(RequestError("not with me"))
    assert ask(session, stream=False) == 400
    assert ask(session, stream=True) == 400
    meddler.does.clear()
    assert (session.calls, len(engine.generations)) == ([], asked)
    engine.say("yes")
    session.answer("hello")
    session.close()
    assert session.trajectories()[1]["dangling_calls"] == 0


def test_a_hook_that_cannot_store_what_records_refer_to_keeps_them_from_being_recorded(stage: Stage, session: Session) -> None:
    engine, _, meddler = stage
    engine.say("a reply")
    meddler.does["before_commit"] = fail(Conflict("its session is gone"))
    assert ask(session, stream=False) == 409
    # Its tokens were sampled, and no record has them.
    (call,) = session.calls
    assert call["status"] in ("in_flight", "dangling")


def test_a_call_that_no_hook_joins_has_none() -> None:
    meddler = Meddler()
    info = SessionInfo("s", b"", 0.0)
    assert choose_hooks([meddler, meddler], info, Request("chat", "", [])) is NO_HOOKS
    assert len(choose_hooks([meddler, meddler], info, Request("chat", "m", [])).admit) == 2
