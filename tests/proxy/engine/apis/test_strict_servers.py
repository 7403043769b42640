"""Servers that refuse fields they do not know: what the service added is left out, what the harness asked for is refused in their words."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr

from proxy.engine.apis.question import Question
from proxy.engine.replica import Replica
from proxy.engine.wire.refusals import refusal
from proxy.errors import RequestError
from proxy.timeline import CancelScope
from tests.support.engine.scripted_engine import Exchange, Fail, ScriptedEngine
from tests.support.engine.strict_server import KEY, WORDS, StrictServer
from tests.support.service.redis_server import RedisServer
from tests.support.service.running_service import RunningService
from tests.support.sessions.conversations import TOOLS, assemble

OWN = {"return_token_ids", "logprobs", "top_logprobs"}


@contextmanager
def serving(server: ScriptedEngine, redis_server: RedisServer, base: str = "", **settings: Any) -> Iterator[RunningService]:
    redis_server.flushall()
    settings = {"engine_api": "chat", "engine_api_key": SecretStr(KEY), **settings}
    with server, RunningService(server.url + base, redis_server.url, **settings) as service:
        yield service


def describe(service: RunningService) -> dict[str, Any]:
    (replica,) = service.request("GET", "/engines").json()["replicas"]
    return dict(replica)


@pytest.mark.parametrize("words", [name for name in WORDS if name not in ("openai, kept", "sglang", "openai, model")])
def test_fields_that_the_service_added_are_left_out_of_a_request_that_is_refused_for_them(
    redis_server: RedisServer, words: str
) -> None:
    """Every call was answered 400. Some servers name one field in each refusal."""
    server = StrictServer(words=words, refuses=("logprobs", "top_logprobs"))
    with serving(server.say("one", "two", "three"), redis_server) as service:
        session = service.session()
        assert session.answer("q")["content"] == "one"
        refused = len(server.bodies()) - 1
        assert 1 <= refused <= len(OWN)
        assert assemble(session.ask("q", stream=True, tools=TOOLS))["content"] == "two"
        assert session.answer("q")["content"] == "three"
        taken = server.bodies()[refused:]
        assert len(taken) == 3 and not any(OWN & body.keys() for body in taken)
        assert taken[1]["stream_options"] == {"include_usage": True}
        replica = describe(service)
        assert replica["trainable"] is False and replica["status"] == "serving"
        assert "does not take logprobs, return_token_ids" in "; ".join(replica["notes"])
        assert "returns no token ids, or no logprobs: its calls are served and never trained" in replica["notes"]
        rows, accounting = session.trajectories()
        assert rows == [] and {item["reason"] for item in accounting["quarantined"]} == {"no_token_ids"}


def test_what_is_refused_of_streams_alone_is_left_out_of_those_alone(redis_server: RedisServer) -> None:
    """SGLang's `return_token_ids is not supported with streaming`: its whole replies have ids, and are trained."""
    server = StrictServer(words="sglang", ids=True, refuses_streamed=("return_token_ids",))
    with serving(server, redis_server) as service:
        session = service.session()
        for stream in (True, False, True, False):
            answer = session.ask("q", stream=stream)
            assert assemble(answer)["content"] if stream else answer.choices[0].message.content
        assert ["return_token_ids" in body for body in server.bodies()] == [True, False, True, False, True]
        assert [bool(call["completion_ids"]) for call in session.calls] == [False, True, False, True]
        replica = describe(service)
        assert replica["trainable"] is True
        assert replica["notes"][-1].endswith("in streams: those calls are served and never trained")


def test_what_is_refused_of_one_model_is_left_out_for_that_model_alone(redis_server: RedisServer) -> None:
    """OpenAI keeps the logprobs of some models to itself, and answers 403."""
    server = StrictServer(words="openai, kept", ids=True, refuses=("logprobs",), models=("reasons", "talks"))
    with serving(server, redis_server) as service:
        session = service.session()

        def ask(model: str) -> Any:
            return session.client.chat.completions.create(model=model, messages=[{"role": "user", "content": "q"}])

        ask("reasons")
        server.not_taken = frozenset()
        ask("talks")
        ask("reasons")
        told = [(body["model"], "logprobs" in body, "top_logprobs" in body) for body in server.bodies()]
    assert told == [("reasons", True, True), ("reasons", False, False), ("talks", True, True), ("reasons", False, False)]


