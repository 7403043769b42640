"""Sessions over HTTP: open, list, inspect, reward, close and delete them. For the admin."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, fields, replace
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, Query, Request, Response
from pydantic import Field, FiniteFloat

from contract.attempts import ENDED, Ended
from contract.rules import Metadata, Name
from contract.sessions import (
    Lookahead,
    NewSession,
    OpenedSession,
    OpeningFields,
    RunName,
    SessionDetail,
    SessionPage,
    SessionProgress,
    SessionStatus,
    SessionView,
    SettledFields,
)
from proxy.api import admission, closing, forks
from proxy.api.filters import STATUSES, Where, parse_where
from proxy.api.requests import (
    Body,
    JsonBody,
    Opener,
    PageCursor,
    PageSize,
    Served,
    SessionId,
    json_response,
    require_admin,
    require_opener,
    require_owner,
)
from proxy.auth import mint_key
from proxy.dialects.catalogue import base_urls
from proxy.errors import Conflict, NoCalls, NotFound, RequestError
from proxy.projects import claim, name_group
from proxy.scoring.scorers import check_scores
from proxy.services import Services
from proxy.settings import Settings
from proxy.store.states import SessionInfo, SessionState

INFO_FIELDS = ("session_id", "created_at", *(each.name for each in fields(SettledFields)))
STATE_FIELDS = tuple(each.name for each in fields(SessionProgress))
"""What the API shows of a session. `LastEvents` stand beside it, in the state of one session and in archives: whether the budget ended the
run depends on them."""

router = APIRouter(prefix="/sessions", tags=["sessions"], default_response_class=Response)
ADMIN = [Depends(require_admin)]
OWNER = [Depends(require_owner)]


class Reward(Body, json_schema_extra={"example": {"reward": 1.0, "per_call": {}, "metadata": {"judge": "unit tests"}}}):
    reward: FiniteFloat
    per_call: dict[str, FiniteFloat] = Field(default_factory=dict)
    """Reward by call id."""
    per_branch: dict[str, FiniteFloat] = Field(default_factory=dict)
    """Reward of a branch's row, by the id of the branch's last call."""
    metadata: Metadata = Field(default_factory=dict)


class Close(Body, json_schema_extra={"example": {"status": "completed", "reward": 1.0}}):
    status: Ended
    reward: FiniteFloat | None = None
    """Default: the reward it already has, if any."""
    error: str | None = Field(None, max_length=65536)
    """What went wrong, in words."""
    group_id: Name | None = None
    """Its group, if it was opened in none. In a session of a project the project's own of that name."""
    group_size: Annotated[int, Field(ge=1, le=65536)] | None = None
    """Sessions in the complete group. Default: 1."""
    task_id: Name | None = None
    """The task that it attempted, if it was opened for none."""


LOG_CHARACTERS = 65_536


class Review(Body, json_schema_extra={"example": {"flag": "good", "note": "Finds the cause before it edits."}}):
    flag: str = Field("", max_length=64, pattern=r"^[A-Za-z0-9._-]*$")
    """A word to choose sessions by; empty: none."""
    note: str = Field("", max_length=4000)


class AgentLog(Body, json_schema_extra={"example": {"text": "$ pytest\n1 failed, 3 passed\n"}}):
    text: str = Field(max_length=LOG_CHARACTERS)


@router.post(
    "",
    dependencies=[Depends(require_opener)],
    status_code=201,
    responses={
        201: {"model": OpenedSession, "description": "opened"},
        404: {"description": "there is no such session to replay (`not_found`)"},
        409: {"description": "a session with this id exists (`conflict`)"},
        429: {"description": "a new group may not begin because trainers lag behind; see `Retry-After` (`backpressure`)"},
    },
)
async def open_session(
    request: Request, services: Served, opener: Opener, body: Annotated[NewSession, Depends(JsonBody(NewSession).read)]
) -> Response:
    """A session is one run of a harness, which gets one of `base_urls` and `api_key` and needs nothing else. One that a project's token
    opens is the project's, and so is its group, `<project>/<group_id>`."""
    if opener is not None:
        body = claim(body, opener.name)
    session_id, api_key = await open_new(services, body, request.is_disconnected)
    urls = make_base_urls(request, services.settings, session_id)
    return json_response({"session_id": session_id, "api_key": api_key, "base_urls": urls}, 201)


