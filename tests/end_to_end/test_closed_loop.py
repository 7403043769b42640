"""The closed loop on real parts: the openai SDK, `verbatim serve` with its embedded Redis, vLLM on a tiny model, a trainer.

What a row claims is recomputed: every trained token's logprob, by transformers, under the weights of its version.
"""

from __future__ import annotations

import copy
import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI

from examples.vllm_server import VllmServer
from proxy.engine.in_vllm.frames import SAMPLE
from reconstruct.records import RAW, UNKNOWN_MODE, ModeSpan, Span, pack_ids, pack_logprobs
from reconstruct.trajectory import Trajectory
from tests.support.engine.forked_vllm import run_beside_vllm
from tests.support.engine.recording_relay import GENERATE, RecordingRelay
from tests.support.engine.vllm_server import running_vllm
from tests.support.service.running_service import hanging_up
from tests.support.service.verbatim_process import ADMIN, TRAINER, Serving, environment, wait_until
from trainer_client import TrainerClient
from trainer_client.recompute import Difference, compare

pytestmark = pytest.mark.engine

TOLERANCE = 1e-4
PLAIN = {"chat_template_kwargs": {"enable_thinking": False}}
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "guess",
            "description": "Guess a number.",
            "parameters": {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]},
        },
    }
]


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
        wait_until(lambda: service.request("GET", "/readyz").status_code == 200, 120, "ready")
        yield service


@pytest.fixture
def chat_serving(engine: VllmServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """For one test only: a second service with a store of its own knows nothing of the first one's pushes, and would let an engine
    that is paused for one go on."""
    with Serving("--engine", engine.url, "--engine-api", "chat", data_dir=tmp_path_factory.mktemp("data")) as service:
        wait_until(lambda: service.request("GET", "/readyz").status_code == 200, 120, "ready")
        yield service


@pytest.fixture
def opened() -> Iterator[Callable[..., Session]]:
    """Opens sessions, `opened(serving, **fields)`, and closes their clients after the test."""
    sessions: list[Session] = []

    def open_session(serving: Serving, **fields: Any) -> Session:
        sessions.append(Session(serving, **fields))
        return sessions[-1]

    yield open_session
    for session in sessions:
        session.client.close()


class Session:
    """One session and the SDK client of its harness."""

    def __init__(self, serving: Serving, **fields: Any) -> None:
        self._serving = serving
        created = serving.request("POST", "/sessions", json=fields).json()
        self.session_id: str = created["session_id"]
        self.client = OpenAI(base_url=created["base_urls"]["openai"], api_key=created["api_key"], max_retries=0)

    def ask(self, messages: list[Any], **fields: Any) -> Any:
        return self.client.chat.completions.create(model="policy", messages=messages, **{"extra_body": PLAIN, **fields})

    @property
    def calls(self) -> list[dict[str, Any]]:
        listed: list[dict[str, Any]] = self._serving.request("GET", f"/sessions/{self.session_id}/calls").json()["calls"]
        return listed

    def trajectories(self, builder: str = "merged") -> tuple[list[Trajectory], dict[str, Any]]:
        answer = self._serving.request("GET", f"/sessions/{self.session_id}/trajectories?builder={builder}").json()
        return [row_of(row) for row in answer["trajectories"]], answer["accounting"]

    def close(self, reward: float) -> None:
        closing = {"status": "completed", "reward": reward}
        assert self._serving.request("POST", f"/sessions/{self.session_id}/close", json=closing).status_code == 200


def row_of(row: dict[str, Any]) -> Trajectory:
    """A row of the JSON API as a Trajectory."""
    arrays = {"token_ids": pack_ids(row["token_ids"]), "loss_mask": pack_ids(row["loss_mask"]).astype("int8")}
    arrays["logprobs"] = pack_logprobs(row["logprobs"])
    spans = tuple(Span(*span) for span in row["weight_versions"])
    modes = tuple(ModeSpan(*span) for span in row["logprob_modes"])
    given = {name: value for name, value in row.items() if name != "rollout_id"} | {"logprob_modes": modes}
    return Trajectory(**{**given, **arrays, "weight_versions": spans, "call_ids": tuple(row["call_ids"])})


def never(model: Path, *tokens: str) -> dict[str, float]:
    """A logit_bias under which the random model does not sample these: they would cut or rewrite its turns."""
    from transformers import AutoTokenizer

    vocabulary = AutoTokenizer.from_pretrained(model).get_vocab()
    return {str(vocabulary[token]): -100.0 for token in tokens}


def load(model: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model).eval()


def balanced(accounting: dict[str, Any]) -> bool:
    quarantined = sum(item["tokens"] for item in accounting["quarantined"])
    return bool(accounting["sampled_tokens"] == accounting["exported_tokens"] + quarantined)


def assert_true(rows: list[Trajectory], model: Path) -> Difference:
    """Every trained token of `rows` has the logprob that `model` gives it in that context."""
    difference = compare(load(model), rows)
    assert difference.tokens == sum(int(row.loss_mask.sum()) for row in rows) > 0
    assert difference.largest < TOLERANCE, difference
    return difference


def sampled(engine: VllmServer) -> float:
    """How many tokens it has sampled since its start, by its own count."""
    return read_metric(engine, "generation_tokens_total")


def sampled_in_all(engine: VllmServer) -> float:
    """Of an engine that stands: its server counts tokens as it takes them, which on a busy machine is after they were sampled."""
    count = sampled(engine)
    while True:
        time.sleep(1)
        if (again := sampled(engine)) == count:
            return count
        count = again


def read_metric(engine: VllmServer, name: str) -> float:
    """One of vLLM's own, summed up."""
    lines = httpx.get(f"{engine.url}/metrics", timeout=60, verify=False).raise_for_status().text.splitlines()
    counts = [float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"vllm:{name}{{")]
    assert counts, f"it does not count {name}"
    return sum(counts)