def test_max_tokens_is_sent_under_its_newer_name_to_models_that_want_that(redis_server: RedisServer) -> None:
    server = StrictServer(words="openai, model", ids=True, refuses=("max_tokens",))
    with serving(server, redis_server) as service:
        session = service.session()
        for limit in ({"max_tokens": 3}, {"max_completion_tokens": 4}):
            assert session.ask("q", **limit).choices[0].message.content
        told = [{name: body[name] for name in body if name.startswith("max")} for body in server.bodies()]
        assert told == [{"max_tokens": 3}, {"max_completion_tokens": 3}, {"max_completion_tokens": 4}]
        assert [note for note in describe(service)["notes"] if not note.startswith("takes no new weights")] == []


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("guided_choice", {"extra_body": {"guided_choice": ["a"]}}),
        ("logprobs", {"logprobs": True}),
        ("stream_options", {"stream": True, "stream_options": {"include_usage": True}}),
    ],
)
def test_a_field_of_the_harness_is_refused_in_the_servers_words(
    redis_server: RedisServer, name: str, fields: dict[str, Any]
) -> None:
    server = StrictServer(words="openai, new", ids=True, refuses=(name,))
    with serving(server, redis_server) as service:
        session = service.session()
        for _ in range(2):
            with pytest.raises(openai.BadRequestError) as raised:
                session.ask("q", **fields)
            assert raised.value.message.endswith(f"Unknown parameter: '{name}'.") and raised.value.param == name
        assert session.calls == [] and len(server.bodies()) == 2


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ("Invalid value for 'top_logprobs': must be between 0 and 5", "top_logprobs"),
        ("Unknown parameter: 'foo'. Supported parameters: logprobs, return_token_ids.", "foo"),
        ("messages: Extra inputs are not permitted", "messages"),
    ],
)
def test_a_refusal_that_only_mentions_a_field_is_passed_on_at_once(redis_server: RedisServer, message: str, param: str) -> None:
    engine = ScriptedEngine()
    with serving(engine, redis_server) as service, pytest.raises(openai.BadRequestError) as raised:
        engine.fault("/v1/chat/completions", Fail(400, message, "invalid_request_error", param))
        service.session().ask("q")
    assert message in raised.value.message
    assert len([asked for asked in engine.received if asked.path == "/v1/chat/completions" and asked.body]) == 1


class Shaped(ScriptedEngine):
    """Answers every chat request alike."""

    def __init__(self, answer: dict[str, Any]) -> None:
        super().__init__(plain=True)
        self._answer = answer
        self._routes = {("POST", "/v1/chat/completions"): self._tell}

    async def _tell(self, exchange: Exchange, body: Any) -> None:
        if not body.get("stream"):
            return await exchange.answer(self._answer)
        await exchange.open_stream()
        await exchange.event(self._answer)
        await exchange.close_stream()
        return None


def test_ids_are_read_under_sglangs_names(redis_server: RedisServer) -> None:
    entries: list[Any] = [{"token": text, "logprob": -0.5, "top_logprobs": []} for text in ("hel", "lo", "")]
    choice = {"index": 0, "message": {"role": "assistant", "content": "hello"}, "finish_reason": "stop", "matched_stop": 2}
    choice |= {"logprobs": {"content": entries}, "response_token_ids": [7, 8, 2], "prompt_token_ids": [1, 5, 6]}
    usage = {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6}
    answer = {"id": "x", "object": "chat.completion", "created": 1, "model": "policy", "choices": [choice], "usage": usage}
    with serving(Shaped(answer), redis_server) as service:
        session = service.session()
        assert session.answer("q")["content"] == "hello"
        (row,), _ = session.trajectories()
        assert (row["token_ids"], row["loss_mask"]) == ([1, 5, 6, 7, 8, 2], [0, 0, 0, 1, 1, 1])
        assert describe(service)["trainable"] is True


def test_a_refusal_inside_a_stream_is_one_of_the_request(redis_server: RedisServer) -> None:
    """It was answered 502, as if the engine had broken off."""
    error = {"error": {"object": "error", "message": "temperature must be at most 2", "type": "BadRequestError", "code": 400}}
    with serving(Shaped(error), redis_server) as service:
        session = service.session()
        with pytest.raises(openai.APIError) as raised:
            list(session.ask("q", stream=True, temperature=3))
        assert "temperature must be at most 2" in raised.value.message and raised.value.code == "bad_request"
        assert session.calls == []


