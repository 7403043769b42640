"""Whole sessions read from a running service and restored into it, retried while the service restarts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote

import msgpack

from cli.control import CommandClient, RequestFailed
from contract.client import TRANSIENT
from proxy.archive.tables import ArchivedSession

PAGE = 200
PART_BYTES = 4 * 2**20
"""The most records in one request of an import, unless a single record is larger."""
PACKED = "application/msgpack;arrays=packed"


class ArchiveApi(CommandClient):
    """Use in a `with` block. Requests are retried while they get no answer, 408, 502, 503 or 504."""

    # The rows of a long session are built in one request.
    timeout_seconds = 300.0
    retry = TRANSIENT
    retry_seconds = 60.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def list_sessions(self, *, status: str | None, group_id: str | None) -> Iterator[dict[str, Any]]:
        """Every session, newest first."""
        cursor = None
        while True:
            page = self.get("/sessions", status=status, group_id=group_id, limit=PAGE, cursor=cursor)
            yield from page["sessions"]
            cursor = page["cursor"]
            if cursor is None:
                return

    def load_session(self, session_id: str, builder: str) -> ArchivedSession | None:
        """The closed session with all its records; None if it was deleted meanwhile."""
        path = f"/sessions/{quote(session_id, safe='')}"
        records: list[tuple[str, bytes]] = []
        start: int | None = 0
        while start is not None:
            page = self.get_packed(f"{path}/records", absent=(404,), start=start, limit=PAGE)
            if isinstance(page, int):
                return None
            records += [(call_id, record) for call_id, record in page["records"]]
            start = page["next_start"]
        rows = self.get_packed(f"{path}/trajectories", absent=(404, 500), builder=builder)
        if rows == 404:
            return None
        rest: dict[str, Any] = {"log": page["log"], "unserved": page["unserved"], "scores": page["scores"]}
        try:
            rest["media"] = {digest: self._request("GET", f"{path}/media/{digest}").content for digest in page["media"]}
        except RequestFailed as failed:
            if failed.status == 404:
                return None
            raise
        stored = (page["session"], records, page["delivered"], page["intents"])
        if isinstance(rows, int):
            return ArchivedSession(*stored, problem="the service could not build its trajectories; its log says why", **rest)
        return ArchivedSession(*stored, rows["trajectories"], rows["accounting"], **rest)

    def restore_session(self, session: ArchivedSession, *, deliver: bool) -> str:
        """Put the session into the service's store: `restored`, or `present` if it already holds the session."""
        path = f"/sessions/{quote(session.state['session_id'], safe='')}/records"
        outcome = ""
        for name, values in (("media", session.media), ("scores", session.scores)):
            for part in _split_values(values):
                body = {"session": dict(session.state), "start": 0, "records": [], "last": False, name: part}
                self._request("POST", path, content=msgpack.packb(body))
        for start, records, last in _split(session.records):
            body = {"session": dict(session.state), "start": start, "records": records, "last": last}
            if last:
                body |= {"delivered": list(session.delivered), "intents": list(session.intents), "deliver": deliver}
                body |= {"log": session.log} if session.log else {}
                body |= {"unserved": session.unserved} if session.unserved else {}
            outcome = self._request("POST", path, content=msgpack.packb(body)).json()["outcome"]
        return outcome

    def get_packed(self, path: str, *, absent: tuple[int, ...], **params: Any) -> Any:
        """The msgpack answer to GET `path`, or the HTTP status if it is one of `absent`."""
        try:
            return msgpack.unpackb(self._request("GET", path, params=params, accept=PACKED).content)
        except RequestFailed as failed:
            if failed.status in absent:
                return failed.status
            raise


def _split_values(values: Mapping[str, bytes]) -> Iterator[dict[str, bytes]]:
    """The images or scores, at most PART_BYTES at a time, or one."""
    part: dict[str, bytes] = {}
    for name, data in values.items():
        if part and sum(map(len, part.values())) + len(data) > PART_BYTES:
            yield part
            part = {}
        part[name] = data
    if part:
        yield part


def _split(records: Iterable[tuple[str, bytes]]) -> Iterator[tuple[int, list[tuple[str, bytes]], bool]]:
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
