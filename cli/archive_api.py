"""Whole sessions out of a running service and into it, over one connection that outlives a restart of the service."""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import quote

import httpx
import msgpack
from tenacity import retry, retry_if_exception_type, stop_after_delay, wait_exponential

from cli.control import Control, complaint
from cli.refusal import Refusal

if TYPE_CHECKING:
    from proxy.archive.tables import ArchivedSession

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
