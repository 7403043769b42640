"""Tool calls of the Responses dialect, both ways: a chat tool call as the item of its kind, and back; and the ids of items.

A function call carries the arguments as they were sampled. A custom call carries text, a shell or patch call an object: both are read out
of the arguments. Arguments of another shape go out unchanged: a custom call's as its input, a shell's or patch's as a call of a function
of that name, which the harness answers with an error for the model to read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from proxy.dialects.base import tool_call_id
from proxy.dialects.fields import decode, is_integer
from proxy.errors import RequestError


@dataclass(frozen=True, slots=True)
class ToolKind:
    """What a tool offered as a function is to the harness: its type and name there."""

    type: str
    name: str
    namespace: str = ""


def canonical_name(name: str, namespace: Any) -> str:
    """The function name of a tool in a namespace."""
    return f"{namespace}__{name}" if isinstance(namespace, str) and namespace else name


def call_item(kind: ToolKind, call_id: str, position: int, name: str, arguments: str, status: str) -> dict[str, Any]:
    """The output item of one finished tool call; `name` is the function's as the model wrote it."""
    form = FORMS.get(kind.type)
    payload = _parse_payload(kind.type, arguments) if form else None
    if form is None or payload is None:
        return function_item(kind if form is None else ToolKind("function", name), call_id, position, arguments, status)
    item: dict[str, Any] = {
        "type": form.item,
        "id": f"{form.prefix}_{call_id}_{position}",
        "call_id": tool_call_id(call_id, position),
    }
    item |= {form.field: payload, "status": status, **dict.fromkeys(form.required)}
    if kind.type == "custom":
        item |= {"name": kind.name, **_namespace_field(kind)}
    elif kind.type == "apply_patch":
        # OpenAI's type has no status for an incomplete patch.
        item["status"] = "completed"
    return item


def function_item(kind: ToolKind, call_id: str, position: int, arguments: str, status: str) -> dict[str, Any]:
    return {
        "type": "function_call",
        "id": f"fc_{call_id}_{position}",
        "call_id": tool_call_id(call_id, position),
        "name": kind.name,
        **_namespace_field(kind),
        "arguments": arguments,
        "status": status,
    }


def parse_function(item: Mapping[str, Any]) -> tuple[str, str]:
    """(name, arguments) of a call's item; arguments are written anew if the item does not carry them as sampled. Raises RequestError."""
    if item["type"] == "function_call":
        return canonical_name(_field(item, "name", str), item.get("namespace")), _field(item, "arguments", str)
    kind = KINDS_OF_ITEMS[item["type"]]
    name = canonical_name(_field(item, "name", str), item.get("namespace")) if kind == "custom" else kind
    payload = _field(item, FORMS[kind].field, str if kind == "custom" else dict)
    return name, json.dumps(FORMS[kind].arguments(payload), ensure_ascii=False)


def is_call_of(item: Mapping[str, Any], function: Mapping[str, Any]) -> bool:
    """Whether the item shows a call of this function with these arguments."""
    kind = KINDS_OF_ITEMS[item["type"]]
    name, arguments = parse_function(item)
    # Both go through the same form: fields that clients add, or leave out as null, make no difference.
    sampled = function.get("arguments") or ""
    return bool(function.get("name") == name) and _parse_payload(kind, sampled) == _parse_payload(kind, arguments)


def _parse_payload(kind: str, arguments: str) -> Any:
    """What a call of that kind shows of the sampled arguments, None if they are of another shape."""
    try:
        value = decode(arguments.encode("utf-8", "replace"))
    except RequestError:
        value = None
    payload = FORMS[kind].payload(value) if isinstance(value, dict) else None
    return arguments if payload is None and kind == "custom" else payload


def _namespace_field(kind: ToolKind) -> dict[str, str]:
    return {"namespace": kind.namespace} if kind.namespace else {}


def _field(item: Mapping[str, Any], name: str, kind: type) -> Any:
    value = item.get(name)
    if not isinstance(value, kind):
        wanted = "an object" if kind is dict else "a string"
        raise RequestError(f"'{name}' of a {item['type']} must be {wanted}", param="input")
    return value


# The kinds of tools whose calls are not function calls.


@dataclass(frozen=True, slots=True)
class ToolItemForm:
    """The item of calls to one kind of tool. `payload` makes the item's `field` out of the arguments' object, None if that has another
    shape; `arguments` is its inverse."""

    item: str
    prefix: str
    field: str
    payload: Callable[[dict[str, Any]], Any]
    arguments: Callable[[Any], dict[str, Any]]
    required: tuple[str, ...] = ()
    """Further fields, all null, without which clients reject the item."""


