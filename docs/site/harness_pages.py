"""The definition on a harness's page: the one that `verbatim run`, `verbatim env` and nodes use."""

from __future__ import annotations

from pathlib import Path

from proxy.dialects.catalogue import dialects
from rollout.harnesses.catalogue import load
from rollout.harnesses.definition import Harness

DEFINITIONS = Path(__file__).resolve().parents[2] / "rollout" / "harnesses" / "definitions"


def render_facts(name: str) -> str:
    """Markdown: the definition as a table, and its TOML."""
    harness = load(name)
    rows = "\n".join(f"| {name} | {value} |" for name, value in _list_facts(harness))
    definition = (DEFINITIONS / f"{name}.toml").read_text().rstrip()
    # The fence is longer than any fence in the definition.
    return f'\n\n## The definition\n\n| | |\n|---|---|\n{rows}\n\n````toml title="{name}.toml"\n{definition}\n````\n'


def _title(dialect: str) -> str:
    return "any" if dialect == "any" else dialects()[dialect].title


def _list_facts(harness: Harness) -> list[tuple[str, str]]:
    return [
        ("dialect", _title(harness.dialect)),
        ("tested version", harness.version or "-"),
        ("installed by", "<br>".join(f"`{line}`" for line in harness.install) or "-"),
        ("variables it is given", ", ".join(f"`{variable}`" for variable in harness.env) or "none"),
        (
            "variables it must not get",
            ", ".join(f"`{variable}`" for variable in harness.unset) or "only those that no harness gets",
        ),
        ("files in its home", ", ".join(f"`{path}`" for path in harness.files) or "none"),
        ("MCP servers of a task", f"in `{harness.mcp.file}`" if harness.mcp else "not supported"),
        ("skills of a task", f"in `{harness.skills}`" if harness.skills else "not supported"),
    ]
