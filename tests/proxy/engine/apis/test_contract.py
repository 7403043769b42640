"""What every kind of engine owes a call, whichever way it takes: the text, the ids as they were sampled, and what happens when one is cut.

What is particular to a kind is in its own module.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.support.engine.local_format import QWEN3, TEMPLATE, require_renderers
from tests.support.engine.older_vllm import OlderVllm
from tests.support.engine.scripted_engine import Fail, Say, ScriptedEngine
from tests.support.engine.shaped_sglang import ShapedSglang
from tests.support.service.redis_server import RedisServer
from tests.support.service.running_service import RunningService, Session, hanging_up, wait_until
from tests.support.sessions.conversations import (
    CAPTURED,
    TOOLS,
    assert_sampled_as_recorded,
    read,
    said_of,
    tool_result,
    turn,
    without_ids,
)

require_renderers()


@dataclass(frozen=True)
class Kind:
    """`api` is what a service is told to use, `renderer` the options of its own renderer where the engine takes ids alone."""

    engine: Callable[[], ScriptedEngine]
    api: str
    renderer: dict[str, Any] | None = None


KINDS = {
    "token": Kind(ScriptedEngine, "token"),
    "token of vLLM 0.26": Kind(partial(OlderVllm, "0.26.0"), "token"),
    "chat": Kind(ScriptedEngine, "chat"),
    "completions": Kind(ScriptedEngine, "completions", QWEN3),
    "completions by template": Kind(ScriptedEngine, "completions", TEMPLATE),
    "sglang 0.5.23": Kind(ShapedSglang, "sglang", QWEN3),
    "sglang 0.5.23 incremental": Kind(partial(ShapedSglang, incremental=True), "sglang", QWEN3),
    "sglang 0.5.5": Kind(partial(ShapedSglang, newer=False), "sglang", QWEN3),
}
RENDERING = ("/v1/chat/completions", "/v1/chat/completions/render", "/v1/chat/completions/derender")
SAMPLING = ("/inference/v1/generate", "/v1/chat/completions", "/v1/completions", "/generate")


@pytest.fixture(scope="module", params=KINDS)
def running(
    request: pytest.FixtureRequest, qwen3_format: Path, redis_server: RedisServer
) -> Iterator[tuple[ScriptedEngine, RunningService]]:
    kind = KINDS[request.param]
    settings: dict[str, Any] = (
        {} if kind.renderer is None else {"renderer": str(qwen3_format), "renderer_options": kind.renderer}
    )
    redis_server.flushall()
    with kind.engine() as engine, RunningService(engine.url, redis_server.url, engine_api=kind.api, **settings) as service:
        yield engine, service


@pytest.fixture
def engine(running: tuple[ScriptedEngine, RunningService]) -> Iterator[ScriptedEngine]:
    engine, service = running
    yield engine.reset()
    if service.settings.renderer is not None:
        asked = {request.path for request in engine.received if request.body}
        assert not asked & {*RENDERING}, "an engine of this kind renders and reads nothing"


@pytest.fixture
def service(running: tuple[ScriptedEngine, RunningService]) -> RunningService:
    return running[1]


def ask(session: Session, stream: bool, **fields: Any) -> tuple[dict[str, Any], Any]:
    """The message that the harness reads, and the usage."""
    if not stream:
        answer = session.ask("q", **fields)
        return read(answer), answer.usage
    *chunks, last = session.ask("q", stream=True, stream_options={"include_usage": True}, **fields)
    return read(chunks), last.usage


@pytest.mark.parametrize("stream", [False, True])
def test_the_harness_gets_the_text_and_the_store_the_ids(engine: ScriptedEngine, service: RunningService, stream: bool) -> None:
    engine.say("hello world")
    session = service.session()
    message, usage = ask(session, stream)
    assert message["content"] == "hello world"
    (call,) = session.calls
    assert_sampled_as_recorded(engine, [call])
    assert call["prompt_ids"] == engine.family.render([turn("user", "q")])
    assert call["completion_ids"] == [*engine.family.encode("hello world"), engine.family.end_id]
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(call["prompt_ids"]), len(call["completion_ids"]))
    assert (call["status"], call["finish_reason"], call["stop_reason"]) == ("finished", "stop", None)
    assert call["api"] == service.settings.engine_api
    assert call["weight_versions"] == [[0, 0, len(call["completion_ids"])]]


def test_a_session_of_tool_calls_is_one_row(engine: ScriptedEngine, service: RunningService) -> None:
    """The second reply is split otherwise than the tokenizer would split it, and is kept so."""
    fishing = [*engine.family.encode("fish"), *engine.family.encode("ing"), engine.family.end_id]
    engine.say(engine.family.speak(reasoning="think", calls=[("lookup", {"key": "alpha"})]), Say(token_ids=fishing), "hello")
    session = service.session()
    message = session.answer("look", tools=TOOLS)
    assert message["tool_calls"][0]["function"] == {"name": "lookup", "arguments": '{"key": "alpha"}'}
    assert message["reasoning_content"].strip() == "think"
    answer = session.answer([turn("user", "look"), message, tool_result(message, "it is 7")], tools=TOOLS)
    assert answer["content"] == "fishing"
    first, second = session.calls
    assert_sampled_as_recorded(engine, [first, second])
    assert second["prompt_ids"][: len(said_of(first))] == said_of(first)
    assert second["parent_id"] == first["call_id"]
    rows, accounting = session.trajectories()
    assert [row["token_ids"] for row in rows] == [said_of(second)]
    assert accounting["exported_tokens"] == accounting["sampled_tokens"] > 0


@pytest.mark.parametrize(
    "said",
    [
        {"content": "it is sunny", "reasoning": "think step by step"},
        {"content": "", "calls": [("lookup", {"key": "alpha"})]},
        {"content": "look it up", "reasoning": "think", "calls": [("lookup", {"key": "a"}), ("lookup", {"key": "b"})]},
    ],
    ids=["reasoning", "tool call", "all"],
)
def test_streamed_capture_equals_unstreamed_capture(
    engine: ScriptedEngine, service: RunningService, said: dict[str, Any]
) -> None:
    engine.say(*[engine.family.speak(**said)] * 2)
    sessions = service.session(), service.session()
    whole, streamed = (ask(each, stream, tools=TOOLS)[0] for each, stream in zip(sessions, (False, True), strict=True))
    (one,), (other,) = (each.calls for each in sessions)
    assert {name: one[name] for name in CAPTURED} == {name: other[name] for name in CAPTURED}
    assert without_ids(streamed) == without_ids(whole)


@pytest.mark.parametrize("stream", [False, True])
def test_every_choice_is_a_call_of_its_own(engine: ScriptedEngine, service: RunningService, stream: bool) -> None:
    engine.say("hello world", "the cat")
    session = service.session()
    answer, told = session.ask("q", n=2, stream=stream), ["", ""]
    for choice in (choice for chunk in answer for choice in chunk.choices) if stream else answer.choices:
        told[choice.index] += (choice.delta if stream else choice.message).content or ""
    assert told == ["hello world", "the cat"]
    assert [call["reply"]["content"] for call in session.calls] == told
    assert_sampled_as_recorded(engine, session.calls)


def test_logprobs_reach_the_harness_when_it_asks(engine: ScriptedEngine, service: RunningService) -> None:
    engine.say("hello world")
    session = service.session()
    content = session.ask("q", logprobs=True, top_logprobs=2).choices[0].logprobs.content
    assert [entry.logprob for entry in content] == session.calls[0]["logprobs"]
    assert "".join(entry.token for entry in content) == "hello world<|im_end|>"
    assert {len(entry.top_logprobs) for entry in content} == {2}


@pytest.mark.parametrize("stream", [False, True])
def test_usage_tells_of_cached_tokens(engine: ScriptedEngine, service: RunningService, stream: bool) -> None:
    engine.cached_tokens = 3
    engine.say("hello")
    session = service.session()
    _, usage = ask(session, stream)
    assert usage.prompt_tokens_details.cached_tokens == 3
    assert usage.total_tokens == len(said_of(session.calls[0]))


@pytest.mark.parametrize(
    "fields", [{}, {"system": "Be brief."}, {"tools": [{"name": "look", "input_schema": {"type": "object"}}]}]
)
def test_a_count_is_that_of_the_prompt_a_call_would_have(
    engine: ScriptedEngine, service: RunningService, fields: dict[str, Any]
) -> None:
    engine.say("hello")
    session = service.session()
    body = {"model": "policy", "messages": [turn("user", "q")], "max_tokens": 9, **fields}
    key = {"x-api-key": session.api_key}
    counted, asked = (
        httpx.post(f"{session.base_url}/{path}", json=body, headers=key, timeout=120).raise_for_status().json()
        for path in ("messages/count_tokens", "messages")
    )
    (call,) = session.calls
    assert counted["input_tokens"] == len(call["prompt_ids"]) == asked["usage"]["input_tokens"]


def test_a_tool_call_is_text_where_no_tool_was_offered(engine: ScriptedEngine, service: RunningService) -> None:
    engine.say(*[engine.family.speak(calls=[("lookup", {"key": "a"})])] * 2)
    session = service.session()
    for asked in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        message = session.answer("q", **asked)
        assert message["content"].startswith("<tool_call>")
        assert "tool_calls" not in message


@pytest.mark.parametrize("stream", [False, True])
def test_without_parallel_calls_the_first_is_all_the_harness_sees(
    engine: ScriptedEngine, service: RunningService, stream: bool
) -> None:
    """The ids stay as they were sampled: both calls. A chat server, which tells the calls itself, is told not to."""
    calls = engine.family.speak(calls=[("lookup", {"key": key}) for key in ("alpha", "beta")])
    engine.say(calls, "hello")
    session = service.session()
    message, _ = ask(session, stream, tools=TOOLS, parallel_tool_calls=False)
    if service.settings.engine_api == "chat":
        assert engine.last.body["parallel_tool_calls"] is False
        return
    assert [call["function"]["arguments"] for call in message["tool_calls"]] == ['{"key": "alpha"}']
    session.answer([turn("user", "q"), message, tool_result(message, "1")], tools=TOOLS, parallel_tool_calls=False)
    first, second = session.calls
    assert first["completion_ids"] == engine.family.encode(calls)
    assert second["prompt_ids"][: len(said_of(first))] == said_of(first)
    assert len(session.trajectories()[0]) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_is_cut_keeps_what_was_sampled(engine: ScriptedEngine, service: RunningService, stream: bool) -> None:
    said, gate = "hello world the cat is in the ring", threading.Event()
    engine.say(Say(said, gate=gate, gate_after=3))
    session = service.session()
    body = {"model": "policy", "messages": [turn("user", "q")], "stream": stream}
    with hanging_up(session.base_url + "/chat/completions", body, session.api_key):
        engine.wait_for(lambda: bool(engine.generations) and len(engine.last.sampled.get(0, ())) >= 3)
    wait_until(lambda: [call["status"] for call in session.calls] == ["aborted"], 120, "the cut call is recorded")
    gate.set()
    (call,) = session.calls
    assert call["finish_reason"] == "abort"
    assert call["completion_ids"] == engine.family.encode(said)[:3]


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_too_long_for_the_window_is_refused(engine: ScriptedEngine, service: RunningService, stream: bool) -> None:
    session = service.session()
    with pytest.raises(openai.BadRequestError) as raised:
        session.ask("cat " * 9000, stream=stream)
    assert raised.value.code == "context_length_exceeded"
    assert session.calls == []


def test_an_engine_that_reports_an_error_with_status_200_is_not_believed(
    engine: ScriptedEngine, service: RunningService
) -> None:
    session = service.session()
    for route in SAMPLING:
        engine.fault(route, Fail(200, "out of memory"))
    with pytest.raises(openai.APIStatusError, match="out of memory"):
        session.ask("q")
    assert session.calls == []
