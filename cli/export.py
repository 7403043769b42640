"""`verbatim export` and `verbatim import`: closed sessions of a running service as files, and back."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from cli.options import Builder, OfGroup, ServiceUrl, check_installed
from cli.refusal import CommandError
from contract.attempts import ENDED

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

    from cli.archive_api import ArchiveApi
    from proxy.archive.folder import ArchiveReader, ArchiveWriter
    from reconstruct.records import Call


NEEDS = ("pyarrow",)
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def export(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where the files go. Sessions that are already there are skipped.")],
    since: Annotated[
        str | None,
        typer.Option(
            metavar="WHEN", help="Only sessions closed since then: 12h or 7d (ago), an ISO date or time, or epoch seconds."
        ),
    ] = None,
    until: Annotated[str | None, typer.Option(metavar="WHEN", help="Only sessions closed before then.")] = None,
    group: OfGroup = None,
    task: Annotated[str | None, typer.Option(metavar="ID", help="Only the sessions of this task.")] = None,
    status: Annotated[
        list[str] | None,
        typer.Option(metavar="STATUS", help="Only these: completed, failed, timeout or cancelled. Repeatable."),
    ] = None,
    flag: Annotated[
        str | None, typer.Option(metavar="FLAG", help="Only sessions with this flag: verbatim sessions flag.")
    ] = None,
    builder: Builder = "merged",
    pairs: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Also write the preference pairs of all sessions in DIR to this file, as JSON lines."
        ),
    ] = None,
    atif: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Also write each session of the export to this folder as ATIF, the trajectory format of Harbor."
        ),
    ] = None,
    url: ServiceUrl = None,
) -> None:
    """Write closed sessions to DIR: one row per trajectory, and everything verbatim import needs to restore the sessions.

    Repeat the command to continue an interrupted export, or to add new sessions to a finished one. docs/store.md
    describes the files.

    \b
    verbatim export --since 7d --out week
    python -c "import pandas; print(pandas.read_parquet('week/trajectories-000000.parquet'))"
    """
    from rich.console import Console

    from cli.archive_api import ArchiveApi
    from proxy.archive.folder import ArchiveError, ArchiveReader, ArchiveWriter

    check_installed("export", NEEDS, "archive")
    for name in status or ():
        if name not in ENDED:
            raise CommandError(f"--status {name!r} is invalid: choose from {', '.join(ENDED)}", exit_code=2)
    wanted = ExportFilter(parse_time("--since", since), parse_time("--until", until), group, task, tuple(status or ENDED), flag)
    console = Console(stderr=True)
    with ArchiveApi(url) as api:
        try:
            with ArchiveWriter(out, builder=builder) as writer:
                totals = _export(api, writer, wanted, console)
            written = None if pairs is None else write_pairs(ArchiveReader(out), pairs)
            described = None if atif is None else write_atif(ArchiveReader(out), atif)
        except (ArchiveError, OSError) as error:
            raise CommandError(str(error)) from error
    typer.echo(totals.summarize(writer.folder))
    if written is not None:
        typer.echo(f"wrote {written} preference pairs to {pairs}")
    if described is not None:
        typer.echo(f"wrote {described} sessions as ATIF to {atif}")


@dataclass(frozen=True, slots=True)
class ExportFilter:
    """Selects the sessions to export. Times are epoch seconds."""

    since: float | None
    until: float | None
    group: str | None
    task: str | None
    status: tuple[str, ...]
    flag: str | None = None

    def accepts(self, session: dict[str, Any]) -> bool:
        closed_at = session["closed_at"]
        if session["status"] not in self.status or closed_at is None:
            return False
        if self.task is not None and session["task_id"] != self.task:
            return False
        if self.flag is not None and session["flag"] != self.flag:
            return False
        return (self.since or 0) <= closed_at and (self.until is None or closed_at < self.until)

    def list_sessions(self, api: ArchiveApi) -> Iterator[dict[str, Any]]:
        only = self.status[0] if len(self.status) == 1 else None
        return filter(self.accepts, api.list_sessions(status=only, group_id=self.group))


def parse_time(flag: str, text: str | None) -> float | None:
    """Epoch seconds of `7d` (ago), of an ISO date or time (local unless it says otherwise), or of epoch seconds."""
    if text is None:
        return None
    ago = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw])", text.strip())
    if ago:
        return time.time() - float(ago[1]) * UNITS[ago[2]]
    try:
        return float(text) if re.fullmatch(r"\d+(\.\d+)?", text) else datetime.fromisoformat(text).timestamp()
    except ValueError as error:
        raise CommandError(
            f"{flag} {text!r} is invalid: use 12h, 7d, 2026-01-31, 2026-01-31T12:00, or epoch seconds", exit_code=2
        ) from error


@dataclass(slots=True)
class Totals:
    """`present` sessions were exported earlier, `outdated` ones of them with other rewards or scores; those with `problems` have no
    trajectories."""

    sessions: int = 0
    trajectories: int = 0
    tokens: int = 0
    present: int = 0
    outdated: int = 0
    problems: int = 0

    def summarize(self, out: Path) -> str:
        line = f"exported {self.sessions} sessions with {self.trajectories} trajectories, {self.tokens} tokens, to {out}"
        if self.present:
            line += f"; {self.present} were there already"
        if self.outdated:
            line += (
                f", {self.outdated} of them with other rewards or scores than they have now: export those into another folder"
            )
        if self.problems:
            line += f"; {self.problems} have no trajectories because their records contradict each other (column problem)"
        return line


def _export(api: ArchiveApi, writer: ArchiveWriter, wanted: ExportFilter, console: Console) -> Totals:
    totals = Totals()

    def is_present(session: dict[str, Any]) -> bool:
        return writer.holds((session["session_id"], session["created_at"]))

    with _progress(console) as progress:
        count = sum(not is_present(each) for each in wanted.list_sessions(api)) if console.is_terminal else None
        bar = progress.add_task("exporting", total=count, tokens=0)
        for listed in wanted.list_sessions(api):
            if is_present(listed):
                totals.present += 1
                totals.outdated += writer.is_outdated(listed)
                continue
            if (session := api.load_session(listed["session_id"], writer.builder)) is not None:
                writer.add(session)
                totals.sessions += 1
                totals.trajectories += len(session.trajectories)
                totals.tokens += sum(len(row["loss_mask"]) for row in session.trajectories)
                totals.problems += session.problem is not None
                if writer.full:
                    writer.flush()
            progress.update(bar, advance=1, tokens=totals.tokens)
        writer.finish(asdict(wanted))
    return totals


def write_pairs(reader: ArchiveReader, file: Path) -> int:
    """Write what lookaheads chose and did not choose, in the form that preference trainers read, with the token ids. Returns how many pairs
    there are. Each is written with the session that sampled it: a fork's replayed calls are its origin's."""
    from proxy.transcripts import messages_of
    from reconstruct.accounting import settle
    from reconstruct.codec import decode
    from reconstruct.errors import DecodeError
    from reconstruct.messages import rename_calls
    from reconstruct.preferences import find_preferences
    from reconstruct.records import find_engine_id

    written = 0
    with file.open("w", encoding="utf-8") as lines:
        for session in reader.sessions():
            session_id = session.state["session_id"]
            calls: list[Call] = []
            for _, record in session.records:
                # The column `problem` tells of a damaged one.
                with suppress(DecodeError):
                    calls.append(decode(record))
            forest = settle(calls).forest
            shown = partial(rename_calls, rename=partial(find_engine_id, forest.calls))
            for pair in find_preferences(forest):
                if pair.chosen.session_id != session_id:
                    continue
                prompt_ids = forest.prompt_ids(pair.chosen.call_id).tolist()
                line = {
                    "session_id": session_id,
                    "prompt": [*map(shown, messages_of(pair.chosen, forest))],
                    "prompt_ids": prompt_ids,
                }
                for name, call in (("chosen", pair.chosen), ("rejected", pair.rejected)):
                    line |= {
                        name: [shown(json.loads(call.reply))],
                        f"{name}_ids": call.node.completion_ids.tolist(),
                        f"{name}_logprobs": call.node.logprobs.tolist(),
                        f"{name}_call_id": call.call_id,
                    }
                lines.write(json.dumps(line, ensure_ascii=False) + "\n")
                written += 1
    return written


class ArchivedRow(NamedTuple):
    """What is read of a training row."""

    session_id: str
    trajectory_id: str
    role: str
    agent: str
    loss_mask: list[int]
    call_ids: list[str]
    tools: str | None


def write_atif(reader: ArchiveReader, folder: Path) -> int:
    """Write each session that has rows as `<session id>.json`. Returns how many there are."""
    from proxy.rows import every_call_as_wire
    from trainer_client.integrations.atif import describe_session

    folder.mkdir(parents=True, exist_ok=True)
    written = 0
    listed = (ArchivedRow(**row) for row in reader.rows("trajectories", [*ArchivedRow._fields]))
    # Both tables list the sessions in one order.
    by_session = groupby(listed, key=lambda row: row.session_id)
    session_id, rows = next(by_session, (None, None))
    for session in reader.sessions():
        if session.state["session_id"] != session_id or rows is None:
            continue
        own = list(rows)
        calls = [*every_call_as_wire([record for _, record in session.records], set(session.delivered), (), ())]
        tools = json.loads(own[0].tools) if own[0].tools else None
        document = json.dumps(describe_session(session.state, calls, own, tools), ensure_ascii=False)
        (folder / f"{session_id}.json").write_text(document, encoding="utf-8")
        written += 1
        session_id, rows = next(by_session, (None, None))
    return written


def _progress(console: Console) -> Progress:
    """A progress bar, shown only on a terminal."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("sessions"))
    more = (TextColumn("{task.fields[tokens]} tokens"), TimeRemainingColumn())
    return Progress(*columns, *more, console=console, disable=not console.is_terminal)


