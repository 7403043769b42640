"""The path of one call through the real service and a real Redis, against an engine whose replies a script decides.

The harness is the openai SDK. `service` runs every test once per engine path: token (render, generate, derender) and chat.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import APIStatusError, BadRequestError, InternalServerError

from proxy.store import keys
from tests.support.engine.scripted_engine import Fail, Say, ScriptedEngine, logprobs_of
from tests.support.service.redis_server import RedisServer, running_redis
from tests.support.service.running_service import RunningService, Session, hanging_up, streamed_text, wait_until
from tests.support.sessions.conversations import (
    CAPTURED,
    TOOLS,
    assemble,
    assert_sampled_as_recorded,
    said_of,
    tool_result,
    turn,
    without_ids,
)


@pytest.fixture
def own_redis_url() -> Iterator[str]:
    """A store that no other service watches: one whose engine holds newer weights would make them the store's."""
    with running_redis() as redis:
        yield redis.url


# What a reply is, streamed and whole


@pytest.mark.parametrize("stream", [False, True])
def test_the_harness_gets_the_text_and_the_store_the_ids(engine: ScriptedEngine, service: RunningService, stream: bool) -> None:
    engine.say("hello world")
    session = service.session()
    if stream:
        text, chunks = streamed_text(session.ask("q", stream=True, stream_options={"include_usage": True}))
        assert text == "hello world"
        assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
        usage = chunks[-1].usage
    else:
        reply = session.ask("q")
        assert reply.choices[0].message.content == "hello world"
        assert reply.choices[0].finish_reason == "stop"
        assert reply.choices[0].message.tool_calls is None
        usage = reply.usage
    (call,) = session.calls
    assert_sampled_as_recorded(engine, [call])
    assert call["completion_ids"] == [*engine.family.encode("hello world"), engine.family.end_id]
    assert call["prompt_ids"] == engine.family.render([turn("user", "q")])
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(call["prompt_ids"]), len(call["completion_ids"]))
    assert call["status"] == "finished"
    assert call["weight_versions"] == [[0, 0, len(call["completion_ids"])]]
    assert call["reply"] == {"role": "assistant", "content": "hello world"}
    wait_until(lambda: session.calls[0]["delivered"], 120, "the delivery is noted")


@pytest.mark.case(10)
@pytest.mark.parametrize(
    "said",
    [
        {"content": "hello world"},
        {"content": "it is sunny", "reasoning": "think step by step"},
        {"content": "", "calls": [("lookup", {"key": "alpha"})]},
        {"content": "look it up", "reasoning": "think", "calls": [("lookup", {"key": "a"}), ("lookup", {"key": "b"})]},
    ],
    ids=["text", "reasoning", "tool call", "all"],
)
def test_streamed_capture_equals_unstreamed_capture(
    engine: ScriptedEngine, service: RunningService, said: dict[str, Any]
) -> None:
    whole, streamed = service.session(), service.session()
    engine.say(*[engine.family.speak(**said)] * 2)
    message = whole.answer("q", tools=TOOLS)
    assembled = assemble(streamed.ask("q", tools=TOOLS, stream=True))
    (one,), (other,) = whole.calls, streamed.calls
    assert {name: one[name] for name in CAPTURED} == {name: other[name] for name in CAPTURED}
    assert without_ids(one["reply"]) == without_ids(other["reply"])
    assert without_ids(assembled) == without_ids(message)
    for each, call in ((message, one), (assembled, other)):
        # Harnesses read, and replay, one or the other name of the reasoning.
        assert each.pop("reasoning", None) == each.get("reasoning_content")
        # What a harness will replay is what is in the store, ids included.
        assert call["reply"] == {"content": None, **each}


@pytest.mark.parametrize("names", [("reasoning",), ("reasoning_content",), ("reasoning", "reasoning_content")])
def test_reasoning_is_taken_back_under_either_of_its_names(
    engine: ScriptedEngine, service: RunningService, names: tuple[str, ...]
) -> None:
    engine.say(engine.family.speak("look it up", reasoning="think", calls=[("lookup", {"key": "a"})]), "found")
    session = service.session()
    message = session.answer("q", tools=TOOLS)
    for name in {"reasoning", "reasoning_content"} - set(names):
        del message[name]
    session.answer([turn("user", "q"), message, tool_result(message, "1")], tools=TOOLS)
    first, second = session.calls
    assert second["parent_id"] == first["call_id"] and second["messages"][1]["reasoning_content"].strip() == "think"
    if service.settings.engine_api == "token":
        (row,), _ = session.trajectories()
        assert row["call_ids"] == [first["call_id"], second["call_id"]]


