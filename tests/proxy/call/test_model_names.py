"""Which names of models a session answers: any that no other policy goes by, each under the name that was asked for.

Harnesses ask for gpt-5, openai/policy or claude-opus, and many cannot be told otherwise: they got 404.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import pytest

from tests.support.engine.scripted_engine import Say, ScriptedEngine
from tests.support.engine.scripted_fixtures import Running
from tests.support.service.redis_server import RedisServer, free_port
from tests.support.service.running_service import RunningService, Session
from tests.support.sessions.conversations import TOOLS, tool_result, turn
from tests.support.sessions.questions import QUESTIONS

USER: list[Any] = [{"role": "user", "content": "q"}]


@pytest.fixture(scope="module")
def strict(running: Running, redis_server: RedisServer) -> Iterator[RunningService]:
    with RunningService(running[0].url, redis_server.url, strict_models=True) as service:
        yield service


def ask(session: Session, dialect: str, model: str, *, stream: bool = False) -> httpx.Response:
    path, body = QUESTIONS[dialect]
    if dialect == "gemini":
        method = "streamGenerateContent?alt=sse" if stream else "generateContent"
        path = path.replace("policy:generateContent", f"{model}:{method}")
    else:
        body = body | {"model": model, "stream": stream}
    return session.post(path, body)


def models_in(answer: httpx.Response) -> set[str]:
    """Every name of a model that the answer says."""
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
    bodies = [json.loads(event) for event in events] or [answer.json()]
    holders = [holder for body in bodies for holder in (body, body.get("message"), body.get("response")) if holder]
    return {holder[key] for holder in holders for key in ("model", "modelVersion") if key in holder}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dialect", QUESTIONS)
def test_any_name_is_answered_and_echoed(engine: ScriptedEngine, service: RunningService, dialect: str, stream: bool) -> None:
    session = service.session()
    engine.say("hello")
    answer = ask(session, dialect, "claude-opus-9", stream=stream)
    assert answer.status_code == 200, answer.text
    assert models_in(answer) == {"claude-opus-9"}
    assert {request.body["model"] for request in engine.received if isinstance(request.body, dict)} == {"policy"}
    (row,), _ = session.trajectories()
    assert row["policy"] == "" and sum(row["loss_mask"]) > 0


def test_a_name_with_a_slash_is_recorded_as_it_was_asked_for(engine: ScriptedEngine, service: RunningService) -> None:
    session = service.session()
    engine.say("one", "two")
    first = session.client.chat.completions.create(model="openai/policy", messages=USER)
    said = {"role": "assistant", "content": first.choices[0].message.content}
    session.client.chat.completions.create(model="openai/policy", messages=[*USER, said, *USER])
    assert [call["model"] for call in session.calls] == ["openai/policy", "openai/policy"]
    assert len(session.trajectories()[0]) == 1


def test_models_are_listed_by_their_own_names_and_any_that_is_answered_can_be_looked_up(service: RunningService) -> None:
    session = service.session()
    assert [model.id for model in session.client.models.list()] == ["policy"]
    one = session.client.models.retrieve("gpt-5")
    assert one.id == "gpt-5" and one.model_dump()["max_model_len"] == 8192
    assert session.calls == []


@pytest.mark.parametrize("dialect", QUESTIONS)
def test_strictly_an_unknown_name_is_refused(engine: ScriptedEngine, strict: RunningService, dialect: str) -> None:
    session = strict.session()
    refused = ask(session, dialect, "gpt-5")
    assert refused.status_code == 404 and "'gpt-5' does not exist; there are: policy" in refused.text
    assert engine.generations == [] and session.calls == []
    engine.say("hello")
    assert ask(session, dialect, "policy").status_code == 200


def test_strictly_an_unknown_name_cannot_be_looked_up(strict: RunningService) -> None:
    answer = strict.session().request("GET", "/v1/models/gpt-5")
    assert answer.status_code == 404 and answer.json()["error"]["param"] == "model"


def test_a_declared_name_whose_engine_is_away_is_not_answered_by_another(running: Running, redis_server: RedisServer) -> None:
    """The tokens would be those of a model that nobody asked for."""
    engine = running[0].reset()
    away = f"judge=http://127.0.0.1:{free_port()}"
    declared = {"judge": ["large"]}
    with RunningService([engine.url, away], redis_server.url, policy_models=declared) as service:
        session = service.session()
        for name in ("judge", "large"):
            answer = ask(session, "chat", name)
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_unavailable")
        engine.say("hello")
        assert ask(session, "chat", "gpt-5").status_code == 200
        assert len(session.calls) == 1


# Several names of one policy


def ask_in_turns(session: Session, engine: ScriptedEngine, names: Sequence[str], *, tools: bool) -> list[Any]:
    """A tool loop, or a talk, whose calls take these names in turn. Returns its messages."""
    messages: list[Any] = [turn("user", "q")]
    for number, name in enumerate(names):
        engine.say(engine.family.speak("so", calls=[("lookup", {"key": str(number)})]) if tools else f"reply {number}")
        fields = {"tools": TOOLS} if tools else {}
        answer = session.client.chat.completions.create(model=name, messages=messages, **fields)
        assert answer.model == name
        messages.append(answer.choices[0].message.model_dump(exclude_none=True))
        messages.append(tool_result(messages[-1], "found") if tools else turn("user", "more"))
    return messages


ALTERNATING = ("opus", "haiku", "opus", "policy", "haiku")


@pytest.mark.case(20)
@pytest.mark.parametrize(("path", "tools"), [("token", True), ("token", False), ("chat", False)])
def test_calls_that_take_turns_with_the_names_of_one_policy_are_one_row(
    engine: ScriptedEngine, running: Running, path: str, tools: bool
) -> None:
    """The old bug: the name was a part of the root, and each switch began another: 5 calls, 3 rows."""
    session = running[1][path].session()
    ask_in_turns(session, engine, ALTERNATING, tools=tools)
    calls = session.calls
    assert [call["parent_id"] for call in calls] == [None, *(call["call_id"] for call in calls[:-1])]
    assert [call["branch_reason"] for call in calls] == [None] * 5
    assert [call["model"] for call in calls] == list(ALTERNATING), "each is shown under the name that it was asked by"
    (row,) = session.trajectories()[0]
    assert row["call_ids"] == [call["call_id"] for call in calls]


def test_a_prompt_goes_on_under_another_name_of_the_policy(engine: ScriptedEngine, token_service: RunningService) -> None:
    session = token_service.session()
    engine.say(Say("hello world", finish_reason="length"), "fish")
    said = session.client.completions.create(model="opus", prompt="q").choices[0].text
    session.client.completions.create(model="haiku", prompt=f"q{said}")
    assert [call["model"] for call in session.calls] == ["opus", "haiku"]
    assert len(session.trajectories()[0]) == 1


@pytest.mark.case(20)
@pytest.mark.parametrize("names", [("sonnet",) * 5, ALTERNATING[::-1]], ids=["a name of its own", "in another order"])
def test_a_fork_that_asks_by_another_name_of_the_policy_does_not_diverge(
    engine: ScriptedEngine, service: RunningService, names: Sequence[str]
) -> None:
    origin = service.session()
    messages = ask_in_turns(origin, engine, ALTERNATING, tools=True)
    origin.close()
    copy = service.session(replay={"session_id": origin.session_id, "on_divergence": "fail"})
    for number, name in enumerate(names):
        answer = copy.client.chat.completions.create(model=name, messages=messages[: 2 * number + 1], tools=TOOLS)
        assert answer.model == name
        assert answer.choices[0].message.model_dump(exclude_none=True) == messages[2 * number + 1]
    assert [call["session_id"] for call in copy.calls] == [origin.session_id] * 5


def test_a_stored_response_has_the_name_that_it_was_asked_by(engine: ScriptedEngine, token_service: RunningService) -> None:
    session, responses = token_service.session(), list[Any]()
    for name in ("opus", "haiku", "haiku"):
        engine.say("reply")
        more = {"previous_response_id": responses[-1].id} if responses else {}
        responses.append(session.client.responses.create(model=name, input="q", **more))
    assert [session.client.responses.retrieve(response.id).model for response in responses] == ["opus", "haiku", "haiku"]
    assert len(session.trajectories()[0]) == 1
