"""Legacy completions through the real service: the openai SDK, a prompt of text or token ids, one row for a prompt that grows.

Every test runs on the token path (the engine tells text and ids) and on the chat path (its own /v1/completions), unless it is
about one of them.
"""

from __future__ import annotations

import itertools
import threading
from typing import Any

import openai
import pytest
from openai.types import Completion

from proxy.dialects.completions import legacy_logprobs
from tests.support.engine.scripted_engine import Fail, Say, ScriptedEngine, logprobs_of
from tests.support.engine.scripted_fixtures import Running
from tests.support.service.redis_server import RedisServer
from tests.support.service.running_service import RunningService, Session, hanging_up, wait_until

END = "<|im_end|>"


SETTINGS = {"max_model_len": 512}


def complete(session: Session, prompt: Any, **fields: Any) -> Any:
    return session.client.completions.create(model="policy", prompt=prompt, **fields)


def with_ids(session: Session, prompt: Any, **fields: Any) -> Any:
    """The first choice, with the ids that a harness that works on ids asks for."""
    return complete(session, prompt, extra_body={"return_token_ids": True}, **fields).choices[0]


def told(chunks: list[Completion], index: int = 0) -> str:
    return "".join(choice.text for chunk in chunks for choice in chunk.choices if choice.index == index)


def assert_one_row(session: Session, calls: list[dict[str, Any]]) -> None:
    """All of the calls in one row, the ids of each beginning with those of the one before, logprobs of that very context."""
    for before, after in itertools.pairwise(calls):
        said = [*before["prompt_ids"], *before["completion_ids"]]
        assert after["prompt_ids"][: len(said)] == said
        assert (after["parent_id"], after["branch_reason"]) == (before["call_id"], None)
    rows, accounting = session.trajectories()
    assert [row["call_ids"] for row in rows] == [[call["call_id"] for call in calls]]
    assert accounting["quarantined"] == []
    for call in calls:
        assert call["logprobs"] == logprobs_of(call["prompt_ids"], call["completion_ids"])


# Several prompts


@pytest.mark.parametrize("stream", [False, True])
def test_each_prompt_of_an_array_is_a_call_of_its_own(engine: ScriptedEngine, service: RunningService, stream: bool) -> None:
    """Choices are numbered as OpenAI does: those of the first prompt, then those of the second."""
    engine.script = lambda generation, index: Say(f"{generation.prompt} {index}")
    session = service.session()
    fields: dict[str, Any] = {"stream_options": {"include_usage": True}} if stream else {}
    answer = complete(session, ["red", "blue"], n=2, stream=stream, extra_body={"best_of": 2}, **fields)
    chunks = list(answer) if stream else [answer]
    assert [told(chunks, index).removesuffix(END) for index in range(4)] == ["red 0", "red 1", "blue 0", "blue 1"]
    assert len({chunk.id for chunk in chunks}) == 1
    ends = {choice.index: choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason}
    assert ends == dict.fromkeys(range(4), "stop")
    (usage,) = [chunk.usage for chunk in chunks if chunk.usage]
    calls = session.calls
    assert [len(set(told_of)) for told_of in zip(*((each["call_id"], each["status"]) for each in calls), strict=True)] == [4, 1]
    assert usage.completion_tokens == sum(len(call["completion_ids"]) for call in calls)
    _, accounting = session.trajectories()
    assert accounting["exported_tokens"] == accounting["sampled_tokens"] == usage.completion_tokens
    wait_until(lambda: all(call["delivered"] for call in session.calls), 60, "all are delivered")


def test_an_array_may_hold_lists_of_ids_and_equal_prompts(engine: ScriptedEngine, service: RunningService) -> None:
    engine.script = lambda generation, index: Say("same")
    session = service.session()
    answer = complete(session, [[5, 6, 7], [5, 6, 7]], extra_body={"return_token_ids": True})
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert [choice.prompt_token_ids for choice in answer.choices] == [[5, 6, 7]] * 2
    assert len(session.calls) == 2


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_fails_fails_the_request_and_none_of_its_calls_counts_as_delivered(
    engine: ScriptedEngine, service: RunningService, stream: bool
) -> None:
    session = service.session()
    with pytest.raises(openai.APIError, match="maximum context length"):
        list(complete(session, ["red", "x y " * 600], stream=stream))
    assert not any(call["delivered"] for call in session.calls)
    assert complete(session, ["red", "blue"]).choices[1].text