@pytest.mark.parametrize("stream", [False, True])
def test_tool_calls_name_the_call_they_came_from(engine: ScriptedEngine, service: RunningService, stream: bool) -> None:
    engine.say(engine.family.speak(calls=[("lookup", {"key": "a"}), ("lookup", {"key": "b"})]))
    session = service.session()
    if stream:
        chunks = list(session.ask("q", tools=TOOLS, stream=True))
        finish_reason = chunks[-1].choices[0].finish_reason
        ids = [call.id for chunk in chunks for call in chunk.choices[0].delta.tool_calls or () if call.id]
    else:
        choice = session.ask("q", tools=TOOLS).choices[0]
        finish_reason, ids = choice.finish_reason, [call.id for call in choice.message.tool_calls]
    (call,) = session.calls
    assert finish_reason == call["finish_reason"] == "tool_calls"
    assert ids == [f"call_{call['call_id']}_0", f"call_{call['call_id']}_1"]


@pytest.mark.case(27)
@pytest.mark.parametrize("stream", [False, True])
def test_every_choice_of_one_call_is_recorded_with_its_own_tokens(
    engine: ScriptedEngine, service: RunningService, stream: bool
) -> None:
    engine.say("hello", "world", Say(text="fish", seconds_per_token=0.01))
    session = service.session()
    texts = ["", "", ""]
    if stream:
        for chunk in session.ask("q", n=3, stream=True):
            texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    else:
        texts = [choice.message.content for choice in session.ask("q", n=3).choices]
    assert texts == ["hello", "world", "fish"]
    calls = session.calls
    assert_sampled_as_recorded(engine, calls)
    assert [engine.family.decode(call["completion_ids"], skip_special=True) for call in calls] == texts
    rows, _ = session.trajectories()
    assert len(rows) == 3


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_leaves_the_text_but_not_the_ids(engine: ScriptedEngine, service: RunningService, stream: bool) -> None:
    engine.say("hello world in Paris")
    session = service.session()
    if stream:
        text, chunks = streamed_text(session.ask("q", stop=["world"], stream=True))
        finish_reason = chunks[-1].choices[0].finish_reason
    else:
        choice = session.ask("q", stop="world").choices[0]
        text, finish_reason = choice.message.content, choice.finish_reason
    (call,) = session.calls
    assert text == "hello "
    assert finish_reason == call["finish_reason"] == "stop"
    assert call["stop_reason"] == "world"
    assert engine.family.decode(call["completion_ids"]) == "hello world"
    assert_sampled_as_recorded(engine, [call])
    assert call["sampling"]["stop"] == ["world"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_stays_in_the_text_where_the_harness_wants_it(
    engine: ScriptedEngine, token_service: RunningService, stream: bool
) -> None:
    engine.say("hello world in Paris")
    asked: dict[str, Any] = {"stop": ["wor"], "extra_body": {"include_stop_str_in_output": True}}
    answer = token_service.session().ask("q", stream=stream, **asked)
    text = streamed_text(answer)[0] if stream else answer.choices[0].message.content
    assert text == "hello wor"


def test_a_reply_of_nothing_but_the_stop_token_is_an_empty_answer(engine: ScriptedEngine, service: RunningService) -> None:
    engine.say(*[Say(token_ids=[engine.family.end_id])] * 2)
    session = service.session()
    assert session.ask("q").choices[0].message.content == ""
    asked = session.ask("q", logprobs=True).choices[0]
    assert asked.message.content == ""
    assert len(asked.logprobs.content) == 1
    assert [call["completion_ids"] for call in session.calls] == [[engine.family.end_id]] * 2


@pytest.mark.case(40)
def test_logprobs_reach_the_harness_only_when_it_asks_and_the_store_always(
    engine: ScriptedEngine, service: RunningService
) -> None:
    engine.say(*["hello world"] * 4)
    session = service.session()
    silent = session.ask("q").choices[0]
    asked = session.ask("q", logprobs=True, top_logprobs=2).choices[0]
    _, silent_chunks = streamed_text(session.ask("q", stream=True))
    _, asked_chunks = streamed_text(session.ask("q", stream=True, logprobs=True))
    calls = session.calls
    expected = logprobs_of(calls[0]["prompt_ids"], calls[0]["completion_ids"])
    assert all(call["logprobs"] == expected for call in calls)
    assert silent.logprobs is None
    assert all(chunk.choices[0].logprobs is None for chunk in silent_chunks)
    assert [entry.logprob for entry in asked.logprobs.content] == expected
    assert all(len(entry.top_logprobs) == 2 for entry in asked.logprobs.content)
    entries = [entry for chunk in asked_chunks if chunk.choices[0].logprobs for entry in chunk.choices[0].logprobs.content]
    assert [entry.logprob for entry in entries] == expected


def test_no_engine_word_reaches_the_harness(engine: ScriptedEngine, service: RunningService) -> None:
    """Token ids, weight versions and the engine's own ids stay inside."""
    engine.say(*[engine.family.speak("hello", calls=[("lookup", {"key": "a"})])] * 2)
    session = service.session()
    body = {"model": "policy", "messages": [turn("user", "q")], "tools": TOOLS}
    whole = session.post("/v1/chat/completions", body)
    streamed = session.post("/v1/chat/completions", {**body, "stream": True})
    for text in (whole.text, streamed.text):
        for word in ("token_ids", "weight_version", "routed_experts", "stop_reason", "chatcmpl-tool", "<|im_end|>"):
            assert word not in text


# Sampling


def test_session_overrides_win_and_what_was_effective_is_kept(engine: ScriptedEngine, service: RunningService) -> None:
    others = {"min_p": 0.1, "repetition_penalty": 1.2}
    session = service.session(sampling={"temperature": 0.7, "max_tokens": 2, "top_k": 5, **others})
    session.ask("q", temperature=0.1, top_p=0.9, max_tokens=50, seed=11, extra_body={"min_p": 0.5})
    sampling = engine.last.sampling
    assert {name: sampling[name] for name in others} == others
    assert (sampling["temperature"], sampling["top_p"], sampling["top_k"]) == (0.7, 0.9, 5)
    assert (sampling["max_tokens"], sampling["seed"]) == (2, 11)
    (call,) = session.calls
    assert len(call["completion_ids"]) == 2
    assert call["finish_reason"] == "length"
    kept = {name: call["sampling"][name] for name in ("temperature", "top_p", "top_k", "max_tokens", "seed", *others)}
    assert kept == {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "max_tokens": 2, "seed": 11, **others}


def test_the_same_seed_samples_the_same(engine: ScriptedEngine, service: RunningService) -> None:
    session = service.session()
    for seed in (1, 1, 2):
        session.ask("q", seed=seed)
    first, again, other = (call["completion_ids"] for call in session.calls)
    assert first == again != other


@pytest.mark.parametrize("limit", [{}, {"max_tokens": 100_000}], ids=["none", "beyond the window"])
def test_a_reply_may_fill_the_window_and_no_more(
    engine: ScriptedEngine, service: RunningService, limit: dict[str, Any]
) -> None:
    session = service.session()
    session.ask("q", **limit)
    (call,) = session.calls
    room = engine.max_model_len - len(call["prompt_ids"])
    assert engine.last.sampling["max_tokens"] == room
    assert not limit or call["sampling"]["max_tokens"] == room


def test_what_the_engine_knows_and_we_do_not_is_passed_on(engine: ScriptedEngine, service: RunningService) -> None:
    session = service.session()
    template = {"enable_thinking": False}
    session.ask("q", logit_bias={"7": 5}, extra_body={"min_tokens": 1, "chat_template_kwargs": template})
    assert engine.last.sampling["logit_bias"] == {"7": 5}
    assert engine.last.sampling["min_tokens"] == 1
    (call,) = session.calls
    assert call["prompt_ids"] == engine.family.render([turn("user", "q")], enable_thinking=False)
    assert call["sampling"]["logit_bias"] == {"7": 5}


# Order of writing


@pytest.mark.parametrize("stream", [False, True])
def test_the_reply_ends_only_when_its_record_is_in_the_store(
    engine: ScriptedEngine, service: RunningService, redis_server: RedisServer, stream: bool
) -> None:
    """As long as Redis takes no writes, the harness gets no end of the reply."""
    gate = threading.Event()
    engine.say(Say("hello world", gate=gate, gate_after=2))
    session = service.session()
    ended = threading.Event()

    def harness() -> None:
        answer = session.ask("q", stream=stream)
        for chunk in answer if stream else ():
            if chunk.choices[0].finish_reason:
                break
        ended.set()

    talk = threading.Thread(target=harness)
    talk.start()
    engine.wait_for(lambda: bool(engine.generations) and len(engine.last.sampled.get(0, ())) == 2)
    with redis_server.client() as client:
        client.execute_command("CLIENT", "PAUSE", 30_000, "WRITE")
        try:
            gate.set()
            assert not ended.wait(0.3)
        finally:
            client.execute_command("CLIENT", "UNPAUSE")
    talk.join()
    assert ended.is_set() and len(session.calls) == 1


# Later turns


@pytest.mark.case(1)
def test_turn_two_begins_with_the_ids_of_turn_one(engine: ScriptedEngine, token_service: RunningService) -> None:
    engine.say(engine.family.speak("hello", calls=[("lookup", {"key": "alpha"})]), "it is 7")
    session = token_service.session()
    asked = [turn("user", "q")]
    message = session.answer(asked, tools=TOOLS)
    session.answer([*asked, message, tool_result(message, "7")], tools=TOOLS)
    first, second = session.calls
    assert second["prompt_ids"][: len(said_of(first))] == said_of(first)
    assert second["parent_id"] == first["call_id"]
    assert second["branch_reason"] is None
    rows, _ = session.trajectories()
    assert [row["token_ids"] for row in rows] == [said_of(second)]
    assert sum(rows[0]["loss_mask"]) == len(first["completion_ids"]) + len(second["completion_ids"])


@pytest.mark.case(2)
def test_a_split_the_tokenizer_would_not_make_survives_the_next_turn(
    engine: ScriptedEngine, token_service: RunningService
) -> None:
    """The model says fish + ing; encoding "fishing" gives one token."""
    family = engine.family
    fish, ing = family.id_of("fish"), family.id_of("ing")
    assert family.encode("fishing") == [family.id_of("fishing")]
    engine.say(Say(token_ids=[fish, ing, family.end_id]), "yes")
    session = token_service.session()
    message = session.answer("q")
    assert message["content"] == "fishing"
    session.answer([turn("user", "q"), message, turn("user", "more")])
    first, second = session.calls
    given = engine.last.prompt_ids
    start = len(first["prompt_ids"])
    assert given[start : start + 3] == [fish, ing, family.end_id]
    assert second["branch_reason"] is None
    (row,), _ = session.trajectories()
    assert row["loss_mask"][start : start + 3] == [1, 1, 1]
    assert row["logprobs"][start : start + 3] == first["logprobs"]


@pytest.mark.case(3)
def test_the_newline_after_the_end_of_the_turn_is_there_and_masked(
    engine: ScriptedEngine, token_service: RunningService
) -> None:
    engine.say("hello", "yes")
    session = token_service.session()
    message = session.answer("q")
    session.answer([turn("user", "q"), message, turn("user", "more")])
    (row,), _ = session.trajectories()
    first, second = session.calls
    end = len(said_of(first))
    assert row["token_ids"][end - 1] == engine.family.end_id
    assert row["token_ids"][end : end + 1] == engine.family.encode("\n")
    glue = range(end, len(second["prompt_ids"]))
    assert len(glue) > 1
    assert all(row["loss_mask"][position] == 0 and row["logprobs"][position] == 0.0 for position in glue)
    expected = engine.family.render([turn("user", "q"), turn("assistant", "hello"), turn("user", "more")])
    assert second["prompt_ids"] == expected


@pytest.mark.case(5)
def test_a_turn_cut_by_length_gets_a_masked_end_when_it_goes_on(engine: ScriptedEngine, token_service: RunningService) -> None:
    engine.say("hello world in Paris", "yes")
    session = token_service.session()
    reply = session.ask("q", max_tokens=2)
    assert reply.choices[0].finish_reason == "length"
    message = reply.choices[0].message.model_dump(exclude_none=True)
    session.answer([turn("user", "q"), message, turn("user", "go on")])
    first, second = session.calls
    assert engine.family.end_id not in first["completion_ids"]
    end = len(said_of(first))
    assert second["prompt_ids"][:end] == said_of(first)
    assert second["prompt_ids"][end : end + 2] == [engine.family.end_id, *engine.family.encode("\n")]
    (row,), _ = session.trajectories()
    assert row["loss_mask"][end : end + 2] == [0, 0]


def test_a_turn_cut_by_a_stop_string_gets_a_masked_end_too(engine: ScriptedEngine, token_service: RunningService) -> None:
    engine.say("hello world in Paris", "yes")
    session = token_service.session()
    message = session.answer("q", stop=["world"])
    session.answer([turn("user", "q"), message, turn("user", "go on")])
    first, second = session.calls
    end = len(said_of(first))
    assert second["prompt_ids"][:end] == said_of(first)
    assert second["prompt_ids"][end] == engine.family.end_id
    assert second["branch_reason"] is None


@pytest.mark.case(4)
def test_a_stop_token_that_opens_the_next_turn_is_not_doubled(redis_url: str) -> None:
    with ScriptedEngine("glm4") as engine, RunningService(engine.url, redis_url) as service:
        family = engine.family
        engine.say(family.speak("hello"), family.speak(calls=[("lookup", {"key": "alpha"})]), family.speak("it is 7"))
        session = service.session()
        messages: list[Any] = [turn("user", "q")]
        messages += [session.answer(messages, tools=TOOLS), turn("user", "more")]
        called = session.answer(messages, tools=TOOLS)
        session.answer([*messages, called, tool_result(called, "7")], tools=TOOLS)
        calls = session.calls
        assert [call["stop_reason"] for call in calls] == [
            family.id_of("<|user|>"),
            family.id_of("<|observation|>"),
            family.id_of("<|user|>"),
        ]
        assert [call["branch_reason"] for call in calls] == [None, None, None]
        for opener in ("<|user|>", "<|observation|>"):
            doubled = [family.id_of(opener)] * 2
            given = calls[-1]["prompt_ids"]
            assert not any(given[at : at + 2] == doubled for at in range(len(given)))
        assert calls[-1]["prompt_ids"][: len(said_of(calls[1]))] == said_of(calls[1])
        assert len(session.trajectories()[0]) == 1


@pytest.mark.case(29)
def test_interleaved_conversations_of_one_session_are_two_branches(
    engine: ScriptedEngine, token_service: RunningService
) -> None:
    """A1 B1 A2 B2: each continues its own."""
    session = token_service.session()
    talks: dict[str, list[Any]] = {name: [turn("user", f"question {name}")] for name in "AB"}
    for round_number in (1, 2):
        for name, messages in talks.items():
            engine.say(f"answer {name} {round_number}")
            messages += [session.answer(messages), turn("user", "next")]
    a1, b1, a2, b2 = session.calls
    assert (a2["parent_id"], b2["parent_id"]) == (a1["call_id"], b1["call_id"])
    assert a2["prompt_ids"][: len(said_of(a1))] == said_of(a1)
    assert b2["prompt_ids"][: len(said_of(b1))] == said_of(b1)
    rows, _ = session.trajectories()
    assert sorted(row["call_ids"] for row in rows) == sorted([[a1["call_id"], a2["call_id"]], [b1["call_id"], b2["call_id"]]])


@pytest.mark.case(32)
def test_concurrent_calls_of_one_session_are_all_recorded(engine: ScriptedEngine, service: RunningService) -> None:
    session = service.session()
    engine.script = lambda generation, index: Say("hello " + generation.prompt[-40:-22], seconds_per_token=0.002)
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda number: session.ask(f"question {number}"), range(16)))
    assert len({answer.id for answer in answers}) == 16
    calls = session.calls
    assert len(calls) == 16
    assert_sampled_as_recorded(engine, calls)
    rows, accounting = session.trajectories()
    assert len(rows) == 16
    assert accounting["quarantined"] == []


