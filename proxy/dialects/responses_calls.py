"""Tool calls of the Responses dialect, both ways: a chat tool call as the item its kind of tool goes out as, and back.

A function call carries the arguments as they were sampled. A custom call carries text, a shell or patch call an object: both are
read out of the arguments. Arguments of another shape go out as they are: a custom call's whole arguments as its input, a shell's
or patch's as a call of a function of that name, which the harness answers with an error for the model to read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from proxy.dialects.body import decode
from proxy.errors import RequestError
from proxy.minting import tool_call_id


@dataclass(frozen=True, slots=True)
class Kind:
    """The kind of a tool that is offered as a function: its type and name as the harness knows them."""

    type: str
    name: str
    namespace: str = ""


@dataclass(frozen=True, slots=True)
class Form:
    """How calls of one kind of tool look. `shown` makes the item's `field` of the arguments' object, None when they are of
    another shape; `arguments` makes the object of the field."""

    item: str
    prefix: str
    field: str
    shown: Callable[[dict[str, Any]], Any]
    arguments: Callable[[Any], dict[str, Any]]
    required: tuple[str, ...] = ()
    """Further fields without which clients do not take the item, all null."""


def canonical_name(name: str, namespace: Any) -> str:
    """The name under which a tool of a namespace is offered as a function."""
    return f"{namespace}__{name}" if isinstance(namespace, str) and namespace else name


def _text(value: dict[str, Any]) -> str | None:
    text = value.get("input")
    return text if value.keys() == {"input"} and isinstance(text, str) else None


def _local_shell(value: dict[str, Any]) -> dict[str, Any] | None:
    command, directory, timeout = value.get("command"), value.get("workdir"), value.get("timeout_ms")
    if not _strings(command) or not isinstance(directory, str | None) or not _milliseconds(timeout):
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


def _shell(value: dict[str, Any]) -> dict[str, Any] | None:
    limits = {name: value.get(name) for name in ("timeout_ms", "max_output_length")}
    if not _strings(value.get("commands")) or not all(map(_milliseconds, limits.values())):
        return None
    return {"commands": value["commands"], **limits}


def _patch(value: dict[str, Any]) -> dict[str, Any] | None:
    given, kind = _given(value), value.get("type")
    fields = _PATCHES.get(kind) if isinstance(kind, str) else None
    return given if given.keys() == fields and all(isinstance(item, str) for item in given.values()) else None


_PATCHES = {"create_file": {"type", "path", "diff"}, "update_file": {"type", "path", "diff"}, "delete_file": {"type", "path"}}


def _given(value: Any) -> dict[str, Any]:
    return {name: item for name, item in value.items() if item is not None}


def _strings(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, str) for item in value)


def _milliseconds(value: Any) -> bool:
    return value is None or (isinstance(value, int) and not isinstance(value, bool))


FORMS: Mapping[str, Form] = {
    "custom": Form("custom_tool_call", "ctc", "input", _text, lambda text: {"input": text}),
    "local_shell": Form("local_shell_call", "lsh", "action", _local_shell, _local_shell_arguments),
    "shell": Form("shell_call", "sh", "action", _shell, _given, required=("environment",)),
    "apply_patch": Form("apply_patch_call", "apc", "operation", _patch, _given),
}
"""By the type of the tool; all other tools are functions."""

KINDS_OF_ITEMS: Mapping[str, str] = {form.item: kind for kind, form in FORMS.items()}


def shown_payload(kind: str, arguments: str) -> Any:
    """What a call of that kind of tool shows of the sampled arguments, None when they are of another shape."""
    try:
        value = decode(arguments.encode("utf-8", "replace"))
    except RequestError:
        value = None
    shown = FORMS[kind].shown(value) if isinstance(value, dict) else None
    return arguments if shown is None and kind == "custom" else shown


def call_item(kind: Kind, call_id: str, position: int, name: str, arguments: str, status: str) -> dict[str, Any]:
    """The output item of one finished tool call; `name` is the function's as the model wrote it."""
    form = FORMS.get(kind.type)
    payload = shown_payload(kind.type, arguments) if form else None
    if form is None or payload is None:
        return function_call(kind if form is None else Kind("function", name), call_id, position, arguments, status)
    item: dict[str, Any] = {
        "type": form.item,
        "id": f"{form.prefix}_{call_id}_{position}",
        "call_id": tool_call_id(call_id, position),
    }
    item |= {form.field: payload, "status": status, **dict.fromkeys(form.required)}
    if kind.type == "custom":
        item |= {"name": kind.name, **_namespaced(kind)}
    elif kind.type == "apply_patch":
        # The type knows of no patch that is incomplete.
        item["status"] = "completed"
    return item


def function_call(kind: Kind, call_id: str, position: int, arguments: str, status: str) -> dict[str, Any]:
    return {
        "type": "function_call",
        "id": f"fc_{call_id}_{position}",
        "call_id": tool_call_id(call_id, position),
        "name": kind.name,
        **_namespaced(kind),
        "arguments": arguments,
        "status": status,
    }


def _namespaced(kind: Kind) -> dict[str, str]:
    return {"namespace": kind.namespace} if kind.namespace else {}


def function_of(item: Mapping[str, Any]) -> tuple[str, str]:
    """(name, arguments) of a call's item, the arguments written anew where the item does not carry them as they were sampled.
    Raises RequestError."""
    if item["type"] == "function_call":
        return canonical_name(_field(item, "name", str), item.get("namespace")), _field(item, "arguments", str)
    kind = KINDS_OF_ITEMS[item["type"]]
    name = canonical_name(_field(item, "name", str), item.get("namespace")) if kind == "custom" else kind
    payload = _field(item, FORMS[kind].field, str if kind == "custom" else dict)
    return name, json.dumps(FORMS[kind].arguments(payload), ensure_ascii=False)


def is_call_of(item: Mapping[str, Any], function: Mapping[str, Any]) -> bool:
    """Whether the item shows a call of this function with these arguments."""
    kind = KINDS_OF_ITEMS[item["type"]]
    name, arguments = function_of(item)
    # Both go through the same form: fields that clients add or leave out as null do not count.
    return bool(function.get("name") == name) and shown_payload(kind, function.get("arguments") or "") == shown_payload(
        kind, arguments
    )


def _field(item: Mapping[str, Any], name: str, kind: type) -> Any:
    value = item.get(name)
    if not isinstance(value, kind):
        wanted = "an object" if kind is dict else "a string"
        raise RequestError(f"'{name}' of a {item['type']} must be {wanted}", param="input")
    return value