def import_sessions(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="A folder that verbatim export or the service's retention wrote.")
    ],
    deliver: Annotated[
        bool,
        typer.Option(
            "--deliver",
            help="Put the sessions into their groups as if they had just been closed, so that trainers get them. By default they "
            "are history: never delivered, and their rewards cannot change.",
        ),
    ] = False,
    url: ServiceUrl = None,
) -> None:
    """Put the sessions of DIR into the store of a service: records, state, rewards and marks.

    A session that is already there is skipped; one that is there and differs ends the import with exit code 1 and is not changed.
    Repeat the command to continue an interrupted import. Session keys are not restored, so no harness can use the sessions.

    \b
    verbatim import week
    """
    from rich.console import Console

    from cli.archive_api import ArchiveApi
    from proxy.archive.folder import ArchiveError, ArchiveReader

    check_installed("import", NEEDS, "archive")
    try:
        reader = ArchiveReader(folder)
        with ArchiveApi(url) as api:
            counted = _import(api, reader, deliver, Console(stderr=True))
    except (ArchiveError, OSError) as error:
        raise CommandError(str(error)) from error
    line = f"imported {counted['restored']} sessions from {folder}"
    line += f"; {counted['present']} were there already" if counted["present"] else ""
    typer.echo(line if reader.manifest["complete"] else f"{line}; the export is not finished, so more may follow")


def _import(api: ArchiveApi, reader: ArchiveReader, deliver: bool, console: Console) -> dict[str, int]:
    from rich.progress import track

    counted = {"restored": 0, "present": 0}
    total = sum(part["sessions"] for part in reader.parts)
    for session in track(reader.sessions(), "importing", total, console=console, disable=not console.is_terminal):
        counted[api.restore_session(session, deliver=deliver)] += 1
    return counted
