"""`verbatim sessions`: what a running service holds, as tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from datetime import datetime
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


# `verbatim view`: one session as a single HTML file, to look at and to pass on without the service.


def view(
    session_id: Annotated[str, typer.Argument(metavar="SESSION", help="The session's id.")],
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Where to write it; default: SESSION.html.")] = None,
) -> None:
    """Write a session's page into one HTML file: its tree, its messages, and every token with its logprob and weights."""
    from cli.control import Control

    page = Control().fetch(f"/ui/sessions/{quote(session_id, safe='')}/download/page.html")
    target = out or Path(f"{session_id}.html")
    try:
        target.write_bytes(page)
    except OSError as error:
        raise Refusal(f"{target} cannot be written: {error.strerror}") from error
    typer.echo(target)


# `verbatim dead-letters`: groups that are not delivered any more, and why; delivered again or taken off the list.


dead_letters = typer.Typer(
    no_args_is_help=True,
    help="Groups that no trainer gets any more: too often delivered, unreadable, or never complete (VERBATIM_URL, "
    "VERBATIM_ADMIN_TOKEN).",
)

PAGE = 1000

Letters = Annotated[list[str] | None, typer.Argument(metavar="[LETTER]", help="Ids of letters, or of their groups.")]
All = Annotated[bool, typer.Option("--all", help="All of them, or all that --reason selects.")]
Reason = Annotated[str | None, typer.Option(metavar="TEXT", help="Only letters whose reason contains this text.")]


@dead_letters.command("list")
def list_(
    reason: Reason = None,
    limit: Annotated[int, typer.Option(metavar="N", min=1, help="At most so many, the newest.")] = 50,
) -> None:
    """List dead letters with their reasons, newest first."""
    from itertools import islice

    from cli.control import Control
    from cli.tables import standard_output

    found = list(islice(letters(Control(), reason), limit + 1))
    console = standard_output()
    console.print(letters_table(found[:limit]))
    if len(found) > limit:
        console.print(f"There are more: raise --limit above {limit}.")


@dead_letters.command("retry")
def retry(names: Letters = None, all_: All = False, reason: Reason = None) -> None:
    """Deliver them again, as if never delivered; an incomplete group waits for its members again."""
    from cli.control import Control

    control = Control()
    _each(control, names, all_, reason, "delivered again", lambda path: control.post(f"{path}/retry", {}))


@dead_letters.command("drop")
def drop(names: Letters = None, all_: All = False, reason: Reason = None) -> None:
    """Take them off the list for good. Their sessions stay until they are deleted."""
    from cli.control import Control

    control = Control()
    _each(control, names, all_, reason, "dropped", control.delete)


def letters(control: Control, reason: str | None) -> Iterator[dict[str, Any]]:
    """Every dead letter whose reason contains `reason`, newest first, page after page."""
    cursor = None
    while True:
        page = control.get("/batches/dead", cursor=cursor, limit=PAGE, reason=reason)
        yield from page["dead_letters"]
        cursor = page["cursor"]
        if cursor is None:
            return


def letters_table(found: list[dict[str, Any]]) -> Table:
    from rich.markup import escape

    from cli.tables import whole_table

    table = whole_table("letter", "sessions", "deliveries", "died", "reason")
    for letter in found:
        died_at = datetime.fromtimestamp(letter["died_at"]).astimezone().strftime("%Y-%m-%d %H:%M:%S")
        sessions = str(len(letter["session_ids"]))
        table.add_row(escape(letter["letter_id"]), sessions, str(letter["deliveries"]), died_at, escape(letter["reason"]))
    return table


def _each(
    control: Control,
    names: list[str] | None,
    all_: bool,
    reason: str | None,
    done: str,
    act: Callable[[str], dict[str, Any]],
) -> None:
    """`act` on the path of each letter that is meant, and what became of them. Raises `Refusal` when some could not be had."""
    from rich.console import Console
    from rich.progress import track

    meant, screen = _meant(control, names, all_, reason), Console(stderr=True)
    refusals: list[str] = []
    count = 0
    for name in track(meant, "dead letters", console=screen, transient=True, disable=not screen.is_terminal):
        try:
            count += len(act(f"/batches/dead/{quote(name, safe='')}")["letters"])
        except Refusal as refusal:
            refusals.append(str(refusal))
    Console().print(f"{count} {'letter' if count == 1 else 'letters'} {done}")
    if refusals:
        raise Refusal("; ".join(refusals[:5]) + (f"; and {len(refusals) - 5} more" if len(refusals) > 5 else ""))


def _meant(control: Control, names: list[str] | None, all_: bool, reason: str | None) -> list[str]:
    """The letters to act on. All are listed first: what is acted on leaves the list."""
    if bool(names) == all_:
        raise Refusal("name the letters, or say --all", exit_code=2)
    if not names:
        return [letter["letter_id"] for letter in letters(control, reason)]
    if reason is not None:
        raise Refusal("--reason selects among --all; letters that are named need none", exit_code=2)
    return names
