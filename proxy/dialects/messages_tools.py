"""Tools of the Messages dialect: which are offered as functions, and which are dropped because only Anthropic's servers could run them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from proxy.dialects import fields
from proxy.dialects.base import Past
from proxy.dialects.fields import function_tool
from proxy.errors import RequestError

_DATED = re.compile(r"(?P<kind>.+?)_(?P<date>\d{8})\Z")
_SERVER_KINDS = (
    *("web_search", "web_fetch", "code_execution", "tool_search", "mcp_toolset", "advisor"),
    *("browser_toolset", "computer_toolset"),
)
"""Tools that no function can replace: Anthropic's servers run them, or one type is a whole set of tools."""


def parse_tools(body: Mapping[str, Any], past: Past) -> tuple[list[dict[str, Any]], list[str]]:
    """(the body's tools as chat functions, kinds of everything else it asks for and cannot have). Raises RequestError for a tool without
    a name or with a schema that is no object."""
    functions, kinds = past.convert(body.get("tools"), _functions)
    dropped = [*kinds]
    if body.get("mcp_servers"):
        dropped.append("mcp_servers")
    if _edits_context(body):
        dropped.append("context_management")
    return functions, dropped


def _functions(tools: Any) -> tuple[list[dict[str, Any]], list[str]]:
    """(the tools as chat functions, kinds of the others)."""
    functions: list[dict[str, Any]] = []
    dropped: list[str] = []
    for tool in fields.objects({"tools": tools}, "tools"):
        function = _function(tool)
        if function is None:
            dropped.append(_server_kind(str(tool.get("type"))))
        else:
            functions.append(function)
    return functions, dropped


def _function(tool: dict[str, Any]) -> dict[str, Any] | None:
    kind = tool.get("type") or "custom"
    if not isinstance(kind, str):
        raise RequestError("a tool's 'type' must be a string", param="tools")
    if kind == "custom":
        return _custom(tool)
    dated = _DATED.match(kind)
    if dated is None or not isinstance(tool.get("name"), str):
        return None
    return _client_tool(dated["kind"], dated["date"], tool)


def _custom(tool: dict[str, Any]) -> dict[str, Any]:
    name, schema = tool.get("name"), tool.get("input_schema")
    if not isinstance(name, str) or not name:
        raise RequestError("tools: a tool's 'name' must be a non-empty string", param="tools")
    if schema is not None and not isinstance(schema, dict):
        raise RequestError(f"tools: the 'input_schema' of '{name}' must be an object", param="tools")
    return function_tool(name, fields.text(tool, "description"), schema)


def _server_kind(kind: str) -> str:
    """The kind as one of a fixed list, whatever the harness wrote, since it labels a metric."""
    return next((known for known in _SERVER_KINDS if kind.startswith(known)), "other")


def _edits_context(body: Mapping[str, Any]) -> bool:
    """Whether Anthropic would cut the history, which is any edit but keeping all thinking, as this service does anyway."""
    edits = fields.objects(fields.mapping(body, "context_management"), "edits")
    return any(not str(edit.get("type")).startswith("clear_thinking") or not _keeps_all(edit) for edit in edits)


def _keeps_all(edit: Mapping[str, Any]) -> bool:
    keep = edit.get("keep")
    return keep == "all" or (isinstance(keep, dict) and keep.get("type") == "all")


def parse_tool_choice(body: Mapping[str, Any], functions: list[dict[str, Any]]) -> dict[str, Any]:
    """`tool_choice` and `parallel_tool_calls` of the chat body. Raises RequestError for a choice of a tool that is not offered."""
    choice = fields.mapping(body, "tool_choice")
    kind = choice.get("type")
    if not choice or (not functions and kind in ("auto", "none")):
        return {}
    if kind not in ("auto", "any", "tool", "none"):
        raise RequestError("tool_choice: 'type' must be auto, any, tool or none", param="tool_choice")
    names = [function["function"]["name"] for function in functions]
    if (kind == "any" and not names) or (kind == "tool" and choice.get("name") not in names):
        raise RequestError("tool_choice: there is no such tool among those that can be offered", param="tool_choice")
    named = {"type": "function", "function": {"name": choice.get("name")}}
    chosen: dict[str, Any] = {"tool_choice": {"auto": "auto", "any": "required", "tool": named, "none": "none"}[kind]}
    if fields.flag(choice, "disable_parallel_tool_use"):
        chosen["parallel_tool_calls"] = False
    return chosen


# Anthropic's own tools that the client runs, spelt out as functions: only Anthropic's models know them by type. Names, commands and
# parameters are those of the documentation of each tool.

_TEXT = {"type": "string"}
_COUNT = {"type": "integer"}
_POINT = {"type": "array", "items": _COUNT, "minItems": 2, "maxItems": 2}


