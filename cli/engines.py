"""`verbatim engines`: list the replicas of a running service, add and remove engines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer

from cli.options import SERVICE, AsJson, ServiceUrl

if TYPE_CHECKING:
    from rich.table import Table

app = typer.Typer(no_args_is_help=True, help=f"List, add and remove engines. {SERVICE}")


@app.command("list")
def list_(url: ServiceUrl = None, as_json: AsJson = False) -> None:
    """List the replicas, what they serve, and why one does not.

    \b
    verbatim engines list
    verbatim engines list --json | jq -r '.[] | select(.status == "down") | .reason'
    """
    from cli.control import CommandClient
    from cli.tables import print_json, standard_output

    found = CommandClient(url).get("/engines")
    if as_json:
        print_json(found["replicas"])
        return
    console = standard_output()
    console.print(replicas_table(found["replicas"]))
    for policy, calls in found["waiting"].items():
        if calls:
            console.print(f"{calls} calls are waiting for a replica of {policy or 'the default policy'}", markup=False)
    for replica in found["replicas"]:
        if replica["api"]:
            console.print(f"{replica['name']}: {replica['description']}", markup=False)
        for note in replica["notes"]:
            console.print(f"{replica['name']} {note}", markup=False)
    known = {replica[key] for replica in found["replicas"] for key in ("url", "source")}
    for url in sorted({engine["url"] for engine in found["engines"]} - known):
        console.print(f"{url}: no address is known", markup=False)


@app.command("add")
def add(
    engine: Annotated[
        str,
        typer.Argument(
            metavar="[POLICY=]ENGINE",
            help="http://HOST:PORT, or dns://NAME:PORT for all its addresses. POLICY= makes it a replica of that policy.",
        ),
    ],
    model: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A model it serves, so that calls for that model wait for this engine. Repeatable."),
    ] = None,
    url: ServiceUrl = None,
) -> None:
    """Add an engine. It takes calls once it answers and has the current weights; it stays across restarts of the service.

    \b
    verbatim engines add http://10.0.0.7:8000
    verbatim engines add critic=dns://vllm.default.svc:8000
    """
    from cli.control import CommandClient

    added = CommandClient(url).post("/engines", {"url": engine} | ({"models": model} if model else {}))
    typer.echo(f"{added['name']} added to {added['policy'] or 'the default policy'}")


@app.command("remove")
def remove(
    engine: Annotated[
        str, typer.Argument(metavar="ENGINE", help="What `verbatim engines add` was given, or its name in the list.")
    ],
    url: ServiceUrl = None,
) -> None:
    """Remove an engine that was added. Calls in flight finish on it.

    \b
    verbatim engines remove http://10.0.0.7:8000
    """
    from cli.control import CommandClient

    removed = CommandClient(url).delete(f"/engines/{quote(engine, safe='')}")
    typer.echo(f"{removed['name']} removed; calls in flight finish on it")


def replicas_table(found: list[dict[str, Any]]) -> Table:
    from cli.tables import as_cell, make_table

    table = make_table("replica", "policy", "status", "weights", "in flight", "models", "from", "reason")
    for replica in found:
        most = f" of {replica['max_calls']}" if replica["max_calls"] else ""
        table.add_row(
            as_cell(replica["name"]),
            as_cell(replica["policy"] or "(default)"),
            replica["status"],
            as_cell(replica["weight_version"]),
            f"{replica['in_flight']}{most}",
            as_cell(", ".join(replica["models"])),
            as_cell(replica["source"]),
            as_cell(replica["reason"]),
        )
    return table
