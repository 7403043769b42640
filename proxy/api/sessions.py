"""Sessions: open, list, look into, reward, close, delete. For the admin, and for nodes what a rollout needs of its session."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Depends, Query, Request, Response
from pydantic import Field, FiniteFloat, model_validator

from proxy import rows
from proxy.api.batches import DEFAULT, current_versions
from proxy.api.closing import CLOSED, SWEEP_AGE_SECONDS, close_session, group_ref, policy_of, reward_session, withdraw_session
from proxy.api.requests import Body, Metadata, Served, admin_only, answer, body_of, form_of, json_response, node_only
from proxy.auth import SESSION_ID, mint_key
from proxy.errors import Backpressure, Conflict, NotFound
from proxy.rows import CallsCursor
from proxy.services import Services
from proxy.settings import Settings
from proxy.store.delivery import Admission, Freshness
from proxy.store.groups import GroupRule
from proxy.store.keys import StoredValueError
from proxy.store.sessions import SessionInfo, SessionState
from reconstruct.roles import RoleRule
from reconstruct.trajectory import accounting_as_wire, as_wire

router = APIRouter(prefix="/sessions")
ADMIN, NODE = [Depends(admin_only)], [Depends(node_only)]

Status = Literal["open", "closing", "completed", "failed", "timeout", "cancelled"]
Name = Annotated[str, Field(min_length=1, max_length=256)]


class SamplingOverrides(Body):
    temperature: float | None = Field(None, ge=0, allow_inf_nan=False)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=2**31)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    max_tokens: int | None = Field(None, ge=1, lt=2**31)
    top_logprobs: int | None = Field(None, ge=0, le=128)
    """The most probable tokens to keep of each sampled one; for the trainer, harnesses do not see them."""
    prompt_logprobs: bool | None = None
    """Keep the logprobs of prompts."""
    routed_experts: bool | None = None
    """Keep the experts that tokens were routed to."""


class NewSession(Body):
    session_id: str | None = None
    """1 to 128 of letters, digits, '.', '_' and '-'; left out: made up."""
    task_id: Name | None = None
    """What it is an attempt at."""
    group_id: Name | None = None
    """The group that it is compared in; left out: it is a group of its own."""
    group_size: int = Field(1, ge=1, le=65536)
    """Members that make the group whole."""
    group_policy: Literal["require_all", "allow_partial", "drop"] | None = None
    """What the group needs to be delivered; left out, as all of these: as the service is set."""
    group_minimum: int | None = Field(None, ge=1, le=65536)
    """Usable members that allow_partial asks for."""
    zero_variance: Literal["keep", "drop"] | None = None
    """Whether a group whose rewards are all equal is delivered."""
    group_replacements: bool | None = None
    """False: no session takes the place of a failed member."""
    max_quarantined_share: float | None = Field(None, ge=0, le=1)
    """The most of its sampled tokens that may be in quarantine for it to be usable in its group, those of roles and models that are not
    trained left out."""
    trained: bool = True
    """False: no trainer ever gets it, and it is never held back, as for judges."""
    max_calls: int | None = Field(None, ge=1, lt=2**31)
    """Calls that it may make, every choice of a request counted; further ones get 403 `budget_exhausted`, and the row that they end is
    marked by `finish_reason: budget`."""
    max_completion_tokens: int | None = Field(None, ge=1, lt=2**53)
    """Tokens that it may sample in all its calls."""
    max_total_tokens: int | None = Field(None, ge=1, lt=2**53)
    """Tokens that its calls may have in all, prompts and replies, as each call counts them."""
    metadata: Metadata = Field(default_factory=dict)
    """Kept with the session and its rows."""
    role_rules: list[RoleRule] = Field(default_factory=list, max_length=64)
    """What its harness's definition declares of the roles of its calls; the service's own rules come first."""
    sampling: SamplingOverrides | None = None
    """Wins over what the harness sends."""
    echo_policy: Literal["strict", "minted"] | None = None
    """What becomes of a reply that its harness replays with an edit; left out: as the service is set."""

    @model_validator(mode="after")
    def _whole(self) -> NewSession:
        if self.session_id is not None and not SESSION_ID.match(self.session_id):
            raise ValueError("session_id: 1 to 128 of letters, digits, '.', '_' and '-'")
        if self.group_size > 1 and self.group_id is None:
            raise ValueError("group_size: more than 1 needs a group_id")
        if not self.trained and self.group_id is not None:
            raise ValueError("trained: a session of a group cannot be left out of training")
        return self

    def rule(self) -> GroupRule | None:
        """What the session says of its group against the service's settings of the same names."""
        decision = (self.group_policy, self.group_minimum, self.zero_variance, self.group_replacements)
        rule = GroupRule(*decision, max_quarantined_share=self.max_quarantined_share)
        return None if rule == GroupRule() else rule


class Reward(Body):
    reward: FiniteFloat
    per_call: dict[str, FiniteFloat] = Field(default_factory=dict)
    """Call id -> reward."""
    per_branch: dict[str, FiniteFloat] = Field(default_factory=dict)
    """Id of a branch's last call -> reward of its row."""
    metadata: Metadata = Field(default_factory=dict)


