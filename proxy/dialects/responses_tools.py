"""The tools of a Responses request: each kind offered to the model as a function, or dropped where only OpenAI could serve it.

`namespace` tools are offered as `<namespace>__<name>`; a `custom` tool as a function whose one argument `input` is its text; a local
`shell`, `local_shell` and `apply_patch` as functions of these names. See proxy.dialects.responses_tools for the way back.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from proxy.dialects import fields
from proxy.dialects.base import tool_call_id
from proxy.dialects.fields import decode, function_tool
from proxy.errors import RequestError

_HOSTED_KINDS = (
    *("web_search", "file_search", "code_interpreter", "image_generation", "computer", "mcp", "tool_search"),
    *("programmatic_tool_calling", "shell"),
)
"""Tools that only OpenAI's own servers can run, as their types begin."""

_STRINGS = {"type": "array", "items": {"type": "string"}}
_MILLISECONDS = {"type": "integer", "description": "Longest time the command may run, in milliseconds."}

_BUILT_IN: Mapping[str, tuple[str, dict[str, Any], list[str]]] = {
    "local_shell": (
        "Runs a command on the local machine and returns its output.",
        {
            "command": {**_STRINGS, "description": "The program and its arguments."},
            "workdir": {"type": "string", "description": "The directory to run it in."},
            "timeout_ms": _MILLISECONDS,
        },
        ["command"],
    ),
    "shell": (
        "Runs shell commands and returns the output of each.",
        {
            "commands": {**_STRINGS, "description": "Shell commands, run one after the other."},
            "timeout_ms": _MILLISECONDS,
            "max_output_length": {"type": "integer", "description": "Longest output to return, in characters."},
        },
        ["commands"],
    ),
    "apply_patch": (
        "Creates, updates or deletes a file.",
        {
            "type": {"type": "string", "enum": ["create_file", "update_file", "delete_file"]},
            "path": {"type": "string", "description": "The file's path."},
            "diff": {"type": "string", "description": "What to change, as a V4A diff; not given when a file is deleted."},
        },
        ["type", "path"],
    ),
}

# Tool calls of the Responses dialect, both ways: a chat tool call as the item its kind of tool goes out as, and back.
#
# A function call carries the arguments as they were sampled. A custom call carries text, a shell or patch call an object: both are
# read out of the arguments. Arguments of another shape go out as they are: a custom call's whole arguments as its input, a shell's
# or patch's as a call of a function of that name, which the harness answers with an error for the model to read.


@dataclass(frozen=True, slots=True)
class Kind:
    """The kind of a tool that is offered as a function: its type and name as the harness knows them."""

    type: str
    name: str
    namespace: str = ""


@dataclass(slots=True)
class Toolbox:
    """What a request offers: chat tools by name, the kind of each that is not a plain function, and the kinds that were dropped."""

    functions: dict[str, dict[str, Any]] = field(default_factory=dict)
    kinds: dict[str, Kind] = field(default_factory=dict)
    dropped: list[str] = field(default_factory=list)

    @property
    def tools(self) -> list[dict[str, Any]]:
        return list(self.functions.values())

    def kind(self, name: str) -> Kind:
        return self.kinds.get(name) or Kind("function", name)

    def add(self, name: str, kind: Kind, description: str | None, parameters: Mapping[str, Any] | None) -> None:
        """A tool that is defined again takes the place of the former."""
        self.functions[name] = function_tool(name, description, parameters)
        self.kinds.pop(name, None)
        if kind != Kind("function", name):
            self.kinds[name] = kind


def toolbox(definitions: Iterable[Any]) -> Toolbox:
    """Raises RequestError for a definition that cannot be read."""
    box = Toolbox()
    for definition in definitions:
        _offer(box, definition, "")
    return box


