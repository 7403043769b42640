"""The tools of a Responses request: each kind is offered to the model as a function, or dropped if only OpenAI could serve it.

`namespace` tools are offered as `<namespace>__<name>`; a `custom` tool as a function whose one argument `input` is its text; a local
`shell`, `local_shell` and `apply_patch` as functions of these names. responses_items converts their calls.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from proxy.dialects import fields
from proxy.dialects.fields import function_tool
from proxy.dialects.responses_items import FORMS, ToolKind, canonical_name
from proxy.errors import RequestError

_HOSTED_KINDS = (
    *("web_search", "file_search", "code_interpreter", "image_generation", "computer", "mcp", "tool_search"),
    *("programmatic_tool_calling", "shell"),
)
"""Prefixes of the types of tools that only OpenAI's servers can run."""

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


@dataclass(slots=True)
class Toolbox:
    """What a request offers: chat tools by name, the kind of each that is not a plain function, and the dropped kinds."""

    functions: dict[str, dict[str, Any]] = field(default_factory=dict)
    kinds: dict[str, ToolKind] = field(default_factory=dict)
    dropped: list[str] = field(default_factory=list)
    tools: list[dict[str, Any]] = field(default_factory=list)
    """The chat tools in order."""

    def kind(self, name: str) -> ToolKind:
        return self.kinds.get(name) or ToolKind("function", name)

    def add(self, name: str, kind: ToolKind, description: str | None, parameters: Mapping[str, Any] | None) -> None:
        """A tool defined again replaces the former."""
        self.functions[name] = function_tool(name, description, parameters)
        self.kinds.pop(name, None)
        if kind != ToolKind("function", name):
            self.kinds[name] = kind


def build_toolbox(definitions: Iterable[Any]) -> Toolbox:
    """Raises RequestError for a malformed definition."""
    box = Toolbox()
    for definition in definitions:
        _offer(box, definition, "")
    box.tools = [*box.functions.values()]
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
        box.add(shown, ToolKind("function", name, namespace), fields.text(definition, "description"), parameters)
    elif kind == "custom":
        _offer_custom(box, definition, namespace)
    elif kind in _BUILT_IN and not _runs_remotely(definition):
        description, properties, required = _BUILT_IN[kind]
        box.add(kind, ToolKind(kind, kind), description, _object(properties, required))
    else:
        # "unknown" keeps names that clients make up out of the metrics.
        box.dropped.append(next((known for known in _HOSTED_KINDS if kind.startswith(known)), "unknown"))


def _offer_custom(box: Toolbox, definition: dict[str, Any], namespace: str) -> None:
    name = _name(definition)
    description = (fields.text(definition, "description") or "") + _grammar(fields.mapping(definition, "format"))
    properties = {"input": {"type": "string", "description": "The tool's whole input, as plain text."}}
    shown = canonical_name(name, namespace)
    box.add(shown, ToolKind("custom", name, namespace), description.strip(), _object(properties, ["input"]))


def _grammar(form: Mapping[str, Any]) -> str:
    """What a custom tool's format demands of its input, for the model to read."""
    definition = form.get("definition")
    if not isinstance(definition, str):
        return ""
    return f"\n\nThe input must follow this grammar ({form.get('syntax')}):\n{definition}"


def _object(properties: Mapping[str, Any], required: list[str]) -> dict[str, Any]:
    return {"type": "object", "properties": dict(properties), "required": required, "additionalProperties": False}


def _runs_remotely(definition: Mapping[str, Any]) -> bool:
    environment = definition.get("environment")
    return isinstance(environment, dict) and environment.get("type") not in (None, "local")


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


def parse_tool_choice(choice: Any, box: Toolbox) -> Any:
    """The chat form of `tool_choice`; None for the default. Raises RequestError if it asks for a tool that is not offered.

    `allowed_tools` limits the model to some of the tools. Engines have no such limit, so only its mode counts, and its tool if the call
    is required and it is the only one.
    """
    if choice is None or choice == "auto" or (choice == "none" and not box.functions):
        return None
    if isinstance(choice, str) and choice in ("none", "required") and box.functions:
        return choice
    if not isinstance(choice, dict):
        raise _not_offered(choice)
    if choice.get("type") == "allowed_tools":
        allowed = _list({"type": "allowed", **choice}, "tools")
        if choice.get("mode") == "required" and len(allowed) == 1 and isinstance(allowed[0], dict):
            return _force(allowed[0], box)
        return parse_tool_choice(choice.get("mode"), box)
    return _force(choice, box)


def _force(choice: Mapping[str, Any], box: Toolbox) -> dict[str, Any]:
    kind, name = _type(choice), choice.get("name")
    wanted = canonical_name(name, choice.get("namespace")) if isinstance(name, str) else kind
    if kind in ("function", "custom") or kind in _BUILT_IN:
        for offered in box.functions:
            if offered == wanted or box.kind(offered).name == wanted:
                return {"type": "function", "function": {"name": offered}}
    raise _not_offered(choice)


def _not_offered(choice: Any) -> RequestError:
    shown = json.dumps(choice, ensure_ascii=False)[:200]
    return RequestError(f"'tool_choice' asks for a tool that is not offered: {shown}", param="tool_choice")


# The toolbox of a stored response. The record holds the chat tools; their kinds are kept beside it.


def record_kinds(box: Toolbox) -> dict[str, list[str]]:
    """The kinds as stored: tool names by type, and the namespaces."""
    kinds: dict[str, list[str]] = {}
    for name, kind in box.kinds.items():
        if kind.type in FORMS:
            kinds.setdefault(kind.type, []).append(name)
        if kind.namespace and kind.namespace not in kinds.setdefault("namespace", []):
            kinds["namespace"].append(kind.namespace)
    return kinds


def restore_toolbox(tools: Sequence[Mapping[str, Any]], kinds: Mapping[str, Sequence[str]]) -> Toolbox:
    """From the chat tools and `record_kinds`."""
    box = Toolbox()
    spaces = sorted(kinds.get("namespace", ()), key=len, reverse=True)
    for tool in tools:
        function = tool["function"]
        name = function["name"]
        space = next((space for space in spaces if name.startswith(f"{space}__")), "")
        kind = next((kind for kind in FORMS if name in kinds.get(kind, ())), "function")
        local = name.removeprefix(f"{space}__") if space else name
        box.add(name, ToolKind(kind, local, space), function.get("description"), function.get("parameters"))
    return box


def list_definitions(box: Toolbox) -> list[dict[str, Any]]:
    """The tools of a restored toolbox as a response lists them."""
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


def _definition(kind: ToolKind, function: Mapping[str, Any]) -> dict[str, Any]:
    if kind.type in _BUILT_IN:
        return {"type": kind.type}
    shown = {"type": kind.type, "name": kind.name, "description": function.get("description")}
    if kind.type == "custom":
        return shown
    return {**shown, "parameters": function.get("parameters"), "strict": False}
