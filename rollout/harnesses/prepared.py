"""A harness made ready for one run: every placeholder filled in."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where the session is. `base_urls` has `openai`, `anthropic` and `gemini`, as `POST /sessions` answers them."""

    base_urls: Mapping[str, str]
    api_key: str


@dataclass(frozen=True, slots=True)
class Prepared:
    """`env` is set over the surroundings, `unset` are variables that would lead the harness elsewhere, `files` map paths
    relative to the home to their text. Environment and files hold the session's key."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    files: Mapping[str, str]
    unset: tuple[str, ...]
    stdin: bytes = b""

    def write(self, home: Path) -> list[Path]:
        """The files written below `home`, readable by their owner alone, beside a directory for temporary files. Raises
        `OutsideHome` when a link in `home` leads out of it."""
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
    """The harness's TMPDIR. Codex withholds its helper programs where its home is below it, so it is below the home."""
    return home / "tmp"


# The environment a harness runs in: the caller's, without what would lead it elsewhere or is not its to know.
#
# Withheld are the settings and keys of every model vendor and agent (they would send calls past the session), proxies (they would
# divert calls to it), Verbatim's own tokens, other credentials (a sampled command may print them into a training row), and what
# points into the caller's home.


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
    """Whether a variable of the caller never reaches a harness unless it is passed on by name."""
    return _WITHHELD.fullmatch(variable) is not None


def build_environment(
    outer: Mapping[str, str], prepared: Prepared, home: Path, passed: Mapping[str, str] | None = None
) -> dict[str, str]:
    """The harness's whole environment. `outer` is the caller's; `passed` are variables the caller gives it on purpose, which
    win over everything else. PATH is kept; HOME is `home`, and TMPDIR below it."""
    env = {name: value for name, value in outer.items() if not is_withheld(name) and name not in prepared.unset}
    return env | home_variables(home) | dict(prepared.env) | dict(passed or {})


def home_variables(home: Path) -> dict[str, str]:
    """What makes `home` a harness's home."""
    return {"HOME": str(home), "TMPDIR": str(temporary_directory(home))}


# What can go wrong with a harness before it runs.
#
# HarnessError
# ├── UnknownHarness        no definition of that name or at that path
# ├── BadDefinition         a definition breaks a rule of its format
# │   ├── UnknownField      a field that the format does not have
# │   ├── UnknownPlaceholder  `{name}` with a name that stands for nothing
# │   └── OutsideHome       a file that would be written outside the harness's home
# ├── NotTaken              a task passes on what the harness has no place for
# ├── PromptTooLong         the system passes no argument of that length
# ├── MissingExecutable     there is no such command on PATH
# └── CannotStart           the command is there, and the system does not run it


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


class NotTaken(HarnessError):
    pass


class PromptTooLong(HarnessError):
    pass


class MissingExecutable(HarnessError):
    pass


class CannotStart(HarnessError):
    pass


# Placeholders in the text of a definition: `{name}` stands for a value of the run.
#
# Only a known name in single braces is one, so JSON and code are written as they are. `{{name}}` gives a literal `{name}`, and
# `${name}` is the shell's. Values are put in once: what looks like a placeholder in a prompt stays as it is.


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