async def open_new(services: Services, body: NewSession, hung_up: Callable[[], Awaitable[bool]]) -> tuple[str, str]:
    """The id of the session that was opened, and its key. Raises `Conflict` for an id that is taken, `NotFound` and RequestError for what
    it cannot replay, and what `admission.open_session` does."""
    session_id = body.session_id or uuid.uuid4().hex
    replay = None
    if (asked := body.replay) is not None:
        replay = await forks.prepare(services, session_id, asked.session_id, asked.until, session_from_wire)
        replay = replace(replay, on_divergence=asked.on_divergence, tokens_per_second=asked.tokens_per_second)
    if body.lookahead is not None:
        check_judge(services, body.lookahead)
    check_scores(services.settings.scorers, body.scores)
    api_key, key_hash = mint_key(session_id)
    info = SessionInfo(
        session_id,
        key_hash,
        await services.clock.now(),
        **{each.name: getattr(body, each.name) for each in fields(OpeningFields)}
        | {"echo_policy": body.echo_policy or services.settings.echo_policy, "replay": replay},
    )
    if not await admission.open_session(services, info, hung_up):
        raise Conflict(f"there is a session {session_id} already", param="session_id")
    if replay is not None:
        await forks.keep_origin(services, session_id, replay)
    return session_id, api_key


@router.get("", dependencies=ADMIN, responses={200: {"model": SessionPage, "description": "a page"}})
async def list_sessions(
    services: Served,
    status: Annotated[SessionStatus | None, Query(description="Only sessions with this status.")] = None,
    group_id: Annotated[str | None, Query(description="Only sessions of this group.")] = None,
    run: Annotated[RunName | None, Query(description="Only sessions of this run.")] = None,
    where: Where = None,
    limit: PageSize = 100,
    cursor: PageCursor = None,
) -> Response:
    """Newest first. Each session appears on exactly one page."""
    asked = parse_where(where or (), STATUSES)
    states, following = await services.sessions.listing.load_page(
        status=status,
        group_id=group_id or asked.group or None,
        run=run or asked.run or None,
        after=asked.after,
        accepts=asked.accepts,
        limit=limit,
        cursor=cursor or asked.window_cursor,
    )
    listed = [session_as_wire(state) | {"accounting": state.accounting and asdict(state.accounting)} for state in states]
    return json_response({"sessions": listed, "cursor": following})


@router.get("/{session_id}", dependencies=OWNER, responses={200: {"model": SessionDetail, "description": "the session"}})
async def get_session(services: Served, session_id: SessionId) -> Response:
    """Its current state. `unserved` is the last call that the service or the engine failed, and why."""
    state = await closing.load_session(services, session_id)
    return json_response({**session_as_wire(state), "unserved": unserved_as_wire(state), "replayed_at": state.replayed_at})


@router.delete(
    "/{session_id}",
    dependencies=OWNER,
    status_code=204,
    responses={
        204: {"description": "deleted"},
        409: {"description": "a trainer has leased it, or forks replay it (`conflict`)"},
    },
)
async def delete_session(services: Served, session_id: SessionId) -> Response:
    """Ends its calls in flight, then removes its records and its key for good. A group left short is dropped or becomes a dead
    letter."""
    await closing.delete_session(services, session_id)
    return Response(status_code=204)


@router.post(
    "/{session_id}/reward",
    dependencies=OWNER,
    responses={
        200: {"model": SessionView, "description": "the session"},
        409: {"description": "its group has been leased (`conflict`)"},
    },
)
async def reward_session(
    services: Served, session_id: SessionId, body: Annotated[Reward, Depends(JsonBody(Reward).read)]
) -> Response:
    """Before or after the close, until its group is leased."""
    state = await closing.reward_session(services, session_id, body.reward, body.per_call, body.per_branch, body.metadata)
    return json_response(session_as_wire(state))


@router.post(
    "/{session_id}/close",
    dependencies=OWNER,
    responses={
        200: {"model": SessionView, "description": "the session"},
        409: {
            "description": "it was closed with another status, or opened or closed with another group or task (`conflict`), or is to be "
            "completed and the model was never called in it (`no_calls`): it stays as it was"
        },
    },
)
async def close_session(
    services: Served, session_id: SessionId, body: Annotated[Close, Depends(JsonBody(Close).read)]
) -> Response:
    """Freezes it: calls in flight end and are recorded, later ones get 409. With a reward it joins its group at once. Group and task may be
    said here, if they were not when it was opened. Repeating the same close is not an error."""
    if body.status == "completed":
        await _require_calls(services, session_id)
    if (body.group_id, body.group_size, body.task_id) != (None, None, None):
        await _assign(services, session_id, body)
    state = await closing.close_session(services, session_id, body.status, body.reward, body.error)
    return json_response(session_as_wire(state))


async def _assign(services: Services, session_id: str, close: Close) -> None:
    info = (await closing.load_session(services, session_id)).info
    if assign(info, close).group_id != info.group_id:
        # First: a place that stays noted for a group which never comes would hold others back for good.
        await services.delivery.dismiss(session_id)
    await services.sessions.amend(session_id, lambda info: assign(info, close))


