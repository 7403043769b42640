"""A harness prepared for one run: placeholders filled in, files written, and the environment it runs in.

HarnessError
├── UnknownHarness          no definition of that name or at that path
├── BadDefinition           a definition breaks a rule of the format
│   ├── UnknownField        a field that the format does not have
│   ├── UnknownPlaceholder  `{name}` with an unknown name
│   └── OutsideHome         a file would be written outside the harness's home
├── UnknownBaseUrl          a base URL that the service does not have
├── NotTaken                the task has something that the harness does not accept
├── PromptTooLong           the system passes no argument of that length
├── MissingExecutable       no such command on PATH
└── CannotStart             the system does not run the command
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class SessionAccess:
    """How to reach the session. `base_urls` are those of the response to `POST /sessions`."""

    base_urls: Mapping[str, str]
    api_key: str


@dataclass(frozen=True, slots=True)
class Prepared:
    """`env` overrides the environment, from which `unset` is removed; `files` maps paths below the home to texts. `env` and `files` contain
    the session's key."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    files: Mapping[str, str]
    unset: tuple[str, ...]
    stdin: bytes = b""

    def write(self, home: Path) -> list[Path]:
        """Write the files below `home`, readable by the owner only, and make the folder for temporary files. Returns the paths. Raises
        `OutsideHome` if a link in `home` leads out of it."""
        temporary_directory(home).mkdir(parents=True, exist_ok=True)
        written = []
        for path, text in self.files.items():
            target = home / path
            if not target.resolve().is_relative_to(home.resolve()):
                raise OutsideHome(f"{path} would be written to {target.resolve()}, outside {home}")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.unlink(missing_ok=True)
            with os.fdopen(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
                file.write(text)
            written.append(target)
        return written


def temporary_directory(home: Path) -> Path:
    """The harness's TMPDIR, below its home: Codex withholds its helper programs if its home is below TMPDIR."""
    return home / "tmp"


# Withheld from a harness: the settings and keys of every model vendor and agent (calls would bypass the session), proxies (they would
# divert its calls), Verbatim's tokens, other credentials (a sampled command may print them into a training row), and paths into the
# caller's home.


_WITHHELD = re.compile(
    r"(?:OPENAI|ANTHROPIC|GEMINI|GOOGLE|VERTEX|VERTEXAI|AZURE|AWS|DEEPSEEK|GROQ|MISTRAL|XAI|OPENROUTER|DASHSCOPE|OLLAMA|LITELLM"
    r"|CODEX|CLAUDE|CLAUDECODE|QWEN|PI|OPENCODE|MSWEA|AIDER|CLINE|CONTINUE|COPILOT|FACTORY|GPTME|KILO|KIMI|LLM|MOONSHOT|OPENHANDS"
    r"|VIBE|VERBATIM|XDG)(?:_.*)?"
    r"|(?:HTTP|HTTPS|ALL|FTP|WS|WSS)_PROXY"
    r"|(?:.*_)?(?:API_?KEY|TOKEN|SECRET|PASSWORD|ACCESS_KEY|CREDENTIALS)"
    r"|SSH_AUTH_SOCK|DBUS_SESSION_BUS_ADDRESS",
    re.IGNORECASE,
)


def is_withheld(variable: str) -> bool:
    """Whether a variable of the caller only reaches a harness if it is passed by name."""
    return _WITHHELD.fullmatch(variable) is not None


def build_environment(
    outer: Mapping[str, str], prepared: Prepared, home: Path, passed: Mapping[str, str] | None = None
) -> dict[str, str]:
    """The harness's whole environment. `outer` is the caller's; `passed` are variables given on purpose, which win over all others. PATH is
    kept; HOME is `home`, with TMPDIR below it."""
    env = {name: value for name, value in outer.items() if not is_withheld(name) and name not in prepared.unset}
    return env | home_variables(home) | dict(prepared.env) | dict(passed or {})


def home_variables(home: Path) -> dict[str, str]:
    """The variables that make `home` a harness's home."""
    return {"HOME": str(home), "TMPDIR": str(temporary_directory(home))}


class HarnessError(Exception):
    """The message names the value and the rule it broke."""


class UnknownHarness(HarnessError):
    pass


class BadDefinition(HarnessError):
    pass


class UnknownField(BadDefinition):
    pass


class UnknownPlaceholder(BadDefinition):
    pass


class OutsideHome(BadDefinition):
    pass


class UnknownBaseUrl(HarnessError):
    pass


class NotTaken(HarnessError):
    pass


class PromptTooLong(HarnessError):
    pass


class MissingExecutable(HarnessError):
    pass


class CannotStart(HarnessError):
    pass


# Placeholders: `{name}` with a known name, or `{base_url:NAME}`, is replaced by a value of the run; other braces, as in JSON and code,
# stay. `{{name}}` gives a literal `{name}`, and `${name}` is the shell's. Values are not filled in again: braces in a prompt stay.
# A limit may be unknown: `{window:131072}` then stands for 131072, and what uses `{window}` or `{window/1048576}` (the window as a
# fraction of that) is left out: a word, a variable, or a line of a file.


LIMITS = ("window", "max_input", "max_output", "reserve")
"""Placeholders of tokens that a harness has, `Limits` of `rollout.harnesses.limits`; those that nobody knows have no value."""
NAMES = ("openai", "anthropic", "gemini", "api_key", "model", "prompt", "home", "workdir", *LIMITS)
BASE_URL = "base_url:"
"""Before the name of a base URL of the session. The built-in dialects' also go by their names alone; only the service knows all names."""

_URLS = ("openai", "anthropic", "gemini", BASE_URL)

_PLACEHOLDER = re.compile(
    r"\{\{(?P<literal>[a-z_]+)\}\}|(?<!\$)\{(?P<name>base_url:[A-Za-z0-9._-]+|[a-z_]+)\}"
    rf"|(?<!\$)\{{(?P<limit>{'|'.join(LIMITS)})(?::(?P<default>[0-9]+)|/(?P<whole>[1-9][0-9]*))\}}"
)
_QUOTED_FORMATS = (".json", ".toml", ".yaml")
_NO_ASCII = re.compile(r"[^ -~]")


def check(text: str, where: str) -> None:
    """Raises `UnknownPlaceholder` for a `{name}` with an unknown name; `where` begins its message."""
    for found in _PLACEHOLDER.finditer(text):
        name = found["name"]
        if name is not None and name not in NAMES and not name.startswith(BASE_URL):
            known = ", ".join((*NAMES, f"{BASE_URL}NAME"))
            raise UnknownPlaceholder(
                f"{where}: {{{name}}} stands for nothing (known: {known}); {{{{{name}}}}} writes it as it is"
            )


def uses(text: str, name: str) -> bool:
    return any(name in (found["name"], found["limit"]) for found in _PLACEHOLDER.finditer(text))


def lacks_limit(text: str, values: Mapping[str, str]) -> bool:
    """Whether the text needs a limit that `values` does not have."""
    needed = [found["name"] or found["limit"] for found in _PLACEHOLDER.finditer(text) if found["default"] is None]
    return any(name in LIMITS and name not in values for name in needed)


def uses_base_url(text: str) -> bool:
    return any((found["name"] or "").startswith(_URLS) for found in _PLACEHOLDER.finditer(text))


def fill(text: str, values: Mapping[str, str]) -> str:
    """`text` with every placeholder replaced; `values` has all of `NAMES` but unknown limits, and the session's base URLs. Raises
    `UnknownBaseUrl`."""
    return _PLACEHOLDER.sub(lambda found: _find(found, values), text)


def _find(found: re.Match[str], values: Mapping[str, str]) -> str:
    if found["literal"]:
        return f"{{{found['literal']}}}"
    if found["whole"]:
        return f"{min(1.0, int(values[found['limit']]) / int(found['whole'])):.6f}"
    if found["limit"]:
        return values.get(found["limit"], found["default"])
    if (name := found["name"]) not in values:
        known = ", ".join(sorted(each.removeprefix(BASE_URL) for each in values if each.startswith(BASE_URL)))
        raise UnknownBaseUrl(f"{{{name}}}: the service has no such base URL; it has {known}")
    return values[name]


def fill_file(path: str, text: str, values: Mapping[str, str]) -> str:
    """`fill` for a file's text, without the lines that lack a limit. In JSON, TOML and YAML files placeholders stand in double-quoted
    strings, so values are escaped: a prompt with quotes or line ends leaves the file well formed."""
    text = "".join(line for line in text.splitlines(keepends=True) if not lacks_limit(line, values))
    if path.endswith(_QUOTED_FORMATS):
        values = {name: _escape(value, path) for name, value in values.items()}
    return fill(text, values)


def _escape(value: str, path: str) -> str:
    escaped = json.dumps(value, ensure_ascii=False)[1:-1]
    # TOML and YAML forbid some characters that JSON allows, and YAML treats some as line ends.
    return escaped if path.endswith(".json") else _NO_ASCII.sub(lambda found: f"\\U{ord(found[0]):08x}", escaped)