@pytest.mark.parametrize(
    ("prompts", "fields"),
    [(["red", ""], {}), (["red", 7], {}), ([[5], [-1]], {}), ([[5], ["a"]], {}), (["red"] * 129, {}), (["red"] * 65, {"n": 2})],
)
def test_an_array_with_what_is_no_prompt_or_of_too_many_is_refused(
    engine: ScriptedEngine, service: RunningService, prompts: list[Any], fields: dict[str, Any]
) -> None:
    session = service.session()
    with pytest.raises(openai.BadRequestError, match="'prompt'"):
        complete(session, prompts, **fields)
    assert engine.generations == [] and session.calls == []


# What a reply is, streamed and whole


@pytest.mark.parametrize("stream", [False, True])
def test_a_completion_gives_the_harness_its_text_and_the_store_its_ids(
    engine: ScriptedEngine, service: RunningService, stream: bool
) -> None:
    engine.say("hello world")
    engine.cached_tokens = 2
    session = service.session()
    if stream:
        chunks = list(complete(session, "the cat", stream=True, stream_options={"include_usage": True}))
        assert told(chunks) == "hello world"
        assert [choice.finish_reason for chunk in chunks for choice in chunk.choices][-1] == "stop"
        assert {chunk.object for chunk in chunks} == {"text_completion"}
        usage = chunks[-1].usage
    else:
        reply = complete(session, "the cat")
        assert (reply.choices[0].text, reply.choices[0].finish_reason) == ("hello world", "stop")
        assert reply.choices[0].logprobs is None
        assert reply.object == "text_completion"
        usage = reply.usage
    (call,) = session.calls
    assert call["prompt_ids"] == engine.family.encode("the cat")
    assert call["completion_ids"] == [*engine.family.encode("hello world"), engine.family.end_id]
    assert call["logprobs"] == logprobs_of(call["prompt_ids"], call["completion_ids"])
    assert call["weight_versions"] == [[0, 0, len(call["completion_ids"])]]
    assert call["messages"] == [{"role": "prompt", "content": "the cat"}]
    assert call["reply"] == {"role": "assistant", "content": "hello world"}
    assert (call["dialect"], call["status"], call["finish_reason"]) == ("completions", "finished", "stop")
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(call["prompt_ids"]), len(call["completion_ids"]))
    assert usage.prompt_tokens_details.cached_tokens == 2
    wait_until(lambda: session.calls[0]["delivered"], 120, "the delivery is noted")


@pytest.mark.parametrize("prompt", [["the cat"], [40, 41, 42], [[40, 41, 42]]])
def test_a_prompt_is_text_or_ids_alone_or_in_a_list_of_one(
    engine: ScriptedEngine, service: RunningService, prompt: Any
) -> None:
    session = service.session()
    complete(session, prompt)
    (call,) = session.calls
    ids = engine.family.encode("the cat") if prompt == ["the cat"] else [40, 41, 42]
    assert call["prompt_ids"] == engine.last.prompt_ids == ids
    assert call["messages"] == [{"role": "prompt", "content": "the cat" if prompt == ["the cat"] else ids}]


def test_a_reply_is_sixteen_tokens_long_unless_the_request_says_otherwise(
    engine: ScriptedEngine, service: RunningService
) -> None:
    session = service.session()
    for fields, expected in (({}, 16), ({"max_tokens": 20}, 20)):
        engine.say(Say(token_ids=[40] * 30))
        reply = complete(session, "the cat", **fields)
        assert (reply.choices[0].finish_reason, reply.usage.completion_tokens) == ("length", expected)
        assert session.calls[-1]["sampling"]["max_tokens"] == expected


@pytest.mark.parametrize("stream", [False, True])
def test_the_stop_string_and_what_may_become_it_leave_the_text_but_not_the_ids(
    engine: ScriptedEngine, service: RunningService, stream: bool
) -> None:
    engine.say("hello world in Paris")
    session = service.session()
    asked = complete(session, "the cat", stop=["rld in"], stream=stream)
    text = told(list(asked)) if stream else asked.choices[0].text
    assert text == "hello wo"
    (call,) = session.calls
    assert call["completion_ids"] == engine.family.encode("hello world in")
    assert (call["stop_reason"], call["reply"]["content"]) == ("rld in", "hello wo")


