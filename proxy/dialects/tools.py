"""Tools and their arguments on the way between a vendor's shape and the chat shape.

Chat arguments are text that the model wrote; other vendors speak of objects. Text that is no JSON object travels in a wrapper
(the one Claude Code makes of a call it cannot read) and is read back as it was, so that a replay still names its exact call.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from proxy.dialects.body import decode
from proxy.errors import RequestError

UNPARSED = "__unparsedToolInput"


def function_tool(name: str, description: str | None, parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    """A chat function tool; a function without parameters takes none."""
    function: dict[str, Any] = {"name": name}
    if description:
        function["description"] = description
    function["parameters"] = dict(parameters) if parameters else {"type": "object", "properties": {}}
    return {"type": "function", "function": function}


def tool_call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def made_up_id(position: int) -> str:
    """The id of a call that came without one, by its position in its turn: nine letters and digits, as the templates of Mistral want."""
    return f"call{position:05d}"


def arguments_object(arguments: str) -> dict[str, Any]:
    """Arguments as the object a vendor's client expects."""
    if not arguments.strip():
        return {}
    try:
        value = decode(arguments.encode("utf-8", "replace"))
    except RequestError:
        value = None
    return value if isinstance(value, dict) else {UNPARSED: arguments}


def arguments_text(value: Any) -> str:
    """The text that `arguments_object` was made of; for an object that a client wrote, its JSON."""
    if isinstance(value, dict) and value.keys() == {UNPARSED}:
        told = value[UNPARSED]
        # Claude Code 2.1 writes {"raw": text, "len": number} where it read such a text itself.
        raw = told.get("raw") if isinstance(told, dict) else told
        if isinstance(raw, str):
            return raw
    return json.dumps(value if value is not None else {}, ensure_ascii=False)
