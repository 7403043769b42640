"""The part of a harness's page that is its definition: the one that `verbatim run`, `verbatim env` and nodes use."""

from __future__ import annotations

from pathlib import Path

from rollout.harnesses.catalogue import load
from rollout.harnesses.definition import Harness

DEFINITIONS = Path(__file__).resolve().parents[2] / "rollout" / "harnesses" / "definitions"
DIALECTS = {
    "chat": "OpenAI Chat (`/v1/chat/completions`)",
    "responses": "OpenAI Responses (`/v1/responses`)",
    "messages": "Anthropic Messages (`/v1/messages`)",
    "gemini": "Google generateContent (`/v1beta/models/{model}:generateContent`)",
    "any": "whatever the command speaks",
}


def facts(name: str) -> str:
    """Markdown: what the definition says in a table, and the definition itself."""
    harness = load(name)
    rows = "\n".join(f"| {what} | {said} |" for what, said in _rows(harness))
    definition = (DEFINITIONS / f"{name}.toml").read_text().rstrip()
    # A fence longer than any that the definition may hold.
    return f'\n\n## The definition\n\n| | |\n|---|---|\n{rows}\n\n````toml title="{name}.toml"\n{definition}\n````\n'


def _rows(harness: Harness) -> list[tuple[str, str]]:
    return [
        ("dialect", DIALECTS[harness.dialect]),
        ("tested version", harness.version or "-"),
        ("installed by", "<br>".join(f"`{line}`" for line in harness.install) or "-"),
        ("variables it gets", ", ".join(f"`{variable}`" for variable in harness.env) or "none"),
        ("variables it must not get", ", ".join(f"`{variable}`" for variable in harness.unset) or "those no harness gets"),
        ("files in its home", ", ".join(f"`{path}`" for path in harness.files) or "none"),
        ("MCP servers of a task", f"in `{harness.mcp.file}`" if harness.mcp else "not taken"),
        ("skills of a task", f"in `{harness.skills}`" if harness.skills else "not taken"),
    ]