def test_concurrent_continuations_of_one_call_are_siblings(engine: ScriptedEngine, token_service: RunningService) -> None:
    session = token_service.session()
    engine.say("hello")
    message = session.answer("q")
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda number: session.ask([turn("user", "q"), message, turn("user", f"{number}")]), range(4)))
    first, *others = session.calls
    assert [call["parent_id"] for call in others] == [first["call_id"]] * 4
    _, accounting = session.trajectories()
    assert accounting["quarantined"] == []


def test_two_processes_serve_one_session_as_one(redis_url: str) -> None:
    with (
        ScriptedEngine("qwen3") as engine,
        RunningService(engine.url, redis_url) as here,
        RunningService(engine.url, redis_url) as there,
    ):
        session = here.session()
        elsewhere = session.client_at(there)
        messages: list[Any] = [turn("user", "q")]
        for number in range(4):
            engine.say(f"answer {number}")
            client = (session.client, elsewhere)[number % 2]
            reply = client.chat.completions.create(model="policy", messages=messages)
            messages += [reply.choices[0].message.model_dump(exclude_none=True), turn("user", "more")]
        calls = session.calls
        assert [call["parent_id"] for call in calls] == [None, *(call["call_id"] for call in calls[:-1])]
        assert len(session.trajectories()[0]) == 1


