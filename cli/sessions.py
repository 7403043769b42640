"""`verbatim sessions`, `verbatim view` and `verbatim dead-letters`: the sessions of a running service and its undeliverable groups."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer

from cli.refusal import Refusal

if TYPE_CHECKING:
    from rich.table import Table

    from cli.control import Control


app = typer.Typer(
    no_args_is_help=True,
    help="List and show the sessions of a running service (VERBATIM_URL, default http://127.0.0.1:8700; VERBATIM_ADMIN_TOKEN).",
)


@app.command("ls")
def ls(
    status: Annotated[
        str | None, typer.Option(metavar="STATUS", help="Only these: open, closing, completed, failed, timeout or cancelled.")
    ] = None,
    group: Annotated[str | None, typer.Option(metavar="ID", help="Only the sessions of this group.")] = None,
    limit: Annotated[int, typer.Option(metavar="N", min=1, max=1000, help="How many to list.")] = 50,
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
    """Show one session: its state, its calls, and the accounting of its sampled tokens."""
    from cli.control import Control
    from cli.tables import standard_output

    control, path = Control(), f"/sessions/{quote(session_id, safe='')}"
    session = control.get(path)
    calls = list_calls(control, session_id)
    exported = control.get(f"{path}/trajectories")
    console = standard_output()
    console.print(sessions_table([session]))
    console.print(calls_table(calls))
    console.print(accounting_line(len(exported["trajectories"]), exported["accounting"]))


def list_calls(control: Control, session_id: str) -> list[dict[str, Any]]:
    """Every call of the session."""
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

    from cli.tables import format_time, make_table

    session_id = Column("session", no_wrap=True, overflow="fold")
    table = make_table(session_id, Column("status", no_wrap=True), "calls", "reward", "group", "task", "created")
    for session in sessions:
        table.add_row(
            session["session_id"],
            session["status"],
            str(session["calls"]),
            "" if session.get("reward") is None else f"{session['reward']:g}",
            escape(session.get("group_id") or ""),
            escape(session.get("task_id") or ""),
            format_time(session["created_at"]),
        )
    return table


def calls_table(calls: list[dict[str, Any]]) -> Table:
    from cli.tables import make_table

    table = make_table("call", "parent", "status", "finish", "prompt", "completion", "weights", "seconds", "engine")
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
    """The equation sampled = exported + quarantined, with the reasons."""
    quarantined = accounting["quarantined"]
    line = (
        f"{accounting['sampled_tokens']} tokens sampled = {accounting['exported_tokens']} exported in {rows} trajectories + "
        f"{sum(item['tokens'] for item in quarantined)} quarantined"
    )
    reasons = sorted({item["reason"] for item in quarantined})
    return f"{line} ({', '.join(reasons)})" if reasons else line


def count_roles(rows: list[dict[str, Any]]) -> str:
    """The number of rows of each role, listing inferred roles and rows that train nothing separately."""
    found = Counter((row["role"], row.get("role_source"), any(row["loss_mask"])) for row in rows)
    counts = []
    for (role, source, trained), count in sorted(found.items(), key=lambda item: -item[1]):
        notes = ["inferred"] if source == "inferred" and role != "main" else []
        notes += [] if trained else ["not trained"]
        counts.append(f"{count} {role}" + (f" ({', '.join(notes)})" if notes else ""))
    return ", ".join(counts)


def view(
    session_id: Annotated[str, typer.Argument(metavar="SESSION", help="The session's id.")],
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Where to write it. Default: SESSION.html.")] = None,
) -> None:
    """Save a session's page as one HTML file: reward, feedback, the conversation, and every token with its logprob and weights."""
    from cli.control import Control

    page = Control().fetch(f"/ui/sessions/{quote(session_id, safe='')}/download/page.html").content
    target = out or Path(f"{session_id}.html")
    try:
        target.write_bytes(page)
    except OSError as error:
        raise Refusal(f"{target} cannot be written: {error.strerror}") from error
    typer.echo(target)


