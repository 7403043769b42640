"""The closed loop on real parts: the openai SDK, `verbatim serve` with its embedded Redis, vLLM on a tiny model, a trainer.

What a row claims is recomputed: every trained token's logprob, by transformers, under the weights of its version.
"""

from __future__ import annotations

import copy
import itertools
import json
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from examples.vllm_server import VllmServer
from proxy.engine.in_vllm.frames import SAMPLE
from tests.support.engine.forked_vllm import run_beside_vllm
from tests.support.engine.real_engine import (
    PLAIN,
    TOLERANCE,
    TOOLS,
    ask,
    assert_true,
    load,
    never,
    read_metric,
    rows_of,
    sampled,
    tool_turns,
    wait_until_it_samples,
)
from tests.support.engine.recording_relay import GENERATE, RecordingRelay
from tests.support.engine.vllm_server import running_vllm
from tests.support.service.running_service import Session
from tests.support.service.verbatim_process import ADMIN, TRAINER, Serving, environment, wait_until
from trainer_client import TrainerClient
from trainer_client.recompute import compare

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def engine(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    with running_vllm(tiny_model, tmp_path_factory.mktemp("vllm")) as server:
        yield server


@pytest.fixture(scope="module")
def relay(engine: VllmServer) -> Iterator[RecordingRelay]:
    with RecordingRelay(engine.url) as relay:
        yield relay


@pytest.fixture(scope="module")
def serving(relay: RecordingRelay, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with Serving("--engine", relay.url, data_dir=tmp_path_factory.mktemp("data")) as service:
        service.await_ready()
        yield service


def sampled_in_all(engine: VllmServer) -> float:
    """Of an engine that stands: its server counts tokens as it takes them, which on a busy machine is after they were sampled."""
    count = sampled(engine)
    while True:
        time.sleep(1)
        if (again := sampled(engine)) == count:
            return count
        count = again


def pause_in_mid_reply(engine: VllmServer, session: Session, tokens: int) -> list[threading.Thread]:
    """Ask for a whole and for a streamed reply of so many tokens and pause the engine in the middle of both; returns the threads that
    wait for the replies.

    Replies that are over before the engine stands are let go, and the next ones are tried: they take the engine as long as the machine
    lets them, and the call that pauses it too."""

    def ask_for_many(stream: bool) -> None:
        asked = {"max_tokens": tokens, "extra_body": {**PLAIN, "ignore_eos": True}, "stream": stream}
        answer = ask(session, [{"role": "user", "content": "go"}], **asked)
        if stream:
            list(answer)

    for _ in range(10):
        before, begun = sampled(engine), partial(read_metric, engine, "time_to_first_token_seconds_count")
        both = begun() + 2
        asking = [threading.Thread(target=ask_for_many, args=(stream,)) for stream in (False, True)]
        for thread in asking:
            thread.start()
        wait_until(lambda: begun() == both, 60, "both begin")  # noqa: B023
        wait_until_it_samples(engine, before, 60)
        httpx.post(f"{engine.url}/pause?mode=keep", timeout=60).raise_for_status()
        # The longer of the two has fewer than both together.
        if sampled_in_all(engine) < before + tokens:
            return asking
        httpx.post(f"{engine.url}/resume", timeout=60).raise_for_status()
        for thread in asking:
            thread.join()
    raise AssertionError(f"none of ten pairs was caught before one had its last of {tokens} tokens")


def test_a_tool_calling_conversation_is_one_row_of_the_very_tokens_the_model_saw_and_said(
    serving: Serving, tiny_model: Path
) -> None:
    """Forced tool calls: a random model then emits real ones. Grammar and bias change even raw logprobs: here the ids count."""
    session = serving.session()
    bias = never(tiny_model, "<|endoftext|>", "<think>", "</think>")
    messages = tool_turns(session, 5, tool_choice="required", logit_bias=bias)
    assert any(message.get("tool_calls") for message in messages)
    calls = session.calls
    for earlier, later in itertools.pairwise(calls):
        seen = earlier["prompt_ids"] + earlier["completion_ids"]
        assert later["prompt_ids"][: len(seen)] == seen
        assert later["parent_id"] == earlier["call_id"]
    assert {call["api"] for call in calls} == {"token"}
    rows, accounting = session.trajectories()
    assert len(rows) == 1
    assert accounting["sampled_tokens"] == sum(len(call["completion_ids"]) for call in calls)


def test_every_row_of_a_conversation_has_the_logprobs_that_its_context_gives(serving: Serving, tiny_model: Path) -> None:
    session = serving.session()
    tool_turns(session, 6)
    rows = rows_of(session)
    assert len(rows) < 6
    assert_true(rows, tiny_model)


@pytest.mark.case(36)
def test_one_row_per_call_trains_the_same_tokens(serving: Serving, tiny_model: Path) -> None:
    session = serving.session()
    tool_turns(session, 3)
    rows = rows_of(session, "per_call")
    assert len(rows) == 3
    assert sum(int(row.loss_mask.sum()) for row in rows) == session.trajectories()[1]["exported_tokens"]
    assert_true(rows, tiny_model)


@pytest.mark.case(10)
def test_a_streamed_call_records_what_the_unstreamed_one_does(serving: Serving) -> None:
    messages = [{"role": "user", "content": "Say something."}]
    whole, streamed = serving.session(), serving.session()
    reply = ask(whole, messages, seed=7, max_tokens=24)
    chunks = list(ask(streamed, messages, seed=7, max_tokens=24, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == reply.choices[0].message.content
    assert chunks[-1].usage == reply.usage
    (one,), (other,) = whole.calls, streamed.calls
    for field in ("prompt_ids", "completion_ids", "logprobs", "finish_reason", "weight_versions"):
        assert one[field] == other[field], field


def test_every_choice_is_a_call_of_its_own_and_stop_strings_leave_the_text_but_not_the_ids(
    serving: Serving, tiny_model: Path
) -> None:
    session = serving.session()
    reply = ask(session, [{"role": "user", "content": "a"}], n=3, max_tokens=40, stop=["e"], seed=1)
    assert [choice.index for choice in reply.choices] == [0, 1, 2]
    calls = session.calls
    assert len(calls) == 3
    assert len({tuple(call["prompt_ids"]) for call in calls}) == 1
    for choice, call in zip(reply.choices, calls, strict=True):
        assert "e" not in (choice.message.content or "")
        assert len(call["completion_ids"]) == len(call["logprobs"])
    rows = rows_of(session)
    assert len(rows) == 3
    assert_true(rows, tiny_model)


@pytest.mark.case(7)
def test_a_new_user_turn_drops_the_thinking_and_branches_and_both_rows_are_true(serving: Serving, tiny_model: Path) -> None:
    session = serving.session()
    messages: list[Any] = [{"role": "user", "content": "Think."}]
    for turn in range(3):
        reply = ask(session, messages, max_tokens=16, seed=turn, extra_body={}).choices[0].message
        assert reply.model_extra and reply.model_extra["reasoning_content"]
        messages += [reply.model_dump(exclude_none=True), {"role": "user", "content": "Again."}]
    assert [call["branch_reason"] for call in session.calls] == [None, "thinking_dropped", "thinking_dropped"]
    rows = rows_of(session)
    assert len(rows) == 3
    assert_true(rows, tiny_model)


def test_a_prompt_of_text_that_grows_keeps_the_sampled_ids_where_its_text_has_others(
    serving: Serving, tiny_model: Path
) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    shown = {number: tokenizer.decode([number]) for number in tokenizer.get_vocab().values()}
    # Sampled twice in a row, it is two tokens whose text is one.
    twice = next(number for number, text in sorted(shown.items()) if text.isalpha() and len(tokenizer.encode(text * 2)) == 1)
    session, prompt = serving.session(), "The fox"
    for _ in range(3):
        asked = {"max_tokens": 2, "logit_bias": {str(twice): 100.0}, "stream": True}
        chunks = session.client.completions.create(model="policy", prompt=prompt, **asked)
        prompt += "".join(choice.text for chunk in chunks for choice in chunk.choices) + "\nGo on:"
    calls = session.calls
    assert [call["completion_ids"] for call in calls] == [[twice, twice]] * 3
    assert [call["branch_reason"] for call in calls] == [None] * 3
    assert len(session.trajectories()[0]) == 1
    told = ["".join(message["content"] for message in call["messages"]) for call in calls]
    assert told[-1] in prompt
    for text, call in zip(told, calls, strict=True):
        assert tokenizer.decode(call["prompt_ids"]) == text
    assert [tokenizer.encode(text) == call["prompt_ids"] for text, call in zip(told, calls, strict=True)] == [
        True,
        False,
        False,
    ]


@pytest.mark.parametrize("stream", [False, True])
def test_usage_tells_of_the_tokens_the_engine_had_cached(serving: Serving, stream: bool) -> None:
    session = serving.session()
    messages = [{"role": "user", "content": f"{stream} " + "hi " * 600}]
    cached = []
    for _ in range(2):
        asked = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        reply = ask(session, messages, max_tokens=4, **asked)
        usage = list(reply)[-1].usage if stream else reply.usage
        cached.append(usage.prompt_tokens_details.cached_tokens)
    assert cached[0] < cached[1] <= usage.prompt_tokens


def test_what_a_request_forces_is_forced(serving: Serving) -> None:
    """A random model says nothing of the kind of its own accord."""
    session = serving.session()
    question = [{"role": "user", "content": "Which?"}]
    schema = {
        "type": "object",
        "properties": {"door": {"enum": ["a", "b"]}},
        "required": ["door"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "choice", "schema": schema}}
    said = ask(session, question, response_format=form, max_tokens=600, seed=1).choices[0]
    assert said.finish_reason == "stop"
    assert json.loads(said.message.content)["door"] in ("a", "b")
    strict = {**TOOLS[0], "function": {**TOOLS[0]["function"], "strict": True}}
    for choice in ("required", {"type": "function", "function": {"name": "guess"}}):
        (call,) = (
            ask(session, question, tools=[strict], tool_choice=choice, max_tokens=600, seed=1).choices[0].message.tool_calls
        )
        assert call.function.name == "guess"
        assert isinstance(json.loads(call.function.arguments)["number"], int)
    forced = ask(session, question, logit_bias={"100": 100.0}, max_tokens=5).choices[0]
    assert forced.finish_reason == "length"
    assert session.calls[-1]["completion_ids"] == [100] * 5


def test_an_audit_shows_the_tree_and_the_accounting_and_finds_logprobs_of_other_weights(
    serving: Serving, tiny_model: Path, tmp_path: Path
) -> None:
    from examples.demo.tiny_model import make_tiny_model

    session = serving.session()
    messages = tool_turns(session, 3)
    ask(session, messages[:1], max_tokens=4)
    env = environment(VERBATIM_URL=serving.url, VERBATIM_ADMIN_TOKEN=ADMIN)
    audit = ("-m", "cli.main", "audit", session.session_id, "--model")
    true = run_beside_vllm(*audit, str(tiny_model), env=env)
    assert true.returncode == 0, true.stderr
    for call in session.calls:
        assert call["call_id"] in true.stdout
    sampled = sum(len(call["completion_ids"]) for call in session.calls)
    assert f"{sampled} tokens sampled = {sampled} exported" in " ".join(true.stdout.split())
    other = make_tiny_model(tmp_path / "other", seed=1)
    false = run_beside_vllm(*audit, str(other), env=env)
    assert false.returncode == 1
    assert "a logprob is off by" in " ".join(false.stderr.split())


@pytest.mark.case(49)
def test_new_weights_reach_the_engine_in_mid_reply_and_every_token_knows_its_own(
    serving: Serving,
    engine: VllmServer,
    relay: RecordingRelay,
    tiny_model: Path,
    tmp_path: Path,
) -> None:
    """The engine stands from the middle of the replies to the push, which lets it go on. A first push falls into replies of the plugin
    inside vLLM, a second into replies over the three routes: both know which tokens are whose, whole and streamed."""
    import torch

    models, tokens = [load(tiny_model)], 800
    session = serving.session(group_id="versions", group_size=1)
    with TrainerClient(serving.url, TRAINER) as trainer:
        for version, route in ((1, SAMPLE), (2, GENERATE)):
            models.append(copy.deepcopy(models[-1]))
            torch.manual_seed(version)
            with torch.no_grad():
                for parameter in models[-1].parameters():
                    parameter.add_(0.02 * torch.randn_like(parameter))
            relay.asked.clear()
            replies = pause_in_mid_reply(engine, session, tokens)
            assert relay.asked[route] > 0 == relay.asked[SAMPLE if route == GENERATE else GENERATE]
            pushed = trainer.publish(models[-1].state_dict(), version, directory=tmp_path)
            assert pushed.applied and not pushed.failed
            for reply in replies:
                reply.join()
            for call in session.calls[-2:]:
                assert len(call["weight_versions"]) == 2, (call, sampled(engine))
                (first, begin, turn), (second, again, end) = call["weight_versions"]
                assert (first, second) == (version - 1, version)
                assert 0 == begin < turn == again < end == len(call["completion_ids"]) == tokens
            if route == SAMPLE:
                forget_plugin(relay, serving, session)
        session.close(reward=1.0)
        batch = next(iter(trainer.batches(max_groups=1)))
        with batch:
            rows = list(batch.rows)
            true = [compare(model, rows, version=version) for version, model in enumerate(models)]
            assert all(each.tokens > 20 and each.largest < TOLERANCE for each in true), true
            assert sum(each.tokens for each in true) == sum(int(row.loss_mask.sum()) for row in rows)


def forget_plugin(relay: RecordingRelay, serving: Serving, session: Session) -> None:
    """From now on the service uses the three routes: the call that finds no plugin any more tells it so."""
    relay.plugin = False
    ask(session, [{"role": "user", "content": "?"}], max_tokens=1)
    assert [replica["plugin"] for replica in serving.request("GET", "/engines").json()["replicas"]] == [False]