@pytest.mark.parametrize("prompt", ["the cat", [40, 41]])
def test_a_completion_may_fill_the_window_and_no_more(engine: ScriptedEngine, service: RunningService, prompt: Any) -> None:
    session = service.session()
    engine.say(Say(token_ids=[40] * 600))
    reply = complete(session, prompt, max_tokens=600)
    room = 512 - reply.usage.prompt_tokens
    assert reply.usage.completion_tokens == room
    assert session.calls[-1]["sampling"]["max_tokens"] == room


def test_what_the_harness_asks_of_the_sampling_reaches_the_engine(engine: ScriptedEngine, service: RunningService) -> None:
    session = service.session()
    asked: dict[str, Any] = {"temperature": 0.5, "top_p": 0.9, "seed": 7, "presence_penalty": 0.25, "frequency_penalty": 0.5}
    asked |= {"logit_bias": {"5": -100}, "user": "u"}
    complete(session, "the cat", **asked, extra_body={"top_k": 3, "min_p": 0.1, "repetition_penalty": 1.5})
    sampling = engine.last.sampling
    for name, value in {**asked, "top_k": 3, "min_p": 0.1, "repetition_penalty": 1.5}.items():
        if name != "user":
            assert sampling[name] == value, name
    kept = session.calls[-1]["sampling"]
    assert {name: kept[name] for name in ("temperature", "seed", "top_k", "min_p", "presence_penalty")} == {
        "temperature": 0.5,
        "seed": 7,
        "top_k": 3,
        "min_p": 0.1,
        "presence_penalty": 0.25,
    }


# Logprobs, ids and echo


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("count", [0, 2])
def test_logprobs_come_as_parallel_lists(engine: ScriptedEngine, service: RunningService, count: int, stream: bool) -> None:
    engine.say(Say("hello world", finish_reason="length"))
    session = service.session()
    asked = complete(session, "the cat", logprobs=count, stream=stream)
    choices = [choice for chunk in asked for choice in chunk.choices] if stream else asked.choices
    parts = [choice.logprobs for choice in choices if choice.logprobs]
    tokens = [token for part in parts for token in part.tokens]
    (call,) = session.calls
    assert tokens == [engine.family.decode([token]) for token in call["completion_ids"]]
    assert [value for part in parts for value in part.token_logprobs] == call["logprobs"]
    assert [at for part in parts for at in part.text_offset] == [len("".join(tokens[:n])) for n in range(len(tokens))]
    tops = [top for part in parts for top in part.top_logprobs]
    assert {len(top) for top in tops} == {max(count, 1)}
    assert all(top[token] == value for top, token, value in zip(tops, tokens, call["logprobs"], strict=True))


def test_nobody_who_did_not_ask_gets_logprobs(engine: ScriptedEngine, service: RunningService) -> None:
    session = service.session()
    chunks = list(complete(session, "the cat", stream=True))
    assert all(choice.logprobs is None for chunk in chunks for choice in chunk.choices)
    assert "token_ids" not in chunks[0].choices[0].model_dump()


@pytest.mark.parametrize("stream", [False, True])
def test_the_ids_come_back_to_who_asks_for_them(engine: ScriptedEngine, service: RunningService, stream: bool) -> None:
    session = service.session()
    asked = complete(session, "the cat", stream=stream, extra_body={"return_token_ids": True})
    choices = [choice for chunk in asked for choice in chunk.choices] if stream else asked.choices
    (call,) = session.calls
    assert [token for choice in choices for token in choice.token_ids] == call["completion_ids"]
    assert choices[-1].prompt_token_ids == call["prompt_ids"]


@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_puts_the_prompt_before_every_choice(engine: ScriptedEngine, service: RunningService, stream: bool) -> None:
    engine.say("hello", "world")
    session = service.session()
    asked = complete(session, "the cat ", echo=True, n=2, stream=stream)
    chunks = list(asked) if stream else [asked]
    assert [told(chunks, index) for index in (0, 1)] == ["the cat hello", "the cat world"]
    assert session.calls[0]["reply"]["content"] == "hello"


# Prompts that grow


