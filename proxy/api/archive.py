"""Export and import of sessions as the store holds them, for `verbatim export` and `verbatim import`. For the admin.

Both use msgpack, since records are bytes. A session's key is never exported: no key opens an imported session.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Depends, Query, Request, Response

from contract.attempts import ENDED
from contract.sessions import SESSION_ID, Unserved
from proxy.api.closing import fill_group, load_session
from proxy.api.requests import (
    MSGPACK,
    Body,
    Encoding,
    Served,
    SessionId,
    encode_response,
    json_response,
    read_body,
    require_admin,
)
from proxy.api.sessions import LOG_CHARACTERS, session_as_wire, session_from_wire, unserved_as_wire
from proxy.call.recording import images_of
from proxy.errors import Conflict, RequestError
from proxy.services import Services
from proxy.store.states import Intent, SessionInfo, SessionState
from reconstruct.codec import decode
from reconstruct.errors import DecodeError

router = APIRouter(prefix="/sessions", tags=["archive"], dependencies=[Depends(require_admin)], default_response_class=Response)


class Restore(msgspec.Struct, forbid_unknown_fields=True):
    """Part of a session: `records` from number `start` on, `scores` of its calls, and `media`, bytes of images by digest. The `last` part
    carries the remaining state and closes the session. With `deliver` the session joins its group as if it had been closed now; otherwise
    it is never delivered to a trainer."""

    session: dict[str, Any]
    start: int
    records: list[tuple[str, bytes]]
    last: bool
    delivered: list[str] = []
    intents: list[dict[str, Any]] = []
    log: Annotated[str, msgspec.Meta(max_length=LOG_CHARACTERS)] = ""
    unserved: Unserved | None = None
    deliver: bool = False
    media: dict[str, bytes] = {}
    scores: dict[str, bytes] = {}

    def stored_intents(self) -> list[Intent]:
        """Raises `RequestError` for an invalid intent."""
        try:
            return msgspec.convert(self.intents, list[Intent])
        except msgspec.ValidationError as error:
            raise RequestError(f"{error}", param="intents") from error


class RestoredPart(Body, json_schema_extra={"example": {"session_id": "first", "outcome": "restored", "group": None}}):
    session_id: str
    outcome: Literal["part", "restored", "present"]
    group: str | None


@router.get("/{session_id}/records", responses={200: {"content": {MSGPACK: {}}, "description": "a part of the session"}})
async def export_records(
    services: Served,
    session_id: SessionId,
    start: Annotated[int, Query(ge=0, description="Number of the first record.")] = 0,
    limit: Annotated[int, Query(ge=1, le=1000, description="Records per part.")] = 100,
) -> Response:
    """Answers msgpack: `session`, `delivered`, `intents`, `records` as the store holds them, and `next_start`. The last part has
    the `log`, the `scores` and the digests of the session's images: `media`."""
    state = await load_session(services, session_id)
    named, delivered, intents = await asyncio.gather(
        services.archive.load_named_records(session_id, start, start + limit - 1),
        services.sessions.load_delivered(session_id),
        services.sessions.load_intents(session_id),
    )
    following = start + len(named)
    next_start = following if following < state.calls else None
    log, images, scores = "", set[str](), dict[str, bytes]()
    if next_start is None:
        log = await services.sessions.load_log(session_id)
        scores = await services.scores.load_packed(session_id) if state.scored else {}
        every = () if state.info.replay is None else await services.sessions.load_records(session_id, 0, -1)
        images = await list_images(services, state.info, every)
    return encode_response(part_as_wire(state, delivered, intents, named, next_start, log, images, scores), Encoding.MSGPACK)


@router.post(
    "/{session_id}/records",
    responses={
        200: {"model": RestoredPart, "description": "stored"},
        409: {"description": "the session is not closed, or exists with other contents (`conflict`)"},
    },
    openapi_extra={"requestBody": {"required": True, "content": {MSGPACK: {"schema": {"type": "object"}}}}},
)
async def import_records(request: Request, services: Served, session_id: SessionId) -> Response:
    """Takes msgpack: a part from an export. The last part closes the session."""
    raw = await read_body(request, services.settings.max_body_bytes)
    part, state = await asyncio.to_thread(_decode_part, raw, session_id)
    await services.archive.restore(state.info, part.start, part.records)
    if part.scores:
        await services.scores.restore(session_id, state.info.created_at, part.scores)
    if part.media:
        await services.media.restore(session_id, state.info.created_at, part.media)
    if not part.last:
        return json_response({"session_id": session_id, "outcome": "part", "group": None})
    if part.deliver:
        fresh, group = await _finish_with_delivery(services, part, state)
    else:
        intents, now = part.stored_intents(), await services.clock.now()
        fresh, group = await services.archive.finish(state, part.delivered, intents, now, part.log), None
    return json_response({"session_id": session_id, "outcome": "restored" if fresh else "present", "group": group})


