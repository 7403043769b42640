"""Anthropic's tools that the client runs, spelt out as functions: the vendor's own models know them by their type alone.

Names, commands and parameters are those of Anthropic's documentation of each tool.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from proxy.dialects.tools import function_tool

_TEXT = {"type": "string"}
_COUNT = {"type": "integer"}
_POINT = {"type": "array", "items": _COUNT, "minItems": 2, "maxItems": 2}


def client_tool(kind: str, date: str, tool: Mapping[str, Any]) -> dict[str, Any] | None:
    """The chat function for a tool of type `<kind>_<date>`; None when the kind is not one that a client runs."""
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


def _said(schema: Mapping[str, Any], description: str) -> dict[str, Any]:
    return {**schema, "description": description}


_BASH = {
    "type": "object",
    "properties": {
        "command": _said(_TEXT, "The command to run. Needed unless the shell is restarted."),
        "restart": {"type": "boolean", "description": "True restarts the shell."},
    },
}


def _file_edits() -> dict[str, Any]:
    """The parameters that editing a file and editing a memory share."""
    return {
        "view_range": _said(
            _POINT, "view: first and last line to show, counted from 1; -1 as the last is the end of the file."
        ),
        "file_text": _said(_TEXT, "create: the content of the new file."),
        "old_str": _said(_TEXT, "str_replace: the text to replace, exactly as it stands in the file, once."),
        "new_str": _said(_TEXT, "str_replace: the text to put in its place."),
        "insert_line": _said(_COUNT, "insert: the line after which to insert, 0 for the beginning of the file."),
    }


def _editor(date: str) -> dict[str, Any]:
    edits = _file_edits()
    commands = ["view", "create", "str_replace", "insert"]
    if date <= "20250124":
        # The first versions insert `new_str` and can undo; later ones have a parameter for it and no way back.
        commands.append("undo_edit")
        edits["new_str"] = _said(_TEXT, "str_replace: the text to put in its place; insert: the text to insert.")
    else:
        edits["insert_text"] = _said(_TEXT, "insert: the text to insert.")
    path = _said(_TEXT, "Absolute path of the file or directory.")
    return _schema(("command", "path"), {"command": _one_of(*commands), "path": path, **edits})


def _memory() -> dict[str, Any]:
    commands = _one_of("view", "create", "str_replace", "insert", "delete", "rename")
    moves = {"old_path": _said(_TEXT, "rename: the path now."), "new_path": _said(_TEXT, "rename: the path afterwards.")}
    path = _said(_TEXT, "Path under /memories; all commands but rename need it.")
    inserted = {"insert_text": _said(_TEXT, "insert: the text to insert.")}
    return _schema(("command",), {"command": commands, "path": path, **_file_edits(), **inserted, **moves})


_ACTIONS_2024 = (
    *("key", "type", "mouse_move", "left_click", "left_click_drag", "right_click", "middle_click", "double_click"),
    *("screenshot", "cursor_position"),
)
_ACTIONS_2025 = ("left_mouse_down", "left_mouse_up", "scroll", "hold_key", "wait", "triple_click")


def _computer(date: str) -> dict[str, Any]:
    actions = list(_ACTIONS_2024)
    parameters = {
        "coordinate": _said(_POINT, "(x, y) in pixels from the upper left corner; where a drag ends."),
        "text": _said(_TEXT, "type: the text; key and hold_key: the keys, as ctrl+s; clicks: keys held meanwhile."),
    }
    if date >= "20250124":
        actions += _ACTIONS_2025
        parameters |= {
            "start_coordinate": _said(_POINT, "left_click_drag: where it begins."),
            "scroll_direction": _one_of("up", "down", "left", "right"),
            "scroll_amount": _said(_COUNT, "scroll: how many clicks of the wheel."),
            "duration": {"type": "number", "description": "wait and hold_key: seconds."},
        }
    if date >= "20251124":
        actions.append("zoom")
        corners = {"type": "array", "items": _COUNT, "minItems": 4, "maxItems": 4}
        parameters["region"] = _said(corners, "zoom: (x0, y0, x1, y1) of what to show enlarged.")
    return _schema(("action",), {"action": _one_of(*actions), **parameters})