# When the harness goes away


@pytest.mark.parametrize("stream", [False, True])
def test_a_harness_that_goes_away_ends_the_engine_and_leaves_what_was_sampled(
    engine: ScriptedEngine, service: RunningService, stream: bool
) -> None:
    gate = threading.Event()
    engine.say(Say("hello world in Paris is sunny today", gate=gate, gate_after=3))
    session = service.session()
    leave_after(session, engine, tokens=3, stream=stream)
    wait_until(
        lambda: bool(session.calls) and session.calls[0]["status"] not in ("in_flight", "dangling"), 60, "the call is recorded"
    )
    (call,) = session.calls
    assert (call["finish_reason"], call["status"]) == ("abort", "aborted")
    assert not call["delivered"]
    assert_sampled_as_recorded(engine, [call])
    assert len(call["completion_ids"]) == 3
    engine.wait_for(lambda: engine.last.aborted or engine.last.disconnected)
    _, accounting = session.trajectories()
    assert accounting["quarantined"] == [{"call_id": call["call_id"], "tokens": 3, "reason": "not_delivered"}]
    gate.set()


def leave_after(session: Session, engine: ScriptedEngine, *, tokens: int, stream: bool, heard: bytes = b"") -> None:
    """Ask, and hang up once the engine has sampled so many tokens, and what is to be `heard` of the answer has come."""
    body = {"model": "policy", "messages": [turn("user", "q")], "stream": stream}
    with hanging_up(f"{session.base_url}/chat/completions", body, session.api_key) as connection:
        engine.wait_for(lambda: bool(engine.generations) and len(engine.last.sampled.get(0, ())) == tokens)
        answer = b""
        while heard not in answer:
            part = connection.recv(65536)
            assert part, f"the answer ended: {answer!r}"
            answer += part


