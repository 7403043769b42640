"""The page of commands: what `verbatim COMMAND --help` prints, for each of them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import typer
from cells import in_a_cell
from typer.core import TyperGroup

from cli.main import app

HEAD = """# Commands

What `verbatim COMMAND --help` says. Exit codes: 0 done, 1 refused with one sentence on stderr, 2 misspelt; `verbatim run` has the
agent's ([harnesses](../harnesses.md#run-one)).
"""


def page() -> str:
    return HEAD + "".join(_section(words, command) for words, command in commands())


def commands() -> Iterator[tuple[str, typer.core.TyperCommand]]:
    """Each command with its words, those of groups behind their group."""
    yield from _within("verbatim", typer.main.get_command(app))


def _within(words: str, command: object) -> Iterator[tuple[str, typer.core.TyperCommand]]:
    if isinstance(command, TyperGroup):
        for name, inner in command.commands.items():
            yield from _within(f"{words} {name}", inner)
    else:
        assert isinstance(command, typer.core.TyperCommand)
        yield words, command


def _section(words: str, command: typer.core.TyperCommand) -> str:
    said = inspect.cleandoc(command.help or "").replace("\f", "").replace("\b", "").strip()
    return f"\n## {words}\n\n```text\n{said}\n```\n\n| | |\n|---|---|\n" + "".join(map(_row, command.params))


def _row(parameter: object) -> str:
    names = [*getattr(parameter, "opts", ()), *getattr(parameter, "secondary_opts", ())]
    if type(parameter).__name__ == "TyperArgument":
        names = [str(getattr(parameter, "human_readable_name", names[0]))]
    text = in_a_cell(str(getattr(parameter, "help", None) or ""))
    default = getattr(parameter, "default", None)
    shown = "" if default in (None, False, (), [], ...) or callable(default) else f" Default: `{default}`."
    return f"| {', '.join(f'`{name}`' for name in names)} | {text}{shown} |\n"
