"""The input items of a Responses request as chat messages.

`divider` tells items apart by their heads, without decoding them. The items of one reply stand side by side and make one assistant
message. Their ids name the reply they come from, wherever they stand: items that a harness puts between the outputs of the calls before
them still belong to it. Items that only OpenAI's servers make and that mean nothing to another model are skipped; an unknown kind is
refused, since dropping it would change what the model reads.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from proxy.dialects.base import Divide, ItemReader, ParsedMessage, Past, Seals, Unit, tool_call_id
from proxy.dialects.fields import decode, tool_call
from proxy.dialects.responses_items import KINDS_OF_ITEMS, ItemId, is_call_of, parse_function, parse_item_id
from proxy.errors import RequestError, UnknownCall

CALLS = frozenset({"function_call", *KINDS_OF_ITEMS})
_OUTPUTS = frozenset({"function_call_output", "custom_tool_call_output", "local_shell_call_output", "shell_call_output"}) | {
    "apply_patch_call_output"
}
_SKIPPED = frozenset(
    {"web_search_call", "file_search_call", "code_interpreter_call", "image_generation_call", "tool_search_call"}
    | {"mcp_list_tools", "mcp_approval_request", "mcp_approval_response"}
)
_TOOLS = frozenset({"additional_tools", "tool_search_output"})


@dataclass(slots=True)
class Section:
    """Raw items that are read together. `kind`: system, message, output, tools or reply."""

    kind: str
    start: int
    """The number of the first."""
    items: list[bytes]
    fresh: bool
    """See `Unit`."""
    reply: str | None = None
    """The call that ids in a reply's items name."""

    @property
    def raw(self) -> bytes:
        return self.items[0] if self.kind != "reply" else b"[" + b",".join(self.items) + b"]"


@functools.cache
def divider(later_system_role: str) -> Divide:
    """Divides items into sections. Tools, and system messages before any other message, are left to the dialect."""
    readers: dict[str, ItemReader] = {
        "system": ReadSystem(later_system_role),
        "message": read_message,
        "output": read_output,
        "reply": read_reply,
    }

    def divide(items: Sequence[bytes]) -> Iterator[Unit]:
        leads = True
        for each in _split_sections(items):
            leads = leads and each.kind in ("system", "tools")
            yield Unit(each.start, each.raw, None if leads else readers.get(each.kind), each.fresh)

    return divide


def _split_sections(items: Sequence[bytes]) -> list[Section]:
    """The items in order, those of one reply together. Raises RequestError for an unknown kind of item, UnknownCall for a reference to an
    id that this service did not mint."""
    found: list[Section] = []
    reply: Section | None = None
    beside = False
    for at, raw in enumerate(items):
        head = _read_head(raw)
        kind = _kind(head)
        if kind == "":
            continue
        if kind == "reply":
            item_id = parse_item_id(head.id, head.call_id)
            call_id = item_id.call_id if item_id else None
            if reply is None or not _belongs(reply, call_id, beside):
                reply = Section("reply", at, [], True)
                found.append(reply)
            reply.items.append(raw)
            reply.reply, beside = reply.reply or call_id, True
            continue
        # Items after a reply may be followed by more of it; a system message at the start is another than a later one.
        found.append(Section(kind, at, [raw], kind == "message" or (kind == "output" and reply is None)))
        beside = False
        if kind in ("system", "message"):
            reply = None
    return found


def kind_of(raw: bytes) -> str:
    """The kind of the item's section. Raises as `divider`."""
    return _kind(_read_head(raw))


def _belongs(reply: Section, call_id: str | None, beside: bool) -> bool:
    """Whether an item belongs to the reply last begun: it is next to it and names no other, or it names that very reply."""
    if beside:
        return call_id is None or reply.reply in (None, call_id)
    return call_id is not None and reply.reply == call_id


class _Head(msgspec.Struct):
    """The fields that tell what an item is and which reply it belongs to."""

    type: str | None = None
    role: str | None = None
    id: str | None = None
    call_id: str | None = None


_decode_head = msgspec.json.Decoder(_Head).decode


