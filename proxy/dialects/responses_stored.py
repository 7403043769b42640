"""Responses that were answered before: found in the session's records, and shown as they were sent.

A record holds the chat messages. What else a response is made of is kept in its marks: `store` where it is not to be found again,
`response` the small fields of the request, `tools` the kinds of the tools, `instructions` how many characters of the first system
message were the request's instructions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from proxy.dialects.base import Past, Seen
from proxy.dialects.responses_reply import KEPT, Wanted, response, said_in, tell, usage, wanted
from proxy.dialects.responses_tools import answering_call, definitions, noted_kinds, recalled
from proxy.errors import UnknownCall
from reconstruct.records import Call

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.decode


def marks(body: Mapping[str, Any], how: Wanted, instructions: int) -> dict[str, str]:
    """What is kept with the record of a call; `instructions`: their length in characters."""
    if not how.fields["store"]:
        return {"store": "false"}
    kept = {"response": {key: body[key] for key in KEPT if body.get(key) is not None}, "tools": noted_kinds(how.toolbox)}
    noted = {name: _encode(value).decode() for name, value in kept.items() if value}
    return {**noted, "instructions": str(instructions)} if instructions else noted


def stored_call(identifier: str, past: Past, *, what: str, param: str | None = None) -> Call:
    """The call behind a response's id. Raises UnknownCall where the session has none, or was told not to store it."""
    call_id = answering_call(identifier)
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


def conversation(call: Call, past: Past) -> tuple[str, list[Seen]]:
    """What a response's successor goes on from: the system prompt without the request's instructions, and all other messages."""
    _, system, rest = _divided(call, past)
    return system, rest


def _divided(call: Call, past: Past) -> tuple[str, str, list[Seen]]:
    """(instructions, the rest of the first system message, all other messages)."""
    history = past.history(call.call_id)
    first = history[0].message if history else {}
    if first.get("role") != "system":
        return "", "", history
    length = int(call.marks.get("instructions", "0"))
    text = str(first["content"])
    return text[:length], text[length:].removeprefix("\n\n") if length else text, history[1:]


def stored_response(call: Call, past: Past) -> dict[str, Any]:
    """The response object as it was sent; how many prompt tokens the engine had cached is not kept."""
    model, how = _recalled(call, past)
    output = how.output(call.call_id)
    # A reply that was cut by a harness that hung up was ended as one cut by length.
    finish_reason = "length" if call.finish_reason == "abort" else call.finish_reason
    tell(output, said_in(past.reply(call.call_id)), finish_reason)
    said: dict[str, Any] = {"output": output.items}
    said["usage"] = usage(call.node.base_length + len(call.node.delta_ids), 0, len(call.node.completion_ids))
    status = "completed"
    if call.status == "failed":
        status, said["error"] = "failed", {"code": "server_error", "message": "the engine broke off before the reply was whole"}
    elif finish_reason == "length":
        status, said["incomplete_details"] = "incomplete", {"reason": "max_output_tokens"}
    return response(how, call.call_id, int(call.started_at), model, status, **said)


def _recalled(call: Call, past: Past) -> tuple[str, Wanted]:
    """(model, how the reply is shown), from the record and that of its root, which names model and tools for all after it."""
    root = call
    while root.node.parent_id is not None:
        root = past.call(root.node.parent_id)
    preamble = _decode(root.preamble)
    box = recalled(preamble["tools"], _decode(call.marks.get("tools", "{}")))
    body = _decode(call.marks.get("response", "{}"))
    instructions = _divided(call, past)[0]
    if instructions:
        body["instructions"] = instructions
    return preamble["model"], wanted(body, definitions(box), box)


def stored_items(call: Call, past: Past) -> dict[str, Any]:
    """The list of the response's input items, the newest first as OpenAI lists them; instructions are none."""
    how = _recalled(call, past)[1]
    _, system, rest = _divided(call, past)
    items = [_message_item(call, 0, "system", system)] if system else []
    for position, seen in enumerate(rest[:-1], 1):
        items += _items(call, position, seen, how)
    items = _with_output_types(items)[::-1]
    ends = [items[0]["id"], items[-1]["id"]] if items else ["", ""]
    return {"object": "list", "data": items, "first_id": ends[0], "last_id": ends[1], "has_more": False}


def _items(call: Call, position: int, seen: Seen, how: Wanted) -> list[dict[str, Any]]:
    message = seen.message
    if message["role"] == "assistant":
        # Ids and seals that name no call must not look like those that do.
        minted = seen.minted[0] if seen.minted else ""
        shown = how if minted else replace(how, sealed=False)
        output = shown.output(minted or f"in_{call.call_id}_{position}")
        tell(output, said_in(message), "stop")
        calls = iter(message.get("tool_calls") or ())
        return [{**item, "call_id": next(calls)["id"]} if "call_id" in item else item for item in output.items]
    if message["role"] == "tool":
        item = {"type": "function_call_output", "id": f"in_{call.call_id}_{position}", "status": "completed"}
        return [{**item, "call_id": message["tool_call_id"], "output": _content(message["content"], whole_text=True)}]
    return [_message_item(call, position, message["role"], message["content"])]


def _message_item(call: Call, position: int, role: str, content: Any) -> dict[str, Any]:
    item = {"type": "message", "id": f"in_{call.call_id}_{position}", "role": role, "status": "completed"}
    return {**item, "content": _content(content)}


def _content(content: Any, *, whole_text: bool = False) -> Any:
    """Chat content as input parts; text alone stays text where it may."""
    if isinstance(content, str):
        return content if whole_text else [{"type": "input_text", "text": content}]
    return [_part(part) for part in content]


def _part(part: Mapping[str, Any]) -> dict[str, Any]:
    if part["type"] == "text":
        return {"type": "input_text", "text": part["text"]}
    return {"type": "input_image", "detail": "auto", "image_url": part["image_url"]["url"], **_detail(part["image_url"])}


def _detail(image: Mapping[str, Any]) -> dict[str, Any]:
    return {"detail": image["detail"]} if "detail" in image else {}


def _with_output_types(items: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The items with each tool's answer in the type that belongs to its call's."""
    kinds = {item["call_id"]: item["type"] for item in items if str(item.get("type")).endswith("_call")}
    shown = []
    for item in items:
        kind = kinds.get(item["call_id"]) if item["type"] == "function_call_output" else None
        shown.append({**item, "type": f"{kind}_output"} if kind in ("custom_tool_call", "local_shell_call") else item)
    return shown
