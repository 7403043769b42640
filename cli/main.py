"""The `verbatim` command, one module per subcommand.

Importing this module must stay cheap: each subcommand imports what it needs when it runs, so that `verbatim --help` loads no web
framework, no store and no tensors.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from cli import (
    audit,
    doctor,
    engines,
    env,
    export,
    fork,
    generate,
    groups,
    import_tasks,
    node,
    run,
    runs,
    score,
    serve,
    sessions,
    tasks,
    weights,
)
from cli.options import installed_version
from cli.refusal import CommandError
from contract.plugins import PluginError

app = typer.Typer(
    name="verbatim",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Reinforcement learning on any agent, unmodified: point it at a URL, train on exactly the tokens it saw and sampled.",
)
app.command("serve", cls=serve.ServeCommand, short_help="Run the service.")(serve.serve)
app.command("run", short_help="Run a harness in a new session, then close it.")(run.run)
app.command("node", short_help="Run rollouts of submitted tasks on this machine.")(node.node)
app.command("generate", short_help="Sample until enough attempts pass.")(generate.generate)
app.command("fork", short_help="Run a session's task again from one of its calls.")(fork.fork)
app.command("env", short_help="Open a session and print a harness's settings for it.")(env.env)
app.command("audit", short_help="Check a session's tree, tokens and logprobs.")(audit.audit)
app.command("score", short_help="Have a scorer judge what a closed session sampled.")(score.score)
app.command("doctor", short_help="Check what works here and what to fix.")(doctor.doctor)
app.command("view", short_help="Save a session's page as one HTML file.")(sessions.view)
app.command("export", short_help="Write closed sessions to files.")(export.export)
app.command("import", short_help="Restore exported sessions into a service.")(export.import_sessions)
tasks.app.command("import", short_help="Turn published task sets into tasks.")(import_tasks.import_tasks)
app.add_typer(sessions.app, name="sessions", short_help="Open, list, show, reward and close sessions.")
app.add_typer(tasks.app, name="tasks", short_help="Import, submit, watch, list and cancel tasks.")
app.add_typer(runs.app, name="runs", short_help="List and compare training runs.")
app.add_typer(groups.app, name="groups", short_help="List groups, and why one is not leased.")
app.add_typer(sessions.dead_letters, name="dead-letters", short_help="Groups no longer delivered: list, retry, drop.")
app.add_typer(engines.app, name="engines", short_help="List, add and remove engines.")
app.add_typer(weights.app, name="weights", short_help="Push weights, show them, roll back.")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"verbatim {installed_version()}")
        raise typer.Exit


@app.callback()
def _options(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command. Exit codes: 0 success, 1 failure with one sentence on stderr, 2 usage error."""
    try:
        app()
    except (CommandError, PluginError) as refusal:
        from cli.feedback import remove_controls

        # It may quote what an agent printed.
        print(f"verbatim: {remove_controls(str(refusal))}", file=sys.stderr)  # noqa: T201
        sys.exit(refusal.exit_code if isinstance(refusal, CommandError) else 1)


if __name__ == "__main__":
    main()
