"""Sessions over HTTP: open, list, inspect, reward, close and delete them. For the admin, and for nodes what a rollout needs."""

from __future__ import annotations

import dataclasses
import json
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Depends, Query, Request, Response
from pydantic import Field, FiniteFloat, Strict, model_validator

from proxy.api import admission, closing, forks
from proxy.api.requests import (
    Body,
    JsonBody,
    Metadata,
    PageCursor,
    PageSize,
    Served,
    SessionId,
    json_response,
    require_admin,
    require_node,
)
from proxy.auth import SESSION_ID, mint_key
from proxy.dialects.catalogue import base_urls
from proxy.errors import Conflict, NotFound, RequestError
from proxy.services import Services
from proxy.settings import Role, Settings
from proxy.store.groups import GroupRule
from proxy.store.states import Lookahead, SessionInfo, SessionState
from reconstruct.roles import RoleRule

router = APIRouter(prefix="/sessions", tags=["sessions"], default_response_class=Response)
ADMIN, NODE = [Depends(require_admin)], [Depends(require_node)]

Status = Literal["open", "closing", "completed", "failed", "timeout", "cancelled"]
Name = Annotated[str, Field(min_length=1, max_length=256)]


class SamplingOverrides(Body):
    temperature: float | None = Field(None, ge=0, allow_inf_nan=False)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=2**31)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    max_tokens: int | None = Field(None, ge=1, lt=2**31)
    top_logprobs: int | None = Field(None, ge=0, le=128)
    """How many of the most probable tokens to keep at each sampled position. For the trainer; harnesses do not see them."""
    prompt_logprobs: bool | None = None
    """Keep the logprobs of prompts."""
    routed_experts: bool | None = None
    """Keep the experts each token was routed to."""


class ReplayRequest(Body):
    session_id: str
    """The recorded session: open, closed, or archived by this service."""
    until: str | Annotated[int, Field(ge=0)] | None = None
    """The pivot, from which the model samples: a call's id, or how many recorded requests to replay. Default: all."""
    on_divergence: Literal["live", "fail"] = "live"
    """What becomes of a request before the pivot that was not recorded: it is sampled, or refused as `replay_diverged`."""
    tokens_per_second: float | None = Field(None, gt=0, allow_inf_nan=False)
    """The pace of replayed replies that are streamed. Default: at once."""


class LookaheadBody(Body):
    n: int = Field(ge=2, le=64)
    """Candidates that are sampled for each reply; the harness sees the chosen one."""
    choose: Literal["logprob", "model", "http"] = "logprob"
    """Who chooses: the highest mean logprob, a model as judge, or an HTTP endpoint."""
    model: Name | None = None
    """The judge: a frozen model that an engine serves."""
    url: Annotated[str, Field(pattern=r"^https?://")] | None = None
    """The endpoint."""
    roles: Annotated[tuple[Role, ...], Strict(False)] = ()
    """Of which calls. Default: of all."""
    timeout_seconds: float = Field(60.0, gt=0, le=3600)
    """How long the chooser may take."""

    @model_validator(mode="after")
    def _check(self) -> LookaheadBody:
        for name, chooser in (("model", "model"), ("url", "http")):
            if (getattr(self, name) is not None) != (self.choose == chooser):
                raise ValueError(f"{name}: goes with choose {chooser!r}, and that with it")
        return self


