"""The reference of commands: what `verbatim COMMAND --help` prints, for each of them."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Container, Iterator

import typer
from typer.core import TyperGroup

from cli.main import app

HEAD = """# Commands

The help of every command. Exit codes: 0 success, 1 refused with one sentence on stderr, 2 misspelt; `verbatim run` returns the
agent's ([harnesses](../harnesses.md#run-one)).

## Options of many commands

A command lists these by their names alone.

{shared}"""
MANY = 3
"""An option with the same text at so many commands is explained once."""


def render() -> str:
    sections = list(list_commands())
    rows = Counter(row for _, command in sections for row in map(_render_row, command.params))
    shared = {row for row, count in rows.items() if count >= MANY}
    head = HEAD.format(shared="".join(sorted(shared)))
    return head + "".join(_render_section(words, command, shared) for words, command in sections)


def list_commands() -> Iterator[tuple[str, typer.core.TyperCommand]]:
    """Each command with its words, those of a group after the group's own."""
    yield from _walk("verbatim", typer.main.get_command(app))


def _walk(words: str, command: object) -> Iterator[tuple[str, typer.core.TyperCommand]]:
    if isinstance(command, TyperGroup):
        for name, inner in command.commands.items():
            yield from _walk(f"{words} {name}", inner)
    else:
        assert isinstance(command, typer.core.TyperCommand)
        yield words, command


def _render_section(words: str, command: typer.core.TyperCommand, shared: Container[str]) -> str:
    text = inspect.cleandoc(command.help or "").replace("\f", "").replace("\b", "").strip()
    rows = [_render_row(parameter) for parameter in command.params]
    known = ", ".join(row.removeprefix("- ").partition(":")[0] for row in rows if row in shared)
    listed = [*(row for row in rows if row not in shared), *([f"- {known}\n"] if known else [])]
    return f"\n## {words}\n\n```text\n{text}\n```\n\n" + "".join(listed)


def _render_row(parameter: object) -> str:
    names = [*getattr(parameter, "opts", ()), *getattr(parameter, "secondary_opts", ())]
    if type(parameter).__name__ == "TyperArgument":
        names = [str(getattr(parameter, "human_readable_name", names[0]))]
    text = " ".join(str(getattr(parameter, "help", None) or "").split())
    default = getattr(parameter, "default", None)
    shown = "" if default in (None, False, (), [], ...) or callable(default) else f" Default: `{default}`."
    return f"- {', '.join(f'`{name}`' for name in names)}: {text}{shown}\n"
