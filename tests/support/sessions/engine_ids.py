"""A conversation as its engine knows it: with the ids of tool calls that the engine gave, which the harness never sees."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def with_engine_ids(messages: Sequence[dict[str, Any]], calls: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages of a harness with the engine's ids, as the `calls` of its session list them."""
    own = {
        minted["id"]: identifier
        for call in calls
        for minted, identifier in zip(call["reply"].get("tool_calls") or (), call["engine_tool_call_ids"], strict=True)
    }
    return [_rename(message, own) for message in messages]


def _rename(message: dict[str, Any], own: dict[str, str]) -> dict[str, Any]:
    renamed = dict(message)
    if message.get("tool_calls"):
        renamed["tool_calls"] = [{**call, "id": own.get(call["id"], call["id"])} for call in message["tool_calls"]]
    if "tool_call_id" in message:
        renamed["tool_call_id"] = own.get(message["tool_call_id"], message["tool_call_id"])
    return renamed
