"""`verbatim dead-letters`: groups that are not delivered any more, and why; delivered again or taken off the list."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer

from cli.refusal import Refusal

if TYPE_CHECKING:
    from rich.table import Table

    from cli.control import Control

app = typer.Typer(
    no_args_is_help=True,
    help="Groups that no trainer gets any more: too often delivered, unreadable, or never complete (VERBATIM_URL, "
    "VERBATIM_ADMIN_TOKEN).",
)

PAGE = 1000

Letters = Annotated[list[str] | None, typer.Argument(metavar="[LETTER]", help="Ids of letters, or of their groups.")]
All = Annotated[bool, typer.Option("--all", help="All of them, or all that --reason selects.")]
Reason = Annotated[str | None, typer.Option(metavar="TEXT", help="Only letters whose reason contains this text.")]


@app.command("list")
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


@app.command("retry")
def retry(names: Letters = None, all_: All = False, reason: Reason = None) -> None:
    """Deliver them again, as if never delivered; an incomplete group waits for its members again."""
    from cli.control import Control

    control = Control()
    _each(control, names, all_, reason, "delivered again", lambda path: control.post(f"{path}/retry", {}))


@app.command("drop")
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
