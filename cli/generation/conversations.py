"""Sessions as chat messages: what each training row of a session said and was told, one conversation per row.

The messages are as chat templates and the libraries that train with them take them, not as the harness wrote them: text in one string, the
arguments of a tool call as an object.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from reconstruct.codec import decode
from reconstruct.records import Call


def conversations(records: Sequence[tuple[str, bytes]], rows: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """One per row: the messages of its last call's request, then that call's reply; and its tools, where it was given some."""
    calls = {call_id: decode(record) for call_id, record in records}
    for row in rows:
        last = calls[row["call_ids"][-1]]
        preamble = json.loads(_root(calls, last).preamble or b"{}")
        yield {
            "messages": messages_of(calls, last),
            **({"tools": preamble["tools"]} if preamble.get("tools") else {}),
            "reward": row["reward"],
            "finish_reason": row["finish_reason"],
            "truncated": row["truncated"],
            "model": preamble.get("model"),
            "role": row["role"],
            "agent": row["agent"],
            "session_id": row["session_id"],
            "trajectory_id": row["trajectory_id"],
        }


def messages_of(calls: Mapping[str, Call], last: Call) -> list[dict[str, Any]]:
    """Every message of the call's request, then its reply, as templates take them."""
    lineage = [last]
    while lineage[-1].messages_from and lineage[-1].node.parent_id is not None:
        lineage.append(calls[lineage[-1].node.parent_id])
    made: list[dict[str, Any]] = []
    for call in reversed(lineage):
        made += [*json.loads(call.messages), json.loads(call.reply)]
    return [plain(message) for message in made]


def plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message as templates take it. Many of them show nothing of a list of parts, break where there is no text at all, or write
    arguments that are text as a string within a string. What is not text among the parts, and arguments that are no JSON object, stay
    as they are."""
    made = {**message, "content": message.get("content") or ""}
    if isinstance(made["content"], list):
        made["content"] = _text(made["content"])
    if made.get("tool_calls"):
        made["tool_calls"] = [_with_arguments(call) for call in made["tool_calls"]]
    return made


def _text(parts: list[Any]) -> Any:
    texts: list[Any] = [part.get("text") if isinstance(part, Mapping) else part for part in parts]
    # As vLLM joins them for a template that wants text.
    return "\n".join(texts) if all(isinstance(text, str) for text in texts) else parts


def _with_arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function") or {}
    try:
        arguments = json.loads(function["arguments"])
    except (KeyError, TypeError, ValueError):
        return {**call}
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else {**call}


def _root(calls: Mapping[str, Call], call: Call) -> Call:
    while call.node.parent_id is not None:
        call = calls[call.node.parent_id]
    return call