def test_an_aborted_turn_that_is_continued_is_trained_with_a_masked_end(
    engine: ScriptedEngine, token_service: RunningService
) -> None:
    gate = threading.Event()
    engine.say(Say("hello world in Paris", gate=gate, gate_after=2), "yes")
    session = token_service.session()
    leave_after(session, engine, tokens=2, stream=True)
    wait_until(lambda: bool(session.calls) and session.calls[0]["status"] == "aborted", 120, "the call is recorded")
    gate.set()
    session.answer([turn("user", "q"), turn("assistant", "hello world"), turn("user", "go on")])
    first, second = session.calls
    end = len(said_of(first))
    assert second["parent_id"] == first["call_id"]
    assert second["prompt_ids"][: end + 1] == [*said_of(first), engine.family.end_id]
    _, accounting = session.trajectories()
    assert accounting["quarantined"] == []


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_cannot_be_asked_to_stop_is_hung_up_on(redis_url: str, stream: bool) -> None:
    with ScriptedEngine("qwen3", plain=True) as engine, RunningService(engine.url, redis_url) as service:
        engine.say(Say("hello world in Paris", gate=threading.Event(), gate_after=2), "hello")
        session = service.session()
        leave_after(session, engine, tokens=2, stream=stream, heard=b"hello" if stream else b"")
        engine.wait_for(lambda: engine.last.disconnected)
        # Unstreamed nobody will ever know what was sampled: the intent alone is left, and shown.
        left = "failed" if stream else "dangling"
        wait_until(lambda: [call["status"] for call in session.calls] == [left], 120, "what became of the call is shown")
        assert session.answer("q")["content"] == "hello"
        statuses = [call["status"] for call in session.calls]
        assert statuses == (["failed", "finished"] if stream else ["finished", "dangling"])
        assert session.trajectories()[0] == []


