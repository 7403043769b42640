"""How harnesses read replies and write them down again: what they keep, trim, drop and spell anew."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]


@dataclass(frozen=True)
class Habits:
    """How this harness writes down what it was told."""

    reasoning: str  # keep | trim | drop
    arguments: str  # verbatim | reserialise
    content: str  # string | trim | part


def written(message: Message, habits: Habits) -> Message:
    """The reply as a harness of these habits keeps it."""
    kept = {"content": None, **message}
    text = kept["content"] or ""
    kept["content"] = {"string": text, "trim": text.strip(), "part": [{"type": "text", "text": text}]}[habits.content]
    reasoning = kept.pop("reasoning_content", None)
    if reasoning is not None and habits.reasoning != "drop":
        kept["reasoning_content"] = reasoning.strip() if habits.reasoning == "trim" else reasoning
    if habits.arguments == "reserialise":
        kept["tool_calls"] = [reserialised(call) for call in kept.get("tool_calls") or ()] or None
    return {name: value for name, value in kept.items() if value is not None}


def reserialised(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:
        return call
    if not isinstance(arguments, dict):  # cut by length, the engine reads what there is of a call as one without arguments
        return call
    text = json.dumps({key: arguments[key] for key in sorted(arguments, reverse=True)}, indent=1)
    return {**call, "index": 0, "function": {**function, "arguments": text}}


def assembled(stream: Any, choices: int) -> tuple[list[Message], str]:
    """The messages of a stream's choices, and the call id."""
    messages: list[Message] = [{"role": "assistant", "content": ""} for _ in range(choices)]
    call_id = ""
    for chunk in stream:
        call_id = chunk.id.removeprefix("chatcmpl-")
        for choice in chunk.choices:
            add_delta(messages[choice.index], choice.delta.model_dump(exclude_none=True))
    return messages, call_id


def add_delta(message: Message, delta: dict[str, Any]) -> None:
    for name in ("content", "reasoning_content"):
        if delta.get(name):
            message[name] = message.get(name, "") + delta[name]
    for piece in delta.get("tool_calls") or ():
        calls = message.setdefault("tool_calls", [])
        while len(calls) <= piece["index"]:
            calls.append({"id": "", "type": "function", "function": {"name": "", "arguments": ""}})
        call = calls[piece["index"]]
        call["id"] = piece.get("id") or call["id"]
        for name, value in piece["function"].items():
            call["function"][name] += value or ""
