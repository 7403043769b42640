"""An append-only conversation of tool calls with thinking, up to fifty of them, is one training row, however its harness replays it.

The real service and a real Redis, the openai SDK as the harness; the scripted engine renders with a Qwen3 template, samples
thinking and a well-formed tool call in every turn, and is given the ids that the row must show.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.engine.scripted_engine import Say, ScriptedEngine, logprobs_of
from tests.support.engine.template_families import Family
from tests.support.service.running_service import RunningService

SETTINGS = {"max_model_len": 65536}

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "lookup",
            "description": "Looks a key up.",
            "parameters": {"type": "object", "properties": {"key": {"type": "string"}, "depth": {"type": "integer"}}},
        },
    }
]
OPENING: list[dict[str, Any]] = [
    {"role": "system", "content": "You look keys up until you know the answer."},
    {"role": "user", "content": "Find alpha."},
]

Replay = Callable[[dict[str, Any]], dict[str, Any]]


def spoken(family: Family, turn: int) -> list[int]:
    """Thinking and one call, or two in every fifth turn, in a split that the tokenizer would not make."""
    calls = [("lookup", {"key": f"alpha {turn}", "depth": turn}), ("lookup", {"depth": 1, "key": "beta"})]
    text = family.speak("look", reasoning=f"step {turn} of fishing", calls=calls[: 1 + (turn % 5 == 4)])
    fish, ing = family.id_of("fish"), family.id_of("ing")
    return [part for token in family.encode(text) for part in ([fish, ing] if token == family.id_of("fishing") else [token])]


def as_sent(message: dict[str, Any]) -> dict[str, Any]:
    return message


def reserialised(message: dict[str, Any]) -> dict[str, Any]:
    """Arguments parsed, their keys in another order, written with other spaces; provider fields added."""
    calls = []
    for call in message["tool_calls"]:
        arguments = json.loads(call["function"]["arguments"])
        swapped = {key: arguments[key] for key in sorted(arguments, reverse=True)}
        text = json.dumps(swapped, indent=1)
        assert text != call["function"]["arguments"]
        calls.append({**call, "index": 0, "function": {"name": call["function"]["name"], "arguments": text}})
    return {**message, "tool_calls": calls, "refusal": None, "annotations": []}


def trimmed(message: dict[str, Any]) -> dict[str, Any]:
    """As qwen-code does: outer white space gone, content as one text part."""
    content = [{"type": "text", "text": message["content"].strip()}]
    return {**reserialised(message), "content": content, "reasoning_content": message["reasoning_content"].strip()}


def without_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """As the OpenAI Agents SDK does on Chat: it sends no reasoning back."""
    return {key: value for key, value in reserialised(message).items() if key != "reasoning_content"}


@pytest.mark.case(8)
@pytest.mark.parametrize(("replay", "turns"), [(as_sent, 10), (reserialised, 50), (trimmed, 10), (without_reasoning, 10)])
def test_turns_of_thinking_and_tool_calls_are_one_row(
    engine: ScriptedEngine, token_service: RunningService, replay: Replay, turns: int
) -> None:
    """Every turn is one user turn's tool loop, in which the template keeps the thinking: nothing but the replay could branch."""
    engine.reset().say(*[Say(token_ids=spoken(engine.family, turn)) for turn in range(turns)])
    session = token_service.session()
    messages = list(OPENING)
    for turn in range(turns):
        reply = session.answer(messages, tools=TOOLS)
        assert reply["reasoning_content"].strip() == f"step {turn} of fishing"
        messages.append(replay(reply))
        for call in reply["tool_calls"]:
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": f"value {turn}"})
    calls = session.calls
    assert [call["prompt_ids"] for call in calls] == [made.prompt_ids for made in engine.generations]
    (row,), accounting = session.trajectories()
    assert row["call_ids"] == [call["call_id"] for call in calls]
    assert len(row["call_ids"]) == turns
    assert row["token_ids"] == engine.last.prompt_ids + engine.last.sampled[0]
    for made in engine.generations:
        start, end = len(made.prompt_ids), len(made.prompt_ids) + len(made.sampled[0])
        assert row["token_ids"][:end] == made.prompt_ids + made.sampled[0]
        assert row["loss_mask"][start:end] == [1] * (end - start)
        assert row["logprobs"][start:end] == logprobs_of(made.prompt_ids, made.sampled[0])
    assert accounting["quarantined"] == []
    assert accounting["exported_tokens"] == sum(row["loss_mask"]) == sum(len(made.sampled[0]) for made in engine.generations)
    assert len(session.trajectories("per_call")[0]) == turns