# Engines that say less, or fail


@pytest.mark.case(11)
@pytest.mark.parametrize("kind", ["plain", "without ids"])
@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_without_ids_is_served_and_never_trained(redis_url: str, kind: str, stream: bool) -> None:
    made = ScriptedEngine("qwen3", plain=True) if kind == "plain" else ScriptedEngine("qwen3", ids=False)
    with made as engine, RunningService(engine.url, redis_url, engine_api="chat") as service:
        engine.say("hello", engine.family.speak(calls=[("lookup", {"key": "a"})]))
        session = service.session()
        messages: list[Any] = [turn("user", "q")]
        for expected in ("hello", None):
            reply = session.ask(messages, tools=TOOLS, stream=stream)
            message = assemble(reply) if stream else reply.choices[0].message.model_dump(exclude_none=True)
            assert message.get("content") == expected
            messages += [message, turn("user", "more")]
        calls = session.calls
        assert [call["status"] for call in calls] == ["finished", "finished"]
        assert [call["reply"].get("content") for call in calls] == ["hello", None]
        rows, accounting = session.trajectories()
        assert rows == []
        assert {item["reason"] for item in accounting["quarantined"]} == {"no_token_ids"}


@pytest.mark.case(9)
def test_a_missing_logprob_shifts_nothing_and_is_not_trained(engine: ScriptedEngine, service: RunningService) -> None:
    engine.say(Say("hello world in Paris", unknown_logprobs=frozenset({1})))
    session = service.session()
    assert session.answer("q")["content"] == "hello world in Paris"
    rows, accounting = session.trajectories()
    assert rows == []
    assert [item["reason"] for item in accounting["quarantined"]] == ["missing_logprob"]
    (call,) = session.calls
    expected = logprobs_of(call["prompt_ids"], call["completion_ids"])
    assert [call["logprobs"][position] for position in (0, 2, 3)] == [expected[position] for position in (0, 2, 3)]


@pytest.mark.case(12)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fault", "raised"),
    [(Fail(400, "no such grammar", "BadRequestError"), BadRequestError), (Fail(500), InternalServerError)],
    ids=["4xx", "5xx"],
)
def test_an_engine_error_leaves_the_tree_as_it_was_and_the_next_turn_is_right(
    engine: ScriptedEngine,
    service: RunningService,
    redis_server: RedisServer,
    fault: Fail,
    raised: type[Exception],
    stream: bool,
) -> None:
    engine.say("hello", fault, "yes")
    session = service.session()
    message = session.answer("q")
    following = [turn("user", "q"), message, turn("user", "more")]
    with pytest.raises(raised):
        list(session.ask(following, stream=stream))
    assert len(session.calls) == 1
    with redis_server.client() as client:
        assert client.hlen(keys.intents(session.session_id)) == 0
    assert session.answer(following)["content"] == "yes"
    first, second = session.calls
    assert second["parent_id"] == first["call_id"]
    assert second["prompt_ids"] == engine.family.render(following)
    assert len(session.trajectories()[0]) == 1


