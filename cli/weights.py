"""`verbatim weights`: push a checkpoint into the engines, see what each of them holds, go back to an earlier one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.refusal import Refusal

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from cli.control import Control

app = typer.Typer(
    no_args_is_help=True,
    help="The engines' weights: push, see, go back (VERBATIM_URL, VERBATIM_ADMIN_TOKEN).",
)

SILENCE_SECONDS = 3600.0
"""A push says nothing while a replica loads, or while it waits for calls to end."""


class Kind(StrEnum):
    FULL = "full"
    LORA = "lora"


class Mode(StrEnum):
    KEEP = "keep"
    WAIT = "wait"
    ABORT = "abort"


Model = Annotated[str, typer.Option("--model", metavar="NAME", help="The model (policy); without it the default one.")]
In = Annotated[Mode, typer.Option("--mode", help="Calls in flight go on under the new weights, end first, or are cut.")]


@app.command("push")
def push(
    path: Annotated[
        Path, typer.Argument(metavar="PATH", help="A safetensors file or folder, or an adapter, that the engines can read.")
    ],
    version: Annotated[int | None, typer.Option(metavar="N", min=1, help="Its version; without it the next one.")] = None,
    kind: Annotated[Kind, typer.Option("--kind", help="Full weights, or a LoRA adapter.")] = Kind.FULL,
    mode: In = Mode.KEEP,
    model: Model = "",
) -> None:
    """Push a checkpoint into every replica, with its progress. Exit code 1 when a replica does not run on it."""
    from cli.control import Control

    control = Control()
    if version is None:
        version = int(line_of(control, model)["current"]["version"]) + 1
    # The engines open it, perhaps on other machines: only made absolute, not looked at.
    _push(control, {"version": version, "path": str(path.absolute()), "kind": kind.value, "mode": mode.value, "model": model})


@app.command("rollback")
def rollback(
    to: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="The version to go back to; without it the one before.")
    ] = None,
    mode: In = Mode.KEEP,
    model: Model = "",
) -> None:
    """Push an earlier checkpoint of the history again, as a new version: versions only grow."""
    from cli.control import Control

    control = Control()
    line = line_of(control, model)
    earlier = earlier_state(line, to)
    version = int(line["current"]["version"]) + 1
    typer.echo(f"version {earlier['version']} ({earlier['path']}) becomes version {version}")
    kind = "lora" if earlier["kind"] == "lora" else "full"
    _push(control, {"version": version, "path": earlier["path"], "kind": kind, "mode": mode.value, "model": model})


@app.command("status")
def status(
    limit: Annotated[int, typer.Option(metavar="N", min=1, help="At most so many versions of the history, the newest.")] = 5,
) -> None:
    """Show the current version of every model, what each replica holds, and what was pushed before."""
    from cli.control import Control
    from cli.tables import standard_output

    console, answer = standard_output(), Control().get("/weights")
    for name, line in {"": answer, **answer["models"]}.items():
        if name or line["replicas"] or not answer["models"]:
            _show(console, name, line, limit)


def line_of(control: Control, model: str) -> Mapping[str, Any]:
    """The part of `GET /weights` about one model. Raises `Refusal` when there is no such model."""
    answer = control.get("/weights")
    if not model:
        return answer
    if model not in answer["models"]:
        raise Refusal(f"there is no model {model!r}; there are: {', '.join(answer['models']) or 'none but the default one'}")
    line: Mapping[str, Any] = answer["models"][model]
    return line


def earlier_state(line: Mapping[str, Any], to: int | None) -> Mapping[str, Any]:
    """The state of the history to go back to: that of version `to`, or the newest of another checkpoint than the current one's
    and of its kind. Raises `Refusal`."""
    current = line["current"]
    for state in line["history"]:
        if state["version"] == to:
            return _with_path(state)
        other = state["path"] not in (None, current["path"])
        if to is None and other and (state["kind"] == "lora") == (current["kind"] == "lora"):
            return _with_path(state)
    wanted = f"version {to}" if to is not None else "another checkpoint of the same kind"
    raise Refusal(f"the history does not hold {wanted}")


def _with_path(state: Mapping[str, Any]) -> Mapping[str, Any]:
    if state["path"] is None:
        raise Refusal(
            f"version {state['version']} has no path: it was sent straight to the engines, or was theirs at the start"
        )
    return state


def _push(control: Control, body: dict[str, Any]) -> None:
    from rich.console import Console

    screen, steps = Console(stderr=True), dict[str, str]()
    result: dict[str, Any] | None = None
    with screen.status(f"version {body['version']}") as shown:
        for event in control.lines("/weights", body, silence_seconds=SILENCE_SECONDS):
            if "error" in event and "status" in event:
                raise Refusal(event["error"]["message"])
            if "result" in event:
                result = event["result"]
            elif "replica" in event:
                steps[event["replica"]] = event["step"]
                shown.update(f"version {body['version']}  " + "  ".join(f"{name} {step}" for name, step in steps.items()))
    if result is None:
        raise Refusal("the service ended before the push did; verbatim weights status tells what became of it")
    _report(result)


def _report(result: Mapping[str, Any]) -> None:
    """Print what became of each replica. Raises `Refusal` when one does not run on the new weights."""
    failed = [name for name, replica in result["replicas"].items() if not replica["ok"]]
    for name, replica in result["replicas"].items():
        paused = f"{replica['seconds']:.2f} s, paused {replica['paused_seconds']:.2f} s"
        typer.echo(f"{name}  {'done' if replica['ok'] else 'failed'}  {paused}" + _because(replica))
    if not result["applied"]:
        raise Refusal(f"version {result['version']} is served by none, nothing has changed")
    typer.echo(f"version {result['version']} is current, after {result['seconds']:.2f} s")
    if failed:
        raise Refusal(
            f"{len(failed)} of {len(result['replicas'])} replicas serve no one until they are repaired, by themselves"
        )


def _because(replica: Mapping[str, Any]) -> str:
    return f"  {replica['error']}" if "error" in replica else ""


def _show(console: Console, name: str, line: Mapping[str, Any], limit: int) -> None:
    notes = [note for note, true in (("frozen", line["frozen"]), ("a push is running", line["updating"])) if true]
    title = f"{name or 'default model'}: version {line['current']['version']}"
    console.print(title + (f" ({', '.join(notes)})" if notes else ""), highlight=False)
    console.print(_replicas_table(line["replicas"]))
    if line["history"]:
        console.print(_history_table(line["history"][:limit]))


def _replicas_table(replicas: Mapping[str, Mapping[str, Any]]) -> Table:
    from cli.tables import whole_table

    table = whole_table("replica", "version", "serves", "reason")
    for name, replica in replicas.items():
        version = replica["weight_version"]
        table.add_row(name, "?" if version is None else str(version), "yes" if replica["healthy"] else "no", replica["reason"])
    return table


def _history_table(history: Iterable[Mapping[str, Any]]) -> Table:
    from cli.tables import whole_table

    table = whole_table("version", "kind", "pushed", "path")
    for state in history:
        pushed = datetime.fromtimestamp(state["updated_at"]).astimezone().strftime("%Y-%m-%d %H:%M:%S")
        table.add_row(str(state["version"]), state["kind"], pushed, state["path"])
    return table
