"""Tools of the Messages dialect: which are offered as functions, and which only Anthropic's own servers could run."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from proxy.dialects import fields
from proxy.dialects.messages_client_tools import client_tool
from proxy.dialects.tools import function_tool
from proxy.errors import RequestError

_DATED = re.compile(r"(?P<kind>.+?)_(?P<date>\d{8})\Z")
_SERVER_KINDS = (
    *("web_search", "web_fetch", "code_execution", "tool_search", "mcp_toolset", "advisor"),
    *("browser_toolset", "computer_toolset"),
)
"""What no function can stand for: the vendor's servers run them, or one type stands for a whole set of tools."""


def offered(body: Mapping[str, Any]) -> tuple[list[dict[str, Any]], list[str]]:
    """The body's tools as chat functions, and the kinds of what else it asks for and cannot have.

    Raises RequestError for a tool without a name or with a schema that is no object."""
    functions: list[dict[str, Any]] = []
    dropped: list[str] = []
    for tool in fields.objects(body, "tools"):
        function = _function(tool)
        if function is None:
            dropped.append(_server_kind(str(tool.get("type"))))
        else:
            functions.append(function)
    if body.get("mcp_servers"):
        dropped.append("mcp_servers")
    if _edits_context(body):
        dropped.append("context_management")
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
    return client_tool(dated["kind"], dated["date"], tool)


def _custom(tool: dict[str, Any]) -> dict[str, Any]:
    name, schema = tool.get("name"), tool.get("input_schema")
    if not isinstance(name, str) or not name:
        raise RequestError("tools: a tool's 'name' must be a non-empty string", param="tools")
    if schema is not None and not isinstance(schema, dict):
        raise RequestError(f"tools: the 'input_schema' of '{name}' must be an object", param="tools")
    return function_tool(name, fields.text(tool, "description"), schema)


def _server_kind(kind: str) -> str:
    """The kind as a word of this list, whatever the harness wrote: it labels a counter."""
    return next((known for known in _SERVER_KINDS if kind.startswith(known)), "other")


def _edits_context(body: Mapping[str, Any]) -> bool:
    """Whether the vendor would cut the history: everything but keeping all thinking, which is what happens here anyway."""
    edits = fields.objects(fields.mapping(body, "context_management"), "edits")
    return any(not str(edit.get("type")).startswith("clear_thinking") or not _keeps_all(edit) for edit in edits)


def _keeps_all(edit: Mapping[str, Any]) -> bool:
    keep = edit.get("keep")
    return keep == "all" or (isinstance(keep, dict) and keep.get("type") == "all")


def choice_of_tools(body: Mapping[str, Any], functions: list[dict[str, Any]]) -> dict[str, Any]:
    """`tool_choice` and `parallel_tool_calls` of the chat body. Raises RequestError for a choice that cannot be made."""
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
