"""Which names of models a session answers: any that no other policy goes by, each under the name that was asked for.

Harnesses ask for gpt-5, openai/policy or claude-opus, and many cannot be told otherwise: they got 404.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support.engine.scripted_engine import ScriptedEngine
from tests.support.engine.scripted_fixtures import Running, both_paths
from tests.support.service import plain_http
from tests.support.service.redis_server import RedisServer, free_port
from tests.support.service.running_service import RunningService, Session

USER: list[Any] = [{"role": "user", "content": "q"}]
DIALECTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": USER}),
    "completions": ("/v1/completions", {"prompt": "q", "max_tokens": 9}),
    "responses": ("/v1/responses", {"input": "q"}),
    "messages": ("/v1/messages", {"messages": USER, "max_tokens": 9}),
    "gemini": ("/v1beta/models/{model}:{method}", {"contents": [{"role": "user", "parts": [{"text": "q"}]}]}),
}


@pytest.fixture(scope="module")
def running(redis_server: RedisServer) -> Iterator[Running]:
    with both_paths(redis_server) as running:
        yield running


@pytest.fixture(scope="module")
def strict(running: Running, redis_server: RedisServer) -> Iterator[RunningService]:
    with RunningService(running[0].url, redis_server.url, strict_models=True) as service:
        yield service


def ask(session: Session, dialect: str, model: str, *, stream: bool = False) -> httpx.Response:
    path, body = DIALECTS[dialect]
    if dialect == "gemini":
        path = path.format(model=model, method="streamGenerateContent?alt=sse" if stream else "generateContent")
    else:
        body = body | {"model": model, "stream": stream}
    url = session.base_url.removesuffix("/v1") + path
    return plain_http.post(url, json=body, headers={"Authorization": f"Bearer {session.api_key}"})


def models_in(answer: httpx.Response) -> set[str]:
    """Every name of a model that the answer says."""
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
    bodies = [json.loads(event) for event in events] or [answer.json()]
    holders = [holder for body in bodies for holder in (body, body.get("message"), body.get("response")) if holder]
    return {holder[key] for holder in holders for key in ("model", "modelVersion") if key in holder}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dialect", DIALECTS)
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


@pytest.mark.parametrize("dialect", DIALECTS)
def test_strictly_an_unknown_name_is_refused(engine: ScriptedEngine, strict: RunningService, dialect: str) -> None:
    session = strict.session()
    refused = ask(session, dialect, "gpt-5")
    assert refused.status_code == 404 and "'gpt-5' does not exist; there are: policy" in refused.text
    assert engine.generations == [] and session.calls == []
    engine.say("hello")
    assert ask(session, dialect, "policy").status_code == 200


def test_strictly_an_unknown_name_cannot_be_looked_up(strict: RunningService) -> None:
    session = strict.session()
    answer = plain_http.get(f"{session.base_url}/models/gpt-5", headers={"Authorization": f"Bearer {session.api_key}"})
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
