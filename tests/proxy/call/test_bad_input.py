"""What goes wrong around a call, as the openai SDK sees it: its own exceptions, what it retries, and what is left in the store."""

from __future__ import annotations

import gzip
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from openai import APIError, BadRequestError, InternalServerError, NotFoundError

from proxy.store import keys
from tests.support.engine.scripted_engine import Drop, Fail, Hang, Say, ScriptedEngine
from tests.support.engine.scripted_fixtures import Running
from tests.support.engine.template_families import FAMILIES
from tests.support.service import plain_http
from tests.support.service.redis_server import RedisServer, free_port, running_redis
from tests.support.service.running_service import RunningService, streamed_text, wait_until
from tests.support.service.verbatim_process import ADMIN
from tests.support.sessions.questions import QUESTIONS

SETTINGS = {"max_model_len": 512, "max_body_bytes": 20_000}


QUESTION: list[Any] = [{"role": "user", "content": "q"}]


# What the harness got wrong


@pytest.mark.parametrize("dialect", sorted(QUESTIONS))
def test_to_continue_the_last_message_is_refused_in_every_dialect(
    engine: ScriptedEngine, service: RunningService, dialect: str
) -> None:
    """It was dropped in silence: the model answered the message that it should have continued, and that was trained."""
    session, (path, body) = service.session(), QUESTIONS[dialect]

    def ask(**fields: Any) -> httpx.Response:
        return session.post(path, {**body, **fields})

    for named in ({"continue_final_message": True}, {"add_generation_prompt": False}, {"continue_final_message": "yes"}):
        ((name, _),) = named.items()
        for fields in (named, {"chat_template_kwargs": named}):
            answer = ask(**fields)
            assert answer.status_code == 400, answer.text
            assert f"{name}' can only be" in answer.json()["error"]["message"]
    assert engine.generations == []
    assert session.calls == []
    # As every client may say that asks for a new turn.
    assert ask(continue_final_message=False, add_generation_prompt=True).status_code == 200
    assert len(session.calls) == 1


@pytest.mark.parametrize(("family", "text_extends"), [("qwen3", False), ("llama3", True)])
def test_no_later_rendering_proves_what_a_begun_message_was_continued_with(family: str, text_extends: bool) -> None:
    """Why a message is not continued: in the conversation's next turn, what was sampled after "fish" stands after other ids. Qwen3's
    template shows the turn otherwise, and where the text is the same "fish" + "ing" are one token."""
    of = FAMILIES[family]
    question, following = {"role": "user", "content": "say it"}, {"role": "user", "content": "and again"}
    shown = of.render_text([question, {"role": "assistant", "content": "fish"}], add_generation_prompt=False)
    prompt = shown[: shown.rindex("fish") + len("fish")]
    later = of.render_text([question, {"role": "assistant", "content": "fishing"}, following])
    assert later.startswith(prompt) == text_extends
    said = [*of.encode(prompt), *of.encode("ing")]
    assert of.encode(later)[: len(said)] != said


