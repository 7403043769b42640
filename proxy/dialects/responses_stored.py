"""Stored responses: found in the session's records and rendered as they were sent.

A record holds the chat messages. Whatever else makes up a response is in the call's marks, GIVEN: `store` if it must not be found again,
`response` the small fields of the request, `tools` the kinds of the tools, `instructions` how many characters of the first system message
were the request's instructions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from proxy.dialects.base import HistoryMessage, Past, read_model
from proxy.dialects.fields import encode
from proxy.dialects.responses_items import parse_response_id
from proxy.dialects.responses_reply import (
    KEPT,
    ResponsesReplyOptions,
    build_response,
    build_usage,
    content_of,
    feed,
    parse_options,
)
from proxy.dialects.responses_tools import list_definitions, record_kinds, restore_toolbox
from proxy.errors import UnknownCall
from proxy.images import SCHEME
from reconstruct.records import Call

_decode = msgspec.json.decode

GIVEN = ("store", "response", "tools", "instructions")
"""The marks of how a reply was given."""

_CLIENT = ("metadata", "prompt_cache_key", "safety_identifier", "user")
"""Fields of a request that are repeated and change nothing."""


def record_marks(body: Mapping[str, Any], options: ResponsesReplyOptions, instructions: int) -> dict[str, str]:
    """The facts stored with the call; `instructions`: their length in characters."""
    if not options.fields["store"]:
        return {"store": "false"}
    request = {key: body[key] for key in KEPT if body.get(key) is not None}
    kept = {"response": request, "tools": record_kinds(options.toolbox)}
    marks = {name: encode(value).decode() for name, value in kept.items() if value}
    return {**marks, "instructions": str(instructions)} if instructions else marks


def describes_alike(marks: Mapping[str, str], others: Mapping[str, str]) -> bool:
    """Whether replies with such marks are followed and shown alike, but for what only names the client."""
    return all(_describe(name, marks.get(name)) == _describe(name, others.get(name)) for name in GIVEN)


def _describe(name: str, mark: str | None) -> Any:
    if name != "response" or mark is None:
        return mark
    return {field: value for field, value in _decode(mark).items() if field not in _CLIENT}


def find_call(identifier: str, past: Past, *, what: str, param: str | None = None) -> Call:
    """The call behind a response's id. Raises UnknownCall if the session gave none in this dialect, or was requested not to store it."""
    call_id = parse_response_id(identifier)
    missing = UnknownCall(f"{what} with id '{identifier}' not found.", param=param)
    if call_id is None:
        raise missing
    try:
        call = past.call(call_id)
    except UnknownCall as error:
        raise missing from error
    if call.dialect != "responses" or call.marks.get("store") == "false":
        raise missing
    return call


def load_conversation(call: Call, past: Past) -> tuple[str, list[HistoryMessage]]:
    """What a follow-up of the response continues: (the system prompt without the request's instructions, all other messages)."""
    _, system, rest = _split_history(call, past)
    return system, rest


def render_response(call: Call, past: Past) -> dict[str, Any]:
    """The response object as it was sent, except for the number of cached prompt tokens, which is not stored; nor is any number
    of an engine that returns no ids."""
    model, options = _restore_options(call, past)
    output = options.output(call.call_id)
    # A reply cut by a harness that hung up was sent as one cut by length.
    finish_reason = "length" if call.finish_reason == "abort" else call.finish_reason
    feed(output, content_of(past.reply(call.call_id)), finish_reason)
    result: dict[str, Any] = {"output": output.items}
    result["usage"] = build_usage(call.node.base_length + len(call.node.delta_ids), 0, len(call.node.completion_ids))
    status = "completed"
    if call.status == "failed":
        broken = {"code": "server_error", "message": "the engine broke off before the reply was whole"}
        status, result["error"] = "failed", broken
    elif finish_reason == "length":
        status, result["incomplete_details"] = "incomplete", {"reason": "max_output_tokens"}
    return build_response(options, call.call_id, int(call.started_at), model, status, **result)


