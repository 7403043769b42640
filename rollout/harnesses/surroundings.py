"""The environment a harness runs in: the caller's, without what would lead it elsewhere or is not its to know.

Withheld are the settings and keys of every model vendor and agent (they would send calls past the session), proxies (they would
divert calls to it), Verbatim's own tokens, other credentials (a sampled command may print them into a training row), and what
points into the caller's home.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from rollout.harnesses.prepared import Prepared, temporary_directory

_WITHHELD = re.compile(
    r"(?:OPENAI|ANTHROPIC|GEMINI|GOOGLE|VERTEX|VERTEXAI|AZURE|AWS|DEEPSEEK|GROQ|MISTRAL|XAI|OPENROUTER|DASHSCOPE|OLLAMA|LITELLM"
    r"|CODEX|CLAUDE|CLAUDECODE|QWEN|PI|OPENCODE|MSWEA|AIDER|CLINE|CONTINUE|COPILOT|FACTORY|GPTME|KILO|KIMI|LLM|MOONSHOT|OPENHANDS"
    r"|VIBE|VERBATIM|XDG)(?:_.*)?"
    r"|(?:HTTP|HTTPS|ALL|FTP|WS|WSS)_PROXY"
    r"|(?:.*_)?(?:API_?KEY|TOKEN|SECRET|PASSWORD|ACCESS_KEY|CREDENTIALS)"
    r"|SSH_AUTH_SOCK|DBUS_SESSION_BUS_ADDRESS",
    re.IGNORECASE,
)


def withheld(variable: str) -> bool:
    """Whether a variable of the caller never reaches a harness unless it is passed on by name."""
    return _WITHHELD.fullmatch(variable) is not None


def surroundings(
    outer: Mapping[str, str], prepared: Prepared, home: Path, passed: Mapping[str, str] | None = None
) -> dict[str, str]:
    """The harness's whole environment. `outer` is the caller's; `passed` are variables the caller gives it on purpose, which
    win over everything else. PATH is kept; HOME is `home`, and TMPDIR below it."""
    env = {name: value for name, value in outer.items() if not withheld(name) and name not in prepared.unset}
    return env | home_variables(home) | dict(prepared.env) | dict(passed or {})


def home_variables(home: Path) -> dict[str, str]:
    """What makes `home` a harness's home."""
    return {"HOME": str(home), "TMPDIR": str(temporary_directory(home))}