def _custom_input(value: dict[str, Any]) -> str | None:
    text = value.get("input")
    return text if value.keys() == {"input"} and isinstance(text, str) else None


def _local_shell_action(value: dict[str, Any]) -> dict[str, Any] | None:
    command, directory, timeout = value.get("command"), value.get("workdir"), value.get("timeout_ms")
    if not _is_strings(command) or not isinstance(directory, str | None) or not _is_limit(timeout):
        return None
    return {
        "type": "exec",
        "command": command,
        "env": {},
        "working_directory": directory,
        "timeout_ms": timeout,
        "user": None,
    }


def _local_shell_arguments(action: Any) -> dict[str, Any]:
    renamed = {"command": "command", "working_directory": "workdir", "timeout_ms": "timeout_ms"}
    return {ours: action[theirs] for theirs, ours in renamed.items() if action.get(theirs) is not None}


def _shell_action(value: dict[str, Any]) -> dict[str, Any] | None:
    limits = {name: value.get(name) for name in ("timeout_ms", "max_output_length")}
    if not _is_strings(value.get("commands")) or not all(map(_is_limit, limits.values())):
        return None
    return {"commands": value["commands"], **limits}


_PATCHES = {"create_file": {"type", "path", "diff"}, "update_file": {"type", "path", "diff"}, "delete_file": {"type", "path"}}


def _patch_operation(value: dict[str, Any]) -> dict[str, Any] | None:
    operation, kind = _without_nulls(value), value.get("type")
    fields = _PATCHES.get(kind) if isinstance(kind, str) else None
    return operation if operation.keys() == fields and all(isinstance(item, str) for item in operation.values()) else None


def _without_nulls(value: Any) -> dict[str, Any]:
    return {name: item for name, item in value.items() if item is not None}


def _is_strings(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, str) for item in value)


def _is_limit(value: Any) -> bool:
    return value is None or is_integer(value)


FORMS: Mapping[str, ToolItemForm] = {
    "custom": ToolItemForm("custom_tool_call", "ctc", "input", _custom_input, lambda text: {"input": text}),
    "local_shell": ToolItemForm("local_shell_call", "lsh", "action", _local_shell_action, _local_shell_arguments),
    "shell": ToolItemForm("shell_call", "sh", "action", _shell_action, _without_nulls, required=("environment",)),
    "apply_patch": ToolItemForm("apply_patch_call", "apc", "operation", _patch_operation, _without_nulls),
}
"""By the type of the tool; all other tools are functions."""

KINDS_OF_ITEMS: Mapping[str, str] = {form.item: kind for kind, form in FORMS.items()}


# Ids of items. Each names its call, so that a replayed item finds the reply it comes from.
#
# | what | id |
# |---|---|
# | response | `resp_<call id>` |
# | reasoning, message | `rs_<call id>`, `msg_<call id>`; a further one of the same reply `…_<n>` |
# | function, custom, local shell, shell and patch call | `fc_`, `ctc_`, `lsh_`, `sh_`, `apc_` `<call id>_<position>` |
# | `call_id` of a call and of its output | `call_<call id>_<position>` (proxy.dialects.base.tool_call_id) |
# | item of a request that had no such id | `in_<call id>_<number>` |


_ITEM = re.compile(r"(rs|msg|fc|ctc|lsh|sh|apc|call)_([0-9a-f]{24})(?:_(\d{1,6}))?")
_RESPONSE = re.compile(r"resp_([0-9a-f]{24})")


@dataclass(frozen=True, slots=True)
class ItemId:
    """What an item's id names: the call, and a tool call's position in it. `kind` is the id's prefix."""

    kind: str
    call_id: str
    position: int = 0


def parse_item_id(*identifiers: object) -> ItemId | None:
    """The first of the ids that this service minted; None if it minted none of them."""
    for identifier in identifiers:
        match = _ITEM.fullmatch(identifier) if isinstance(identifier, str) else None
        if match:
            return ItemId(match[1], match[2], int(match[3] or 0))
    return None


def response_id(call_id: str) -> str:
    return f"resp_{call_id}"


def parse_response_id(response: str) -> str | None:
    """The call behind a response's id; None if this service did not mint it."""
    match = _RESPONSE.fullmatch(response)
    return match[1] if match else None
