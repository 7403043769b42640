"""What vLLM says beside its tokens, recomputed by transformers: prompt logprobs, the most probable tokens, processed logprobs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from examples.vllm_server import VllmServer
from reconstruct.trajectory import Trajectory
from tests.support.engine.real_engine import TOLERANCE, reaching
from tests.support.engine.vllm_server import running_vllm
from tests.support.service.redis_server import RedisServer
from tests.support.service.running_service import RunningService, Session, streamed_text
from trainer_client.wire import decode_trajectory

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

TOP = 3
LONG = "Tell me of " + "the sea and the wind and " * 60
"""Longer than the blocks of vLLM's prefix cache on a CPU, of 128 tokens."""


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()


@contextmanager
def serving(engine: VllmServer, redis_server: RedisServer, **settings: Any) -> Iterator[RunningService]:
    redis_server.flushall()
    with RunningService(engine.url, redis_server.url, **settings) as service:
        service.await_ready()
        yield service


def talk(session: Session, *, stream: bool) -> list[Trajectory]:
    """The rows of a question, its answer and a question after it, which begins with what the engine has in its cache."""
    asked: list[Any] = [{"role": "user", "content": LONG}]
    fields: dict[str, Any] = {"max_tokens": 12, "seed": 3, "stream": stream}
    fields["extra_body"] = {"chat_template_kwargs": {"enable_thinking": False}}
    answer = session.ask(asked, **fields)
    text = streamed_text(answer)[0] if stream else answer.choices[0].message.content
    asked += [{"role": "assistant", "content": text}, {"role": "user", "content": "And of the moon."}]
    answer = session.ask(asked, **fields)
    if stream:
        streamed_text(answer)
    assert [call["api"] for call in session.calls] == ["token"] * 2
    return [decode_trajectory(row) for row in session.trajectories()[0]]


def logprobs_after(model: Any, row: Trajectory, temperature: float = 1.0) -> NDArray[np.float32]:
    """log p of every token of the vocabulary at each position of the row but the first: [i] is after the tokens 0 to i."""
    import torch

    ids = torch.as_tensor(np.array(row.token_ids), dtype=torch.long)[None]
    with torch.no_grad():
        logits = model(ids).logits[0].float() / temperature
    told: NDArray[np.float32] = torch.log_softmax(logits, dim=-1).numpy()
    return told


def of_tokens(row: Trajectory, told: NDArray[np.float32]) -> NDArray[np.float32]:
    """The logprob of each of the row's own tokens; 0.0 for the first."""
    positions = np.arange(1, len(row.token_ids))
    return np.concatenate(([np.float32(0)], told[positions - 1, row.token_ids[1:]]))


@pytest.mark.parametrize("stream", [False, True])
def test_raw_logprobs_prompts_and_the_most_probable_tokens_are_the_models(
    vllm_server: VllmServer, redis_server: RedisServer, model: Any, stream: bool
) -> None:
    wanted = {"temperature": 0.7, "top_p": 0.9, "top_logprobs": TOP, "prompt_logprobs": True}
    with serving(vllm_server, redis_server) as service:
        rows = talk(service.session(sampling=wanted), stream=stream)
    assert sum(int(row.loss_mask.sum()) for row in rows) >= 2
    for row in rows:
        assert {span.mode for span in row.logprob_modes} == {"raw"}
        told, sampled = logprobs_after(model, row), row.loss_mask == 1
        assert row.details is not None and row.details.top_token_ids is not None and row.details.top_logprobs is not None
        expected = of_tokens(row, told)
        np.testing.assert_allclose(row.logprobs[sampled], expected[sampled], atol=TOLERANCE)
        given = row.details.prompt_logprobs
        assert given is not None
        known = ~np.isnan(given)
        assert known[1:][~sampled[1:]].all() and not known[sampled].any() and not known[0]
        np.testing.assert_allclose(given[known], expected[known], atol=TOLERANCE)
        for at in np.flatnonzero(sampled):
            best = np.sort(told[at - 1])[::-1][:TOP]
            np.testing.assert_allclose(row.details.top_logprobs[at], best, atol=TOLERANCE)
            np.testing.assert_allclose(told[at - 1, row.details.top_token_ids[at]], best, atol=TOLERANCE)


def test_processed_logprobs_are_those_at_the_calls_temperature(
    tiny_model: Path, tmp_path: Path, redis_server: RedisServer, model: Any
) -> None:
    """The engine's mode is known from the engine, and a service that wants the other one trains none of it."""
    with (
        running_vllm(tiny_model, tmp_path, "--logprobs-mode", "processed_logprobs") as engine,
        serving(engine, redis_server) as service,
    ):
        session = service.session(sampling={"temperature": 0.7, "top_logprobs": TOP})
        rows = talk(session, stream=False)
        assert {mode for call in session.calls for mode, *_ in call["logprob_modes"]} == {"processed"}
        with RunningService(engine.url, redis_server.url, train_logprob_modes=["raw"]) as other:
            answer = other.request("GET", f"/sessions/{session.session_id}/trajectories").json()
    assert answer["trajectories"] == []
    assert {item["reason"] for item in answer["accounting"]["quarantined"]} == {"logprob_mode"}
    for row in rows:
        assert {span.mode for span in row.logprob_modes} == {"processed"}
        told, sampled = logprobs_after(model, row, temperature=0.7), row.loss_mask == 1
        np.testing.assert_allclose(row.logprobs[sampled], of_tokens(row, told)[sampled], atol=TOLERANCE)
        assert np.abs(of_tokens(row, logprobs_after(model, row)) - row.logprobs)[sampled].max() > 100 * TOLERANCE
        assert row.details is not None and row.details.top_logprobs is not None
        for at in np.flatnonzero(sampled):
            np.testing.assert_allclose(row.details.top_logprobs[at], np.sort(told[at - 1])[::-1][:TOP], atol=TOLERANCE)