def part_as_wire(
    state: SessionState,
    delivered: Iterable[str],
    intents: Sequence[Intent],
    named: Sequence[tuple[str, bytes]],
    next_start: int | None,
    log: str,
    images: Iterable[str],
    scores: Mapping[str, bytes],
) -> dict[str, Any]:
    """A part of a session with the records `named`; the last one has the log, the scores and the digests of the `images`."""
    return {
        "session": session_as_wire(state),
        "delivered": sorted(delivered),
        "intents": intents_as_wire(intents),
        "unserved": unserved_as_wire(state),
        "records": named,
        "next_start": next_start,
        "log": log,
        "media": sorted(images),
        "scores": dict(scores),
    }


async def list_images(services: Services, info: SessionInfo, records: Iterable[bytes]) -> set[str]:
    """The digests of the session's images, `records` being all of its calls: a fork refers to none of those that it replays."""
    images = set(await services.media.sizes(info.session_id, info.created_at))
    return images if info.replay is None else images | await asyncio.to_thread(_read_images, records)


def _read_images(records: Iterable[bytes]) -> set[str]:
    images = set[str]()
    for record in records:
        with contextlib.suppress(DecodeError):
            images.update(images_of(decode(record)))
    return images


def intents_as_wire(intents: Sequence[Intent]) -> list[dict[str, Any]]:
    """Calls without a result, with their digests in base64."""
    wire: list[dict[str, Any]] = msgspec.to_builtins(intents)
    return wire


async def _finish_with_delivery(services: Services, part: Restore, state: SessionState) -> tuple[bool, str | None]:
    """Whether the session is new, and the state of its group. The session is announced first, as before every close, so that a sweep
    completes it after a crash."""
    await services.delivery.announce(state.info.session_id, None, await services.clock.now())
    try:
        fresh = await services.archive.finish(state, part.delivered, part.stored_intents(), None, part.log)
    except RequestError:
        await services.delivery.retract(state.info.session_id)
        raise
    # The stored state counts: an archive does not have the group's rule.
    return fresh, await fill_group(services, await services.sessions.load(state.info.session_id) or state)


def _decode_part(raw: bytes, session_id: str) -> tuple[Restore, SessionState]:
    """The part, checked record by record. Raises RequestError and Conflict."""
    try:
        part = msgspec.msgpack.decode(raw, type=Restore)
        state = replace(session_from_wire(part.session), unserved=part.unserved)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise RequestError(f"the body is not part of a session: {error}") from error
    _check(part, state, session_id)
    return part, state


def _check(part: Restore, state: SessionState, session_id: str) -> None:
    """Raise unless the part is of a closed session with that id and every record is one of its calls."""
    if state.info.session_id != session_id or not SESSION_ID.match(session_id):
        raise RequestError(f"the part is of session {state.info.session_id!r}", param="session")
    if state.status not in ENDED or state.closed_at is None:
        raise Conflict(f"session {session_id} was {state.status}: only closed sessions can be imported", param="session")
    for number, (call_id, record) in enumerate(part.records, part.start):
        _check_record(session_id, number, call_id, record, forked=state.info.replay is not None)


def _check_record(session_id: str, number: int, call_id: str, record: bytes, *, forked: bool) -> None:
    """A fork's records may be calls of the sessions that it replays."""
    try:
        call = decode(record)
    except DecodeError as error:
        # It was already damaged when it was exported. It is kept as it was and never trained.
        if call_id == f"record-{number}":
            return
        raise RequestError(f"record {number} of session {session_id} cannot be read: {error}", param="records") from error
    if call.call_id != call_id or (call.session_id != session_id and not forked):
        raise RequestError(
            f"record {number} of session {session_id} is call {call.call_id} of session {call.session_id}", param="records"
        )