@pytest.mark.parametrize("stream", [False, True])
def test_a_server_that_says_how_long_to_wait_is_asked_again_then(redis_server: RedisServer, stream: bool) -> None:
    server = StrictServer(ids=True)
    with serving(server.busy("0", "0").say("hello"), redis_server) as service:
        session = service.session()
        answer = session.ask("q", stream=stream)
        assert (assemble(answer)["content"] if stream else answer.choices[0].message.content) == "hello"
        (call,) = session.calls
        assert call["status"] == "finished" and len(server.bodies()) == 3


def test_a_wait_that_is_longer_than_a_call_may_queue_is_the_harnesss(redis_server: RedisServer) -> None:
    server = StrictServer(ids=True)
    with serving(server.busy("3600"), redis_server) as service:
        session = service.session()
        with pytest.raises(openai.InternalServerError) as raised:
            session.ask("q")
        assert (raised.value.status_code, raised.value.response.headers["retry-after"]) == (503, "3600")
        assert "too busy (HTTP 429): Rate limit reached for requests per min (RPM): Limit 3, Used 3." in raised.value.message
        assert session.calls == [] and len(server.bodies()) == 1


def test_calls_go_to_the_routes_of_a_base_without_v1(redis_server: RedisServer) -> None:
    """Gemini's base URL ends in /v1beta/openai: each call was answered 404."""
    base = "/v1beta/openai"
    server = StrictServer(
        words="gemini", base=base, refuses=("logprobs", "top_logprobs"), models=("models/small", "models/large")
    )
    with serving(server.say("one", "two"), redis_server, base, engine_api="auto") as service:
        session = service.session()
        asked = {"model": "models/large", "messages": [{"role": "user", "content": "q"}]}
        assert session.client.chat.completions.create(**asked).choices[0].message.content == "one"
        assert assemble(session.client.chat.completions.create(**asked, stream=True))["content"] == "two"
        assert [call["status"] for call in session.calls] == ["finished", "finished"]
        assert {body["model"] for body in server.bodies()} == {"models/large"}
        replica = describe(service)
        assert (replica["status"], replica["models"]) == ("serving", ["models/small", "models/large"])
        with pytest.raises(openai.BadRequestError) as raised:
            session.client.completions.create(model="models/large", prompt="q")
        assert "takes no prompts without messages" in raised.value.message
        assert server.paths()[-1] == f"{base}/completions"


ADDED = ("return_token_ids", "logprobs", "top_logprobs", "prompt_logprobs", "stream_options")


@given(
    st.sets(st.sampled_from([*ADDED, "max_tokens"])),
    st.sets(st.sampled_from(["temperature", "guided_choice"])),
    st.sampled_from(sorted(WORDS.keys() - {"openai, kept"})),
)
def test_a_request_loses_only_what_was_added_and_refused_and_is_refused_no_more_often_than_that(
    refused: set[str], of_harness: set[str], words: str
) -> None:
    replica, sent = Replica("one", "http://one"), []
    asked = {"model": "m", "stream": True, "max_tokens": 5, "temperature": 1.0, "guided_choice": ["a"]}

    async def send(body: dict[str, Any]) -> None:
        sent.append(body)
        if unknown := [name for name in body if name in refused | of_harness]:
            status, answer = WORDS[words](unknown)
            raise refusal(replica, "/v1/chat/completions", status, json.dumps(answer).encode())

    async def put() -> None:
        await Question(replica, dict(asked), dict.fromkeys(ADDED, True)).put(CancelScope("s", "c"), [], send)

    if of_harness:
        with pytest.raises(RequestError):
            asyncio.run(put())
        assert replica.refused_fields == set()
    else:
        for _ in range(2):
            asyncio.run(put())
        kept = {name for name in ADDED if name not in refused and not (name == "top_logprobs" and "logprobs" in refused)}
        limit = {"max_completion_tokens": 5} if "max_tokens" in refused else {"max_tokens": 5}
        expected = {name: asked[name] for name in asked if name != "max_tokens"} | dict.fromkeys(kept, True) | limit
        assert sent[-1] == sent[-2] == expected
    assert len(sent) <= len(refused) + 2
