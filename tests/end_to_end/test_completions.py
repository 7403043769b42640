"""A real vLLM by its `/v1/completions`, as one without `--enable-scale-out` would be used: what is recorded is recomputed.

The model is a random one; its chat template is rendered here, by the renderers package, and its replies are read here.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from examples.vllm_server import VllmServer
from tests.support.engine.local_format import TEMPLATE, require_renderers
from tests.support.engine.real_engine import PLAIN, TOOLS, ask, assert_true, never, rows_of, tool_turns
from tests.support.service.verbatim_process import Serving

require_renderers()
pytestmark = pytest.mark.engine

A_CALL = r'<tool_call>\n\{"name": "guess", "arguments": \{"number": [1-9]\}\}\n</tool_call>'


@pytest.fixture(scope="module")
def serving(vllm_server: VllmServer, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    args = ("--engine", vllm_server.url, "--engine-api", "completions", "--renderer", str(tiny_model))
    data_dir = tmp_path_factory.mktemp("data")
    with Serving(*args, data_dir=data_dir, VERBATIM_RENDERER_OPTIONS=json.dumps(TEMPLATE)) as service:
        service.await_ready()
        yield service


def test_a_session_of_tool_calls_is_one_row(serving: Serving, tiny_model: Path) -> None:
    """A grammar makes the random model call the tool, and a bias write markup and end in the tokens made for them; the reply to the
    tool's result is free, and has the logprobs that its context gives."""
    session = serving.session()
    messages: list[Any] = [{"role": "user", "content": "Find the number."}]
    bias = dict.fromkeys(never(tiny_model, "<tool_call>", "</tool_call>", "<|im_end|>"), 100.0)
    forced = {"structured_outputs": {"regex": A_CALL}, "chat_template_kwargs": {"enable_thinking": False}}
    reply = ask(session, messages, tools=TOOLS, max_tokens=64, seed=1, logit_bias=bias, extra_body=forced).choices[0].message
    (call,) = reply.tool_calls
    assert call.function.name == "guess"
    messages += [reply.model_dump(exclude_none=True), {"role": "tool", "tool_call_id": call.id, "content": "too low"}]
    ask(session, messages, tools=TOOLS, max_tokens=32, seed=2)
    first, second = session.calls
    seen = first["prompt_ids"] + first["completion_ids"]
    assert second["prompt_ids"][: len(seen)] == seen
    assert {one["api"] for one in (first, second)} == {"completions"}
    rows, accounting = session.trajectories()
    assert len(rows) == 1
    assert rows[0]["token_ids"] == second["prompt_ids"] + second["completion_ids"]
    assert accounting["exported_tokens"] == accounting["sampled_tokens"]
    assert_true([row for row in rows_of(session, "per_call") if row.call_ids == (second["call_id"],)], tiny_model)


def test_every_row_of_a_conversation_has_the_logprobs_that_its_context_gives(serving: Serving, tiny_model: Path) -> None:
    session = serving.session()
    tool_turns(session, 4)
    rows, accounting = session.trajectories()
    assert accounting["exported_tokens"] == accounting["sampled_tokens"]
    assert len(rows) < 4
    assert_true(rows_of(session), tiny_model)


@pytest.mark.parametrize("arguments", ['{"number": 1}', '{"number":1}', '{"number": ', "[1]", "null", ""])
def test_a_call_in_the_history_is_rendered_as_the_engine_renders_it(
    serving: Serving, vllm_server: VllmServer, arguments: str
) -> None:
    """Whatever its arguments are."""
    call = {"id": "call_1", "type": "function", "function": {"name": "guess", "arguments": arguments}}
    said = {"role": "assistant", "content": "", "tool_calls": [call]}
    messages = [{"role": "user", "content": "Go."}, said, {"role": "tool", "tool_call_id": "call_1", "content": "too low"}]
    session = serving.session()
    ask(session, messages, tools=TOOLS, max_tokens=1)
    body = {"model": "policy", "messages": messages, "tools": TOOLS, **PLAIN}
    rendered = httpx.post(f"{vllm_server.url}/v1/chat/completions/render", json=body, timeout=120).raise_for_status().json()
    assert session.calls[0]["prompt_ids"] == rendered["token_ids"]


def test_the_prompt_is_the_one_that_the_engine_would_have_rendered(
    serving: Serving, vllm_server: VllmServer, tmp_path: Path
) -> None:
    """The same conversation over both paths, with the same seed: the same ids in, the same ids out."""
    with Serving("--engine", vllm_server.url, data_dir=tmp_path) as token:
        token.await_ready()
        ours, theirs = serving.session(), token.session()
        for session in (ours, theirs):
            messages: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say it."}]
            for turn in range(2):
                reply = ask(session, messages, tools=TOOLS, max_tokens=24, seed=turn)
                messages += [reply.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "Again."}]
        for one, other in itertools.zip_longest(ours.calls, theirs.calls):
            for name in ("prompt_ids", "completion_ids", "finish_reason", "stop_reason", "weight_versions"):
                assert one[name] == other[name], name
            assert one["logprobs"] == pytest.approx(other["logprobs"], abs=1e-5)