def render_items(call: Call, past: Past) -> dict[str, Any]:
    """The list of the response's input items, newest first as OpenAI lists them, without instructions."""
    options = _restore_options(call, past)[1]
    _, system, rest = _split_history(call, past)
    items = [_message_item(call, 0, "system", system)] if system else []
    for position, seen in enumerate(rest[:-1], 1):
        items += _items(call, position, seen, options)
    items = _match_outputs(items)[::-1]
    ends = [items[0]["id"], items[-1]["id"]] if items else ["", ""]
    return {"object": "list", "data": items, "first_id": ends[0], "last_id": ends[1], "has_more": False}


def _split_history(call: Call, past: Past) -> tuple[str, str, list[HistoryMessage]]:
    """(instructions, the rest of the first system message, all other messages)."""
    history = past.history(call.call_id)
    first = history[0].message if history else {}
    if first.get("role") != "system":
        return "", "", history
    length = int(call.marks.get("instructions", "0"))
    text = str(first["content"])
    return text[:length], text[length:].removeprefix("\n\n") if length else text, history[1:]


def _restore_options(call: Call, past: Past) -> tuple[str, ResponsesReplyOptions]:
    """(model, how the reply is rendered), from the call's record and its root's, which holds the tools of all calls below it, and the
    model where no call has named another since."""
    root, model = call, read_model(call)
    while root.node.parent_id is not None:
        root = past.call(root.node.parent_id)
        model = model or read_model(root)
    box = restore_toolbox(_decode(root.preamble)["tools"], _decode(call.marks.get("tools", "{}")))
    body = _decode(call.marks.get("response", "{}"))
    instructions = _split_history(call, past)[0]
    if instructions:
        body["instructions"] = instructions
    return model, parse_options(body, list_definitions(box), box)


def _items(call: Call, position: int, seen: HistoryMessage, options: ResponsesReplyOptions) -> list[dict[str, Any]]:
    message = seen.message
    if message["role"] == "assistant":
        # Ids and seals that name no call must not look like those that do.
        minted = seen.minted[0] if seen.minted else ""
        shown = options if minted else replace(options, sealed=False)
        output = shown.output(minted or f"in_{call.call_id}_{position}")
        feed(output, content_of(message), "stop")
        calls = iter(message.get("tool_calls") or ())
        return [{**item, "call_id": next(calls)["id"]} if "call_id" in item else item for item in output.items]
    if message["role"] == "tool":
        item = {"type": "function_call_output", "id": f"in_{call.call_id}_{position}", "status": "completed"}
        content = message["content"]
        output_parts = content if isinstance(content, str) else _parts(content)
        return [{**item, "call_id": message["tool_call_id"], "output": output_parts}]
    return [_message_item(call, position, message["role"], message["content"])]


def _message_item(call: Call, position: int, role: str, content: Any) -> dict[str, Any]:
    parts = _parts([{"type": "text", "text": content}] if isinstance(content, str) else content)
    item = {"type": "message", "id": f"in_{call.call_id}_{position}", "role": role, "status": "completed"}
    return {**item, "content": parts}


def _parts(content: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Chat parts as input parts."""
    parts: list[dict[str, Any]] = []
    for part in content:
        if part["type"] == "text":
            parts.append({"type": "input_text", "text": part["text"]})
        else:
            # By the name under which it can be sent again.
            parts.append({"type": "input_image", "detail": "auto", "image_url": SCHEME + part["digest"]})
    return parts


def _match_outputs(items: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The items with each tool output's type matched to its call's."""
    kinds = {item["call_id"]: item["type"] for item in items if str(item.get("type")).endswith("_call")}
    matched = []
    for item in items:
        kind = kinds.get(item["call_id"]) if item["type"] == "function_call_output" else None
        matched.append({**item, "type": f"{kind}_output"} if kind in ("custom_tool_call", "local_shell_call") else item)
    return matched