class NewSession(
    Body,
    json_schema_extra={
        "example": {"session_id": "first", "group_id": "task-1", "group_size": 1, "sampling": {"temperature": 1.0}}
    },
):
    session_id: str | None = None
    """1 to 128 letters, digits, '.', '_' and '-'. Default: a generated id."""
    task_id: Name | None = None
    """The task it attempts."""
    group_id: Name | None = None
    """The group it is compared in. Default: a group with no other session."""
    group_size: int = Field(1, ge=1, le=65536)
    """Sessions in a complete group."""
    group_policy: Literal["require_all", "allow_partial", "drop"] | None = None
    """What the group needs to be delivered. This and the next four default to the service's settings."""
    group_minimum: int | None = Field(None, ge=1, le=65536)
    """Usable sessions that allow_partial requires."""
    zero_variance: Literal["keep", "drop"] | None = None
    """Whether a group whose rewards are all equal is delivered."""
    group_replacements: bool | None = None
    """False: no session replaces a failed one."""
    max_quarantined_share: float | None = Field(None, ge=0, le=1)
    """The largest share of its sampled tokens that may be quarantined if it is to be usable in its group, not counting roles and models
    that are not trained."""
    trained: bool = True
    """False: it is never delivered to a trainer and never held back. For judges."""
    max_calls: int | None = Field(None, ge=1, lt=2**31)
    """Calls it may make, counting every choice of a request. Further calls are refused as `budget_exhausted`, and the row they would have
    extended is marked `finish_reason: budget`."""
    max_completion_tokens: int | None = Field(None, ge=1, lt=2**53)
    """Tokens all its calls together may sample."""
    max_total_tokens: int | None = Field(None, ge=1, lt=2**53)
    """Tokens all its calls together may have, prompts and replies, each call counted in full."""
    metadata: Metadata = Field(default_factory=dict)
    """Stored with the session and its rows."""
    role_rules: list[RoleRule] = Field(default_factory=list, max_length=64)
    """The harness definition's rules for the roles of calls. The service's own rules take precedence."""
    sampling: SamplingOverrides | None = None
    """Overrides what the harness sends."""
    echo_policy: Literal["strict", "minted"] | None = None
    """How to treat a reply that the harness replays with an edit. Default: the service's setting."""
    replay: ReplayRequest | None = None
    """Makes the session a fork: its harness gets the replies that another session's got, as far as the pivot."""
    lookahead: LookaheadBody | None = None
    """Samples several candidates for each reply and gives the harness the best of them."""

    @model_validator(mode="after")
    def _check(self) -> NewSession:
        if self.session_id is not None and not SESSION_ID.match(self.session_id):
            raise ValueError("session_id: 1 to 128 letters, digits, '.', '_' and '-'")
        if self.group_size > 1 and self.group_id is None:
            raise ValueError("group_size: more than 1 needs a group_id")
        if not self.trained and self.group_id is not None:
            raise ValueError("trained: a session of a group cannot be left out of training")
        return self

    def group_rule(self) -> GroupRule | None:
        """What the session overrides of the service's settings for its group. None: nothing."""
        decision = (self.group_policy, self.group_minimum, self.zero_variance, self.group_replacements)
        rule = GroupRule(*decision, max_quarantined_share=self.max_quarantined_share)
        return None if rule == GroupRule() else rule


class Reward(Body, json_schema_extra={"example": {"reward": 1.0, "per_call": {}, "metadata": {"judge": "unit tests"}}}):
    reward: FiniteFloat
    per_call: dict[str, FiniteFloat] = Field(default_factory=dict)
    """Reward by call id."""
    per_branch: dict[str, FiniteFloat] = Field(default_factory=dict)
    """Reward of a branch's row, by the id of the branch's last call."""
    metadata: Metadata = Field(default_factory=dict)


class Close(Body, json_schema_extra={"example": {"status": "completed", "reward": 1.0}}):
    status: Literal["completed", "failed", "timeout", "cancelled"]
    reward: FiniteFloat | None = None
    """Default: the reward it already has, if any."""
    error: str | None = Field(None, max_length=65536)
    """What went wrong, in words."""


LOG_CHARACTERS = 65_536


class AgentLog(Body, json_schema_extra={"example": {"text": "$ pytest\n1 failed, 3 passed\n"}}):
    text: str = Field(max_length=LOG_CHARACTERS)


OPENED: dict[str, Any] = json.loads("""
{"session_id": "first", "api_key": "vb-0123456789abcdef0123456789abcdef01234567-first",
 "base_urls": {"openai": "http://127.0.0.1:8700/s/first/v1", "anthropic": "http://127.0.0.1:8700/s/first",
  "gemini": "http://127.0.0.1:8700/s/first"}}
""")


class BaseUrls(Body, extra="allow"):
    """Dialects of other packages may add keys."""

    openai: str
    """For OpenAI clients: ends in /v1."""
    anthropic: str
    gemini: str


class OpenedSession(Body, json_schema_extra={"example": OPENED}):
    session_id: str
    api_key: str
    """Shown only here."""
    base_urls: BaseUrls


EXAMPLE: dict[str, Any] = json.loads("""
{"session_id": "first", "created_at": 1767225600.0, "task_id": null, "group_id": "task-1", "group_size": 1, "metadata": {},
 "sampling": {}, "trained": true, "echo_policy": "strict", "max_calls": null, "max_completion_tokens": null,
 "max_total_tokens": null, "replay": null, "lookahead": null,
 "status": "completed", "calls": 2, "reward": 1.0, "per_call": {}, "per_branch": {},
 "reward_metadata": {}, "error": null, "closed_at": 1767225700.0, "updated_at": 1767225700.0}
""")