@pytest.mark.case(39)
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'"text"',
        b"\xff\xfe",
        b"{}",
        b'{"model": "policy"}',
        b'{"model": "policy", "messages": []}',
        b'{"model": "policy", "messages": "q"}',
        b'{"model": "policy", "messages": ["q"]}',
        b'{"model": "policy", "messages": [{"content": "q"}]}',
        b'{"model": "policy", "messages": [{"role": "user", "content": 7}]}',
        b'{"model": 7, "messages": [{"role": "user", "content": "q"}]}',
        b'{"model": "policy", "messages": [{"role": "user", "content": "q"}], "n": 0}',
        b'{"model": "policy", "messages": [{"role": "user", "content": "q"}], "max_tokens": "many"}',
        b'{"model": "policy", "messages": [{"role": "user", "content": "q"}], "temperature": "hot"}',
        b'{"model": "policy", "messages": [{"role": "user", "content": "q"}], "stop": 7}',
        b'{"model": "policy", "messages": [{"role": "user", "content": "q"}], "stream": "yes"}',
        b'{"model": "policy", "messages": [{"role": "user", "content": "q"}], "stream_options": 7}',
        b'{"model": "policy", "messages": [{"role": "user", "content": "q"}], "tools": {"a": 1}}',
        b'{"model": "policy", "messages": [{"role": "user", "content": "q"}], "top_logprobs": "two", "logprobs": true}',
        b'{"model": "policy", "messages": [{"role": "assistant", "tool_calls": [{"function": 7}]}, {"role": "user"}]}',
        b'{"model": "policy", "messages": [{"role": "user", "content": [7]}]}',
        b'{"model": "policy", "messages": [{"role": "\\ud800", "content": "q"}]}',
        b'{"model": "policy", "messages": [{"role": "", "content": "q"}]}',
        b'{"model": "policy", "messages": [{"role": "us er", "content": "q"}]}',
        b'{"model": "policy", "messages": [{"role": "user\\n", "content": "q"}]}',
        b'{"model": "policy", "messages": [{"role": "\xd1\x83ser", "content": "q"}]}',
    ],
)
def test_a_malformed_body_is_refused_in_the_dialects_shape_and_records_nothing(
    engine: ScriptedEngine, service: RunningService, body: bytes
) -> None:
    session = service.session()
    answer = session.post("/v1/chat/completions", body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["message"]
    assert "Traceback" not in answer.text
    assert session.calls == []
    assert engine.generations == []


PREFILLED = [*QUESTION, {"role": "assistant", "content": "The answer is"}]
ENDS_IN_THE_REPLY: dict[str, tuple[str, dict[str, Any]]] = {
    "chat, prefix": (
        "/v1/chat/completions",
        {"model": "policy", "messages": [*QUESTION, {"role": "assistant", "content": "The answer is", "prefix": True}]},
    ),
    "chat, partial": (
        "/v1/chat/completions",
        {"model": "policy", "messages": [*QUESTION, {"role": "assistant", "content": "The answer is", "partial": True}]},
    ),
    "responses": (
        "/v1/responses",
        {"model": "policy", "input": [*QUESTION, {"role": "assistant", "content": "The answer is", "prefix": True}]},
    ),
    "messages": ("/v1/messages", {"model": "policy", "max_tokens": 9, "messages": PREFILLED}),
    "gemini": (
        "/v1beta/models/policy:generateContent",
        {"contents": [{"role": "user", "parts": [{"text": "q"}]}, {"role": "model", "parts": [{"text": "The answer is"}]}]},
    ),
}


@pytest.mark.parametrize("form", ENDS_IN_THE_REPLY)
def test_a_reply_to_be_continued_is_refused_and_not_answered_by_a_new_turn(
    engine: ScriptedEngine, service: RunningService, form: str
) -> None:
    session = service.session()
    path, body = ENDS_IN_THE_REPLY[form]
    answer = session.post(path, body)
    assert answer.status_code == 400, answer.text
    assert engine.generations == [] and session.calls == []


def test_a_replayed_message_that_was_once_a_prefix_and_an_unset_one_are_taken(
    engine: ScriptedEngine, service: RunningService
) -> None:
    session = service.session()
    engine.say("a", "b")
    session.answer([*QUESTION, {"role": "assistant", "content": "The", "prefix": True}, *QUESTION])
    session.answer([*QUESTION, {"role": "assistant", "content": "The", "prefix": False}])
    assert len(session.calls) == 2


@pytest.mark.parametrize("encoding", ["gzip", "br", "zstd", "GZIP", "gzip, identity"])
@pytest.mark.parametrize("dialect", QUESTIONS)
def test_a_compressed_body_is_refused_by_its_name(
    engine: ScriptedEngine, service: RunningService, dialect: str, encoding: str
) -> None:
    session = service.session()
    path, body = QUESTIONS[dialect]
    answer = session.post(path, gzip.compress(json.dumps(body).encode()), headers={"content-encoding": encoding})
    assert answer.status_code == 415 and f"Content-Encoding '{encoding}'" in answer.text
    assert "retry-after" not in answer.headers and session.calls == []
    plain = session.post(path, body, headers={"content-encoding": "identity"})
    assert plain.status_code == 200, plain.text


def test_a_compressed_body_of_the_control_side_is_refused_by_its_name(service: RunningService) -> None:
    headers = {"Authorization": f"Bearer {ADMIN}", "content-encoding": "gzip"}
    answer = plain_http.post(f"{service.url}/sessions", content=gzip.compress(b"{}"), headers=headers)
    assert answer.status_code == 415 and answer.json()["error"]["code"] == "unsupported_encoding"


@pytest.mark.parametrize(
    "said",
    [
        Fail(404, "The model `x` does not exist.", "NotFoundError", "model"),
        Fail(404, "model 'x' not found, try pulling it first"),
        Fail(404, "Not Found"),
        Fail(404, ""),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_an_engine_does_not_have_is_final(
    engine: ScriptedEngine, service: RunningService, said: Fail, stream: bool
) -> None:
    """It was a 502 with Retry-After: a harness asked for minutes for what is not there."""
    token = service.settings.engine_api == "token"
    engine.fault("/inference/v1/generate" if token else "/v1/chat/completions", said)
    session = service.session()
    with pytest.raises(NotFoundError) as refused:
        session.ask("q", stream=stream)
    assert "retry-after" not in refused.value.response.headers
    assert session.calls == [] and session.answer("q")["content"]


@pytest.mark.case(39)
@pytest.mark.parametrize("stream", [False, True])
def test_a_context_that_is_too_long_says_so_in_a_way_clients_know(
    engine: ScriptedEngine, service: RunningService, stream: bool
) -> None:
    session = service.session()
    with pytest.raises(BadRequestError) as refused:
        session.ask("x y " * 600, stream=stream)
    assert refused.value.code == "context_length_exceeded"
    assert "maximum context length" in refused.value.message
    assert session.calls == []


def test_a_second_turn_that_outgrows_the_window_leaves_the_first_as_it_was(
    engine: ScriptedEngine, service: RunningService
) -> None:
    engine.say("hello")
    session = service.session()
    message = session.answer("q")
    with pytest.raises(BadRequestError) as refused:
        session.ask([*QUESTION, message, {"role": "user", "content": "x y " * 600}])
    assert refused.value.code == "context_length_exceeded"
    assert len(session.calls) == 1


# Keys and sessions


def test_a_key_alone_names_its_session(engine: ScriptedEngine, service: RunningService) -> None:
    session = service.session()
    bare = session.client.with_options(base_url=f"{service.url}/v1")
    assert bare.chat.completions.create(model="policy", messages=QUESTION).choices
    assert len(session.calls) == 1


def test_a_deleted_session_is_not_found_also_where_it_was_in_memory(engine: ScriptedEngine, service: RunningService) -> None:
    session = service.session()
    session.ask("q")
    assert service.request("DELETE", f"/sessions/{session.session_id}").status_code == 204
    with pytest.raises(NotFoundError):
        session.ask("again")


def test_a_session_deleted_through_another_process_is_not_found(engine: ScriptedEngine, running: Running) -> None:
    here, there = running[1]["token"], running[1]["chat"]
    session = here.session()
    session.ask("q")
    assert there.request("DELETE", f"/sessions/{session.session_id}").status_code == 204
    with pytest.raises(NotFoundError):
        session.ask("again")
    assert here.request("GET", f"/sessions/{session.session_id}").status_code == 404


def test_a_session_that_never_was_is_not_found(service: RunningService) -> None:
    session = service.session()
    key = f"vb-{'0' * 40}-never-was"
    client = session.client.with_options(api_key=key, base_url=f"{service.url}/s/never-was/v1")
    with pytest.raises(NotFoundError):
        client.chat.completions.create(model="policy", messages=QUESTION)


def test_a_wrong_method_is_said(service: RunningService) -> None:
    session = service.session()
    answer = session.request("GET", "/v1/chat/completions")
    assert answer.status_code == 405
    assert answer.json()["error"]["message"]


# Engines that are away, break off or say nothing


def test_an_unreachable_engine_is_a_retryable_error_until_it_is_there(redis_url: str) -> None:
    port = free_port()
    with RunningService(f"http://127.0.0.1:{port}", redis_url) as service:
        ready = service.request("GET", "/readyz")
        assert ready.status_code == 503
        assert str(port) in ready.json()["reason"]
        session = service.session()
        for stream in (False, True):
            with pytest.raises(InternalServerError) as refused:
                session.ask("q", stream=stream)
            assert refused.value.status_code == 503
            assert refused.value.code == "engine_unavailable"
            assert int(refused.value.response.headers["retry-after"]) >= 1
        assert session.calls == []
        patient = service.session(max_retries=8)
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(patient.answer, "q")
            with ScriptedEngine("qwen3").say("hello").start(port) as engine:
                assert answer.result()["content"] == "hello"
                assert len(engine.generations) == 1
        assert len(patient.calls) == 1


@pytest.mark.parametrize("broken", [Drop(), Say("hello world", break_after=0), Say("hello world", break_after=2)])
def test_an_engine_that_breaks_off_an_unstreamed_call_leaves_nothing_behind(
    engine: ScriptedEngine, service: RunningService, redis_server: RedisServer, broken: Any
) -> None:
    engine.say(broken, "hello")
    session = service.session()
    with pytest.raises(InternalServerError) as refused:
        session.ask("q")
    assert refused.value.status_code == 502
    assert session.calls == []
    with redis_server.client() as client:
        assert client.hlen(keys.intents(session.session_id)) == 0
    assert session.answer("q")["content"] == "hello"
    assert len(session.trajectories()[0]) == 1


@pytest.mark.parametrize("broken", [Say("hello world in Paris", break_after=2), Say("hello world in Paris", error_after=2)])
def test_an_engine_that_breaks_off_a_stream_is_an_error_and_its_tokens_are_kept_untrained(
    engine: ScriptedEngine, service: RunningService, broken: Say
) -> None:
    engine.say(broken, "hello")
    session = service.session()
    text = ""
    with pytest.raises(APIError):
        for chunk in session.ask("q", stream=True):
            assert chunk.choices[0].finish_reason is None
            text += chunk.choices[0].delta.content or ""
    (call,) = session.calls
    assert call["status"] == "failed"
    assert call["completion_ids"] == engine.family.encode("hello world")
    assert "hello world".startswith(text)
    rows, accounting = session.trajectories()
    assert rows == []
    assert [item["tokens"] for item in accounting["quarantined"]] == [2]
    assert not call["delivered"]
    assert session.answer("q")["content"] == "hello"
    assert len(session.trajectories()[0]) == 1


def test_a_stream_that_breaks_before_its_first_token_keeps_its_status(engine: ScriptedEngine, service: RunningService) -> None:
    engine.say(Say("hello", break_after=0), Drop(), Fail(503, "overloaded", "ServiceUnavailableError"))
    session = service.session()
    for status in (502, 502, 503):
        with pytest.raises(InternalServerError) as refused:
            session.ask("q", stream=True)
        assert refused.value.status_code == status
    assert session.calls == []


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_is_killed_in_mid_call_and_comes_back_serves_the_retry(redis_url: str, stream: bool) -> None:
    gate = threading.Event()
    first = ScriptedEngine("qwen3").say(Say("hello world in Paris", gate=gate, gate_after=0)).start()
    with RunningService(first.url, redis_url) as service, ThreadPoolExecutor(1) as pool:
        session = service.session(max_retries=8)
        answer = pool.submit(
            lambda: streamed_text(session.ask("q", stream=True))[0] if stream else session.answer("q")["content"]
        )
        first.wait_for(lambda: bool(first.generations))
        first.stop()
        gate.set()
        with ScriptedEngine("qwen3").say("hello").start(first.port):
            assert answer.result() == "hello"
            (call,) = session.calls
            assert call["reply"]["content"] == "hello"
            assert call["branch_reason"] is None


def test_an_engine_that_hangs_is_given_up_after_the_timeout(redis_url: str) -> None:
    with ScriptedEngine("qwen3") as engine, RunningService(engine.url, redis_url, engine_timeout_seconds=2.0) as service:
        engine.say(Hang(), Say("hello world", seconds_per_token=20.0), "hello")
        session = service.session()
        for stream in (False, True):
            with pytest.raises(APIError, match="did not answer in time"):
                streamed_text(session.ask("q", stream=stream)) if stream else session.ask("q")
        wait_until(lambda: engine.last.disconnected, 120, "the engine saw its client go")
        assert session.answer("q")["content"] == "hello"


def test_an_engine_that_cannot_parse_its_own_reply_loses_no_token(engine: ScriptedEngine, running: Running) -> None:
    """The tokens were sampled: they are kept, and not trained, for no harness ever acted on them."""
    session = running[1]["token"].session()
    for stream in (False, True):
        # A slow stream is parsed in steps first, and whole where a step fails.
        engine.say("hello world").fault("/v1/chat/completions/derender", *[Fail(500, "no parser")] * 2)
        with pytest.raises(APIError, match="no parser") as refused:
            streamed_text(session.ask("q", stream=True)) if stream else session.ask("q")
        engine.clear_faults()
        # A stream has begun with the first token, so its error is an event.
        assert getattr(refused.value, "status_code", None) == (None if stream else 502)
    calls = session.calls
    assert [call["status"] for call in calls] == ["failed", "failed"]
    assert all(call["completion_ids"] for call in calls)
    rows, accounting = session.trajectories()
    assert rows == []
    assert len(accounting["quarantined"]) == 2


@pytest.mark.parametrize("status", [429, 503])
def test_an_engine_that_is_too_busy_is_asked_again_later(engine: ScriptedEngine, service: RunningService, status: int) -> None:
    session = service.session()
    for path in ("/inference/v1/generate", "/v1/chat/completions"):
        engine.fault(path, Fail(status, "too many requests"))
    with pytest.raises(InternalServerError) as refused:
        session.ask("q")
    assert refused.value.status_code == 503
    assert int(refused.value.response.headers["retry-after"]) >= 1
    engine.reset()
    assert session.calls == []


def test_a_render_that_fails_is_an_error_of_the_engine(engine: ScriptedEngine, running: Running) -> None:
    session = running[1]["token"].session()
    # What only renders may be asked again, of another engine too: one that hangs up is not there at the moment.
    for faults, status in (([Fail(500)], 502), ([Drop(), Drop()], 503)):
        for fault in faults:
            engine.fault("/v1/chat/completions/render", fault)
        with pytest.raises(InternalServerError) as refused:
            session.ask("q")
        assert refused.value.status_code == status
    assert session.calls == []


@pytest.mark.parametrize("endpoint", ["/v1/chat/completions/render", "/v1/chat/completions/derender"])
def test_a_connection_that_the_engine_had_just_closed_costs_a_second_try_and_not_the_call(
    endpoint: str, engine: ScriptedEngine, running: Running
) -> None:
    """vLLM closes idle connections after five seconds; what may be asked twice is asked again."""
    session = running[1]["token"].session()
    engine.say("hello world").fault(endpoint, Drop())
    assert session.ask("q").choices[0].message.content == "hello world"
    assert len(session.calls) == 1


# A store that is down or full


@pytest.mark.parametrize("stream", [False, True])
def test_a_full_store_fails_calls_until_it_has_room(stream: bool) -> None:
    with ScriptedEngine("qwen3") as engine, running_redis() as redis, RunningService(engine.url, redis.url) as service:
        session = service.session()
        engine.say("hello", "world")
        message = session.answer("q")
        with redis.client() as client:
            client.config_set("maxmemory", 1)
        following = [*QUESTION, message, {"role": "user", "content": "more"}]
        with pytest.raises(InternalServerError) as refused:
            session.ask(following, stream=stream)
        assert refused.value.status_code == 503
        assert refused.value.code == "store_unavailable"
        with redis.client() as client:
            client.config_set("maxmemory", 0)
        assert session.answer(following)["content"] == "world"
        assert len(session.calls) == 2
        assert len(session.trajectories()[0]) == 1