class Close(Body):
    status: Literal["completed", "failed", "timeout", "cancelled"]
    reward: FiniteFloat | None = None
    """Left out: the one it was given before, if any."""
    error: str | None = Field(None, max_length=65536)
    """What went wrong, in words."""


@router.post("", dependencies=NODE)
async def create(request: Request, services: Served, body: Annotated[NewSession, Depends(body_of(NewSession))]) -> Response:
    session_id = body.session_id or uuid.uuid4().hex
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
        group_rule=body.rule(),
        trained=body.trained,
        echo_policy=body.echo_policy or services.settings.echo_policy,
        role_rules=tuple(body.role_rules),
        max_calls=body.max_calls,
        max_completion_tokens=body.max_completion_tokens,
        max_total_tokens=body.max_total_tokens,
    )
    if not await open_session(services, info, request.is_disconnected):
        raise Conflict(f"there is a session {session_id} already", param="session_id")
    urls = _base_urls(_harness_url(request, services.settings), session_id)
    return json_response({"session_id": session_id, "api_key": api_key, "base_urls": urls}, 201)


@router.get("", dependencies=ADMIN)
async def listing(
    services: Served,
    status: Status | None = None,
    group_id: str | None = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    cursor: str | None = None,
) -> Response:
    states, following = await services.sessions.listing(status=status, group_id=group_id, limit=limit, cursor=cursor)
    return json_response({"sessions": [session_as_wire(state) for state in states], "cursor": following})


@router.get("/{session_id}", dependencies=NODE)
async def one(services: Served, session_id: str) -> Response:
    state = await _load(services, session_id)
    unserved = None if state.unserved is None else asdict(state.unserved)
    return json_response({**session_as_wire(state), "unserved": unserved})


@router.delete("/{session_id}", dependencies=NODE)
async def delete(services: Served, session_id: str) -> Response:
    await withdraw_session(services, session_id)
    return Response(status_code=204)


