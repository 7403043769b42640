"""The `verbatim` command: one module per subcommand, each of which imports what it needs when it runs.

Importing this module must stay cheap: `verbatim --help` loads no web framework, no store and no tensors.
"""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated

import typer

from cli import (
    audit,
    bench,
    engines,
    export,
    generate,
    node,
    run,
    serve,
    sessions,
    tasks,
    top,
    weights,
)
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
app.command("run", short_help="Run a harness in a new session, and close it.")(run.run)
app.command("node", short_help="Run rollouts of submitted tasks on this machine.")(node.node)
app.command("generate", short_help="Attempt tasks until enough attempts are accepted.")(generate.generate)
app.command("env", short_help="Open a session and print what a harness needs for it.")(run.env)
app.command("audit", short_help="Check a session: its tree, its tokens, its logprobs.")(audit.audit)
app.command("top", short_help="Watch a running service: calls, engines, groups, nodes.")(top.top)
app.command("view", short_help="Write a session's page into one HTML file.")(sessions.view)
app.command("bench", short_help="Ask an engine directly and through the service.")(bench.bench)
app.command("export", short_help="Write closed sessions to files.")(export.export)
app.command("import", short_help="Put exported sessions into the store of a service.")(export.import_sessions)
app.add_typer(sessions.app, name="sessions", short_help="Look at the sessions of a running service.")
app.add_typer(tasks.app, name="tasks", short_help="Submit, watch and cancel tasks.")
app.add_typer(sessions.dead_letters, name="dead-letters", short_help="Groups that no trainer gets any more.")
app.add_typer(engines.app, name="engines", short_help="The engines of a running service, added and removed.")
app.add_typer(weights.app, name="weights", short_help="The engines' weights: push, see, go back.")


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