def wait_until_it_samples(engine: VllmServer, before: float, tokens: int) -> None:
    """Until the engine has sampled so many tokens more than `before`."""
    wait_until(lambda: sampled(engine) >= before + tokens, 60, f"{tokens} tokens are sampled")


def pause_in_mid_reply(engine: VllmServer, session: Session, tokens: int) -> list[threading.Thread]:
    """Ask for a whole and for a streamed reply of so many tokens and pause the engine in the middle of both; returns the threads that
    wait for the replies.

    Replies that are over before the engine stands are let go, and the next ones are tried: they take the engine as long as the machine
    lets them, and the call that pauses it too."""

    def ask(stream: bool) -> None:
        asked = {"max_tokens": tokens, "extra_body": {**PLAIN, "ignore_eos": True}, "stream": stream}
        answer = session.ask([{"role": "user", "content": "go"}], **asked)
        if stream:
            list(answer)

    for _ in range(10):
        before, both = sampled(engine), read_metric(engine, "time_to_first_token_seconds_count") + 2
        asking = [threading.Thread(target=ask, args=(stream,)) for stream in (False, True)]
        for thread in asking:
            thread.start()
        wait_until(lambda both=both: read_metric(engine, "time_to_first_token_seconds_count") == both, 60, "both begin")
        wait_until_it_samples(engine, before, 60)
        httpx.post(f"{engine.url}/pause?mode=keep", timeout=60).raise_for_status()
        # The longer of the two has fewer than both together.
        if sampled_in_all(engine) < before + tokens:
            return asking
        httpx.post(f"{engine.url}/resume", timeout=60).raise_for_status()
        for thread in asking:
            thread.join()
    raise AssertionError(f"none of ten pairs was caught before one had its last of {tokens} tokens")


def tool_turns(session: Session, turns: int, **fields: Any) -> list[Any]:
    """A conversation of tool calls with an environment that answers every call; returns its messages."""
    messages: list[Any] = [{"role": "user", "content": "Find the number."}]
    for turn in range(turns):
        reply = session.ask(messages, tools=TOOLS, max_tokens=48, seed=turn, **fields).choices[0].message
        messages.append(reply.model_dump(exclude_none=True))
        for call in reply.tool_calls or ():
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "too low"})
        if not reply.tool_calls:
            messages.append({"role": "user", "content": "Use the tool."})
    return messages


def test_a_tool_calling_conversation_is_one_row_of_the_very_tokens_the_model_saw_and_said(
    opened: Callable[..., Session], serving: Serving, tiny_model: Path
) -> None:
    """Forced tool calls: a random model then emits real ones. Grammar and bias change even raw logprobs: here the ids count."""
    session = opened(serving)
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
    assert balanced(accounting)
    assert accounting["sampled_tokens"] == sum(len(call["completion_ids"]) for call in calls)


def test_every_row_of_a_conversation_has_the_logprobs_that_its_context_gives(
    opened: Callable[..., Session], serving: Serving, tiny_model: Path
) -> None:
    session = opened(serving)
    tool_turns(session, 6)
    rows, accounting = session.trajectories()
    assert len(rows) < 6
    assert balanced(accounting)
    assert_true(rows, tiny_model)


