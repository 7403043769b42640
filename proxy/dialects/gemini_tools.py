"""Google's tools as chat tools: function declarations, and which of them may or must be called.

Tools that Google runs itself (search, code execution, ...) are left out: no engine can serve them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from proxy.dialects import fields
from proxy.dialects.gemini_json import many, one, shallow
from proxy.dialects.gemini_schema import json_schema
from proxy.dialects.tools import function_tool
from proxy.errors import RequestError

_SERVED_BY_GOOGLE = frozenset(
    {"googleSearch", "googleSearchRetrieval", "enterpriseWebSearch", "urlContext", "codeExecution", "googleMaps"}
    | {"computerUse", "fileSearch", "retrieval", "mcpServers"}
)

_AUTO_MODES = frozenset({"AUTO", "VALIDATED", "MODE_UNSPECIFIED"})


def offered_tools(body: Mapping[str, Any]) -> tuple[list[dict[str, Any]], list[str]]:
    """(chat tools, the kinds of tools that were left out)."""
    offered, left_out = [], []
    for tool in many(body, "tools"):
        for kind in tool:
            if kind == "functionDeclarations":
                offered += [_function(declared) for declared in many(tool, kind)]
            else:
                # The kind becomes a metric's label: a caller must not be able to make up ever more of them.
                left_out.append(kind if kind in _SERVED_BY_GOOGLE else "other")
    return offered, left_out


def _function(declared: Mapping[str, Any]) -> dict[str, Any]:
    name = fields.text(declared, "name")
    if not name:
        raise RequestError("a function declaration must have a 'name'", param="functionDeclarations")
    if "parametersJsonSchema" in declared:
        parameters = shallow(fields.mapping(declared, "parametersJsonSchema"), "parametersJsonSchema")
    else:
        parameters = json_schema(declared.get("parameters", {}), "parameters")
    return function_tool(name, fields.text(declared, "description"), parameters)


def tool_choice(body: Mapping[str, Any], tools: Sequence[Mapping[str, Any]]) -> Any:
    """The chat request's `tool_choice`, None where it is the default. Several allowed names under ANY become "required": engines
    can force one function or any of all."""
    config = one(one(body, "toolConfig"), "functionCallingConfig")
    mode = (fields.text(config, "mode") or "AUTO").upper()
    if mode not in _AUTO_MODES and mode not in ("ANY", "NONE"):
        raise RequestError(f"functionCallingConfig.mode must be AUTO, ANY, VALIDATED or NONE, not '{mode}'", param="mode")
    allowed = fields.strings(config, "allowedFunctionNames")
    known = {tool["function"]["name"] for tool in tools}
    if unknown := [name for name in allowed if name not in known]:
        raise RequestError(f"allowedFunctionNames names '{unknown[0]}', which is not declared", param="allowedFunctionNames")
    if mode == "ANY" and not tools:
        raise RequestError("functionCallingConfig.mode ANY needs function declarations", param="mode")
    if mode == "NONE":
        return "none" if tools else None
    if mode != "ANY":
        return None
    return {"type": "function", "function": {"name": allowed[0]}} if len(allowed) == 1 else "required"
