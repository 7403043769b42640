"""vLLM before 0.32 tells less at its token routes: what is recorded is what 0.32 would have given, as far as it can be known.

The engines are scripted ones, which sample the same after the same prompt.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai import APIError, APIStatusError

from proxy.engine.apis.vllm import find_stop
from proxy.engine.replica import Replica
from tests.support.engine.older_vllm import OlderVllm, tell_less
from tests.support.engine.scripted_engine import Say, ScriptedEngine
from tests.support.service.redis_server import RedisServer
from tests.support.service.running_service import RunningService, Session, streamed_text

OLDER = ("0.26.0", "0.29.0", "0.31.0", "hidden")
TOOLS: list[Any] = [{"type": "function", "function": {"name": "lookup", "parameters": {"type": "object"}}}]
CALL = 'Now.<tool_call>\n{"name": "lookup", "arguments": {"key": "a"}}\n</tool_call>'
RECORDED = ("prompt_ids", "completion_ids", "logprobs", "logprob_modes", "finish_reason", "stop_reason", "weight_versions")
DETAILS = ("token_ids", "logprobs", "top_token_ids", "top_logprobs", "prompt_logprobs")
REQUESTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "choices": {"n": 3},
    "a stop string": {"stop": ["lo wor"]},
    "a stop string of several choices": {"n": 2, "stop": ["Paris", "in"]},
    "a stop string that is not met": {"stop": ["nowhere"]},
    "logprobs for the harness": {"logprobs": True, "top_logprobs": 2},
    "a tool call": {"tools": TOOLS},
    "a limit": {"max_tokens": 3},
}


@pytest.fixture(scope="module")
def engines(redis_server: RedisServer) -> Iterator[dict[str, tuple[ScriptedEngine, RunningService]]]:
    redis_server.flushall()
    made = {"0.32.0": ScriptedEngine("qwen3")} | {name: OlderVllm(name) for name in OLDER[:-1]}
    made["hidden"] = OlderVllm("0.30.0", tells_version=False)
    with ExitStack() as stack:
        services = {}
        for name, engine in made.items():
            stack.enter_context(engine)
            services[name] = (engine, stack.enter_context(RunningService(engine.url, redis_server.url, engine_api="token")))
        yield services


def opened(
    engines: dict[str, tuple[ScriptedEngine, RunningService]], name: str, **fields: Any
) -> tuple[ScriptedEngine, Session]:
    engine, service = engines[name]
    return engine.reset(), service.session(**fields)


def play(engine: ScriptedEngine, session: Session, stream: bool, **fields: Any) -> list[Any]:
    """Two turns; what the harness got and what was recorded."""
    said = CALL if "tools" in fields else "hello world in Paris"
    engine.script = lambda generation, index: said
    got: list[Any] = []
    messages: list[Any] = [{"role": "user", "content": "q"}]
    for _ in range(2):
        answer = session.ask(messages, stream=stream, **fields)
        texts = [""] * fields.get("n", 1)
        for choice in (choice for chunk in answer for choice in chunk.choices) if stream else answer.choices:
            texts[choice.index] += (choice.delta if stream else choice.message).content or ""
        got.append(texts)
        messages += [{"role": "assistant", "content": texts[0]}, {"role": "user", "content": "go on"}]
    for call in session.calls:
        got.append({name: call[name] for name in RECORDED})
        reply = dict(call["reply"])
        got.append([reply["content"], [each["function"] for each in reply.get("tool_calls") or ()], call["branch_reason"]])
    return got


@pytest.mark.parametrize("name", OLDER)
@pytest.mark.parametrize("stream", [False, True])
def test_what_an_older_vllm_samples_is_recorded_as_the_newest_is(engines: Any, name: str, stream: bool) -> None:
    for wanted, fields in REQUESTS.items():
        assert play(*opened(engines, name), stream, **fields) == play(*opened(engines, "0.32.0"), stream, **fields), wanted


@pytest.mark.parametrize("name", OLDER)
def test_details_beside_the_tokens_are_those_of_the_newest(engines: Any, name: str) -> None:
    rows = []
    for each in (name, "0.32.0"):
        engine, session = opened(engines, each, sampling={"top_logprobs": 2, "prompt_logprobs": True})
        play(engine, session, False)
        rows.append([{name: row[name] for name in DETAILS} for row in session.trajectories()[0]])
    assert repr(rows[0]) == repr(rows[1])
    assert all(row["top_token_ids"] and row["prompt_logprobs"] for row in rows[0])


@pytest.mark.parametrize("name", OLDER[:-1])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["The fox", [40, 41, 42]])
def test_the_text_after_a_prompt_is_that_of_the_newest(engines: Any, name: str, stream: bool, prompt: Any) -> None:
    told = []
    for each in (name, "0.32.0"):
        engine, session = opened(engines, each)
        engine.script = lambda generation, index: "hello world in Paris"
        asked = {"model": "policy", "max_tokens": 20, "stop": ["Par"], "logprobs": 2, "n": 2, "stream": stream}
        answer = session.client.completions.create(prompt=prompt, **asked)
        parts = [choice for chunk in answer for choice in chunk.choices] if stream else answer.choices
        texts = ["".join(part.text for part in parts if part.index == index) for index in (0, 1)]
        told.append([texts, *([call[field] for field in RECORDED] for call in session.calls)])
    assert told[0] == told[1]
    assert told[0][0] == ["hello world in "] * 2


def test_text_after_a_prompt_of_an_engine_that_hides_its_version_is_refused(engines: Any) -> None:
    _, session = opened(engines, "hidden")
    with pytest.raises(APIStatusError, match="--engine-api chat takes prompts"):
        session.client.completions.create(model="policy", prompt="The fox")
    assert session.calls == []


@pytest.mark.parametrize("stream", [False, True])
def test_weights_that_change_in_mid_reply_leave_its_version_unknown(engines: Any, stream: bool) -> None:
    engine, session = opened(engines, "0.29.0")

    def push(generation: Any, index: int) -> Say:
        engine.sampler.version = "1"
        return Say("hello")

    before = engine.sampler.version
    session.ask("q", stream=False)
    engine.script = push
    answer = session.ask("q", stream=stream)
    if stream:
        streamed_text(answer)
    engine.sampler.version = before
    assert [call["weight_versions"] for call in session.calls] == [[[0, 0, len(session.calls[0]["completion_ids"])]], []]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("token", ["", "hello", "token_id:-1"])
def test_a_logprob_that_names_no_id_is_an_error(engines: Any, stream: bool, token: str) -> None:
    engine, session = opened(engines, "0.29.0")
    assert isinstance(engine, OlderVllm)

    def spoil(answer: dict[str, Any]) -> dict[str, Any] | None:
        made = tell_less(answer)
        for choice in (made or {}).get("choices", ()):
            for entry in (choice.get("logprobs") or {}).get("content") or ():
                entry["token"] = token
        return made

    engine.alter = spoil
    with pytest.raises(APIError, match="does not say of which token id"):
        list(session.ask("q", stream=stream))
    assert session.calls == []


pieces = st.lists(st.text("ab\ufffd", min_size=1, max_size=3), min_size=1, max_size=6)


@given(pieces, st.lists(st.text("ab", min_size=1, max_size=3), min_size=1, max_size=3))
def test_the_stop_string_is_the_one_that_vllm_stopped_at(parts: list[str], stops: list[str]) -> None:
    """It looks after every token, and takes the one that it would have met first had the text come a character at a time."""
    text, met = "", None
    for part in parts:
        before, text = text, text + part
        grown = (text[:length] for length in range(len(before) + 1, len(text) + 1))
        met = next((stop for shown in grown for stop in stops if shown.endswith(stop)), None)
        if met is not None:
            break
    assert find_stop(stops, text, before) == met


@pytest.mark.parametrize(
    ("version", "is_older"),
    [
        ("0.31.0", True),
        ("0.9.2", True),
        ("0.31.1+cpu", True),
        ("0.32.0", False),
        ("0.32.1rc1", False),
        ("1.0", False),
        ("", False),
    ],
)
def test_versions_are_compared_by_their_numbers(version: str, is_older: bool) -> None:
    assert Replica("a", "http://a", version=version).precedes((0, 32)) == is_older