def assign(info: SessionInfo, close: Close) -> SessionInfo:
    """The session with the group and the task that its close names. Raises Conflict where it has others, RequestError for a size without
    a group."""
    group_id = close.group_id
    if group_id is not None and info.project is not None and group_id != info.group_id:
        group_id = name_group(info.project, group_id)
    named = {"group_id": group_id, "group_size": close.group_size, "task_id": close.task_id}
    given: dict[str, Any] = {name: value for name, value in named.items() if value is not None}
    fixed = {name for name in given if (info.task_id if name == "task_id" else info.group_id) is not None}
    if other := [name for name in sorted(fixed) if getattr(info, name) != given[name]]:
        had = ", ".join(f"{name} {getattr(info, name)!r}" for name in other)
        raise Conflict(f"session {info.session_id} has {had} already: its close may repeat that, not change it", param=other[0])
    assigned = replace(info, **given)
    if assigned.group_size > 1 and assigned.group_id is None:
        raise RequestError("group_size: more than 1 needs a group_id", param="group_size")
    if not assigned.trained and assigned.group_id is not None:
        raise Conflict(f"session {info.session_id} is not trained: it cannot be of a group", param="group_id")
    return assigned


async def _require_calls(services: Services, session_id: str) -> None:
    """Raises NoCalls: an agent that never reached the model must not look like one that did its work, whatever its reward."""
    state = await closing.load_session(services, session_id)
    if state.calls or state.status in ENDED or await services.sessions.load_intents(session_id):
        return
    raise NoCalls(
        f"session {session_id} cannot be completed: the model was never called in it (its agent's base URL and key may be wrong); "
        "close it as failed"
    )


@router.put("/{session_id}/review", dependencies=ADMIN, responses={200: {"model": SessionView, "description": "the session"}})
async def review_session(
    services: Served, session_id: SessionId, body: Annotated[Review, Depends(JsonBody(Review).read)]
) -> Response:
    """Puts a flag and a note on it, in place of those it has, at any time. They change nothing that a trainer gets."""
    return json_response(session_as_wire(await services.sessions.set_review(session_id, body.flag, body.note)))


@router.put("/{session_id}/log", dependencies=ADMIN, status_code=204, responses={204: {"description": "stored"}})
async def store_log(
    services: Served, session_id: SessionId, body: Annotated[AgentLog, Depends(JsonBody(AgentLog).read)]
) -> Response:
    """The end of what the agent printed, for its page in the web UI. Replaces an earlier one; never given to a trainer."""
    await services.sessions.set_log(session_id, body.text)
    return Response(status_code=204)


def session_as_wire(state: SessionState) -> dict[str, Any]:
    """The session as a `SessionView`: its fixed data and its state in one flat object."""
    shown = {name: getattr(state.info, name) for name in INFO_FIELDS} | {name: getattr(state, name) for name in STATE_FIELDS}
    parts = {name: None if shown[name] is None else asdict(shown[name]) for name in ("replay", "lookahead")}
    return shown | parts


def unserved_as_wire(state: SessionState) -> dict[str, Any] | None:
    return None if state.unserved is None else asdict(state.unserved)


def session_from_wire(wire: Mapping[str, Any]) -> SessionState:
    """Inverse of `session_as_wire`; no key opens the session. Raises `msgspec.ValidationError` if a field is missing or has a wrong
    type."""
    if missing := [name for name in (*INFO_FIELDS, *STATE_FIELDS) if name not in wire]:
        raise msgspec.ValidationError(f"session: {', '.join(missing)} missing")
    info = {"key_hash": b"", **{name: wire[name] for name in INFO_FIELDS}}
    return msgspec.convert({"info": info, **{name: wire[name] for name in STATE_FIELDS}}, SessionState)


def check_judge(services: Services, lookahead: Lookahead) -> None:
    """Raise RequestError for a judge that is not served, or that is trained: its taste would change with every push of weights."""
    if lookahead.model is None:
        return
    try:
        replicas = services.pool.of(services.pool.find_policy(lookahead.model))
    except NotFound as error:
        raise RequestError(f"lookahead.model: {error.message}", param="lookahead.model") from error
    if not any(services.pool.is_frozen(replica, lookahead.model) for replica in replicas):
        raise RequestError(
            f"lookahead.model: '{lookahead.model}' is not frozen: name it in VERBATIM_FROZEN_MODELS, or choose another judge",
            param="lookahead.model",
        )


def make_base_urls(request: Request, settings: Settings, session_id: str) -> dict[str, str]:
    return base_urls(f"{find_harness_url(request, settings)}/s/{session_id}")


def find_harness_url(request: Request, settings: Settings) -> str:
    """The URL by which harnesses reach this service, as far as the request reveals it; without a slash at its end."""
    url = request.base_url if settings.control_port is None else request.base_url.replace(port=settings.port)
    return (str(url) if settings.public_url is None else settings.public_url).rstrip("/")