def test_ids_sent_back_with_more_after_them_grow_one_row(engine: ScriptedEngine, service: RunningService) -> None:
    """`fish` + `ing` is sampled where the text would be the one token `fishing`; the harness never makes text of it."""
    family = engine.family
    session = service.session()
    engine.say(Say(token_ids=[*family.encode("fish"), *family.encode("ing"), family.end_id]))
    prompt = family.encode("the cat is ")
    for turn in range(3):
        choice = with_ids(session, prompt)
        prompt = [*choice.prompt_token_ids, *choice.token_ids, *family.encode(f" and {turn}")]
    calls = session.calls
    assert_one_row(session, calls)
    assert calls[0]["completion_ids"][:2] == [*family.encode("fish"), *family.encode("ing")]
    shown = [message["role"] for message in calls[2]["messages"]]
    assert shown == ["prompt", "assistant", "prompt", "assistant", "prompt"]
    assert calls[2]["messages"][-1]["content"] == family.encode(" and 1")


def test_text_that_is_tokenised_to_what_was_sampled_grows_one_row(engine: ScriptedEngine, service: RunningService) -> None:
    session = service.session()
    prompt = "the cat"
    for reply in (" is in", " a dog", " on the"):
        engine.say(Say(reply, finish_reason="length"))
        prompt += complete(session, prompt).choices[0].text + " and"
    assert prompt == "the cat is in and a dog and on the and"
    calls = session.calls
    assert_one_row(session, calls)
    assert [call["projection"] for call in calls] == ["", "exact", "exact"]
    assert "".join(message["content"] for message in calls[2]["messages"]) == "the cat is in and a dog and"


def test_text_keeps_the_sampled_ids_where_it_would_be_tokenised_otherwise(
    engine: ScriptedEngine, token_service: RunningService
) -> None:
    """Sampled: `fish`, `ing`; the text `fishing` is one token. What follows is tokenised alone and put behind the sampled ids."""
    family = engine.family
    fish, ing, fishing = (family.encode(text) for text in ("fish", "ing", "fishing"))
    assert fishing not in ([*fish, *ing], [])
    session = token_service.session()
    engine.say(Say(token_ids=[*fish, *ing], finish_reason="length"), Say(token_ids=ing, finish_reason="length"))
    first = complete(session, "the cat ").choices[0].text
    second = complete(session, f"the cat {first} and s").choices[0].text
    complete(session, f"the cat {first} and s{second}")
    calls = session.calls
    assert calls[1]["prompt_ids"] == [*family.encode("the cat "), *fish, *ing, *family.encode(" and s")]
    assert_one_row(session, calls)


def test_on_the_chat_path_such_text_branches(engine: ScriptedEngine, running: Running) -> None:
    family = engine.family
    session = running[1]["chat"].session()
    engine.say(Say(token_ids=[*family.encode("fish"), *family.encode("ing")], finish_reason="length"))
    complete(session, "the cat ")
    complete(session, "the cat fishing and")
    first, second = session.calls
    assert (second["parent_id"], second["branch_reason"]) == (first["call_id"], "retokenized")
    assert second["prompt_ids"] == family.encode("the cat fishing and")


def test_a_stop_token_that_the_text_shows_again_is_the_sampled_one(engine: ScriptedEngine, service: RunningService) -> None:
    """A harness that writes the chat template itself."""
    session = service.session()
    prompt = f"<|im_start|>user\nq{END}\n<|im_start|>assistant\n"
    for reply in ("hello world", "a dog"):
        engine.say(reply)
        prompt += complete(session, prompt).choices[0].text + f"{END}\n<|im_start|>user\nmore{END}\n<|im_start|>assistant\n"
    complete(session, prompt)
    assert_one_row(session, session.calls)


def test_a_stop_string_that_the_text_shows_again_is_the_sampled_one(
    engine: ScriptedEngine, token_service: RunningService
) -> None:
    family = engine.family
    fish, ing = family.encode("fish"), family.encode("ing")
    session = token_service.session()
    engine.say(Say(token_ids=[*fish, *ing, *family.encode(" dog")]), "hello")
    text = complete(session, "the cat ", stop=[" dog"]).choices[0].text
    assert text == "fishing"
    complete(session, f"the cat {text} dog is")
    assert_one_row(session, session.calls)
    assert session.calls[1]["prompt_ids"] == [*family.encode("the cat "), *fish, *ing, *family.encode(" dog is")]