def test_a_template_that_refuses_the_messages_is_the_callers_error(redis_url: str) -> None:
    with ScriptedEngine("gemma") as engine, RunningService(engine.url, redis_url) as service:
        session = service.session()
        with pytest.raises(BadRequestError, match="alternate"):
            session.ask([turn("user", "q"), turn("user", "q again")])
        assert session.calls == []


# Signs of life, and what leaves no trace


def test_a_slow_engine_is_bridged_by_keep_alive_chunks_the_sdk_can_read(redis_url: str) -> None:
    """The engine says nothing before four of them have come."""
    gate, signs, text = threading.Event(), 0, ""
    with ScriptedEngine("qwen3") as engine, RunningService(engine.url, redis_url, keepalive_seconds=0.1) as service:
        engine.say(Say("hello", gate=gate))
        for chunk in service.session().ask("q", stream=True):
            text += chunk.choices[0].delta.content or ""
            signs += not text
            if signs == 4:
                gate.set()
        assert text == "hello"
        assert signs >= 4


# New weights


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / "weights-1"
    path.mkdir()
    return path


def push(service: RunningService, path: Path, mode: str) -> dict[str, Any]:
    body = {"version": 1, "path": str(path), "mode": mode}
    answer = service.request("POST", "/weights", json=body)
    assert answer.status_code == 200, answer.text
    pushed: dict[str, Any] = answer.json()
    return pushed


@pytest.mark.case(50)
@pytest.mark.parametrize("stream", [False, True])
def test_calls_that_arrive_during_a_push_are_held_and_sampled_under_the_new_weights(
    own_redis_url: str, checkpoint: Path, stream: bool
) -> None:
    gate = threading.Event()
    with (
        ScriptedEngine("qwen3") as engine,
        RunningService(engine.url, own_redis_url, keepalive_seconds=0.05) as service,
        ThreadPoolExecutor(3) as pool,
    ):
        engine.say(Say("hello world", gate=gate, gate_after=1), "fish")
        early, late = service.session(), service.session()
        first = pool.submit(early.answer, "q")
        engine.wait_for(lambda: bool(engine.generations) and len(engine.last.sampled.get(0, ())) == 1)
        pushed = pool.submit(push, service, checkpoint, "wait")
        engine.wait_for(lambda: "/pause" in engine.paths())
        second = pool.submit(lambda: streamed_text(late.ask("q", stream=True))[0] if stream else late.answer("q")["content"])
        time.sleep(0.3)
        assert not second.done()
        assert not pushed.done()
        assert len(engine.generations) == 1, "the held call has not reached the engine"
        gate.set()
        assert first.result()["content"] == "hello world"
        assert second.result() == "fish"
        assert pushed.result()["applied"]
        assert early.calls[0]["weight_versions"] == [[0, 0, 3]]
        assert late.calls[0]["weight_versions"] == [[1, 0, 2]]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("mode", ["wait", "abort"])
def test_a_call_that_reaches_a_paused_engine_waits_until_it_is_resumed(own_redis_url: str, mode: str, stream: bool) -> None:
    """vLLM 0.33 refuses it with 503. Another service, or another process of this one, changes the weights, so that no gate holds it."""
    with ScriptedEngine("qwen3") as engine, RunningService(engine.url, own_redis_url) as service, ThreadPoolExecutor(1) as pool:
        engine.sampler.refuses_while_paused = True
        httpx.post(f"{engine.url}/pause?mode={mode}").raise_for_status()
        engine.say("fish")
        session = service.session()
        answer = pool.submit(
            lambda: streamed_text(session.ask("q", stream=True))[0] if stream else session.answer("q")["content"]
        )
        engine.wait_for(lambda: engine.sampler.refused > 1)
        httpx.post(f"{engine.url}/resume").raise_for_status()
        assert answer.result() == "fish"
        assert [call["status"] for call in session.calls] == ["finished"]


def test_a_call_waits_no_longer_for_a_paused_engine_than_for_a_seat(own_redis_url: str) -> None:
    with ScriptedEngine("qwen3") as engine, RunningService(engine.url, own_redis_url, queue_seconds=0.01) as service:
        engine.sampler.refuses_while_paused = True
        httpx.post(f"{engine.url}/pause?mode=wait").raise_for_status()
        session = service.session()
        with pytest.raises(APIStatusError, match="is paused while its weights change") as refused:
            session.ask("q")
        assert refused.value.status_code == 503 and session.calls == []


def test_alternatives_that_an_engine_shows_beyond_those_asked_for_are_left_out(own_redis_url: str) -> None:
    """vLLM 0.33 returns one more where the sampled token is not among the likeliest."""
    with ScriptedEngine("qwen3") as engine, RunningService(engine.url, own_redis_url) as service:
        engine.sampler.shows_one_more = True
        chat = service.session().ask("q", logprobs=True, top_logprobs=2).choices[0].logprobs
        text = service.session().client.completions.create(model="policy", prompt="q", logprobs=2).choices[0].logprobs
        assert chat is not None and text is not None
        assert {len(entry.top_logprobs) for entry in chat.content or ()} == {2}
        assert {len(alternatives) for alternatives in text.top_logprobs or ()} == {2}


