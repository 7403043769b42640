"""An engine's answer that cannot be true is refused as one, in the harness's dialect: nothing of it is recorded, nothing dangles.

The engine is the scripted one; `engine.alter` spoils what it says, whole and in a stream, on each path to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from tests.support.engine.altered_engine import AlteredEngine
from tests.support.engine.scripted_fixtures import Running
from tests.support.service.redis_server import RedisServer, running_redis
from tests.support.service.running_service import RunningService, Session

TEXT = "hello world in Paris"


@pytest.fixture(scope="module")
def running(redis_server: RedisServer) -> Iterator[Running]:
    redis_server.flushall()
    with (
        AlteredEngine("qwen3", also=("/v1/chat/completions/render",)) as engine,
        RunningService(engine.url, redis_server.url, engine_api="token") as token,
        RunningService(engine.url, redis_server.url, engine_api="chat") as chat,
    ):
        yield engine, {"token": token, "chat": chat}


def choices_of(told: dict[str, Any]) -> list[dict[str, Any]]:
    """The choices that say something of tokens."""
    return [choice for choice in told.get("choices") or () if choice.get("token_ids")]


def without_choices(told: dict[str, Any]) -> dict[str, Any]:
    return {**told, "choices": []}


def with_ids(change: Callable[[int], int]) -> Callable[[dict[str, Any]], None]:
    """Every sampled id another, and so that of its logprob where that names one."""

    def alter(told: dict[str, Any]) -> None:
        for choice in choices_of(told):
            choice["token_ids"] = [change(token) for token in choice["token_ids"]]
            for entry in (choice.get("logprobs") or {}).get("content") or ():
                if "token_id" in entry:
                    entry["token_id"] = change(entry["token_id"])

    return alter


def with_logprobs(change: Callable[[dict[str, Any]], None]) -> Callable[[dict[str, Any]], None]:
    def alter(told: dict[str, Any]) -> None:
        for choice in choices_of(told):
            for entry in (choice.get("logprobs") or {}).get("content") or ():
                change(entry)

    return alter


SPOILT: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "no choices": (without_choices, "choice 0"),
    "an id beyond 32 bits": (with_ids(lambda token: 2**40), str(2**40)),
    "an id beyond 64 bits": (with_ids(lambda token: 2**70), ""),
    "a negative id": (with_ids(lambda token: -1), "-1"),
    "a positive logprob": (with_logprobs(lambda entry: entry.update(logprob=0.5)), "0.5"),
}

DIALECTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "q"}]}),
    "completions": ("/v1/completions", {"prompt": "q", "max_tokens": 20}),
    "messages": ("/v1/messages", {"messages": [{"role": "user", "content": "q"}], "max_tokens": 20}),
    "responses": ("/v1/responses", {"input": "q"}),
    "gemini": ("/v1beta/models/policy:generateContent", {"contents": [{"role": "user", "parts": [{"text": "q"}]}]}),
}


def ask(session: Session, dialect: str, *, stream: bool = False) -> httpx.Response:
    path, body = DIALECTS[dialect]
    if dialect == "gemini":
        path = path.replace(":generateContent", ":streamGenerateContent?alt=sse") if stream else path
    else:
        body = {**body, "model": "policy", "stream": stream}
    base = session.base_url.removesuffix("/v1")
    return httpx.post(base + path, json=body, headers={"Authorization": f"Bearer {session.api_key}"}, timeout=120)


def check_nothing_is_left(engine: AlteredEngine, session: Session) -> None:
    """No call, finished or dangling; and the session goes on."""
    assert session.calls == []
    rows, accounting = session.trajectories()
    assert rows == accounting["quarantined"] == []
    engine.reset().say(TEXT)
    assert session.answer("q")["content"] == TEXT
    assert len(session.calls) == 1


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("spoilt", sorted(SPOILT))
def test_an_answer_that_cannot_be_true_is_refused_and_leaves_nothing(
    engine: AlteredEngine, service: RunningService, spoilt: str, stream: bool
) -> None:
    session = service.session()
    engine.alter, says = SPOILT[spoilt]
    engine.say(TEXT)
    answer = ask(session, "chat", stream=stream)
    assert "engine_failed" in answer.text, answer.text
    assert answer.status_code == (200 if stream and answer.headers["content-type"].startswith("text/event-stream") else 502)
    assert says in answer.text
    check_nothing_is_left(engine, session)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_logprobs_of_other_tokens_than_were_sampled_are_refused(
    engine: AlteredEngine, token_service: RunningService, stream: bool
) -> None:
    session = token_service.session()
    engine.alter = with_logprobs(lambda entry: entry.update(token_id=entry["token_id"] + 1))
    engine.say(TEXT)
    answer = ask(session, "chat", stream=stream)
    assert "engine_failed" in answer.text and "logprob" in answer.text, answer.text
    check_nothing_is_left(engine, session)


def test_logprobs_of_other_tokens_are_refused_where_the_chat_path_names_their_ids(
    engine: AlteredEngine, running: Running
) -> None:
    session = running[1]["chat"].session(sampling={"top_logprobs": 2})
    engine.alter = with_logprobs(lambda entry: entry.update(token="token_id:7"))
    engine.say(TEXT)
    answer = ask(session, "chat")
    assert answer.status_code == 502 and "logprob" in answer.text, answer.text
    check_nothing_is_left(engine, session)


@pytest.mark.parametrize("dialect", sorted(DIALECTS))
@pytest.mark.parametrize("spoilt", ["no choices", "a negative id"])
def test_every_dialect_says_so_in_its_own_shape(
    engine: AlteredEngine, service: RunningService, dialect: str, spoilt: str
) -> None:
    session = service.session()
    engine.alter = SPOILT[spoilt][0]
    answer = ask(session, dialect)
    assert answer.status_code == 502
    assert "choice" in answer.json()["error"]["message"]
    check_nothing_is_left(engine, session)


@pytest.mark.parametrize("dialect", ["chat", "completions"])
def test_prompt_ids_that_are_none_are_refused(engine: AlteredEngine, running: Running, dialect: str) -> None:
    """Those that an engine rendered, and those that it says it sampled after."""

    def alter(told: dict[str, Any]) -> None:
        for holder in (told, *(told.get("choices") or ())):
            for name in ("token_ids", "prompt_token_ids"):
                if holder.get(name) and "message" not in holder:
                    holder[name] = [2**40, *holder[name]]

    for service in running[1].values():
        session = service.session()
        engine.alter = alter
        answer = ask(session, dialect)
        assert answer.status_code == 502, answer.text
        check_nothing_is_left(engine, session)


def test_an_engine_that_answers_one_of_two_choices_is_refused(engine: AlteredEngine, service: RunningService) -> None:
    session = service.session()
    engine.alter = lambda told: {**told, "choices": told["choices"][:1]} if "choices" in told else None
    with pytest.raises(Exception, match="choice 1 of 2"):
        session.ask("q", n=2)
    check_nothing_is_left(engine, session)


def test_a_logprob_that_rounding_made_positive_is_none_of_these(engine: AlteredEngine, service: RunningService) -> None:
    """An engine that normalises in float32 may end a hair above 0 for a certain token."""
    session = service.session()
    engine.alter = with_logprobs(lambda entry: entry.update(logprob=1e-6))
    engine.say(TEXT)
    assert session.answer("q")["content"] == TEXT


def test_tokens_under_weights_without_a_number_are_not_trained_as_version_0() -> None:
    """An engine that takes no pushes, but was given other weights behind the service's back, and a name for them."""
    with (
        running_redis() as redis,
        AlteredEngine("qwen3", updatable=False) as engine,
        RunningService(engine.url, redis.url, engine_api="token") as service,
    ):
        expected: list[tuple[str, list[Any], list[str]]] = [
            ("default", [[0, 0, 5]], []),
            ("step-120", [], ["weight_version_unknown"]),
            ("3", [[3, 0, 5]], []),
        ]
        for label, versions, reasons in expected:
            engine.sampler.version = label
            session = service.session()
            engine.say(TEXT)
            session.ask("q")
            (call,) = session.calls
            assert call["weight_versions"] == [[version, start, len(call["completion_ids"])] for version, start, _ in versions]
            assert [item["reason"] for item in session.trajectories()[1]["quarantined"]] == reasons
