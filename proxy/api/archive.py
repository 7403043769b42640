"""Sessions out and in, as the store holds them: what `verbatim export` reads and `verbatim import` writes. For the admin.

Both speak msgpack, for records are bytes. A session's key is in neither: a session that came back opens to no key.
"""

from __future__ import annotations

import asyncio
import time
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, Query, Request, Response

from proxy.api.access import Served, admin_only
from proxy.api.answers import Form, answer, json_response
from proxy.api.bodies import read_body
from proxy.api.closing import CLOSED, offer
from proxy.api.sessions import session_as_wire
from proxy.auth import SESSION_ID
from proxy.errors import Conflict, NotFound, RequestError
from proxy.services import Services
from proxy.store.base import Intent, SessionInfo, SessionState
from reconstruct.codec import decode
from reconstruct.errors import DecodeError

router = APIRouter(prefix="/sessions", dependencies=[Depends(admin_only)])


class State(msgspec.Struct):
    """A session as `session_as_wire` gives it."""

    session_id: str
    status: str
    created_at: float
    updated_at: float
    closed_at: float | None
    calls: int
    task_id: str | None
    group_id: str | None
    group_size: int
    metadata: dict[str, Any]
    sampling: dict[str, Any]
    reward: float | None
    per_call: dict[str, float]
    per_branch: dict[str, float]
    reward_metadata: dict[str, Any]
    error: str | None

    def stored(self) -> SessionState:
        info = SessionInfo(
            session_id=self.session_id,
            key_hash=b"",
            created_at=self.created_at,
            task_id=self.task_id,
            group_id=self.group_id,
            group_size=self.group_size,
            metadata=self.metadata,
            sampling=self.sampling,
        )
        return SessionState(
            info=info,
            status=self.status,
            calls=self.calls,
            reward=self.reward,
            per_call=self.per_call,
            per_branch=self.per_branch,
            reward_metadata=self.reward_metadata,
            error=self.error,
            closed_at=self.closed_at,
            updated_at=self.updated_at,
        )


class Restore(msgspec.Struct, forbid_unknown_fields=True):
    """A part of a session: `records` from number `start` on. The `last` part carries the marks and closes it. `deliver`: put it
    into its group, as if it had been closed now; otherwise no trainer is given it."""

    session: State
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
    return answer(
        {
            "session": session_as_wire(state),
            "delivered": sorted(delivered),
            "intents": intents_as_wire(intents),
            "records": named,
            "next_start": following if following < state.calls else None,
        },
        Form.MSGPACK,
    )


@router.post("/{session_id}/records")
async def restore(request: Request, services: Served, session_id: str) -> Response:
    part = _part(await read_body(request, services.settings.max_body_bytes))
    _check(part, session_id)
    state = part.session.stored()
    await services.archive.restore(state.info, part.start, part.records)
    if not part.last:
        return json_response({"session_id": session_id, "outcome": "part", "group": None})
    finish = _deliver if part.deliver else _keep
    fresh, group = await finish(services, part, state)
    return json_response({"session_id": session_id, "outcome": "restored" if fresh else "present", "group": group})


async def _keep(services: Services, part: Restore, state: SessionState) -> tuple[bool, str | None]:
    return await services.archive.finish(state, part.delivered, part.stored_intents(), time.time()), None


async def _deliver(services: Services, part: Restore, state: SessionState) -> tuple[bool, str | None]:
    """Announced before it is closed, as every session is, so that a crash in between is made good."""
    await services.delivery.announce(state.info.session_id, None, time.time())
    try:
        fresh = await services.archive.finish(state, part.delivered, part.stored_intents(), None)
    except RequestError:
        await services.delivery.retract(state.info.session_id)
        raise
    return fresh, await offer(services, state)


def intents_as_wire(intents: list[Intent]) -> list[dict[str, Any]]:
    """Calls without a result, their digests in base64."""
    wire: list[dict[str, Any]] = msgspec.to_builtins(intents)
    return wire


def _part(raw: bytes) -> Restore:
    try:
        return msgspec.msgpack.decode(raw, type=Restore)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise RequestError(f"the body is no part of a session: {error}") from error


def _check(part: Restore, session_id: str) -> None:
    """Raise unless the part is one of a closed session of that id, and every record is a call of it."""
    state = part.session
    if state.session_id != session_id or not SESSION_ID.match(session_id):
        raise RequestError(f"the part is of session {state.session_id!r}", param="session")
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
