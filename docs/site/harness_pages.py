"""The page of definitions: those that `verbatim run`, `verbatim env` and nodes use."""

from __future__ import annotations

from pathlib import Path

from proxy.dialects.catalogue import dialects
from rollout.harnesses.catalogue import load, names
from rollout.harnesses.definition import Harness

DEFINITIONS = Path(__file__).resolve().parents[2] / "rollout" / "harnesses" / "definitions"
INTRODUCTION = """# Harness definitions

What each built-in harness is given, by `verbatim run --harness NAME`, by `verbatim env` and on nodes. [Harnesses](../harnesses.md) says
what is particular to each, and what the fields mean.
"""


def render() -> str:
    """Markdown: each definition as a table and as its TOML, in order of names."""
    return INTRODUCTION + "".join(f"\n## {name}\n\n{_render_facts(name)}" for name in sorted(names()))


def _render_facts(name: str) -> str:
    harness = load(name)
    rows = "\n".join(f"| {name} | {value} |" for name, value in _list_facts(harness))
    definition = (DEFINITIONS / f"{name}.toml").read_text().rstrip()
    # The fence is longer than any fence in the definition.
    return f'| | |\n|---|---|\n{rows}\n\n````toml title="{name}.toml"\n{definition}\n````\n'


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
