"""Placeholders in the text of a definition: `{name}` stands for a value of the run.

Only a known name in single braces is one, so JSON and code are written as they are. `{{name}}` gives a literal `{name}`, and
`${name}` is the shell's. Values are put in once: what looks like a placeholder in a prompt stays as it is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from rollout.harnesses.errors import UnknownPlaceholder

NAMES = ("openai", "anthropic", "gemini", "api_key", "model", "prompt", "home", "workdir")

_PLACEHOLDER = re.compile(r"\{\{(?P<literal>[a-z_]+)\}\}|(?<!\$)\{(?P<name>[a-z_]+)\}")
_QUOTED_FORMATS = (".json", ".toml", ".yaml")
_NO_ASCII = re.compile(r"[^ -~]")


def check(text: str, where: str) -> None:
    """Raises `UnknownPlaceholder`, which says `where`, for a `{name}` that stands for nothing."""
    for found in _PLACEHOLDER.finditer(text):
        name = found["name"]
        if name is not None and name not in NAMES:
            known = ", ".join(NAMES)
            raise UnknownPlaceholder(
                f"{where}: {{{name}}} stands for nothing (known: {known}); {{{{{name}}}}} writes it as it is"
            )


def uses(text: str, name: str) -> bool:
    return any(found["name"] == name for found in _PLACEHOLDER.finditer(text))


def fill(text: str, values: Mapping[str, str]) -> str:
    """`text` with every placeholder replaced by its value; `values` has all of `NAMES`."""
    return _PLACEHOLDER.sub(lambda found: f"{{{found['literal']}}}" if found["literal"] else values[found["name"]], text)


def fill_file(path: str, text: str, values: Mapping[str, str]) -> str:
    """`fill` for a file's text. In JSON, TOML and YAML files a placeholder stands inside a double-quoted string, so the value is
    escaped for one: a prompt with quotes or line ends leaves the file well formed."""
    if path.endswith(_QUOTED_FORMATS):
        values = {name: _quoted(value, path) for name, value in values.items()}
    return fill(text, values)


def _quoted(value: str, path: str) -> str:
    escaped = json.dumps(value, ensure_ascii=False)[1:-1]
    # TOML and YAML forbid some characters that JSON takes as they are, and YAML takes some for line ends.
    return escaped if path.endswith(".json") else _NO_ASCII.sub(lambda found: f"\\U{ord(found[0]):08x}", escaped)
