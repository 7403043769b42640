"""What tests on a real vLLM share: rows that are recomputed by transformers, and what the engine says of its own work."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from examples.vllm_server import VllmServer
from reconstruct.records import pack_ids, pack_logprobs
from reconstruct.spans import ModeSpan, Span
from reconstruct.trajectory import Trajectory
from tests.support.engine.recording_relay import RecordingRelay
from tests.support.service.running_service import RunningService, Session, wait_until
from trainer_client.recompute import Difference, compare

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


@contextmanager
def reaching(path: str, engine_url: str, redis_url: str) -> Iterator[tuple[RecordingRelay, RunningService]]:
    """A service that reaches the engine by the plugin, by the token routes, or as a chat server: "plugin", "token", "chat"."""
    api = "chat" if path == "chat" else "token"
    with (
        RecordingRelay(engine_url, plugin=path == "plugin") as relay,
        RunningService(relay.url, redis_url, engine_api=api) as service,
    ):
        service.await_ready(300)
        yield relay, service


def rows_of(session: Session, builder: str = "merged") -> list[Trajectory]:
    return [row_of(row) for row in session.trajectories(builder)[0]]


def row_of(row: dict[str, Any]) -> Trajectory:
    """A row of the JSON API as a Trajectory."""
    arrays = {"token_ids": pack_ids(row["token_ids"]), "loss_mask": pack_ids(row["loss_mask"]).astype("int8")}
    arrays["logprobs"] = pack_logprobs(row["logprobs"])
    spans = tuple(Span(*span) for span in row["weight_versions"])
    modes = tuple(ModeSpan(*span) for span in row["logprob_modes"])
    given = {name: value for name, value in row.items() if name != "rollout_id"} | {"logprob_modes": modes}
    return Trajectory(**{**given, **arrays, "weight_versions": spans, "call_ids": tuple(row["call_ids"])})


def load(model: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model).eval()


def assert_true(rows: list[Trajectory], model: Path) -> Difference:
    """Every trained token of `rows` has the logprob that `model` gives it in that context."""
    difference = compare(load(model), rows)
    assert difference.tokens == sum(int(row.loss_mask.sum()) for row in rows) > 0
    assert difference.largest < TOLERANCE, difference
    return difference


def read_metric(engine: VllmServer, name: str) -> float:
    """One of vLLM's own, summed up."""
    lines = httpx.get(f"{engine.url}/metrics", timeout=60, verify=False).raise_for_status().text.splitlines()
    counts = [float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"vllm:{name}{{")]
    assert counts, f"it does not count {name}"
    return sum(counts)


def sampled(engine: VllmServer) -> float:
    """How many tokens it has sampled since its start, by its own count."""
    return read_metric(engine, "generation_tokens_total")


def wait_until_it_samples(engine: VllmServer, before: float, tokens: int) -> None:
    """Until the engine has sampled so many tokens more than `before`."""
    wait_until(lambda: sampled(engine) >= before + tokens, 60, f"{tokens} tokens are sampled")


def never(model: Path, *tokens: str) -> dict[str, float]:
    """A logit_bias under which the random model does not sample these: they would cut or rewrite its turns."""
    from transformers import AutoTokenizer

    vocabulary = AutoTokenizer.from_pretrained(model).get_vocab()
    return {str(vocabulary[token]): -100.0 for token in tokens}


def ask(session: Session, messages: list[Any], **fields: Any) -> Any:
    return session.ask(messages, **{"extra_body": PLAIN, **fields})


def tool_turns(session: Session, turns: int, **fields: Any) -> list[Any]:
    """A conversation of tool calls with an environment that answers every call; returns its messages."""
    messages: list[Any] = [{"role": "user", "content": "Find the number."}]
    for turn in range(turns):
        reply = ask(session, messages, tools=TOOLS, max_tokens=48, seed=turn, **fields).choices[0].message
        messages.append(reply.model_dump(exclude_none=True))
        for call in reply.tool_calls or ():
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "too low"})
        if not reply.tool_calls:
            messages.append({"role": "user", "content": "Use the tool."})
    return messages
