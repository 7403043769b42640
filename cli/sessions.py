"""`verbatim sessions`: what a running service holds, as tables."""

from __future__ import annotations

from collections import Counter
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from cli.control import Control

app = typer.Typer(
    no_args_is_help=True,
    help="Look at the sessions of a running service (VERBATIM_URL, default http://127.0.0.1:8700, and VERBATIM_ADMIN_TOKEN).",
)


@app.command("ls")
def ls(
    status: Annotated[
        str | None, typer.Option(metavar="STATUS", help="Only these: open, closing, completed, failed, timeout or cancelled.")
    ] = None,
    group: Annotated[str | None, typer.Option(metavar="ID", help="Only the sessions of this group.")] = None,
    limit: Annotated[int, typer.Option(metavar="N", min=1, max=1000, help="At most so many, the newest.")] = 50,
) -> None:
    """List sessions, newest first."""
    from cli.control import Control
    from cli.tables import standard_output

    answer = Control().get("/sessions", status=status, group_id=group, limit=limit)
    console = standard_output()
    console.print(sessions_table(answer["sessions"]))
    if answer.get("cursor"):
        console.print(f"There are more: raise --limit above {limit}.")


@app.command("show")
def show(session_id: Annotated[str, typer.Argument(metavar="SESSION", help="The session's id.")]) -> None:
    """Show one session: its state, its calls, and where its sampled tokens went."""
    from cli.control import Control
    from cli.tables import standard_output

    control, path = Control(), f"/sessions/{quote(session_id, safe='')}"
    session = control.get(path)
    calls = all_calls(control, session_id)
    exported = control.get(f"{path}/trajectories")
    console = standard_output()
    console.print(sessions_table([session]))
    console.print(calls_table(calls))
    console.print(accounting_line(len(exported["trajectories"]), exported["accounting"]))


def all_calls(control: Control, session_id: str) -> list[dict[str, Any]]:
    """Every call of the session, page after page."""
    calls: list[dict[str, Any]] = []
    cursor = None
    while True:
        page = control.get(f"/sessions/{quote(session_id, safe='')}/calls", cursor=cursor)
        calls += page["calls"]
        cursor = page.get("cursor")
        if cursor is None:
            return calls


def sessions_table(sessions: list[dict[str, Any]]) -> Table:
    from rich.markup import escape
    from rich.table import Column

    from cli.tables import whole_table

    # An id that is cut cannot be copied.
    session_id = Column("session", no_wrap=True, overflow="fold")
    table = whole_table(session_id, Column("status", no_wrap=True), "calls", "reward", "group", "task", "created")
    for session in sessions:
        table.add_row(
            session["session_id"],
            session["status"],
            str(session["calls"]),
            _number(session.get("reward")),
            escape(session.get("group_id") or ""),
            escape(session.get("task_id") or ""),
            _time(session["created_at"]),
        )
    return table


def calls_table(calls: list[dict[str, Any]]) -> Table:
    from cli.tables import whole_table

    table = whole_table("call", "continues", "status", "finish", "prompt", "sampled", "weights", "seconds", "engine")
    for call in calls:
        table.add_row(
            call["call_id"],
            call.get("parent_id") or "",
            call["status"],
            call.get("finish_reason") or "",
            str(len(call.get("prompt_ids") or ())),
            str(len(call.get("completion_ids") or ())),
            ", ".join(str(version) for version, _, _ in call.get("weight_versions") or ()),
            f"{call.get('engine_seconds') or 0:.2f}",
            call.get("api") or "",
        )
    return table


def accounting_line(rows: int, accounting: dict[str, Any]) -> str:
    """sampled = exported + quarantined, in words, with the reasons."""
    quarantined = accounting["quarantined"]
    line = (
        f"{accounting['sampled_tokens']} tokens sampled = {accounting['exported_tokens']} exported in {rows} trajectories + "
        f"{sum(item['tokens'] for item in quarantined)} quarantined"
    )
    reasons = sorted({item["reason"] for item in quarantined})
    return f"{line} ({', '.join(reasons)})" if reasons else line


def rows_by_role(rows: list[dict[str, Any]]) -> str:
    """How many rows there are of each role, those that nobody declared and those that train nothing told apart."""
    found = Counter((row["role"], row.get("role_source"), any(row["loss_mask"])) for row in rows)
    told = []
    for (role, source, trained), count in sorted(found.items(), key=lambda item: -item[1]):
        notes = ["inferred"] if source == "inferred" and role != "main" else []
        notes += [] if trained else ["not trained"]
        told.append(f"{count} {role}" + (f" ({', '.join(notes)})" if notes else ""))
    return ", ".join(told)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:g}"


def _time(epoch_seconds: float) -> str:
    return datetime.fromtimestamp(epoch_seconds).astimezone().strftime("%Y-%m-%d %H:%M:%S")
