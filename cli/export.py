"""`verbatim export`: closed sessions of a running service as files, for training without it and for keeping."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.refusal import Refusal

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

    from cli.archive_api import ArchiveApi
    from proxy.archive.folder import ArchiveWriter

CLOSED = ("completed", "failed", "timeout", "cancelled")
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def export(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where the files go. What is there already is not exported again.")],
    format: Annotated[
        str,
        typer.Option(metavar="parquet|jsonl", help="parquet needs pyarrow: pip install 'verbatim-rl[archive]'."),
    ] = "parquet",
    since: Annotated[
        str | None,
        typer.Option(
            metavar="WHEN", help="Only sessions closed since then: 12h or 7d ago, an ISO date or time, or epoch seconds."
        ),
    ] = None,
    until: Annotated[str | None, typer.Option(metavar="WHEN", help="Only sessions closed before then.")] = None,
    group: Annotated[str | None, typer.Option(metavar="ID", help="Only the sessions of this group.")] = None,
    task: Annotated[str | None, typer.Option(metavar="ID", help="Only the sessions of this task.")] = None,
    status: Annotated[
        list[str] | None,
        typer.Option(metavar="STATUS", help="Only these: completed, failed, timeout or cancelled. Repeat it for several."),
    ] = None,
    builder: Annotated[str, typer.Option(metavar="NAME", help="merged (one row per branch) or per_call.")] = "merged",
) -> None:
    """Write closed sessions to DIR: one row per trajectory, with all that an import needs to bring the sessions back.

    An export that was interrupted goes on where it was when it is started again; one that ended adds what is new. The service is
    the one at VERBATIM_URL, asked with VERBATIM_ADMIN_TOKEN. docs/archive.md describes the files.

    \b
    verbatim export --since 7d --out week
    python -c "import pandas; print(pandas.read_parquet('week/trajectories-000000.parquet'))"
    """
    from rich.console import Console

    from cli.archive_api import ArchiveApi
    from proxy.archive.files import FORMATS
    from proxy.archive.folder import ArchiveError, ArchiveWriter

    if format not in FORMATS:
        raise Refusal(f"--format cannot be {format!r}: choose one of {', '.join(FORMATS)}", exit_code=2)
    if format == "parquet" and find_spec("pyarrow") is None:
        raise Refusal("--format parquet needs pyarrow: pip install 'verbatim-rl[archive]', or choose jsonl")
    wanted = Wanted.read(since, until, group, task, status)
    console = Console(stderr=True)
    with ArchiveApi() as api:
        try:
            with ArchiveWriter(out, format=format, builder=builder) as writer:  # type: ignore[arg-type]
                done = _export(api, writer, wanted, console)
        except (ArchiveError, OSError) as error:
            raise Refusal(str(error)) from error
    typer.echo(done.sentence(out))


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which sessions are exported; times in epoch seconds."""

    since: float | None
    until: float | None
    group: str | None
    task: str | None
    status: tuple[str, ...]

    @classmethod
    def read(
        cls, since: str | None, until: str | None, group: str | None, task: str | None, status: list[str] | None
    ) -> Wanted:
        for name in status or ():
            if name not in CLOSED:
                raise Refusal(f"--status cannot be {name!r}: choose from {', '.join(CLOSED)}", exit_code=2)
        return cls(moment("--since", since), moment("--until", until), group, task, tuple(status or CLOSED))

    def holds(self, session: dict[str, Any]) -> bool:
        closed_at = session["closed_at"]
        if session["status"] not in self.status or closed_at is None:
            return False
        if self.task is not None and session["task_id"] != self.task:
            return False
        return (self.since or 0) <= closed_at and (self.until is None or closed_at < self.until)

    def of(self, api: ArchiveApi) -> Iterator[dict[str, Any]]:
        only = self.status[0] if len(self.status) == 1 else None
        return (session for session in api.sessions(status=only, group_id=self.group) if self.holds(session))


def moment(flag: str, text: str | None) -> float | None:
    """Epoch seconds of `7d` (ago), of an ISO date or time (local unless it says otherwise), or of epoch seconds."""
    if text is None:
        return None
    ago = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw])", text.strip())
    if ago:
        return time.time() - float(ago[1]) * UNITS[ago[2]]
    try:
        return float(text) if re.fullmatch(r"\d+(\.\d+)?", text) else datetime.fromisoformat(text).timestamp()
    except ValueError as error:
        raise Refusal(
            f"{flag} cannot be {text!r}: say 12h, 7d, 2026-01-31, 2026-01-31T12:00, or epoch seconds", exit_code=2
        ) from error


@dataclass(slots=True)
class Done:
    sessions: int = 0
    trajectories: int = 0
    tokens: int = 0
    there: int = 0
    problems: int = 0

    def sentence(self, out: Path) -> str:
        line = f"exported {self.sessions} sessions with {self.trajectories} trajectories, {self.tokens} tokens, to {out}"
        if self.there:
            line += f"; {self.there} were there already"
        if self.problems:
            line += f"; {self.problems} have no trajectories because their records contradict each other (column problem)"
        return line


def _export(api: ArchiveApi, writer: ArchiveWriter, wanted: Wanted, console: Console) -> Done:
    done = Done()
    with _progress(console) as progress:
        total = _count(api, writer, wanted) if console.is_terminal else None
        bar = progress.add_task("exporting", total=total, tokens=0)
        for listed in wanted.of(api):
            if writer.holds((listed["session_id"], listed["created_at"])):
                done.there += 1
                continue
            _add(api, writer, listed["session_id"], done)
            progress.update(bar, advance=1, tokens=done.tokens)
        writer.finish(asdict(wanted))
    return done


def _add(api: ArchiveApi, writer: ArchiveWriter, session_id: str, done: Done) -> None:
    session = api.session(session_id, writer.builder)
    if session is None:
        return
    writer.add(session)
    done.sessions += 1
    done.trajectories += len(session.trajectories)
    done.tokens += sum(len(row["loss_mask"]) for row in session.trajectories)
    done.problems += session.problem is not None
    if writer.full:
        writer.flush()


def _count(api: ArchiveApi, writer: ArchiveWriter, wanted: Wanted) -> int:
    return sum(not writer.holds((session["session_id"], session["created_at"])) for session in wanted.of(api))


def _progress(console: Console) -> Progress:
    """Seen on a terminal only."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("sessions"))
    more = (TextColumn("{task.fields[tokens]} tokens"), TimeRemainingColumn())
    return Progress(*columns, *more, console=console, disable=not console.is_terminal)