def test_a_stop_token_that_the_text_does_not_show_is_no_part_of_the_next_prompt(
    engine: ScriptedEngine, token_service: RunningService
) -> None:
    """The ids before it are still the sampled ones."""
    family = engine.family
    fish, ing = family.encode("fish"), family.encode("ing")
    session = token_service.session()
    engine.say(Say(token_ids=[*fish, *ing, family.end_id]))
    complete(session, "the cat ")
    complete(session, "the cat fishing and")
    first, second = session.calls
    assert first["completion_ids"][-1] == family.end_id
    assert second["prompt_ids"] == [*family.encode("the cat "), *fish, *ing, *family.encode(" and")]
    assert (second["parent_id"], second["branch_reason"]) == (first["call_id"], "stop_dropped")
    rows, accounting = session.trajectories()
    assert len(rows) == 2
    assert accounting["exported_tokens"] == accounting["sampled_tokens"]


def test_what_the_engine_spells_out_otherwise_is_tokenised_afresh(
    engine: ScriptedEngine, token_service: RunningService
) -> None:
    """A reply that is cut within a character: its last byte shows in no text."""
    family = engine.family
    cut = family.encode("fish") + family.encode("é")[:1]
    session = token_service.session()
    engine.say(Say(token_ids=cut, finish_reason="length"))
    text = complete(session, "the cat ").choices[0].text
    assert text == "fish"
    complete(session, "the cat fish and")
    first, second = session.calls
    assert second["prompt_ids"] == family.encode("the cat fish and")
    assert (second["parent_id"], second["branch_reason"]) == (first["call_id"], "text_unproven")


def test_the_same_prompt_again_is_another_sample_and_another_prompt_another_root(
    engine: ScriptedEngine, service: RunningService
) -> None:
    session = service.session()
    engine.say(Say(token_ids=[engine.family.end_id]))
    for prompt in ("the cat", "the cat", "a dog"):
        complete(session, prompt)
    assert [(call["parent_id"], call["branch_reason"]) for call in session.calls] == [
        (None, None),
        (None, "repeated"),
        (None, "new_root"),
    ]


def test_two_continuations_of_a_reply_are_two_branches(engine: ScriptedEngine, service: RunningService) -> None:
    session = service.session()
    engine.say(Say(" is in", finish_reason="length"))
    for prompt in ("the cat", "the cat is in a", "the cat is in the", "the cat is in the"):
        complete(session, prompt)
    first, *others = session.calls
    assert [call["parent_id"] for call in others] == [first["call_id"]] * 3
    assert [call["branch_reason"] for call in others] == [None, "forked", "repeated"]


def test_another_process_finds_the_calls_in_the_store(
    engine: ScriptedEngine, token_service: RunningService, redis_server: RedisServer
) -> None:
    session = token_service.session()
    engine.say(Say(" is in", finish_reason="length"), Say(" a", finish_reason="length"))
    complete(session, "the cat")
    with RunningService(engine.url, redis_server.url, engine_api="token") as other:
        body = {"model": "policy", "prompt": "the cat is in and"}
        answer = session.post("/v1/completions", body, at=other)
        assert answer.status_code == 200, answer.text
    complete(session, "the cat is in and a dog")
    assert_one_row(session, session.calls)


# What is refused, and what breaks


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [2**31]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "best_of": 3}, "best_of"),
        ({"prompt": "a", "n": 2, "best_of": 3}, "best_of"),
        ({"prompt": "a", "echo": True, "logprobs": 1}, "echo"),
        ({"prompt": [1, 2], "echo": True}, "echo"),
        ({"prompt": "a", "logprobs": -1}, "logprobs"),
        ({"prompt": "a", "logprobs": True}, "logprobs"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "a", "truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        ({"prompt": "a", "use_beam_search": True}, "use_beam_search"),
        ({"prompt": "a ", "extra": 1, "model": ""}, "model"),
    ],
)
def test_a_request_it_does_not_take_is_refused_by_name_and_recorded_nowhere(
    engine: ScriptedEngine, service: RunningService, fields: dict[str, Any], param: str
) -> None:
    session = service.session()
    with pytest.raises(openai.BadRequestError) as raised:
        session.client.post("/completions", body={"model": "policy", **fields}, cast_to=Completion)
    error = raised.value.body
    assert isinstance(error, dict)
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert session.calls == [] and engine.generations == []


