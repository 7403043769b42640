"""`verbatim runs`: the training runs of a service, what each adds up to and loses, one alone or several side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer

from cli.options import SERVICE, AsJson, ServiceUrl, check_installed
from cli.refusal import CommandError
from reconstruct.reasons import REASONS

if TYPE_CHECKING:
    from rich.table import Table

app = typer.Typer(
    no_args_is_help=True,
    help=f"List, show, export, end and hide training runs. Sessions and tasks name theirs with --run. {SERVICE}",
)
Run = Annotated[str, typer.Argument(metavar="RUN", help="The run's name.")]
MARKS: Mapping[str, tuple[str, bool]] = {
    "ended": ("ended", True),
    "going": ("ended", False),
    "hidden": ("hidden", True),
    "shown": ("hidden", False),
}
ROWS: Mapping[str, tuple[str, bool]] = {
    "rollouts": ("rollouts", False),
    "mean reward": ("reward", False),
    "rewards of 0": ("zero_rewards", True),
    "solved": ("solved", True),
    "groups": ("groups", False),
    "groups with equal rewards": ("equal_groups", True),
    "tokens lost": ("lost", True),
    "incomplete": ("incomplete", True),
    "truncated": ("truncated", True),
    "timed out": ("timed_out", True),
    "failed": ("failed", True),
    "tokens per rollout": ("sampled_tokens", False),
    "calls per rollout": ("calls", False),
    "seconds per rollout": ("seconds", False),
    "staleness": ("staleness", False),
}
"""What is shown of a run's sums, and whether it is a share."""


@app.command("list", short_help="List runs, the newest first.")
def list_(url: ServiceUrl = None, as_json: AsJson = False) -> None:
    """List the runs, the one that began last first.

    \b
    verbatim runs list
    """
    from cli.control import CommandClient
    from cli.tables import print_json, standard_output

    runs = CommandClient(url).get("/runs")["runs"]
    if as_json:
        print_json(runs)
    elif not runs:
        typer.echo("no run yet: one begins when a session is closed with a reward")
    else:
        standard_output().print(runs_table(runs))


@app.command("show", short_help="Show a run: rewards, losses and why, groups by state; or several side by side.")
def show(
    runs: Annotated[list[str], typer.Argument(metavar="RUN...", help="The run's name. Of several: their sums, in columns.")],
    url: ServiceUrl = None,
    as_json: AsJson = False,
) -> None:
    """Show what a run adds up to, what of it is lost and why, and where its groups are.

    \b
    verbatim runs show grpo-3
    verbatim runs show grpo-3 grpo-4

    The curves of several over each other are on the page /ui/run.
    """
    from cli.control import CommandClient
    from cli.tables import print_json, standard_output

    control = CommandClient(url)
    found, *others = [control.get(path_of(run)) for run in runs]
    if as_json:
        print_json([found, *others] if others else found)
        return
    console = standard_output()
    console.print(sums_table([found, *others]))
    if others:
        return
    for reason, lost in found["sums"]["quarantined"].items():
        kept = "left out by choice" if REASONS[reason].chosen else "lost"
        console.print(f"{reason}: {lost['tokens']} tokens of {lost['calls']} calls, {kept}. {REASONS[reason].sentence}")
    for each in found["groups"]:
        console.print(f"groups {each['state']}{' (' + each['cause'] + ')' if each['cause'] else ''}: {each['groups']}")


@app.command("export", short_help="Write a run's curves for TensorBoard or W&B.")
def export(
    run: Run,
    tensorboard: Annotated[Path | None, typer.Option(metavar="DIR", help="Event files go to DIR/RUN.")] = None,
    wandb: Annotated[
        str | None,
        typer.Option(
            metavar="[ENTITY/]PROJECT", help="A W&B run in this project; W&B's own variables count, as WANDB_MODE=offline."
        ),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", help="Go on until the run is marked as ended, or Ctrl-C.")] = False,
    url: ServiceUrl = None,
) -> None:
    """Write the numbers of each weight version of a run, a step per version. Repeat the command to add what is new.

    \b
    verbatim runs export grpo-3 --tensorboard logs --follow
    """
    from cli.control import CommandClient
    from cli.run_exports import EventFiles, Opening, WandbRun, export_curves
    from cli.stop_signals import StopSignals

    openings: list[Opening] = [partial(EventFiles, tensorboard)] if tensorboard else []
    openings += [partial(WandbRun, wandb)] if wandb else []
    if not openings:
        raise CommandError("say where to: --tensorboard DIR, --wandb PROJECT, or both", exit_code=2)
    for name, wanted in (("tensorboard", tensorboard), ("wandb", wandb)):
        if wanted:
            check_installed(f"runs export --{name}", [name], name)
    with StopSignals() as stop:
        export_curves(CommandClient(url), run, openings, follow=follow, pause=stop.wait)


@app.command("mark", short_help="End or hide a run, or take that back.")
def mark(
    run: Run,
    marks: Annotated[
        list[str],
        typer.Argument(
            metavar="ended|going|hidden|shown...",
            help="ended: the metrics leave it out. hidden: so do the page and GET /run. going and shown take that back.",
        ),
    ],
    url: ServiceUrl = None,
) -> None:
    """Declare a run over or hidden, or take that back. Nothing is deleted.

    \b
    verbatim runs mark grpo-3 ended
    """
    from cli.control import CommandClient

    if unknown := [mark for mark in marks if mark not in MARKS]:
        raise CommandError(f"the mark {unknown[0]!r} is invalid: choose from {', '.join(MARKS)}", exit_code=2)
    marked = CommandClient(url).patch(path_of(run), dict(MARKS[mark] for mark in marks))
    typer.echo(f"{run}: {'over' if marked['ended_at'] else 'going on'}, {'hidden' if marked['hidden'] else 'shown'}")


def path_of(run: str) -> str:
    return f"/runs/{quote(run, safe='')}"


def runs_table(runs: Sequence[Mapping[str, Any]]) -> Table:
    from rich.table import Table

    table = Table("run", "rollouts", "reward", "lost", "equal groups", "groups", "state")
    for each in runs:
        sums = each["sums"]
        words = [word for word, said in (("over", each["ended_at"]), ("hidden", each["hidden"])) if said]
        states = ", ".join(f"{state['groups']} {state['state']}" for state in each["groups"])
        numbers = (_show(sums, *ROWS[name]) for name in ("rollouts", "mean reward", "tokens lost", "groups with equal rewards"))
        table.add_row(each["run"], *numbers, states, ", ".join(words))
    return table


def sums_table(runs: Sequence[Mapping[str, Any]]) -> Table:
    """A column per run."""
    from rich.table import Table

    table = Table("", *(each["run"] for each in runs))
    for name, (key, is_share) in ROWS.items():
        table.add_row(name, *(_show(each["sums"], key, is_share) for each in runs))
    return table


def _show(sums: Mapping[str, Any], key: str, is_share: bool) -> str:
    value = sums[key]
    if value is None:
        return "-"
    if is_share:
        return f"{100 * value:.1f} %"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
