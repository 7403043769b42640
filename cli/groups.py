"""`verbatim groups`: list the groups of sessions, show one, and why no trainer has it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer

from cli.options import SERVICE, AsJson, Limit, ServiceUrl, Where

if TYPE_CHECKING:
    from rich.table import Table

app = typer.Typer(no_args_is_help=True, help=f"List groups, and show why one is not leased. {SERVICE}")


@app.command("list")
def list_(
    where: Where = None,
    limit: Limit = 50,
    url: ServiceUrl = None,
    as_json: AsJson = False,
) -> None:
    """List the groups of the thousand newest sessions, newest first, with what each waits for.

    --where takes status (a group's delivery: announced, filling, ready, leased, acked, dropped, dead), q (a text in its id), and what
    verbatim sessions list takes, of one of its members.

    \b
    verbatim groups list --where status=filling
    verbatim groups list --where run=grpo-3 --where at_least=1
    """
    from cli.control import CommandClient
    from cli.tables import print_listing

    found = CommandClient(url).get("/groups", where=where, limit=limit)["groups"]
    print_listing(found, groups_table, as_json)


@app.command("show")
def show(
    group: Annotated[str, typer.Argument(metavar="GROUP", help="The group's id.")],
    url: ServiceUrl = None,
    as_json: AsJson = False,
) -> None:
    """Show one group: what it waits for or what became of it, and its members.

    \b
    verbatim groups show task-7
    """
    from cli.control import CommandClient
    from cli.tables import print_json, standard_output

    found = CommandClient(url).get(f"/groups/{quote(group, safe='')}")
    if as_json:
        print_json(found)
        return
    console = standard_output()
    console.print(groups_table([found]))
    console.print(members_table(found["members"]))


def groups_table(found: list[dict[str, Any]]) -> Table:
    from cli.tables import as_cell, format_time, make_table

    table = make_table("group", "closed", "failed", "rewards", "delivery", "reason", "newest session")
    for group in found:
        table.add_row(
            as_cell(group["group_id"]),
            f"{group['closed']}/{group['size']}",
            str(group["failed"]),
            as_cell(", ".join(f"{reward:g}" for reward in group["rewards"])),
            group["delivery"],
            as_cell(group["reason"]),
            format_time(group["created_at"]),
        )
    return table


def members_table(members: list[dict[str, Any]]) -> Table:
    from cli.tables import as_cell, make_table

    table = make_table("session", "status", "reward", "delivery", "error")
    for member in members:
        table.add_row(
            as_cell(member["session_id"]),
            member["status"],
            as_cell(member["reward"]),
            member["delivery"],
            as_cell(member["error"]),
        )
    return table
