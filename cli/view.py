"""`verbatim view`: one session as a single HTML file, to look at and to pass on without the service."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated
from urllib.parse import quote

import typer

from cli.refusal import Refusal


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
