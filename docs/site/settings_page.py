"""The reference of settings, from the settings object of the service."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cells import escape_cell
from pydantic_core import PydanticUndefined

from proxy.settings import GivenToken, Settings, list_variables

HEAD = """# Settings

Each setting of the service is an environment variable. Lists and maps are JSON. `verbatim serve` has flags for the common ones
([commands](commands.md)); a flag wins over the variable. Nodes and their runtimes have settings of their own:
[Runtimes](../runtimes.md#settings-of-a-node).

| variable | default | meaning |
|---|---|---|
"""


def render() -> str:
    variables = list_variables(Settings)
    rows = [
        f"| {', '.join(f'`{each}`' for each in variables[name])} | {_format_default(field)} | {escape_cell(field.description or '')} |"
        for name, field in Settings.model_fields.items()
    ]
    return HEAD + "\n".join(rows) + "\n"


def _format_default(field: Any) -> str:
    value = field.get_default(call_default_factory=True)
    if value is PydanticUndefined:
        return "required"
    if value is None or value in ([], {}, "", GivenToken()):
        return "-"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, (Path, str, int, float)):
        return f"`{value}`"
    if isinstance(value, (list, tuple, dict)):
        return f"`{escape_cell(json.dumps(value, default=str))}`"
    return f"`{escape_cell(str(value))}`"
