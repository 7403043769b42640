"""Sessions out and in, as the store holds them: what `verbatim export` reads and `verbatim import` writes. For the admin.

Both speak msgpack, for records are bytes. A session's key is in neither: a session that came back opens to no key.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, Query, Request, Response

from proxy.api.closing import CLOSED, offer
from proxy.api.requests import Form, Served, admin_only, answer, json_response, read_body
from proxy.api.sessions import session_as_wire, session_of_wire
from proxy.auth import SESSION_ID
from proxy.errors import Conflict, NotFound, RequestError
from proxy.services import Services
from proxy.store.sessions import Intent, SessionState
from reconstruct.codec import decode
from reconstruct.errors import DecodeError

router = APIRouter(prefix="/sessions", dependencies=[Depends(admin_only)])


class Restore(msgspec.Struct, forbid_unknown_fields=True):
    """A part of a session: `records` from number `start` on. The `last` part carries the marks and closes it. `deliver`: put it
    into its group, as if it had been closed now; otherwise no trainer is given it."""

    session: dict[str, Any]
    start: int
    records: list[tuple[str, bytes]]
    last: bool
    delivered: list[str] = []
    intents: list[dict[str, Any]] = []
    deliver: bool = False

    def stored_intents(self) -> list[Intent]:
        """Raises RequestError for one that is none."""
        try:
            return msgspec.convert(self.intents, list[Intent])
        except msgspec.ValidationError as error:
            raise RequestError(f"{error}", param="intents") from error


@router.get("/{session_id}/records")
async def records(
    services: Served,
    session_id: str,
    start: Annotated[int, Query(ge=0)] = 0,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> Response:
    state = await services.sessions.load(session_id)
    if state is None:
        raise NotFound(f"there is no session {session_id}")
    named, delivered, intents = await asyncio.gather(
        services.archive.named_records(session_id, start, start + limit - 1),
        services.sessions.delivered(session_id),
        services.sessions.intents(session_id),
    )
    following = start + len(named)
    return answer(part_as_wire(state, delivered, intents, named, following if following < state.calls else None), Form.MSGPACK)


@router.post("/{session_id}/records")
async def restore(request: Request, services: Served, session_id: str) -> Response:
    part, state = _part(await read_body(request, services.settings.max_body_bytes))
    _check(part, state, session_id)
    await services.archive.restore(state.info, part.start, part.records)
    if not part.last:
        return json_response({"session_id": session_id, "outcome": "part", "group": None})
    finish = _deliver if part.deliver else _keep
    fresh, group = await finish(services, part, state)
    return json_response({"session_id": session_id, "outcome": "restored" if fresh else "present", "group": group})


async def _keep(services: Services, part: Restore, state: SessionState) -> tuple[bool, str | None]:
    return await services.archive.finish(state, part.delivered, part.stored_intents(), await services.clock.now()), None


async def _deliver(services: Services, part: Restore, state: SessionState) -> tuple[bool, str | None]:
    """Announced before it is closed, as every session is, so that a crash in between is made good."""
    await services.delivery.announce(state.info.session_id, None, await services.clock.now())
    try:
        fresh = await services.archive.finish(state, part.delivered, part.stored_intents(), None)
    except RequestError:
        await services.delivery.retract(state.info.session_id)
        raise
    # As it is there: an old archive does not tell of a session that no trainer gets it.
    return fresh, await offer(services, await services.sessions.load(state.info.session_id) or state)


def intents_as_wire(intents: Sequence[Intent]) -> list[dict[str, Any]]:
    """Calls without a result, their digests in base64."""
    wire: list[dict[str, Any]] = msgspec.to_builtins(intents)
    return wire


def part_as_wire(
    state: SessionState,
    delivered: Iterable[str],
    intents: Sequence[Intent],
    named: Sequence[tuple[str, bytes]],
    next_start: int | None,
) -> dict[str, Any]:
    """A part of a session with the records `named`."""
    return {
        "session": session_as_wire(state),
        "delivered": sorted(delivered),
        "intents": intents_as_wire(intents),
        "records": named,
        "next_start": next_start,
    }


def _part(raw: bytes) -> tuple[Restore, SessionState]:
    try:
        part = msgspec.msgpack.decode(raw, type=Restore)
        return part, session_of_wire(part.session)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise RequestError(f"the body is no part of a session: {error}") from error


def _check(part: Restore, state: SessionState, session_id: str) -> None:
    """Raise unless the part is one of a closed session of that id, and every record is a call of it."""
    if state.info.session_id != session_id or not SESSION_ID.match(session_id):
        raise RequestError(f"the part is of session {state.info.session_id!r}", param="session")
    if state.status not in CLOSED or state.closed_at is None:
        raise Conflict(f"session {session_id} was {state.status}: only closed sessions can be imported", param="session")
    for at, (call_id, record) in enumerate(part.records):
        _check_record(session_id, part.start + at, call_id, record)


def _check_record(session_id: str, position: int, call_id: str, record: bytes) -> None:
    try:
        call = decode(record)
    except DecodeError as error:
        # It was damaged before it was exported; it is kept as what it was, never trained.
        if call_id == f"record-{position}":
            return
        raise RequestError(f"record {position} of session {session_id} cannot be read: {error}", param="records") from error
    if (call.session_id, call.call_id) != (session_id, call_id):
        raise RequestError(
            f"record {position} of session {session_id} is call {call.call_id} of session {call.session_id}", param="records"
        )
