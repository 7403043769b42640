"""The `verbatim` command: one module per subcommand, each of which imports what it needs when it runs.

Importing this module must stay cheap: `verbatim --help` loads no web framework, no store and no tensors.
"""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated

import typer

from cli import audit, dead_letters, engines, env, export, imports, run, serve, sessions, weights
from cli.refusal import Refusal

app = typer.Typer(
    name="verbatim",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Reinforcement learning on any agent, unmodified: point it at a URL, train on exactly the tokens it saw and said.",
)
app.command("serve")(serve.serve)
app.command("run")(run.run)
app.command("env")(env.env)
app.command("audit")(audit.audit)
app.command("export")(export.export)
app.command("import")(imports.import_sessions)
app.add_typer(sessions.app, name="sessions")
app.add_typer(dead_letters.app, name="dead-letters")
app.add_typer(engines.app, name="engines")
app.add_typer(weights.app, name="weights")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"verbatim {installed_version()}")
        raise typer.Exit


def installed_version() -> str:
    """The installed distribution's version; "from source" when the tree is run without being installed."""
    try:
        return version("verbatim-rl")
    except PackageNotFoundError:
        return "from source"


@app.callback()
def _options(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command. Exit codes: 0 done, 1 refused with one sentence on stderr, 2 misspelt."""
    try:
        app()
    except Refusal as refusal:
        print(f"verbatim: {refusal}", file=sys.stderr)  # noqa: T201
        sys.exit(refusal.exit_code)


if __name__ == "__main__":
    main()
