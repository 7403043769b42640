"""MCP servers in a harness's configuration: each is an entry in one table of one file.

    [mcp]
    file = ".codex/config.toml"
    table = "mcp_servers"
    command = {command = "{program}", args = "{arguments}", env = "{env}"}
    url = {url = "{url}"}

`command` is the entry of a server started by a command, `url` of one reached by URL. A value that is exactly `{program}`, `{arguments}`,
`{words}` (both in one list), `{env}` or `{url}` is replaced by the server's; everything else is written as it is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from rollout.harnesses.prepared import BadDefinition

if TYPE_CHECKING:
    from contract.tasks import McpServer

FORMATS = (".json", ".toml")
OF_COMMAND, OF_URL = ("{program}", "{arguments}", "{words}", "{env}"), ("{url}",)


@dataclass(frozen=True, slots=True)
class McpForm:
    """Raises `BadDefinition`. `file` is relative to the home."""

    file: str
    table: str
    command: Mapping[str, Any] = field(default_factory=dict)
    url: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.file.endswith(FORMATS):
            raise BadDefinition(f"mcp: {self.file!r} is none of {', '.join(FORMATS)}")
        if not (self.command or self.url):
            raise BadDefinition("mcp: neither command nor url says what an entry looks like")
        for name, entry, known in (("command", self.command, OF_COMMAND), ("url", self.url, OF_URL)):
            for value in entry.values():
                if isinstance(value, str) and value.startswith("{") and value not in known:
                    raise BadDefinition(f"mcp: {name}: {value} stands for nothing (known: {', '.join(known)})")

    def write(self, text: str, servers: Sequence[McpServer]) -> str:
        """The file's `text` with the servers added."""
        entries = {server.name: self._build_entry(server) for server in servers}
        if self.file.endswith(".json"):
            data = json.loads(text or "{}")
            data[self.table] = {**data.get(self.table, {}), **entries}
            return json.dumps(data, indent=2, ensure_ascii=False) + "\n"
        tables = [_write_toml_table(f"{self.table}.{name}", entry) for name, entry in entries.items()]
        return "\n".join([text, *tables])

    def _build_entry(self, server: McpServer) -> dict[str, Any]:
        if server.url is not None:
            return _fill(self.url, {"{url}": server.url})
        words = list(server.command)
        values = {"{program}": words[0], "{arguments}": words[1:], "{words}": words, "{env}": dict(server.env)}
        return _fill(self.command, values)


def parse_form(data: Any) -> McpForm:
    """Raises `BadDefinition`."""
    known = [each.name for each in fields(McpForm)]
    if not isinstance(data, dict):
        raise BadDefinition("mcp must be a table")
    for key, value in data.items():
        if key not in known:
            raise BadDefinition(f"mcp: there is no field {key!r} (known: {', '.join(known)})")
        wanted = str if key in ("file", "table") else dict
        if not isinstance(value, wanted):
            raise BadDefinition(f"mcp: {key} must be a {'string' if wanted is str else 'table'}")
    for key in ("file", "table"):
        if key not in data:
            raise BadDefinition(f"mcp: {key} is missing")
    return McpForm(**data)


def _fill(entry: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: values.get(value, value) if isinstance(value, str) else value for name, value in entry.items()}


def _write_toml_table(name: str, entry: Mapping[str, Any]) -> str:
    return "".join([f"[{name}]\n", *(f"{key} = {_write_toml(value)}\n" for key, value in entry.items())])


def _write_toml(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_write_toml(key)} = {_write_toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_write_toml, value)) + "]"
    # A JSON string is a TOML string, except for DEL.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