class ReplayShape(Body):
    session_id: str
    created_at: float
    """The recorded session's."""
    calls: int
    """How many calls it had when the fork was opened."""
    until: str | None
    """The pivot's call id; null: all is replayed."""
    on_divergence: Literal["live", "fail"]
    tokens_per_second: float | None


class LookaheadShape(Body):
    n: int
    choose: Literal["logprob", "model", "http"]
    model: str | None
    url: str | None
    roles: list[Role]
    timeout_seconds: float


class SessionShape(Body, json_schema_extra={"example": EXAMPLE}):
    session_id: str
    created_at: float
    """Epoch seconds, like all times here."""
    task_id: str | None
    group_id: str | None
    group_size: int
    metadata: dict[str, Any]
    sampling: dict[str, Any]
    """Overrides what the harness sends."""
    trained: bool
    """False: it is never delivered to a trainer."""
    echo_policy: Literal["strict", "minted"]
    """How a reply that the harness replays with an edit is treated."""
    max_calls: int | None
    max_completion_tokens: int | None
    max_total_tokens: int | None
    """Its budget; null: unlimited."""
    replay: ReplayShape | None
    """What it replays, if it is a fork."""
    lookahead: LookaheadShape | None
    """How its candidates are chosen; null: each reply is the only one."""
    status: Literal[Status, "restoring"]
    calls: int
    """Recorded calls."""
    reward: float | None
    per_call: dict[str, float]
    per_branch: dict[str, float]
    reward_metadata: dict[str, Any]
    error: str | None
    closed_at: float | None
    updated_at: float


class UnservedShape(Body):
    at: float
    call_id: str
    code: str
    message: str


class SessionDetail(SessionShape, json_schema_extra={"example": {**EXAMPLE, "unserved": None, "replayed_at": None}}):
    unserved: UnservedShape | None
    """The last call that the service or the engine failed, even if later calls succeeded; null: none known."""
    replayed_at: float | None
    """When a recorded reply was last given to a fork's harness."""


class SessionPage(Body, json_schema_extra={"example": {"sessions": [EXAMPLE], "cursor": None}}):
    sessions: list[SessionShape]
    cursor: str | None
    """For the next page; null: this is the last one."""


# The model lists what the API shows of a session: a new field of SessionInfo is not shown by itself, and key_hash never. group_rule belongs
# to the group; replayed_at matters only while the session is open. unserved stands beside it, in the state of one session and in archives:
# whether the budget ended the run depends on it.
INFO_FIELDS = tuple(name for name in SessionShape.model_fields if name in SessionInfo.__dataclass_fields__)
STATE_FIELDS = tuple(name for name in SessionShape.model_fields if name in SessionState.__dataclass_fields__)


@router.post(
    "",
    dependencies=NODE,
    status_code=201,
    responses={
        201: {"model": OpenedSession, "description": "opened"},
        404: {"description": "there is no such session to replay (`not_found`)"},
        409: {"description": "a session with this id exists (`conflict`)"},
        429: {"description": "a new group may not begin because trainers lag behind; see `Retry-After` (`backpressure`)"},
    },
)
async def open_session(
    request: Request, services: Served, body: Annotated[NewSession, Depends(JsonBody(NewSession).read)]
) -> Response:
    """A session is one run of a harness, which gets one of `base_urls` and `api_key` and needs nothing else."""
    session_id, api_key = await open_new(services, body, request.is_disconnected)
    urls = _base_urls(request, services.settings, session_id)
    return json_response({"session_id": session_id, "api_key": api_key, "base_urls": urls}, 201)


async def open_new(services: Services, body: NewSession, hung_up: Callable[[], Awaitable[bool]]) -> tuple[str, str]:
    """The id of the session that was opened, and its key. Raises `Conflict` for an id that is taken, `NotFound` and RequestError for what
    it cannot replay, and what `admission.open_session` does."""
    session_id = body.session_id or uuid.uuid4().hex
    replay = None
    if (asked := body.replay) is not None:
        replay = await forks.prepare(services, session_id, asked.session_id, asked.until, session_from_wire)
        replay = dataclasses.replace(replay, on_divergence=asked.on_divergence, tokens_per_second=asked.tokens_per_second)
    lookahead = None
    if body.lookahead is not None:
        lookahead = Lookahead(**body.lookahead.model_dump())
        check_judge(services, lookahead)
    api_key, key_hash = mint_key(session_id)
    info = SessionInfo(
        session_id=session_id,
        key_hash=key_hash,
        created_at=await services.clock.now(),
        task_id=body.task_id,
        group_id=body.group_id,
        group_size=body.group_size,
        metadata=body.metadata,
        sampling=body.sampling.model_dump(exclude_none=True) if body.sampling else {},
        group_rule=body.group_rule(),
        trained=body.trained,
        echo_policy=body.echo_policy or services.settings.echo_policy,
        role_rules=tuple(body.role_rules),
        max_calls=body.max_calls,
        max_completion_tokens=body.max_completion_tokens,
        max_total_tokens=body.max_total_tokens,
        replay=replay,
        lookahead=lookahead,
    )
    if not await admission.open_session(services, info, hung_up):
        raise Conflict(f"there is a session {session_id} already", param="session_id")
    if replay is not None:
        await forks.keep_origin(services, session_id, replay)
    return session_id, api_key


