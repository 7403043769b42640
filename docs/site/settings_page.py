"""The reference of settings, from the settings objects of the service and of a node's runtimes."""

from __future__ import annotations

import ast
import inspect
import json
from itertools import pairwise
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from proxy.settings import GivenToken, Settings, list_variables
from rollout.runtimes.settings import VARIABLES, PodFields, RuntimeSettings

HEAD = """# Settings

Each setting of the service is an environment variable. Lists and maps are JSON. `verbatim serve` has flags for the common ones
([commands](commands.md)); a flag wins over the variable. Runtimes have [settings of their own](#settings-of-a-nodes-runtimes). After each
variable stands its default.

"""


RUNTIMES = """
## Settings of a node's runtimes

Variables of the node's environment ([Runtimes](../runtimes.md)). Where the meaning names None, that is an unset variable.

"""


def render() -> str:
    variables = list_variables(Settings)
    rows = [
        f"- {', '.join(f'`{each}`' for each in variables[name])}{_format_default(field)}: {' '.join((field.description or '').split())}"
        for name, field in Settings.model_fields.items()
    ]
    return HEAD + "\n".join(rows) + "\n" + RUNTIMES + "\n".join(_list_runtimes()) + "\n"


def _list_runtimes() -> list[str]:
    """A row per variable; its meaning is the docstring under the field."""
    body = ast.parse(inspect.getsource(RuntimeSettings)).body[0].body  # type: ignore[attr-defined]
    told = {
        field.target.id: " ".join(after.value.value.split())
        for field, after in pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(after, ast.Expr)
    }
    defaults = RuntimeSettings()
    return [
        f"- `{variable}`{_format_value(getattr(defaults, name))}: {told.get(name, '')}" for name, variable in VARIABLES.items()
    ]


def _format_default(field: Any) -> str:
    value = field.get_default(call_default_factory=True)
    return " (required)" if value is PydanticUndefined else _format_value(value)


def _format_value(value: Any) -> str:
    """The default, after a blank; empty if there is none."""
    if value is None or value in ([], {}, (), "", GivenToken(), PodFields()):
        return ""
    if isinstance(value, BaseModel):
        return f" `{value.model_dump_json(exclude_none=True)}`"
    if isinstance(value, (bool, list, tuple, dict)):
        return f" `{json.dumps(value, default=str)}`"
    return f" `{value}`"