@router.get("/{session_id}/calls", dependencies=NODE)
async def calls(
    request: Request,
    services: Served,
    session_id: str,
    cursor: str | None = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> Response:
    state = await _load(services, session_id)
    records, delivered, intents = await asyncio.gather(
        services.sessions.records(session_id), services.sessions.delivered(session_id), services.sessions.intents(session_id)
    )
    form = form_of(request)
    in_flight = () if state.status in CLOSED else await services.peers.in_flight(intents)
    start = CallsCursor.parse(cursor)
    page, following = await asyncio.to_thread(
        rows.calls_as_wire, records, delivered, intents, in_flight, start, limit, form.arrays
    )
    return answer({"calls": page, "cursor": following}, form)


@router.get("/{session_id}/trajectories", dependencies=ADMIN)
async def trajectories(request: Request, services: Served, session_id: str, builder: str | None = None) -> Response:
    state = await _load(services, session_id)
    built = await rows.session_rows(services, state, builder)
    form = form_of(request)
    wire = [as_wire(row, arrays=form.arrays) for row in built.rows]
    return answer({"trajectories": wire, "accounting": accounting_as_wire(built.accounting)}, form)


@router.post("/{session_id}/reward", dependencies=NODE)
async def reward(services: Served, session_id: str, body: Annotated[Reward, Depends(body_of(Reward))]) -> Response:
    state = await reward_session(services, session_id, body.reward, body.per_call, body.per_branch, body.metadata)
    return json_response(session_as_wire(state))


@router.post("/{session_id}/close", dependencies=NODE)
async def close(services: Served, session_id: str, body: Annotated[Close, Depends(body_of(Close))]) -> Response:
    state = await close_session(services, session_id, body.status, body.reward, body.error)
    return json_response(session_as_wire(state))


def _harness_url(request: Request, settings: Settings) -> str:
    """What harnesses call this service, as far as the request tells."""
    if settings.public_url is not None:
        return settings.public_url
    return str(request.base_url if settings.control_port is None else request.base_url.replace(port=settings.port))


def _base_urls(base: str, session_id: str) -> dict[str, str]:
    root = f"{base.rstrip('/')}/s/{session_id}"
    return {"openai": f"{root}/v1", "anthropic": root, "gemini": root}


async def _load(services: Services, session_id: str) -> SessionState:
    state = await services.sessions.load(session_id)
    if state is None:
        raise NotFound(f"there is no session {session_id}")
    return state


# A session as the API shows it, and back: what is fixed at its creation and where it stands, in one flat object.


BUDGET = ("max_calls", "max_completion_tokens", "max_total_tokens")
# Named one by one: a field that comes to be must not be shown by itself, and key_hash never. group_rule is the group's and not shown,
# nor is unserved, which matters only while a session is open.
INFO_FIELDS = (
    "session_id",
    "created_at",
    "task_id",
    "group_id",
    "group_size",
    "metadata",
    "sampling",
    "trained",
    "echo_policy",
    *BUDGET,
)
STATE_FIELDS = (
    "status",
    "calls",
    "reward",
    "per_call",
    "per_branch",
    "reward_metadata",
    "error",
    "closed_at",
    "updated_at",
)


def session_as_wire(state: SessionState) -> dict[str, Any]:
    shown = {name: getattr(state.info, name) for name in INFO_FIELDS}
    return shown | {name: getattr(state, name) for name in STATE_FIELDS}


def session_of_wire(wire: Mapping[str, Any]) -> SessionState:
    """The session that was shown so; no key opens it. Raises msgspec.ValidationError when a field is missing or of a wrong type."""
    # What was shown by an earlier build does not say these.
    wire = {"trained": True, "echo_policy": "strict", **dict.fromkeys(BUDGET), **wire}
    if missing := [name for name in (*INFO_FIELDS, *STATE_FIELDS) if name not in wire]:
        raise msgspec.ValidationError(f"session: {', '.join(missing)} missing")
    info = {"key_hash": b"", **{name: wire[name] for name in INFO_FIELDS}}
    return msgspec.convert({"info": info, **{name: wire[name] for name in STATE_FIELDS}}, SessionState)


# Which sessions may be opened while the trainers are behind.
#
# With `max_undelivered_groups` set, the session that would begin one group too many is refused until a group was leased; with
# `admission_staleness`, the one whose group would be too old by the time it is leased, until there are newer weights or fewer groups.
# Sessions of a group that is there already are let in, or it would never be whole. All that is counted lies in the store, so that all
# processes decide alike.


LOOK_SECONDS = 0.5
"""How often a session that is held asks again."""


async def open_session(services: Services, info: SessionInfo, hung_up: Callable[[], Awaitable[bool]]) -> bool:
    """False when another session has its id. Held for at most `admission_hold_seconds`, then raises `Backpressure`; one that no trainer
    gets is let in at once."""
    settings = services.settings
    if not info.trained or (not settings.max_undelivered_groups and settings.admission_staleness is None):
        return await services.sessions.create(info)
    admission = await _admitted(services, info, hung_up)
    created = False
    try:
        created = await services.sessions.create(info)
    finally:
        if admission.noted and not created:
            await asyncio.shield(services.delivery.dismiss(info.session_id))
    return created


async def reclaim_places(services: Services, *, older_than_seconds: float = SWEEP_AGE_SECONDS, limit: int = 100) -> int:
    """Free what processes hold that died between letting a session in and opening it; how many places. Raises `StoreUnavailable`."""
    reclaimed = 0
    for session_id in await services.delivery.unseen(await services.clock.now() - older_than_seconds, limit):
        if await _is_there(services, session_id):
            await services.delivery.seen(session_id)
        else:
            await services.delivery.dismiss(session_id)
            reclaimed += 1
    return reclaimed


async def _is_there(services: Services, session_id: str) -> bool:
    try:
        return await services.sessions.load(session_id) is not None
    except StoredValueError:
        # Unreadable is not absent, and must not keep the others from being looked at.
        return True


async def versions_ahead(services: Services) -> int | None:
    """How many versions will probably have come when a group that is begun now is leased; None unless that is limited."""
    per_version = services.settings.groups_per_version
    if services.settings.admission_staleness is None or per_version is None:
        return None
    versions = await current_versions(services)
    return await services.delivery.versions_ahead(versions.pop(DEFAULT), per_version, versions)


async def _admitted(services: Services, info: SessionInfo, hung_up: Callable[[], Awaitable[bool]]) -> Admission:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + services.settings.admission_hold_seconds
    admission = await _ask(services, info, again=False)
    while not admission.granted:
        left = deadline - loop.time()
        if left > 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(services.stopping.wait(), min(left, LOOK_SECONDS))
        # Whoever has hung up would leave an opened group behind that nobody fills.
        if left <= 0 or services.stopping.is_set() or await hung_up():
            services.metrics.held_back()
            raise Backpressure(_why(services, admission))
        admission = await _ask(services, info, again=True)
    return admission


async def _ask(services: Services, info: SessionInfo, *, again: bool) -> Admission:
    settings, freshness = services.settings, None
    if settings.admission_staleness is not None and settings.groups_per_version is not None:
        versions = await current_versions(services)
        version = versions.pop(DEFAULT)
        freshness = Freshness(version, settings.admission_staleness, settings.groups_per_version, versions)
    group, limit, policy = group_ref(info), settings.max_undelivered_groups, policy_of(settings)
    return await services.delivery.admit(
        group, info.session_id, limit, policy, await services.clock.now(), freshness, again=again
    )


def _why(services: Services, admission: Admission) -> str:
    limit, ahead = services.settings.max_undelivered_groups, admission.versions_ahead
    if limit and admission.undelivered >= limit:
        return f"{admission.undelivered} groups wait for a trainer, of at most {limit}: try again when one was leased"
    return (
        f"a group begun now would probably be {ahead} versions behind when it is leased, of at most "
        f"{services.settings.admission_staleness}: try again when there are newer weights"
    )
