"""`verbatim export`: closed sessions of a running service as files, for training without it and for keeping."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any, Self
from urllib.parse import quote

import httpx
import msgpack
import typer
from tenacity import retry, retry_if_exception_type, stop_after_delay, wait_exponential

from cli.control import Control, complaint
from cli.refusal import Refusal

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

    from proxy.archive.folder import ArchiveReader, ArchiveWriter
    from proxy.archive.tables import ArchivedSession


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
    the one at VERBATIM_URL, asked with VERBATIM_ADMIN_TOKEN. docs/store.md describes the files.

    \b
    verbatim export --since 7d --out week
    python -c "import pandas; print(pandas.read_parquet('week/trajectories-000000.parquet'))"
    """
    from rich.console import Console

    from proxy.archive.folder import FORMATS, ArchiveError, ArchiveWriter

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


# `verbatim import`: an export back into a store, session by session, as they were.


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


# Whole sessions out of a running service and into it, over one connection that outlives a restart of the service.


TIMEOUT_SECONDS = 300.0
"""A long session's rows are built in one request."""
RETRY_SECONDS = 60.0
PAGE = 200
RECORDS_PAGE = 200
PART_BYTES = 4 * 2**20
"""What one request of an import carries at most, or one record."""
PACKED = "application/msgpack;arrays=packed"


class Passing(Exception):
    """What may be over soon: no connection, or a service that cannot answer now."""


class ArchiveApi(Control):
    """Used in a `with` block. Every request raises `Refusal` when it failed for good."""

    def __init__(self, url: str | None = None, token: str | None = None, *, retry_seconds: float = RETRY_SECONDS) -> None:
        super().__init__(url, token)
        self._client = httpx.Client(timeout=TIMEOUT_SECONDS, headers={"Authorization": f"Bearer {self._token}"})
        self._retry_seconds = retry_seconds

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._client.close()

    def sessions(self, *, status: str | None, group_id: str | None) -> Iterator[dict[str, Any]]:
        """Every session, newest first."""
        cursor = None
        while True:
            given = {"status": status, "group_id": group_id, "limit": PAGE, "cursor": cursor}
            params = {name: value for name, value in given.items() if value is not None}
            page = self._send("GET", "/sessions", params=params).json()
            yield from page["sessions"]
            cursor = page["cursor"]
            if cursor is None:
                return

    def session(self, session_id: str, builder: str) -> ArchivedSession | None:
        """The closed session, whole; None when it was deleted meanwhile."""
        from proxy.archive.tables import ArchivedSession

        path = f"/sessions/{quote(session_id, safe='')}"
        records: list[tuple[str, bytes]] = []
        start: int | None = 0
        while start is not None:
            params = {"start": start, "limit": RECORDS_PAGE}
            response = self._send("GET", f"{path}/records", params=params, passes=(404,))
            if response.status_code == 404:
                return None
            page = msgpack.unpackb(response.content)
            records += [(call_id, record) for call_id, record in page["records"]]
            start = page["next_start"]
        built = self._send(
            "GET", f"{path}/trajectories", params={"builder": builder}, headers={"Accept": PACKED}, passes=(404, 500)
        )
        if built.status_code == 404:
            return None
        state, delivered, intents = page["session"], page["delivered"], page["intents"]
        if built.status_code == 500:
            problem = "the service could not build its trajectories; its log says why"
            return ArchivedSession(state, records, delivered, intents, problem=problem)
        rows = msgpack.unpackb(built.content)
        return ArchivedSession(state, records, delivered, intents, rows["trajectories"], rows["accounting"])

    def restore(self, session: ArchivedSession, *, deliver: bool) -> str:
        """Put the session into the service's store: `restored`, or `present` when it was there already."""
        path = f"/sessions/{quote(session.state['session_id'], safe='')}/records"
        outcome = ""
        for start, records, last in _parts(session.records):
            body = {"session": dict(session.state), "start": start, "records": records, "last": last}
            if last:
                body |= {"delivered": list(session.delivered), "intents": list(session.intents), "deliver": deliver}
            outcome = self._send("POST", path, content=msgpack.packb(body)).json()["outcome"]
        return outcome

    def _send(self, method: str, path: str, *, passes: tuple[int, ...] = (), **more: Any) -> httpx.Response:
        again = retry(
            retry=retry_if_exception_type(Passing),
            stop=stop_after_delay(self._retry_seconds),
            wait=wait_exponential(0.1, max=5),
            reraise=True,
        )
        try:
            response = again(self._send_once)(method, path, **more)
        except Passing as error:
            raise Refusal(f"no answer from the service at {self.url} (set VERBATIM_URL to where it is): {error}") from error
        if response.is_error and response.status_code not in passes:
            raise Refusal(complaint(response))
        return response

    def _send_once(self, method: str, path: str, **more: Any) -> httpx.Response:
        try:
            response = self._client.request(method, self.url + path, **more)
        except httpx.InvalidURL as error:
            raise Refusal(f"VERBATIM_URL {self.url!r} is no URL: {error}", exit_code=2) from error
        except httpx.HTTPError as error:
            raise Passing(f"{type(error).__name__} {error}".strip()) from error
        if response.status_code in (502, 503, 504):
            raise Passing(complaint(response))
        return response


def _parts(records: Any) -> Iterator[tuple[int, list[tuple[str, bytes]], bool]]:
    """(number of the first record, the records, whether they are the last): at most PART_BYTES each, or one record."""
    part: list[tuple[str, bytes]] = []
    start = size = 0
    for at, (call_id, record) in enumerate(records):
        if part and size + len(record) > PART_BYTES:
            yield start, part, False
            start, part, size = at, [], 0
        part.append((call_id, record))
        size += len(record)
    yield start, part, True
