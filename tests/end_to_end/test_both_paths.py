"""One real vLLM by its token routes and as a chat server: the same replies, rows that are recomputed, limits, and a call that is cut."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from examples.vllm_server import VllmServer
from reconstruct.records import RAW, UNKNOWN_MODE
from tests.support.engine.real_engine import ask, assert_true, rows_of, sampled, tool_turns, wait_until_it_samples
from tests.support.service.redis_server import RedisServer
from tests.support.service.running_service import RunningService, hanging_up, wait_until

pytestmark = pytest.mark.engine

Services = dict[str, RunningService]


@pytest.fixture(scope="module")
def services(vllm_server: VllmServer, redis_server: RedisServer) -> Iterator[Services]:
    redis_server.flushall()
    with (
        RunningService(vllm_server.url, redis_server.url, engine_api="token") as token,
        RunningService(vllm_server.url, redis_server.url, engine_api="chat") as chat,
    ):
        yield {"token": token, "chat": chat}


def test_the_chat_path_records_true_rows_too(services: Services, tiny_model: Path) -> None:
    session = services["chat"].session()
    tool_turns(session, 3)
    streamed = ask(session, [{"role": "user", "content": "x"}], max_tokens=12, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed if chunk.choices)
    calls = session.calls
    assert {call["api"] for call in calls} == {"chat"}
    assert len(calls) == 4
    rows = rows_of(session)
    assert session.trajectories()[1]["quarantined"] == []
    assert {span.mode for row in rows for span in row.logprob_modes} == {RAW, UNKNOWN_MODE}
    # The route does not tell what it made of the tools that were offered. This engine's parser makes no grammar of them.
    spans = [tuple(replace(span, mode=RAW) for span in row.logprob_modes) for row in rows]
    assert_true([replace(row, logprob_modes=modes) for row, modes in zip(rows, spans, strict=True)], tiny_model)


def test_a_limit_beyond_the_window_is_clamped_on_both_paths(services: Services) -> None:
    for service in services.values():
        session = service.session()
        ask(session, [{"role": "user", "content": "hi " * 4000}], max_tokens=100_000, stop=["e", "a", "i", "t"])
        (call,) = session.calls
        assert call["sampling"]["max_tokens"] == 8192 - len(call["prompt_ids"])


@pytest.mark.parametrize("path", ["token", "chat"])
def test_a_prompt_of_ids_that_grows_is_one_true_row_on_both_paths(services: Services, tiny_model: Path, path: str) -> None:
    session = services[path].session()
    prompt = [40, 41, 42]
    for turn in range(3):
        asked = {"max_tokens": 12, "seed": turn, "extra_body": {"return_token_ids": True}}
        choice = session.client.completions.create(model="policy", prompt=prompt, **asked).choices[0]
        assert choice.prompt_token_ids == prompt
        prompt = [*prompt, *choice.token_ids, 50 + turn]
    assert [call["branch_reason"] for call in session.calls] == [None] * 3
    rows = rows_of(session)
    assert [row.token_ids.tolist() for row in rows] == [prompt[:-1]]
    assert_true(rows, tiny_model)


def test_a_reply_to_a_prompt_says_the_same_streamed_and_whole(services: Services) -> None:
    told = []
    for service, stream in itertools.product(services.values(), (False, True)):
        session = service.session()
        asked = {"max_tokens": 24, "seed": 5, "logprobs": 2, "stop": ["q"], "stream": stream}
        answer = session.client.completions.create(model="policy", prompt="The fox", **asked)
        choices = [choice for chunk in answer for choice in chunk.choices] if stream else answer.choices
        parts = [choice.logprobs for choice in choices if choice.logprobs]
        (call,) = session.calls
        logprobs = [value for part in parts for value in part.token_logprobs]
        assert logprobs == pytest.approx(call["logprobs"], abs=1e-6)
        tokens = [(token, at) for part in parts for token, at in zip(part.tokens, part.text_offset, strict=True)]
        told.append(("".join(choice.text for choice in choices), tokens, choices[-1].finish_reason, call["completion_ids"]))
    assert told == [told[0]] * 4


def test_a_prompts_call_is_cut_on_the_chat_path_with_what_was_sampled(services: Services, vllm_server: VllmServer) -> None:
    session, before = services["chat"].session(), sampled(vllm_server)
    body = {"model": "policy", "prompt": "x", "max_tokens": 8000, "ignore_eos": True}
    with hanging_up(f"{session.base_url}/completions", body, session.api_key):
        wait_until_it_samples(vllm_server, before, 200)
    wait_until(
        lambda: len(session.calls) == 1 and session.calls[0]["status"] not in ("in_flight", "dangling"),
        60,
        "the call is recorded",
    )
    (call,) = session.calls
    assert (call["status"], call["finish_reason"]) == ("aborted", "abort")
    assert 0 < len(call["completion_ids"]) < 8000