@router.get("", dependencies=ADMIN, responses={200: {"model": SessionPage, "description": "a page"}})
async def list_sessions(
    services: Served,
    status: Annotated[Status | None, Query(description="Only sessions with this status.")] = None,
    group_id: Annotated[str | None, Query(description="Only sessions of this group.")] = None,
    limit: PageSize = 100,
    cursor: PageCursor = None,
) -> Response:
    """Newest first. Each session appears on exactly one page."""
    states, following = await services.sessions.list_sessions(status=status, group_id=group_id, limit=limit, cursor=cursor)
    return json_response({"sessions": [session_as_wire(state) for state in states], "cursor": following})


@router.get("/{session_id}", dependencies=NODE, responses={200: {"model": SessionDetail, "description": "the session"}})
async def get_session(services: Served, session_id: SessionId) -> Response:
    """Its current state. `unserved` is the last call that the service or the engine failed, and why."""
    state = await closing.load_session(services, session_id)
    return json_response({**session_as_wire(state), "unserved": unserved_as_wire(state), "replayed_at": state.replayed_at})


@router.delete(
    "/{session_id}",
    dependencies=NODE,
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
    dependencies=NODE,
    responses={
        200: {"model": SessionShape, "description": "the session"},
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
    dependencies=NODE,
    responses={
        200: {"model": SessionShape, "description": "the session"},
        409: {"description": "it was closed with another status (`conflict`)"},
    },
)
async def close_session(
    services: Served, session_id: SessionId, body: Annotated[Close, Depends(JsonBody(Close).read)]
) -> Response:
    """Freezes it: calls in flight end and are recorded, later ones get 409. With a reward it joins its group at once. Repeating the same
    close is not an error."""
    state = await closing.close_session(services, session_id, body.status, body.reward, body.error)
    return json_response(session_as_wire(state))


@router.put("/{session_id}/log", dependencies=NODE, status_code=204, responses={204: {"description": "stored"}})
async def store_log(
    services: Served, session_id: SessionId, body: Annotated[AgentLog, Depends(JsonBody(AgentLog).read)]
) -> Response:
    """The end of what the agent printed, for its page in the web UI. Replaces an earlier one; never given to a trainer."""
    await services.sessions.set_log(session_id, body.text)
    return Response(status_code=204)


def session_as_wire(state: SessionState) -> dict[str, Any]:
    """The session as a `SessionShape`: its fixed data and its state in one flat object."""
    shown = {name: getattr(state.info, name) for name in INFO_FIELDS}
    for name in ("replay", "lookahead"):
        shown[name] = None if shown[name] is None else asdict(shown[name])
    return shown | {name: getattr(state, name) for name in STATE_FIELDS}


def unserved_as_wire(state: SessionState) -> dict[str, Any] | None:
    return None if state.unserved is None else asdict(state.unserved)


def session_from_wire(wire: Mapping[str, Any]) -> SessionState:
    """Inverse of `session_as_wire`; no key opens the session. Raises `msgspec.ValidationError` if a field is missing or has a wrong
    type."""
    # Exports of earlier versions lack these fields.
    budget = {"max_calls": None, "max_completion_tokens": None, "max_total_tokens": None}
    wire = {"trained": True, "echo_policy": "strict", "replay": None, "lookahead": None, **budget, **wire}
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


def _base_urls(request: Request, settings: Settings, session_id: str) -> dict[str, str]:
    """Under the URL by which harnesses reach this service, as far as the request reveals it."""
    url = request.base_url if settings.control_port is None else request.base_url.replace(port=settings.port)
    base = str(url) if settings.public_url is None else settings.public_url
    return base_urls(f"{base.rstrip('/')}/s/{session_id}")
