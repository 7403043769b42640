"""A small MCP server on stdin and stdout with one tool, `weather_report`; stdlib only. It says of itself what its variable says.

Run as a program by the agents under test."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

TOOL = {
    "name": "weather_report",
    "description": "The weather of a place.",
    "inputSchema": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
}


def answer(method: str, params: dict[str, Any]) -> dict[str, Any] | None:
    """The result of a request; None for a method that there is not."""
    if method == "initialize":
        server = {"name": "weather", "version": "1"}
        return {"protocolVersion": params["protocolVersion"], "capabilities": {"tools": {}}, "serverInfo": server}
    if method == "tools/list":
        return {"tools": [TOOL]}
    if method == "tools/call":
        said = f"{os.environ.get('WEATHER', 'unknown')} in {params['arguments']['place']}"
        return {"content": [{"type": "text", "text": said}]}
    return {} if method == "ping" else None


def main() -> None:
    for line in sys.stdin:
        asked = json.loads(line)
        if "id" not in asked or "method" not in asked:
            continue
        result = answer(asked["method"], asked.get("params") or {})
        told = {"result": result} if result is not None else {"error": {"code": -32601, "message": "no such method"}}
        sys.stdout.write(json.dumps({"jsonrpc": "2.0", "id": asked["id"], **told}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