# What bends the choice of a token, and what bends its logprob

TOOL: dict[str, Any] = {
    "name": "open",
    "parameters": {
        "type": "object",
        "properties": {"key": {"enum": ["a", "b"]}},
        "required": ["key"],
        "additionalProperties": False,
    },
}
TOOLS = [{"type": "function", "function": TOOL}]
STRICT = [{"type": "function", "function": {**TOOL, "strict": True}}]
SCHEMA = {"type": "json_schema", "json_schema": {"name": "n", "schema": TOOL["parameters"]}}
MASKED: dict[str, dict[str, Any]] = {
    "a required tool": {"tools": TOOLS, "tool_choice": "required"},
    "a named tool": {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "open"}}},
    "a strict tool": {"tools": STRICT},
    "a schema": {"response_format": SCHEMA},
    "a regex": {"extra_body": {"structured_outputs": {"regex": "(up|down) [0-9]{9}"}}},
}
BENT: dict[str, dict[str, Any]] = {
    "logit_bias": {"logit_bias": {"100": 6.0, "101": 5.5, "102": 5.0}},
    "allowed_token_ids": {"extra_body": {"allowed_token_ids": [100, 101, 102, 103]}},
    "bad_words": {"extra_body": {"bad_words": [" the", "a", "e"]}},
    "min_tokens": {"extra_body": {"min_tokens": 6}},
    "ignore_eos": {"extra_body": {"ignore_eos": True}},
    "min_p": {"extra_body": {"min_p": 0.2}},
    "presence_penalty": {"presence_penalty": 1.9},
    "frequency_penalty": {"frequency_penalty": 1.9},
    "repetition_penalty": {"extra_body": {"repetition_penalty": 1.9}},
}
FIXED = {"temperature", "top_p", "top_k", "seed", "max_tokens", "stop"}


@pytest.mark.case(64)
@pytest.mark.parametrize("path", ["plugin", "token", "chat"])
def test_only_a_grammar_bends_raw_logprobs_and_whatever_bends_the_choice_is_noted(
    vllm_server: VllmServer, redis_server: RedisServer, model: Any, path: str
) -> None:
    """Each whole and streamed. A forced tool's logprobs are far from the model's, and marked; under all else they are the model's to the
    last digits, though the tokens were not drawn from it."""
    redis_server.flushall()
    with reaching(path, vllm_server.url, redis_server.url) as (_, service):
        session = service.session()
        for stream in (False, True):
            for fields in (*MASKED.values(), *BENT.values(), {"tools": TOOLS}):
                # While a model thinks vLLM leaves it free.
                extra = {"chat_template_kwargs": {"enable_thinking": False}, **fields.get("extra_body", {})}
                answer = session.ask("Open the door.", max_tokens=12, seed=5, stream=stream, **{**fields, "extra_body": extra})
                if stream:
                    streamed_text(answer)
        calls = session.calls
        rows = [decode_trajectory(row) for row in session.trajectories("per_call")[0]]
    assert {call["api"] for call in calls} == {"chat" if path == "chat" else "token"}
    told = [([mode for mode, *_ in call["logprob_modes"]], call["sampling"].keys() - FIXED) for call in calls]
    grammars = {"structured_outputs", "tool_choice", "response_format"}
    for half in (told[: len(told) // 2], told[len(told) // 2 :]):
        masked, bent, tools = half[: len(MASKED)], half[len(MASKED) : -1], half[-1]
        assert [modes for modes, _ in masked] == [["masked"]] * len(MASKED)
        assert all(noted <= grammars for _, noted in masked) and sum(bool(noted) for _, noted in masked) >= len(MASKED) - 1
        assert bent == [(["raw"], {name}) for name in BENT]
        # A chat server does not say whether it made a grammar of them. This one did not.
        assert tools == (["unknown" if path == "chat" else "raw"], set())
    differences: dict[str, float] = {}
    for row in rows:
        (span,) = row.logprob_modes
        off = np.abs(of_tokens(row, logprobs_after(model, row)) - row.logprobs)[row.loss_mask == 1].max()
        differences[span.mode] = max(off, differences.get(span.mode, 0.0))
    assert len(rows) == len(calls)
    assert differences["raw"] < TOLERANCE < 1 < differences["masked"]
