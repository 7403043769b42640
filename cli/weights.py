"""`verbatim weights`: push a checkpoint into the engines, show what each holds, roll back; the versions on disk."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli import weight_chains
from cli.options import SERVICE, AsJson, Limit, ServiceUrl
from cli.refusal import CommandError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from cli.control import CommandClient

app = typer.Typer(no_args_is_help=True, help=f"Push weights into the engines, show what they hold, roll back. {SERVICE}")

app.command("chain")(weight_chains.show_chain)
app.command("verify")(weight_chains.verify_chain)
app.command("fold")(weight_chains.fold_chain)
app.command("prune")(weight_chains.prune)

SILENCE_SECONDS = 3600.0
"""A push reports nothing while a replica loads or waits for calls to end."""


class Kind(StrEnum):
    FULL = "full"
    DELTA = "delta"
    LORA = "lora"


class Mode(StrEnum):
    KEEP = "keep"
    WAIT = "wait"
    ABORT = "abort"


Model = Annotated[str, typer.Option("--model", metavar="NAME", help="The model (policy). Default: the default one.")]
In = Annotated[
    Mode,
    typer.Option("--mode", help="Calls in flight continue (keep), finish first (wait) or are cut (abort)."),
]


@app.command("push")
def push(
    path: Annotated[
        Path,
        typer.Argument(metavar="PATH", help="A safetensors file or folder, a delta or an adapter, readable by the engines."),
    ],
    version: Annotated[int | None, typer.Option(metavar="N", min=1, help="Its version. Default: the next one.")] = None,
    kind: Annotated[Kind, typer.Option("--kind", help="Full weights, what changed since, or a LoRA adapter.")] = Kind.FULL,
    mode: In = Mode.KEEP,
    model: Model = "",
    url: ServiceUrl = None,
) -> None:
    """Push a checkpoint into every replica and show the progress. Exit code 1 if a replica fails.

    \b
    verbatim weights push /shared/weights/version-12
    """
    from cli.control import CommandClient

    control = CommandClient(url)
    if version is None:
        version = int(load_model(control, model)["current"]["version"]) + 1
    # The engines open it, perhaps on other machines, so it need not exist here.
    _push(control, {"version": version, "path": str(path.absolute()), "kind": kind.value, "mode": mode.value, "model": model})


@app.command("rollback")
def rollback(
    to: Annotated[
        int | None, typer.Argument(metavar="VERSION", min=1, help="The version to roll back to. Default: the one before.")
    ] = None,
    mode: In = Mode.KEEP,
    model: Model = "",
    url: ServiceUrl = None,
) -> None:
    """Push an earlier checkpoint of the history again, as a new version: versions only increase.

    \b
    verbatim weights rollback 11
    """
    from cli.control import CommandClient

    control = CommandClient(url)
    line = load_model(control, model)
    earlier = find_earlier(line, to)
    version = int(line["current"]["version"]) + 1
    typer.echo(f"version {earlier['version']} ({earlier['path']}) becomes version {version}")
    # What was sent over NCCL has a whole checkpoint at its path.
    kind = earlier["kind"] if earlier["kind"] in ("lora", "delta") else "full"
    _push(control, {"version": version, "path": earlier["path"], "kind": kind, "mode": mode.value, "model": model})


@app.command("status")
def status(
    limit: Limit = 5,
    url: ServiceUrl = None,
    as_json: AsJson = False,
) -> None:
    """Show the current version of every model, what each replica holds, and earlier pushes.

    \b
    verbatim weights status --limit 10
    """
    from cli.control import CommandClient
    from cli.tables import print_json, standard_output

    console, answer = standard_output(), CommandClient(url).get("/weights")
    if as_json:
        print_json(answer)
        return
    for name, line in {"": answer, **answer["models"]}.items():
        if name or line["replicas"] or not answer["models"]:
            _show(console, name, line, limit)


def load_model(control: CommandClient, model: str) -> Mapping[str, Any]:
    """The part of `GET /weights` about one model. Raises `CommandError` if there is no such model."""
    answer = control.get("/weights")
    if not model:
        return answer
    if model not in answer["models"]:
        raise CommandError(f"there is no model {model!r}; known: {', '.join(answer['models']) or 'only the default one'}")
    line: Mapping[str, Any] = answer["models"][model]
    return line


def find_earlier(line: Mapping[str, Any], to: int | None) -> Mapping[str, Any]:
    """The state to roll back to: version `to`, or the newest with another checkpoint of the current one's kind. Raises `CommandError`."""
    current = line["current"]
    for state in line["history"]:
        if state["version"] == to:
            return _with_path(state)
        other = state["path"] not in (None, current["path"])
        if to is None and other and (state["kind"] == "lora") == (current["kind"] == "lora"):
            return _with_path(state)
    wanted = f"version {to}" if to is not None else "other checkpoint of the same kind"
    known = ", ".join(str(state["version"]) for state in line["history"] if state["path"] is not None)
    raise CommandError(f"the history has no {wanted}" + (f": choose one of {known}" if to is not None and known else ""))