dead_letters = typer.Typer(
    no_args_is_help=True,
    help="Groups no longer delivered because they were delivered too often, are unreadable, or never became complete "
    "(VERBATIM_URL, VERBATIM_ADMIN_TOKEN).",
)

PAGE = 1000

Letters = Annotated[list[str] | None, typer.Argument(metavar="[LETTER]", help="Ids of dead letters, or of their groups.")]
All = Annotated[bool, typer.Option("--all", help="All, or all that --reason selects.")]
Reason = Annotated[str | None, typer.Option(metavar="TEXT", help="Only letters whose reason contains this text.")]


@dead_letters.command("list")
def list_(
    reason: Reason = None,
    limit: Annotated[int, typer.Option(metavar="N", min=1, help="How many to list.")] = 50,
) -> None:
    """List dead letters with their reasons, newest first."""
    from itertools import islice

    from cli.control import Control
    from cli.tables import standard_output

    found = list(islice(list_letters(Control(), reason), limit + 1))
    console = standard_output()
    console.print(letters_table(found[:limit]))
    if len(found) > limit:
        console.print(f"There are more: raise --limit above {limit}.")


@dead_letters.command("retry")
def retry(names: Letters = None, all_: All = False, reason: Reason = None) -> None:
    """Deliver groups again, with their delivery count reset; an incomplete group waits for its members again.

    \b
    verbatim dead-letters retry --all --reason "too often"
    """
    from cli.control import Control

    control = Control()
    _apply(control, names, all_, reason, "delivered again", lambda path: control.post(f"{path}/retry", {}))


@dead_letters.command("drop")
def drop(names: Letters = None, all_: All = False, reason: Reason = None) -> None:
    """Remove groups from the list for good. Their sessions stay until they are deleted."""
    from cli.control import Control

    control = Control()
    _apply(control, names, all_, reason, "dropped", control.delete)


def list_letters(control: Control, reason: str | None) -> Iterator[dict[str, Any]]:
    """Every dead letter whose reason contains `reason`, newest first."""
    cursor = None
    while True:
        page = control.get("/batches/dead", cursor=cursor, limit=PAGE, reason=reason)
        yield from page["dead_letters"]
        cursor = page["cursor"]
        if cursor is None:
            return


def letters_table(found: list[dict[str, Any]]) -> Table:
    from rich.markup import escape

    from cli.tables import format_time, make_table

    table = make_table("letter", "sessions", "deliveries", "died", "reason")
    for letter in found:
        counts = str(len(letter["session_ids"])), str(letter["deliveries"])
        table.add_row(escape(letter["letter_id"]), *counts, format_time(letter["died_at"]), escape(letter["reason"]))
    return table


def _apply(
    control: Control,
    names: list[str] | None,
    all_: bool,
    reason: str | None,
    done: str,
    act: Callable[[str], dict[str, Any]],
) -> None:
    """Call `act` on the path of each selected letter and report. Raises `Refusal` if some failed."""
    from rich.console import Console
    from rich.progress import track

    selected, screen = _select(control, names, all_, reason), Console(stderr=True)
    refusals: list[str] = []
    count = 0
    for name in track(selected, "dead letters", console=screen, transient=True, disable=not screen.is_terminal):
        try:
            count += len(act(f"/batches/dead/{quote(name, safe='')}")["letters"])
        except Refusal as refusal:
            refusals.append(str(refusal))
    Console().print(f"{count} {'letter' if count == 1 else 'letters'} {done}")
    if refusals:
        raise Refusal("; ".join(refusals[:5]) + (f"; and {len(refusals) - 5} more" if len(refusals) > 5 else ""))


def _select(control: Control, names: list[str] | None, all_: bool, reason: str | None) -> list[str]:
    """The letters to act on, all listed first because `act` changes the list."""
    if bool(names) == all_:
        raise Refusal("name the letters, or pass --all", exit_code=2)
    if not names:
        return [letter["letter_id"] for letter in list_letters(control, reason)]
    if reason is not None:
        raise Refusal("--reason only works with --all", exit_code=2)
    return names
