"""The reference of commands: what `verbatim COMMAND --help` prints, for each of them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import typer
from typer.core import TyperGroup

from cli.main import app

HEAD = """# Commands

The help of every command. Exit codes: 0 success, 1 refused with one sentence on stderr, 2 misspelt; `verbatim run` returns the
agent's ([harnesses](../harnesses.md#run-one)).
"""


def render() -> str:
    return HEAD + "".join(_render_section(words, command) for words, command in list_commands())


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


def _render_section(words: str, command: typer.core.TyperCommand) -> str:
    text = inspect.cleandoc(command.help or "").replace("\f", "").replace("\b", "").strip()
    return f"\n## {words}\n\n```text\n{text}\n```\n\n" + "".join(map(_render_row, command.params))


def _render_row(parameter: object) -> str:
    names = [*getattr(parameter, "opts", ()), *getattr(parameter, "secondary_opts", ())]
    if type(parameter).__name__ == "TyperArgument":
        names = [str(getattr(parameter, "human_readable_name", names[0]))]
    text = " ".join(str(getattr(parameter, "help", None) or "").split())
    default = getattr(parameter, "default", None)
    shown = "" if default in (None, False, (), [], ...) or callable(default) else f" Default: `{default}`."
    return f"- {', '.join(f'`{name}`' for name in names)}: {text}{shown}\n"