def _offer(box: Toolbox, definition: Any, namespace: str) -> None:
    if not isinstance(definition, dict):
        raise RequestError("'tools' must be a list of objects", param="tools")
    kind = _type(definition)
    if kind == "namespace" and not namespace:
        for inner in _list(definition, "tools"):
            _offer(box, inner, _name(definition))
    elif kind == "function":
        name = _name(definition)
        parameters = fields.mapping(definition, "parameters")
        shown = canonical_name(name, namespace)
        box.add(shown, Kind("function", name, namespace), fields.text(definition, "description"), parameters)
    elif kind == "custom":
        _offer_custom(box, definition, namespace)
    elif kind in _BUILT_IN and not _runs_remotely(definition):
        description, properties, required = _BUILT_IN[kind]
        box.add(kind, Kind(kind, kind), description, _object(properties, required))
    else:
        box.dropped.append(_hosted_kind(kind))


def _offer_custom(box: Toolbox, definition: dict[str, Any], namespace: str) -> None:
    name = _name(definition)
    description = (fields.text(definition, "description") or "") + _format(fields.mapping(definition, "format"))
    properties = {"input": {"type": "string", "description": "The tool's whole input, as plain text."}}
    shown = canonical_name(name, namespace)
    box.add(shown, Kind("custom", name, namespace), description.strip(), _object(properties, ["input"]))


def _format(form: Mapping[str, Any]) -> str:
    """What a custom tool's format asks of its input, for the model to read."""
    definition = form.get("definition")
    if not isinstance(definition, str):
        return ""
    return f"\n\nThe input must follow this grammar ({form.get('syntax')}):\n{definition}"


def _object(properties: Mapping[str, Any], required: list[str]) -> dict[str, Any]:
    return {"type": "object", "properties": dict(properties), "required": required, "additionalProperties": False}


def _runs_remotely(definition: Mapping[str, Any]) -> bool:
    environment = definition.get("environment")
    return isinstance(environment, dict) and environment.get("type") not in (None, "local")


def _hosted_kind(kind: str) -> str:
    """The dropped tool's kind without its date; "unknown" keeps what a client makes up out of the metrics."""
    return next((known for known in _HOSTED_KINDS if kind.startswith(known)), "unknown")


def _type(definition: Mapping[str, Any]) -> str:
    kind = definition.get("type")
    return kind if isinstance(kind, str) else ""


def _name(definition: Mapping[str, Any]) -> str:
    name = definition.get("name")
    if not isinstance(name, str) or not name:
        raise RequestError(f"a {definition['type']} tool needs a 'name'", param="tools")
    return name


def _list(definition: Mapping[str, Any], key: str) -> Sequence[Any]:
    value = definition.get(key)
    if not isinstance(value, list):
        raise RequestError(f"'{key}' of a {definition['type']} tool must be a list", param="tools")
    return value


def tool_choice(choice: Any, box: Toolbox) -> Any:
    """The chat form of `tool_choice`; None for the default. Raises RequestError where it asks for a tool that is not offered.

    `allowed_tools` limits the model to some of the tools: engines know no such limit, so only its mode counts, and its tool when
    it must be called and is the only one.
    """
    if choice is None or choice == "auto" or (choice == "none" and not box.functions):
        return None
    if choice in ("none", "required") and isinstance(choice, str):
        return choice if box.functions else _refuse(choice)
    if not isinstance(choice, dict):
        return _refuse(choice)
    if choice.get("type") == "allowed_tools":
        allowed = _list({"type": "allowed", **choice}, "tools")
        if choice.get("mode") == "required" and len(allowed) == 1 and isinstance(allowed[0], dict):
            return _forced(allowed[0], box)
        return tool_choice(choice.get("mode"), box)
    return _forced(choice, box)


def _forced(choice: Mapping[str, Any], box: Toolbox) -> dict[str, Any]:
    kind, name = _type(choice), choice.get("name")
    wanted = canonical_name(name, choice.get("namespace")) if isinstance(name, str) else kind
    if kind in ("function", "custom") or kind in _BUILT_IN:
        for offered in box.functions:
            if offered == wanted or box.kind(offered).name == wanted:
                return {"type": "function", "function": {"name": offered}}
    raise _refusal(choice)


def _refuse(choice: Any) -> Any:
    raise _refusal(choice)