def _client_tool(kind: str, date: str, tool: Mapping[str, Any]) -> dict[str, Any] | None:
    """The chat function for a tool of type `<kind>_<date>`; None if a client does not run tools of that kind."""
    name = tool["name"]
    if kind == "bash":
        return function_tool(name, "Run commands in a bash shell that keeps its state between calls.", _BASH)
    if kind == "text_editor":
        return function_tool(name, "View, create and edit text files.", _editor(date))
    if kind == "memory":
        return function_tool(name, "Keep notes in files under /memories that outlive this conversation.", _memory())
    if kind == "computer":
        size = f"{tool.get('display_width_px')} by {tool.get('display_height_px')} pixels"
        return function_tool(name, f"Use the mouse, keyboard and screen of a computer. The display is {size}.", _computer(date))
    return None


def _schema(required: Sequence[str], properties: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": dict(properties), "required": list(required)}


def _one_of(*values: str) -> dict[str, Any]:
    return {"type": "string", "enum": list(values)}


def _describe(schema: Mapping[str, Any], description: str) -> dict[str, Any]:
    return {**schema, "description": description}


_BASH = {
    "type": "object",
    "properties": {
        "command": _describe(_TEXT, "The command to run. Needed unless the shell is restarted."),
        "restart": {"type": "boolean", "description": "True restarts the shell."},
    },
}


def _file_edits() -> dict[str, Any]:
    """The parameters that editing a file and editing a memory share."""
    return {
        "view_range": _describe(
            _POINT, "view: first and last line to show, counted from 1; -1 as the last is the end of the file."
        ),
        "file_text": _describe(_TEXT, "create: the content of the new file."),
        "old_str": _describe(_TEXT, "str_replace: the text to replace, exactly as it stands in the file, once."),
        "new_str": _describe(_TEXT, "str_replace: the text to put in its place."),
        "insert_line": _describe(_COUNT, "insert: the line after which to insert, 0 for the beginning of the file."),
    }


def _editor(date: str) -> dict[str, Any]:
    edits = _file_edits()
    commands = ["view", "create", "str_replace", "insert"]
    if date <= "20250124":
        # The first versions insert `new_str` and can undo; later ones have a parameter for it and no way back.
        commands.append("undo_edit")
        edits["new_str"] = _describe(_TEXT, "str_replace: the text to put in its place; insert: the text to insert.")
    else:
        edits["insert_text"] = _describe(_TEXT, "insert: the text to insert.")
    path = _describe(_TEXT, "Absolute path of the file or directory.")
    return _schema(("command", "path"), {"command": _one_of(*commands), "path": path, **edits})


def _memory() -> dict[str, Any]:
    commands = _one_of("view", "create", "str_replace", "insert", "delete", "rename")
    moves = {
        "old_path": _describe(_TEXT, "rename: the path now."),
        "new_path": _describe(_TEXT, "rename: the path afterwards."),
    }
    path = _describe(_TEXT, "Path under /memories; all commands but rename need it.")
    inserted = {"insert_text": _describe(_TEXT, "insert: the text to insert.")}
    return _schema(("command",), {"command": commands, "path": path, **_file_edits(), **inserted, **moves})


_ACTIONS_2024 = (
    *("key", "type", "mouse_move", "left_click", "left_click_drag", "right_click", "middle_click", "double_click"),
    *("screenshot", "cursor_position"),
)
_ACTIONS_2025 = ("left_mouse_down", "left_mouse_up", "scroll", "hold_key", "wait", "triple_click")


def _computer(date: str) -> dict[str, Any]:
    actions = list(_ACTIONS_2024)
    parameters = {
        "coordinate": _describe(_POINT, "(x, y) in pixels from the upper left corner; where a drag ends."),
        "text": _describe(_TEXT, "type: the text; key and hold_key: the keys, as ctrl+s; clicks: keys held meanwhile."),
    }
    if date >= "20250124":
        actions += _ACTIONS_2025
        parameters |= {
            "start_coordinate": _describe(_POINT, "left_click_drag: where it begins."),
            "scroll_direction": _one_of("up", "down", "left", "right"),
            "scroll_amount": _describe(_COUNT, "scroll: how many clicks of the wheel."),
            "duration": {"type": "number", "description": "wait and hold_key: seconds."},
        }
    if date >= "20251124":
        actions.append("zoom")
        corners = {"type": "array", "items": _COUNT, "minItems": 4, "maxItems": 4}
        parameters["region"] = _describe(corners, "zoom: (x0, y0, x1, y1) of what to show enlarged.")
    return _schema(("action",), {"action": _one_of(*actions), **parameters})