@pytest.mark.case(36)
def test_one_row_per_call_trains_the_same_tokens(opened: Callable[..., Session], serving: Serving, tiny_model: Path) -> None:
    session = opened(serving)
    tool_turns(session, 3)
    rows, accounting = session.trajectories("per_call")
    assert len(rows) == 3
    assert accounting["exported_tokens"] == session.trajectories()[1]["exported_tokens"]
    assert_true(rows, tiny_model)


@pytest.mark.case(10)
def test_a_streamed_call_records_what_the_unstreamed_one_does(opened: Callable[..., Session], serving: Serving) -> None:
    messages = [{"role": "user", "content": "Say something."}]
    whole, streamed = opened(serving), opened(serving)
    reply = whole.ask(messages, seed=7, max_tokens=24)
    chunks = list(streamed.ask(messages, seed=7, max_tokens=24, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == reply.choices[0].message.content
    assert chunks[-1].usage == reply.usage
    (one,), (other,) = whole.calls, streamed.calls
    for field in ("prompt_ids", "completion_ids", "logprobs", "finish_reason", "weight_versions"):
        assert one[field] == other[field], field


def test_every_choice_is_a_call_of_its_own_and_stop_strings_leave_the_text_but_not_the_ids(
    opened: Callable[..., Session], serving: Serving, tiny_model: Path
) -> None:
    session = opened(serving)
    reply = session.ask([{"role": "user", "content": "a"}], n=3, max_tokens=40, stop=["e"], seed=1)
    assert [choice.index for choice in reply.choices] == [0, 1, 2]
    calls = session.calls
    assert len(calls) == 3
    assert len({tuple(call["prompt_ids"]) for call in calls}) == 1
    for choice, call in zip(reply.choices, calls, strict=True):
        assert "e" not in (choice.message.content or "")
        assert len(call["completion_ids"]) == len(call["logprobs"])
    rows, accounting = session.trajectories()
    assert len(rows) == 3
    assert balanced(accounting)
    assert_true(rows, tiny_model)


def test_logprobs_reach_the_harness_only_when_it_asks_and_the_store_always(
    opened: Callable[..., Session], serving: Serving
) -> None:
    session = opened(serving)
    messages = [{"role": "user", "content": "hi"}]
    silent = session.ask(messages, max_tokens=8, seed=3).choices[0]
    asked = session.ask(messages, max_tokens=8, seed=3, logprobs=True, top_logprobs=2).choices[0]
    assert silent.logprobs is None
    entries = asked.logprobs.content
    assert [entry.logprob for entry in entries] == pytest.approx(session.calls[1]["logprobs"], abs=1e-6)
    assert all(len(entry.top_logprobs) >= 2 for entry in entries)
    assert session.calls[0]["logprobs"] == session.calls[1]["logprobs"]


@pytest.mark.case(7)
def test_a_new_user_turn_drops_the_thinking_and_branches_and_both_rows_are_true(
    opened: Callable[..., Session], serving: Serving, tiny_model: Path
) -> None:
    session = opened(serving)
    messages: list[Any] = [{"role": "user", "content": "Think."}]
    for turn in range(3):
        reply = session.ask(messages, max_tokens=16, seed=turn, extra_body={}).choices[0].message
        assert reply.model_extra and reply.model_extra["reasoning_content"]
        messages += [reply.model_dump(exclude_none=True), {"role": "user", "content": "Again."}]
    assert [call["branch_reason"] for call in session.calls] == [None, "thinking_dropped", "thinking_dropped"]
    rows, accounting = session.trajectories()
    assert len(rows) == 3
    assert balanced(accounting)
    assert_true(rows, tiny_model)


def test_session_overrides_win_and_what_was_effective_is_kept(opened: Callable[..., Session], serving: Serving) -> None:
    session = opened(serving, sampling={"temperature": 0.7, "max_tokens": 5})
    session.ask([{"role": "user", "content": "hi"}], temperature=0.1, max_tokens=50)
    (call,) = session.calls
    assert call["sampling"]["temperature"] == 0.7
    assert call["sampling"]["max_tokens"] == 5
    assert len(call["completion_ids"]) <= 5


def test_the_chat_path_records_true_rows_too(opened: Callable[..., Session], chat_serving: Serving, tiny_model: Path) -> None:
    session = opened(chat_serving)
    tool_turns(session, 3)
    streamed = session.ask([{"role": "user", "content": "x"}], max_tokens=12, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed if chunk.choices)
    calls = session.calls
    assert {call["api"] for call in calls} == {"chat"}
    assert len(calls) == 4
    rows, accounting = session.trajectories()
    assert balanced(accounting)
    assert accounting["quarantined"] == []
    assert {span.mode for row in rows for span in row.logprob_modes} == {RAW, UNKNOWN_MODE}
    # The route does not tell what it made of the tools that were offered. This engine's parser makes no grammar of them.
    spans = [tuple(replace(span, mode=RAW) for span in row.logprob_modes) for row in rows]
    assert_true([replace(row, logprob_modes=modes) for row, modes in zip(rows, spans, strict=True)], tiny_model)


def test_a_limit_beyond_the_window_is_clamped_on_both_paths(
    opened: Callable[..., Session], serving: Serving, chat_serving: Serving
) -> None:
    for service in (serving, chat_serving):
        session = opened(service)
        session.ask([{"role": "user", "content": "hi " * 4000}], max_tokens=100_000, stop=["e", "a", "i", "t"])
        (call,) = session.calls
        assert call["sampling"]["max_tokens"] == 8192 - len(call["prompt_ids"])


@pytest.mark.parametrize("path", ["token", "chat"])
def test_a_prompt_of_ids_that_grows_is_one_true_row_on_both_paths(
    opened: Callable[..., Session], serving: Serving, chat_serving: Serving, tiny_model: Path, path: str
) -> None:
    session = opened(serving if path == "token" else chat_serving)
    prompt = [40, 41, 42]
    for turn in range(3):
        asked = {"max_tokens": 12, "seed": turn, "extra_body": {"return_token_ids": True}}
        choice = session.client.completions.create(model="policy", prompt=prompt, **asked).choices[0]
        assert choice.prompt_token_ids == prompt
        prompt = [*prompt, *choice.token_ids, 50 + turn]
    assert [call["branch_reason"] for call in session.calls] == [None] * 3
    rows, accounting = session.trajectories()
    assert [row.token_ids.tolist() for row in rows] == [prompt[:-1]]
    assert balanced(accounting)
    assert_true(rows, tiny_model)


def test_a_prompt_of_text_that_grows_keeps_the_sampled_ids_where_its_text_has_others(
    opened: Callable[..., Session], serving: Serving, tiny_model: Path
) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    shown = {number: tokenizer.decode([number]) for number in tokenizer.get_vocab().values()}
    # Sampled twice in a row, it is two tokens whose text is one.
    twice = next(number for number, text in sorted(shown.items()) if text.isalpha() and len(tokenizer.encode(text * 2)) == 1)
    session, prompt = opened(serving), "The fox"
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


def test_a_reply_to_a_prompt_says_the_same_streamed_and_whole(
    opened: Callable[..., Session], serving: Serving, chat_serving: Serving
) -> None:
    told = []
    for service, stream in itertools.product((serving, chat_serving), (False, True)):
        session = opened(service)
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


@pytest.mark.parametrize("stream", [False, True])
def test_usage_tells_of_the_tokens_the_engine_had_cached(
    opened: Callable[..., Session], serving: Serving, stream: bool
) -> None:
    session = opened(serving)
    messages = [{"role": "user", "content": f"{stream} " + "hi " * 600}]
    cached = []
    for _ in range(2):
        asked = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        reply = session.ask(messages, max_tokens=4, **asked)
        usage = list(reply)[-1].usage if stream else reply.usage
        cached.append(usage.prompt_tokens_details.cached_tokens)
    assert cached[0] < cached[1] <= usage.prompt_tokens


def test_what_a_request_forces_is_forced(opened: Callable[..., Session], serving: Serving) -> None:
    """A random model says nothing of the kind of its own accord."""
    session = opened(serving)
    question = [{"role": "user", "content": "Which?"}]
    schema = {
        "type": "object",
        "properties": {"door": {"enum": ["a", "b"]}},
        "required": ["door"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "choice", "schema": schema}}
    said = session.ask(question, response_format=form, max_tokens=600, seed=1).choices[0]
    assert said.finish_reason == "stop"
    assert json.loads(said.message.content)["door"] in ("a", "b")
    strict = {**TOOLS[0], "function": {**TOOLS[0]["function"], "strict": True}}
    for choice in ("required", {"type": "function", "function": {"name": "guess"}}):
        (call,) = (
            session.ask(question, tools=[strict], tool_choice=choice, max_tokens=600, seed=1).choices[0].message.tool_calls
        )
        assert call.function.name == "guess"
        assert isinstance(json.loads(call.function.arguments)["number"], int)
    forced = session.ask(question, logit_bias={"100": 100.0}, max_tokens=5).choices[0]
    assert forced.finish_reason == "length"
    assert session.calls[-1]["completion_ids"] == [100] * 5


@pytest.mark.parametrize("stream", [False, True])
def test_without_parallel_calls_the_harness_gets_the_first_and_the_store_all(
    opened: Callable[..., Session], serving: Serving, stream: bool
) -> None:
    one = r'<tool_call>\n\{"name": "guess", "arguments": \{"number": [1-9]\}\}\n</tool_call>'
    body = {**PLAIN, "structured_outputs": {"regex": rf"{one}\n{one}"}}
    session = opened(serving)
    asked = {"tools": TOOLS, "parallel_tool_calls": False, "max_tokens": 200, "stream": stream, "extra_body": body}
    reply = session.ask([{"role": "user", "content": "Guess."}], **asked)
    if stream:
        told = [call for chunk in reply for choice in chunk.choices for call in choice.delta.tool_calls or ()]
        assert {call.index for call in told} == {0}
    else:
        assert len(reply.choices[0].message.tool_calls) == 1
    (call,) = session.calls
    assert len(call["reply"]["tool_calls"]) == 1
    assert call["finish_reason"] == "tool_calls"
    assert len(call["completion_ids"]) > 40, "both calls"


def test_a_prompts_call_is_cut_on_the_chat_path_with_what_was_sampled(
    opened: Callable[..., Session], chat_serving: Serving, engine: VllmServer
) -> None:
    session, before = opened(chat_serving), sampled(engine)
    body = {"model": "policy", "prompt": "x", "max_tokens": 8000, "ignore_eos": True}
    with hanging_up(f"{session.client.base_url}completions", body, session.client.api_key):
        wait_until_it_samples(engine, before, 200)
    wait_until(
        lambda: len(session.calls) == 1 and session.calls[0]["status"] not in ("in_flight", "dangling"),
        60,
        "the call is recorded",
    )
    (call,) = session.calls
    assert (call["status"], call["finish_reason"]) == ("aborted", "abort")
    assert 0 < len(call["completion_ids"]) < 8000


@pytest.mark.parametrize("stream", [False, True])
def test_a_harness_that_goes_away_leaves_an_aborted_call_with_what_was_sampled(
    opened: Callable[..., Session], serving: Serving, engine: VllmServer, stream: bool
) -> None:
    body = {"model": "policy", "messages": [{"role": "user", "content": "x"}], "max_tokens": 30000, "ignore_eos": True}
    asked = {**body, **PLAIN, "stream": stream}
    for _ in range(5):
        session, before = opened(serving), sampled(engine)
        with hanging_up(f"{session.client.base_url}chat/completions", asked, session.client.api_key):
            wait_until_it_samples(engine, before, 200)
        wait_until(
            lambda session=session: len(session.calls) == 1 and session.calls[0]["status"] not in ("in_flight", "dangling"),
            60,
            "the call is recorded",
        )
        (call,) = session.calls
        # On a machine that stood still the reply may have come to its end before the call was cut.
        if call["finish_reason"] != "length":
            break
    assert call["finish_reason"] == "abort"
    assert call["status"] == "aborted"
    assert not call["delivered"]
    assert 0 < len(call["completion_ids"]) < 6000
    _, accounting = session.trajectories()
    assert accounting["quarantined"] == [
        {"call_id": call["call_id"], "tokens": len(call["completion_ids"]), "reason": "not_delivered"}
    ]


def test_an_audit_shows_the_tree_and_the_accounting_and_finds_logprobs_of_other_weights(
    opened: Callable[..., Session], serving: Serving, tiny_model: Path, tmp_path: Path
) -> None:
    from examples.demo.tiny_model import make_tiny_model

    session = opened(serving)
    messages = tool_turns(session, 3)
    session.ask(messages[:1], max_tokens=4)
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
    opened: Callable[..., Session],
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
    session = opened(serving, group_id="versions", group_size=1)
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
        session.close(1.0)
        batch = next(iter(trainer.batches(max_groups=1)))
        with batch:
            rows = list(batch.rows)
            true = [compare(model, rows, version=version) for version, model in enumerate(models)]
            assert all(each.tokens > 20 and each.largest < TOLERANCE for each in true), true
            assert sum(each.tokens for each in true) == sum(int(row.loss_mask.sum()) for row in rows)


def forget_plugin(relay: RecordingRelay, serving: Serving, session: Session) -> None:
    """From now on the service uses the three routes: the call that finds no plugin any more tells it so."""
    relay.plugin = False
    session.ask([{"role": "user", "content": "?"}], max_tokens=1)
    assert [replica["plugin"] for replica in serving.request("GET", "/engines").json()["replicas"]] == [False]
