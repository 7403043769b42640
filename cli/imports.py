"""`verbatim import`: an export back into a store, session by session, as they were."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cli.refusal import Refusal

if TYPE_CHECKING:
    from rich.console import Console

    from cli.archive_api import ArchiveApi
    from proxy.archive.folder import ArchiveReader


def import_sessions(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="What verbatim export, or the service's retention, wrote.")],
    deliver: Annotated[
        bool,
        typer.Option(
            "--deliver",
            help="Put the sessions into their groups as if they had been closed now: trainers get them. Left out, they are "
            "history: no trainer is given them and their rewards are fixed.",
        ),
    ] = False,
) -> None:
    """Put the sessions of DIR into the store of the service at VERBATIM_URL: records, state, rewards and marks.

    A session that is there already, as it is in DIR, is left alone; one that differs ends the import with exit code 1, and nothing
    of it is changed. An import that was interrupted can be started again. Keys do not come back: a harness cannot use the sessions.
    """
    from rich.console import Console

    from cli.archive_api import ArchiveApi
    from proxy.archive.folder import ArchiveError, ArchiveReader

    try:
        reader = ArchiveReader(folder)
        if reader.manifest["format"] == "parquet" and find_spec("pyarrow") is None:
            raise Refusal(f"{folder} is in Parquet, which needs pyarrow: pip install 'verbatim-rl[archive]'")
        with ArchiveApi() as api:
            counted = _import(api, reader, deliver, Console(stderr=True))
    except (ArchiveError, OSError) as error:
        raise Refusal(str(error)) from error
    line = f"imported {counted['restored']} sessions from {folder}"
    line += f"; {counted['present']} were there already" if counted["present"] else ""
    typer.echo(line if reader.manifest["complete"] else f"{line}; the export itself has not ended: there may be more to come")


def _import(api: ArchiveApi, reader: ArchiveReader, deliver: bool, console: Console) -> dict[str, int]:
    from rich.progress import track

    counted = {"restored": 0, "present": 0}
    total = sum(part["sessions"] for part in reader.parts)
    for session in track(reader.sessions(), "importing", total, console=console, disable=not console.is_terminal):
        counted[api.restore(session, deliver=deliver)] += 1
    return counted