def _read_head(raw: bytes) -> _Head:
    try:
        return _decode_head(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        item, names = decode(raw), _Head.__struct_fields__
        if isinstance(item, dict) and all(isinstance(item.get(name), str | None) for name in names):
            return _Head(**{name: item.get(name) for name in names})
        raise RequestError(
            "'input' must be a list of items: objects whose type, role and ids are strings", param="input"
        ) from error


def _kind(head: _Head) -> str:
    """ "" for skipped items."""
    kind = head.type or ("message" if head.role is not None else "item_reference" if head.id else "")
    if kind == "message":
        return _message_kind(head.role)
    if kind == "item_reference":
        if parse_item_id(head.id) is None:
            raise _unknown_item(head.id)
        return "reply"
    if kind in CALLS or kind == "reasoning":
        return "reply"
    if kind in _OUTPUTS:
        return "output"
    if kind in _TOOLS:
        return "tools"
    if kind in ("agent_message", "compaction"):
        return "message"
    if kind in _SKIPPED:
        return ""
    raise RequestError(f"items of type '{kind}' are not taken as input", param="input")


def _message_kind(role: str | None) -> str:
    if role == "assistant":
        return "reply"
    if role in ("system", "developer"):
        return "system"
    if role == "user":
        return "message"
    raise RequestError(f"a message's 'role' must be user, assistant, system or developer, not {role!r}", param="input")


# One reader per kind of section.


@dataclass(frozen=True)
class ReadSystem:
    """Reads a system or developer message, under `role`."""

    role: str

    def __call__(self, raw: bytes, _: Past) -> list[ParsedMessage]:
        text = _join_texts(_decode_item(raw).get("content"), "\n")
        return [ParsedMessage({"role": self.role, "content": text})] if text else []


def read_message(raw: bytes, past: Past) -> list[ParsedMessage]:
    """A user's message, another agent's, or a readable compacted history."""
    item = _decode_item(raw)
    if item.get("type") == "agent_message":
        content: Any = "".join(_agent_text(part) for part in _parts(item.get("content")))
    elif item.get("type") == "compaction":
        content = _compaction_text(item, past.seals)
    else:
        content = _chat_content(item.get("content"))
    return [ParsedMessage({"role": "user", "content": content})]


def _agent_text(part: Any) -> str:
    # Codex expects what its model says to another agent to be sealed by OpenAI's servers; from our models it is plain text.
    sealed = part.get("encrypted_content") if isinstance(part, dict) else None
    return sealed if isinstance(sealed, str) else _part_text(part)


def _compaction_text(item: Mapping[str, Any], seals: Seals) -> str:
    opened = seals.open(item.get("encrypted_content"))
    text = opened[1] if opened else _join_texts(item.get("content") or item.get("summary"), "\n\n")
    if not text:
        raise RequestError("a compaction item that another service has sealed cannot be read", param="input")
    return text


def read_output(raw: bytes, _: Past) -> list[ParsedMessage]:
    """A tool's result."""
    item = _decode_item(raw)
    item_id = parse_item_id(item.get("call_id"), item.get("id"))
    answers = tool_call_id(item_id.call_id, item_id.position) if item_id else item.get("call_id") or item.get("id")
    if not isinstance(answers, str):
        raise RequestError(f"'call_id' of a {item['type']} must be a string", param="input")
    return [ParsedMessage({"role": "tool", "tool_call_id": answers, "content": _output_content(item)})]


def _output_content(item: Mapping[str, Any]) -> Any:
    output = item.get("output")
    if item["type"] == "shell_call_output" and isinstance(output, list):
        return json.dumps(output, ensure_ascii=False)
    if item["type"] == "apply_patch_call_output":
        return "\n".join(part for part in (item.get("status"), output) if isinstance(part, str) and part)
    return _chat_content(output)


def read_reply(raw: bytes, past: Past) -> list[ParsedMessage]:
    """The items of one reply as an assistant message.

    If an item does not carry the sampled arguments unchanged, or is only a reference, they are looked up in `past`. A call unknown to it
    raises UnknownCall until the store was asked: it may know it.
    """
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    reasoning, minted = "", ""
    for item in decode(raw):
        item_id, sealed = parse_item_id(item.get("id"), item.get("call_id")), ""
        if item.get("type") == "reasoning":
            opened = past.seals.open(item.get("encrypted_content"))
            sealed = opened[0] if opened else ""
            shown = _join_texts(item.get("content"), "") or _join_texts(item.get("summary"), "\n\n")
            reasoning += shown or (opened[1] if opened else "")
        elif item.get("type") in CALLS:
            message.setdefault("tool_calls", []).append(_read_call(item, past))
        elif item.get("role") == "assistant":
            message["content"] += _join_texts(item.get("content"), "")
        elif item_id is not None:
            reasoning += _resolve(item, item_id, message, past)
        minted = minted or sealed or (item_id.call_id if item_id else "")
    if reasoning:
        message["reasoning_content"] = reasoning
    return [ParsedMessage(message, minted)]


def _read_call(item: dict[str, Any], past: Past) -> dict[str, Any]:
    name, arguments = parse_function(item)
    call_id = item.get("call_id")
    if not isinstance(call_id, str):
        raise RequestError(f"'call_id' of a {item['type']} must be a string", param="input")
    minted = parse_item_id(call_id, item.get("id"))
    if minted is not None and item["type"] != "function_call":
        function = _find_sampled(minted, past)
        if function is not None and is_call_of(item, function):
            name, arguments = function["name"], function["arguments"]
    return tool_call(call_id, name, arguments)


def _find_sampled(minted: ItemId, past: Past) -> dict[str, Any] | None:
    """The function call as it was sampled, None if the session has no such call."""
    try:
        calls = past.reply(minted.call_id).get("tool_calls") or []
    except UnknownCall:
        if past.refreshed:
            return None
        raise
    return calls[minted.position]["function"] if minted.position < len(calls) else None


def _resolve(item: Mapping[str, Any], item_id: ItemId, message: dict[str, Any], past: Past) -> str:
    """Add what a reference names to `message`; return it instead if it is reasoning."""
    try:
        stored = past.call(item_id.call_id).marks.get("store") != "false"
        reply = past.reply(item_id.call_id)
    except UnknownCall as error:
        raise _unknown_item(item.get("id")) from error
    calls = reply.get("tool_calls") or []
    if not stored or (item_id.kind not in ("rs", "msg") and item_id.position >= len(calls)):
        raise _unknown_item(item.get("id"))
    if item_id.kind == "rs":
        return reply.get("reasoning_content") or ""
    if item_id.kind == "msg":
        message["content"] += reply.get("content") or ""
    else:
        message.setdefault("tool_calls", []).append(calls[item_id.position])
    return ""


# Content and its parts.

_TEXT_PARTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")


def _chat_content(content: Any) -> Any:
    """A string, or parts if there are several or one that is no text."""
    if isinstance(content, str):
        return content
    parts = [_chat_part(part) for part in _parts(content)]
    if all(part["type"] == "text" for part in parts) and len(parts) < 2:
        return parts[0]["text"] if parts else ""
    return parts


def _chat_part(part: Any) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind != "input_image":
        return {"type": "text", "text": _part_text(part)}
    if not isinstance(part.get("image_url"), str):
        raise RequestError("an input_image needs an 'image_url': there are no uploaded files here", param="input")
    detail = part.get("detail")
    url = {"url": part["image_url"], **({"detail": detail} if isinstance(detail, str) else {})}
    return {"type": "image_url", "image_url": url}


def _join_texts(content: Any, separator: str) -> str:
    """The text of content that may hold nothing else."""
    return content if isinstance(content, str) else separator.join(_part_text(part) for part in _parts(content))


def _parts(content: Any) -> Iterator[Any]:
    if content is not None and not isinstance(content, list):
        raise RequestError("content must be a string or a list of parts", param="input")
    yield from content or ()


def _part_text(part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, dict) else None
    if (kind in _TEXT_PARTS or kind == "refusal") and isinstance(text, str):
        return text
    if kind == "input_file":
        raise RequestError("files are not taken as input: send their text", param="input")
    raise RequestError(f"a part of type {kind!r} is not taken here", param="input")


def _decode_item(raw: bytes) -> dict[str, Any]:
    item = decode(raw)
    assert isinstance(item, dict), "its head was read"
    return item


def _unknown_item(identifier: str | None) -> UnknownCall:
    return UnknownCall(f"Item with id '{identifier}' not found.", param="input")
