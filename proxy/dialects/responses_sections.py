"""The input items of a Responses request, told apart without decoding them.

The items of one reply stand side by side and make one assistant message. Their ids name the reply they come from, wherever they
stand: items that a harness puts between the outputs of the calls before them still belong to it. Items that only OpenAI's servers
make and that say nothing to another model are passed over; a kind that is not known is refused, since leaving it out would change
what the model is told.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from proxy.dialects.body import decode
from proxy.dialects.responses_calls import KINDS_OF_ITEMS
from proxy.dialects.responses_ids import named
from proxy.errors import RequestError, UnknownCall

CALLS = frozenset({"function_call", *KINDS_OF_ITEMS})
_OUTPUTS = frozenset({"function_call_output", "custom_tool_call_output", "local_shell_call_output", "shell_call_output"}) | {
    "apply_patch_call_output"
}
_PASSED_OVER = frozenset(
    {"web_search_call", "file_search_call", "code_interpreter_call", "image_generation_call", "tool_search_call"}
    | {"mcp_list_tools", "mcp_approval_request", "mcp_approval_response"}
)
_TOOLS = frozenset({"additional_tools", "tool_search_output"})


class _Head(msgspec.Struct):
    """As much of an item as says what it is and which reply it is of."""

    type: str | None = None
    role: str | None = None
    id: str | None = None
    call_id: str | None = None


_read_head = msgspec.json.Decoder(_Head).decode


@dataclass(slots=True)
class Section:
    """Raw items that are read together: `kind` is system, message, output, tools or reply."""

    kind: str
    items: list[bytes]
    reply: str | None = None
    """The call that ids in a reply's items name."""

    @property
    def raw(self) -> bytes:
        return self.items[0] if self.kind != "reply" else b"[" + b",".join(self.items) + b"]"


def sections(items: Sequence[bytes]) -> list[Section]:
    """The items in order, those of one reply put together. Raises RequestError for a kind of item that is not known, UnknownCall
    for a reference to what no reply of this service holds."""
    found: list[Section] = []
    reply: Section | None = None
    beside = False
    for raw in items:
        head = _head(raw)
        kind = _kind(head)
        if kind == "":
            continue
        if kind == "reply":
            name = named(head.id, head.call_id)
            call_id = name.call_id if name else None
            if reply is None or not _belongs(reply, call_id, beside):
                reply = Section("reply", [])
                found.append(reply)
            reply.items.append(raw)
            reply.reply, beside = reply.reply or call_id, True
            continue
        found.append(Section(kind, [raw]))
        beside = False
        if kind in ("system", "message"):
            reply = None
    return found


def _belongs(reply: Section, call_id: str | None, beside: bool) -> bool:
    """Whether an item is of the reply last begun: it stands beside it and does not name another, or names the very same."""
    if beside:
        return call_id is None or reply.reply in (None, call_id)
    return call_id is not None and reply.reply == call_id


def _head(raw: bytes) -> _Head:
    try:
        return _read_head(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        if isinstance(item := decode(raw), dict) and all(
            isinstance(item.get(key), str | None) for key in _Head.__struct_fields__
        ):
            return _Head(**{key: item.get(key) for key in _Head.__struct_fields__})
        raise RequestError(
            "'input' must be a list of items: objects whose type, role and ids are strings", param="input"
        ) from error


def _kind(head: _Head) -> str:
    """ "" for items that are passed over."""
    kind = head.type or ("message" if head.role is not None else "item_reference" if head.id else "")
    if kind == "message":
        return _message_kind(head.role)
    if kind == "item_reference":
        if named(head.id) is None:
            raise no_item(head.id)
        return "reply"
    if kind in CALLS or kind == "reasoning":
        return "reply"
    if kind in _OUTPUTS:
        return "output"
    if kind in _TOOLS:
        return "tools"
    if kind in ("agent_message", "compaction"):
        return "message"
    if kind in _PASSED_OVER:
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


def no_item(identifier: str | None) -> UnknownCall:
    return UnknownCall(f"Item with id '{identifier}' not found.", param="input")
