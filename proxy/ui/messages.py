"""ShownMessage: one message of a call as the harness saw it, cut into blocks of plain text."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from proxy.rows import messages_of
from proxy.ui.look import Look
from proxy.ui.rendering import pretty
from reconstruct.messages import reasoning_of
from reconstruct.records import Call

SHOWN_CHARACTERS = 12_000
"""Of a longer text its beginning is shown, and the whole can be fetched."""

_decode = msgspec.json.decode


@dataclass(frozen=True, slots=True)
class Block:
    """`kind`: text, reasoning, tool_call, tool_result or other; `name` is a tool's. `length` is the whole text's."""

    kind: str
    text: str
    name: str = ""
    call_id: str = ""
    length: int = 0

    @property
    def cut(self) -> bool:
        return self.length > len(self.text)


@dataclass(frozen=True, slots=True)
class ShownMessage:
    """`index` counts the request's messages from 0; the reply comes after the last. `said_by` is the number of the call of this session
    whose reply it repeats, if it is one."""

    index: int
    role: str
    blocks: Sequence[Block]
    is_reply: bool = False

    @property
    def length(self) -> int:
        return sum(block.length for block in self.blocks)


@dataclass(frozen=True, slots=True)
class Tool:
    name: str
    description: str
    parameters: str


def request_messages(look: Look, call: Call) -> list[Any]:
    """The call's messages as the API gives them."""
    return messages_of(call, look.forest)


def conversation(look: Look, call: Call) -> list[Any]:
    """What was said to the model and what it replied: the call's messages, then its reply."""
    return [*request_messages(look, call), reply_of(call)]


def reply_of(call: Call) -> dict[str, Any]:
    reply: dict[str, Any] = _decode(call.reply)
    return reply


def shown_message(index: int, message: Any, *, is_reply: bool = False, most: int = SHOWN_CHARACTERS) -> ShownMessage:
    """`most` characters of each block are shown."""
    if not isinstance(message, Mapping):
        return ShownMessage(index, "?", [_block("other", pretty(message), most)], is_reply)
    blocks = [_block(kind, text, most, name, call_id) for kind, text, name, call_id in _parts(message) if text or name]
    return ShownMessage(index, str(message.get("role") or "?"), blocks, is_reply)


def whole_text(message: Any) -> str:
    """All of a message as text, block by block."""
    shown = shown_message(0, message, most=2**62)
    return "\n\n".join(f"[{block.kind} {block.name}]".replace(" ]", "]") + "\n" + block.text for block in shown.blocks)


def tools_of(look: Look, call: Call) -> list[Tool]:
    """The tools that the call's root was offered."""
    if call.call_id not in look.forest:
        return []
    root = list(look.forest.lineage(call.call_id))[-1]
    offered = _decode(root.preamble).get("tools") if root.preamble else None
    return [_tool(each) for each in offered or () if isinstance(each, Mapping)]


def _tool(offered: Mapping[str, Any]) -> Tool:
    told = offered.get("function")
    function = told if isinstance(told, Mapping) else offered
    name, description = str(function.get("name") or offered.get("type") or "?"), str(function.get("description") or "")
    return Tool(name, description[:SHOWN_CHARACTERS], pretty(function.get("parameters"))[:SHOWN_CHARACTERS])


def _block(kind: str, text: str, most: int, name: str = "", call_id: str = "") -> Block:
    return Block(kind, text[:most], name, call_id, len(text))


def _parts(message: Mapping[str, Any]) -> Iterable[tuple[str, str, str, str]]:
    """(kind, text, tool, call id) of everything in the message, in the order in which it was said."""
    if reasoning := reasoning_of(message):
        yield "reasoning", reasoning, "", ""
    answers = str(message.get("tool_call_id") or "")
    kind = "tool_result" if message.get("role") == "tool" else "text"
    for content_kind, text in _content(message.get("content")):
        yield kind if content_kind == "text" else content_kind, text, "", answers
    for call in message.get("tool_calls") or ():
        function = (call.get("function") or {}) if isinstance(call, Mapping) else {}
        yield "tool_call", _arguments(function.get("arguments")), str(function.get("name") or "?"), str(call.get("id") or "")


def _content(content: Any) -> Iterable[tuple[str, str]]:
    for part in [content] if isinstance(content, str) else content or ():
        if isinstance(part, str):
            yield "text", part
        elif isinstance(part, Mapping) and isinstance(part.get("text"), str):
            yield "text", part["text"]
        else:
            yield "other", pretty(part)


def _arguments(arguments: Any) -> str:
    """Indented where they are JSON; what the model said where they are not."""
    if not isinstance(arguments, str):
        return pretty(arguments)
    try:
        return pretty(json.loads(arguments))
    except (ValueError, RecursionError):
        return arguments