def _with_path(state: Mapping[str, Any]) -> Mapping[str, Any]:
    if state["path"] is None:
        raise CommandError(
            f"version {state['version']} has no path: it was sent directly to the engines, or they started with it"
        )
    return state


def _push(control: CommandClient, body: dict[str, Any]) -> None:
    try:
        result = _watch(control, body)
    except KeyboardInterrupt as interrupt:
        raise CommandError(
            "no longer waiting; the push may still go on (verbatim weights status shows the outcome)", exit_code=130
        ) from interrupt
    if result is None:
        raise CommandError("the service stopped before the push ended; verbatim weights status shows the outcome")
    _report(result)


def _watch(control: CommandClient, body: dict[str, Any]) -> dict[str, Any] | None:
    """Push, and show each replica's step. Returns the result, or None if the stream ended without one."""
    from rich.console import Console
    from rich.markup import escape

    result, steps = None, dict[str, str]()
    with Console(stderr=True).status(f"version {body['version']}") as shown:
        for event in control.stream_lines("/weights", body, silence_seconds=SILENCE_SECONDS):
            if "error" in event and "status" in event:
                raise CommandError(event["error"]["message"])
            if "result" in event:
                result = event["result"]
            elif "replica" in event:
                steps[event["replica"]] = event["step"]
                told = "  ".join(f"{name} {step}" for name, step in steps.items())
                shown.update(escape(f"version {body['version']}  {told}"))
    return result


def _report(result: Mapping[str, Any]) -> None:
    """Print the result of each replica. Raises `CommandError` if one does not run on the new weights."""
    failed = [name for name, replica in result["replicas"].items() if not replica["ok"]]
    for name, replica in result["replicas"].items():
        paused = f"{replica['seconds']:.2f} s, paused {replica['paused_seconds']:.2f} s"
        typer.echo(
            f"{name}  {'done' if replica['ok'] else 'failed'}  {paused}"
            + (f"  {replica['error']}" if "error" in replica else "")
        )
    if not result["applied"]:
        raise CommandError(f"no replica serves version {result['version']}; nothing has changed")
    typer.echo(f"version {result['version']} is current, after {result['seconds']:.2f} s")
    if failed:
        raise CommandError(
            f"{len(failed)} of {len(result['replicas'])} replicas take no calls until the service has repaired them"
        )


def _show(console: Console, name: str, line: Mapping[str, Any], limit: int) -> None:
    notes = [note for note, true in (("frozen", line["frozen"]), ("a push is running", line["updating"])) if true]
    title = f"{name or 'default model'}: version {line['current']['version']}"
    console.print(title + (f" ({', '.join(notes)})" if notes else ""), markup=False, highlight=False)
    console.print(replicas_table(line["replicas"]))
    if line["history"]:
        console.print(_history_table(line["history"][:limit]))


def replicas_table(replicas: Mapping[str, Mapping[str, Any]]) -> Table:
    from cli.tables import as_cell, make_table

    table = make_table("replica", "version", "serving", "reason")
    for name, replica in replicas.items():
        version = replica["weight_version"]
        serving = "yes" if replica["healthy"] else "no"
        table.add_row(as_cell(name), "?" if version is None else str(version), serving, as_cell(replica["reason"]))
    return table


def _history_table(history: Iterable[Mapping[str, Any]]) -> Table:
    from cli.tables import as_cell, format_time, make_table

    table = make_table("version", "kind", "pushed", "root", "path")
    for state in history:
        pushed, root = format_time(state["updated_at"]), (state["root"] or "")[:16]
        table.add_row(str(state["version"]), state["kind"], pushed, root, as_cell(state["path"]))
    return table