@contextmanager
def in_mid_reply(redis_url: str) -> Iterator[tuple[RunningService, Session, Future[Any], threading.Event]]:
    """A service, a session and its call: two tokens of "hello world in Paris" are sampled, and the rest when the event is set."""
    gate = threading.Event()
    with ScriptedEngine("qwen3") as engine, RunningService(engine.url, redis_url) as service, ThreadPoolExecutor(1) as pool:
        engine.say(Say("hello world in Paris", gate=gate, gate_after=2))
        session = service.session()
        answer = pool.submit(session.ask, "q")
        try:
            engine.wait_for(lambda: bool(engine.generations) and len(engine.last.sampled.get(0, ())) == 2)
            yield service, session, answer, gate
        finally:
            gate.set()


@pytest.mark.case(49)
def test_a_reply_that_goes_on_across_a_push_knows_the_weights_of_every_token(own_redis_url: str, checkpoint: Path) -> None:
    with in_mid_reply(own_redis_url) as (service, session, answer, gate):
        assert push(service, checkpoint, "keep")["applied"]
        gate.set()
        assert answer.result().choices[0].message.content == "hello world in Paris"
        (call,) = session.calls
        assert call["weight_versions"] == [[0, 0, 2], [1, 2, 5]]
        (row,), _ = session.trajectories()
        start = len(call["prompt_ids"])
        assert row["weight_versions"] == [[0, start, start + 2], [1, start + 2, start + 5]]


@pytest.mark.case(55)
def test_a_push_that_aborts_cuts_replies_and_records_what_was_sampled(own_redis_url: str, checkpoint: Path) -> None:
    with in_mid_reply(own_redis_url) as (service, session, answer, _):
        assert push(service, checkpoint, "abort")["applied"]
        choice = answer.result().choices[0]
        assert (choice.message.content, choice.finish_reason) == ("hello world", "length")
        (call,) = session.calls
        assert (call["finish_reason"], call["weight_versions"]) == ("abort", [[0, 0, 2]])
        session.close(reward=1.0)
        (row,), accounting = session.trajectories()
        assert (row["truncated"], sum(row["loss_mask"])) == (True, 2), "the agent acted on it"
        assert (accounting["quarantined"], accounting["complete"]) == ([], True)


# Arguments filled in with the defaults of their schema

EDIT_TOOL = {
    "type": "function",
    "function": {
        "name": "edit",
        "parameters": {
            "type": "object",
            "properties": {"path": {"type": "string"}, "all": {"type": "boolean", "default": False}},
        },
    },
}


def edit_turns(
    session: Session, engine: ScriptedEngine, arguments: dict[str, Any], *, minted: bool = True
) -> list[dict[str, Any]]:
    """Two tool turns and an end, each call replayed with `arguments` in the place of what was sampled; the calls recorded."""
    engine.say(*(engine.family.speak(calls=[("edit", {"path": "a"})]) for _ in range(2)), "done")
    messages: list[Any] = [turn("user", "q")]
    for _ in range(3):
        message = session.answer(messages, tools=[EDIT_TOOL])
        for call in message.get("tool_calls") or ():
            call["function"]["arguments"] = json.dumps(arguments)
            call["id"] = call["id"] if minted else "call_of_its_own"
        messages.append(message)
        messages += [{"role": "tool", "tool_call_id": call["id"], "content": "ok"} for call in message.get("tool_calls") or ()]
    return session.calls


@pytest.mark.parametrize("minted", [True, False], ids=["as minted", "ids of its own"])
def test_a_call_replayed_with_its_defaults_is_the_call_that_was_sent(
    engine: ScriptedEngine, token_service: RunningService, minted: bool
) -> None:
    """Named by its id, or the one that was asked the same and said the same but for the defaults."""
    session = token_service.session()
    calls = edit_turns(session, engine, {"all": False, "path": "a"}, minted=minted)
    assert [call["projection"] for call in calls[1:]] == ["defaults", "defaults"]
    assert [call["branch_reason"] for call in calls] == [None] * 3
    assert len(session.trajectories()[0]) == 1


@pytest.mark.parametrize("minted", [True, False], ids=["as minted", "ids of its own"])
def test_another_value_is_an_edit(engine: ScriptedEngine, token_service: RunningService, minted: bool) -> None:
    calls = edit_turns(token_service.session(), engine, {"all": True, "path": "a"}, minted=minted)
    assert calls[1]["parent_id"] is None
    assert calls[1]["branch_reason"] == "edited"
