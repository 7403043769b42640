"""What most conversations of the tests are made of: a tool, turns and results; how an answer is read; what its record must hold."""

from __future__ import annotations

from typing import Any

from tests.support.engine.scripted_engine import ScriptedEngine, logprobs_of

Message = dict[str, Any]

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "lookup",
            "description": "Looks a key up.",
            "parameters": {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]},
        },
    }
]
CAPTURED = ("prompt_ids", "completion_ids", "logprobs", "weight_versions", "finish_reason", "stop_reason")


def turn(role: str, content: Any) -> Message:
    return {"role": role, "content": content}


def tool_result(message: Message, content: str, position: int = 0) -> Message:
    return {"role": "tool", "tool_call_id": message["tool_calls"][position]["id"], "content": content}


def said_of(call: dict[str, Any]) -> list[int]:
    return [*call["prompt_ids"], *call["completion_ids"]]


def assert_sampled_as_recorded(engine: ScriptedEngine, calls: list[dict[str, Any]]) -> None:
    """Each record holds the very ids the engine was given and sampled, and its logprobs in that context."""
    recorded = sorted((call["prompt_ids"], call["completion_ids"]) for call in calls)
    given = sorted((made.prompt_ids, ids) for made in engine.generations for ids in made.sampled.values())
    assert recorded == given
    for call in calls:
        assert call["logprobs"] == logprobs_of(call["prompt_ids"], call["completion_ids"])


def assemble(stream: Any) -> Message:
    """The message a harness puts together from a stream's deltas, as a whole reply has it."""
    message: Message = {"role": "assistant"}
    calls: dict[int, dict[str, Any]] = {}
    for chunk in stream:
        delta = chunk.choices[0].delta.model_dump(exclude_none=True)
        for name in ("content", "reasoning_content", "reasoning"):
            if delta.get(name):
                message[name] = message.get(name, "") + delta[name]
        for piece in delta.get("tool_calls", ()):
            call = calls.setdefault(piece["index"], {"id": "", "type": "function", "function": {"name": "", "arguments": ""}})
            call["id"] = piece.get("id") or call["id"]
            for name in ("name", "arguments"):
                call["function"][name] += piece["function"].get(name) or ""
    if calls:
        message["tool_calls"] = [calls[position] for position in sorted(calls)]
    return message


def read(answer: Any) -> Message:
    """The message of an answer, whole or streamed."""
    return assemble(answer) if not hasattr(answer, "choices") else answer.choices[0].message.model_dump(exclude_none=True)


def without_ids(message: Message) -> Message:
    """The message with tool calls that no longer say which call they came from, and without an absent content."""
    kept = {key: value for key, value in message.items() if value is not None}
    if "tool_calls" in kept:
        kept["tool_calls"] = [call["function"] for call in kept["tool_calls"]]
    return kept