@pytest.mark.parametrize("prompt", ["q " * 900, [40] * 900])
def test_a_prompt_beyond_the_window_is_the_harnesses_to_mend(
    engine: ScriptedEngine, service: RunningService, prompt: Any
) -> None:
    session = service.session()
    with pytest.raises(openai.BadRequestError) as raised:
        complete(session, prompt)
    assert raised.value.code == "context_length_exceeded"
    assert "maximum context length" in raised.value.message
    assert session.calls == []


def test_an_id_the_model_does_not_have_is_refused(engine: ScriptedEngine, token_service: RunningService) -> None:
    session = token_service.session()
    with pytest.raises(openai.BadRequestError, match="out of vocabulary"):
        complete(session, [40, 99999])
    assert session.calls == []


def test_an_engine_that_fails_is_said_to(engine: ScriptedEngine, service: RunningService) -> None:
    session = service.session()
    engine.say(Fail(500))
    with pytest.raises(openai.InternalServerError) as raised:
        complete(session, "the cat")
    assert raised.value.status_code == 502
    assert session.calls == []


def test_an_engine_without_completions_is_said_to_take_none(redis_server: RedisServer) -> None:
    with (
        ScriptedEngine("qwen3", plain=True) as plain,
        RunningService(plain.url, redis_server.url, engine_api="chat") as service,
    ):
        session = service.session()
        with pytest.raises(openai.BadRequestError, match="takes no prompts"):
            complete(session, "the cat")


@pytest.mark.parametrize("breaking", [{"break_after": 1}, {"error_after": 1}])
def test_a_stream_that_the_engine_breaks_off_is_recorded_and_ends_in_an_error(
    engine: ScriptedEngine, service: RunningService, breaking: dict[str, Any]
) -> None:
    engine.say(Say("hello world", **breaking))
    session = service.session()
    heard = []
    with pytest.raises(openai.APIError):
        for chunk in complete(session, "the cat", stream=True):
            heard.append(chunk)
    assert told(heard) == "hello"
    (call,) = session.calls
    assert call["completion_ids"] == engine.family.encode("hello")
    assert (call["status"], call["finish_reason"]) == ("failed", "abort")


@pytest.mark.parametrize("stream", [False, True])
def test_a_harness_that_goes_away_leaves_what_was_sampled(
    engine: ScriptedEngine, service: RunningService, stream: bool
) -> None:
    engine.say(Say("hello world", gate=threading.Event(), gate_after=1))
    session = service.session()
    body = {"model": "policy", "prompt": "the cat", "stream": stream}
    with hanging_up(f"{session.base_url}/completions", body, session.api_key):
        engine.wait_for(lambda: bool(engine.generations) and engine.last.sampled.get(0) == engine.family.encode("hello"))
    wait_until(lambda: bool(session.calls) and session.calls[0]["status"] == "aborted", 120, "the cut call is recorded")
    (call,) = session.calls
    assert (call["completion_ids"], call["finish_reason"]) == (engine.family.encode("hello"), "abort")
    assert engine.last.aborted, "asked to end, not hung up on: it told what it had sampled"


def test_a_reply_cut_in_mid_stream_is_gone_on_from(engine: ScriptedEngine, token_service: RunningService) -> None:
    """The text alone would be tokenised otherwise: ` hello` is one token."""
    session = token_service.session()
    engine.say(Say("hello world", gate=threading.Event(), gate_after=1), Say(" in", finish_reason="length"))
    body = {"model": "policy", "prompt": "the cat ", "stream": True}
    with hanging_up(f"{session.base_url}/completions", body, session.api_key):
        engine.wait_for(lambda: bool(engine.generations) and bool(engine.last.sampled.get(0)))
    wait_until(lambda: bool(session.calls) and session.calls[0]["status"] == "aborted", 120, "the cut call is recorded")
    complete(session, "the cat hello")
    first, second = session.calls
    assert second["prompt_ids"] == [*first["prompt_ids"], *first["completion_ids"]]
    assert_one_row(session, [first, second])


# Pure parts


def test_offsets_go_on_where_the_last_piece_ended() -> None:
    entries: list[dict[str, Any]] = [
        {"token": "ab", "logprob": -1.0, "top_logprobs": [{"token": "ab", "logprob": -1.0}]},
        {"token": "c", "logprob": None},
    ]
    assert legacy_logprobs(entries, 3) == {
        "tokens": ["ab", "c"],
        "token_logprobs": [-1.0, None],
        "top_logprobs": [{"ab": -1.0}, {}],
        "text_offset": [3, 5],
    }