def _refusal(choice: Any) -> RequestError:
    shown = json.dumps(choice, ensure_ascii=False)[:200]
    return RequestError(f"'tool_choice' asks for what is not offered: {shown}", param="tool_choice")


def noted_kinds(box: Toolbox) -> dict[str, list[str]]:
    """The kinds of the tools as they are kept with a record: tool names by type, and the namespaces."""
    noted: dict[str, list[str]] = {}
    for name, kind in box.kinds.items():
        if kind.type in FORMS:
            noted.setdefault(kind.type, []).append(name)
        if kind.namespace and kind.namespace not in noted.setdefault("namespace", []):
            noted["namespace"].append(kind.namespace)
    return noted


def recalled(tools: Sequence[Mapping[str, Any]], noted: Mapping[str, Sequence[str]]) -> Toolbox:
    """The toolbox of a record: its chat tools and their noted kinds."""
    box = Toolbox()
    spaces = sorted(noted.get("namespace", ()), key=len, reverse=True)
    for tool in tools:
        function = tool["function"]
        name = function["name"]
        space = next((space for space in spaces if name.startswith(f"{space}__")), "")
        kind = next((kind for kind in FORMS if name in noted.get(kind, ())), "function")
        local = name.removeprefix(f"{space}__") if space else name
        box.add(name, Kind(kind, local, space), function.get("description"), function.get("parameters"))
    return box


def definitions(box: Toolbox) -> list[dict[str, Any]]:
    """The tools as a response lists them, from a toolbox that was recalled."""
    listed: list[dict[str, Any]] = []
    spaces: dict[str, list[dict[str, Any]]] = {}
    for name, tool in box.functions.items():
        kind = box.kind(name)
        shown = _definition(kind, tool["function"])
        if not kind.namespace:
            listed.append(shown)
        elif kind.namespace in spaces:
            spaces[kind.namespace].append(shown)
        else:
            spaces[kind.namespace] = [shown]
            space = {"type": "namespace", "name": kind.namespace, "description": "", "tools": spaces[kind.namespace]}
            listed.append(space)
    return listed


def _definition(kind: Kind, function: Mapping[str, Any]) -> dict[str, Any]:
    if kind.type in _BUILT_IN:
        return {"type": kind.type}
    shown = {"type": kind.type, "name": kind.name, "description": function.get("description")}
    if kind.type == "custom":
        return shown
    return {**shown, "parameters": function.get("parameters"), "strict": False}


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


# The ids of the Responses dialect: each names its call, so that a replayed item finds the reply it comes from.
#
# | what | id |
# |---|---|
# | response | `resp_<call id>` |
# | reasoning, message | `rs_<call id>`, `msg_<call id>`; a further one of the same reply `…_<n>` |
# | function, custom, local shell, shell and patch call | `fc_`, `ctc_`, `lsh_`, `sh_`, `apc_` `<call id>_<position>` |
# | what answers a call | `call_<call id>_<position>` (see proxy.minting) |
# | item of a request that had no such id | `in_<call id>_<number>` |


_ITEM = re.compile(r"(rs|msg|fc|ctc|lsh|sh|apc|call)_([0-9a-f]{24})(?:_(\d{1,6}))?")
_RESPONSE = re.compile(r"resp_([0-9a-f]{24})")


@dataclass(frozen=True, slots=True)
class Named:
    """What an item's id says: which call, and for a tool call its position there. `kind` is the id's prefix."""

    kind: str
    call_id: str
    position: int = 0


def response_id(call_id: str) -> str:
    return f"resp_{call_id}"


def answering_call(response: str) -> str | None:
    """The call behind a response's id; None where this service minted no such id."""
    match = _RESPONSE.fullmatch(response)
    return match[1] if match else None


def named(*identifiers: object) -> Named | None:
    """What the first of the ids that this service minted says; None when there is none among them."""
    for identifier in identifiers:
        match = _ITEM.fullmatch(identifier) if isinstance(identifier, str) else None
        if match:
            return Named(match[1], match[2], int(match[3] or 0))
    return None
