"""Batches over HTTP: a trainer leases ready groups, then acknowledges them, gives them back or extends the lease."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine, Iterable, Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Request, Response
from pydantic import Field

from contract.batches import LeasedSession
from contract.sessions import Role, RunName
from proxy.api.admission import DEFAULT_POLICY, load_current_versions
from proxy.api.calls import ACCOUNTING, ROW, TrajectoryView
from proxy.api.closing import group_name
from proxy.api.dead_letters import DeadLetterShape, letter_as_wire
from proxy.api.leased_rows import BatchResponse, EncodedBatch, RowTerms, encode_groups, give_back
from proxy.api.requests import (
    ENCODINGS,
    Body,
    Encoding,
    JsonBody,
    Served,
    choose_form,
    json_response,
    require_trainer,
    watch_disconnect,
)
from proxy.errors import NotFound, VerbatimError
from proxy.rows import find_builder
from proxy.services import Services
from proxy.settings import TrainedMode
from proxy.store.delivery import LeaseQuery
from proxy.store.groups import Nothing, PolicyLine

router = APIRouter(
    prefix="/batches", tags=["batches"], dependencies=[Depends(require_trainer)], default_response_class=Response
)

RECHECK_SECONDS = 5.0
"""How often a waiting lease checks for groups even if no arrival was announced."""
DEFAULT_CONSUMER = "a trainer"
LEASE_SECONDS = 600.0
"""Of a lease that names no time, as `trainer_client` asks for: ten minutes for a step and its push."""

LeaseId = Annotated[str, Path(description="The lease's id.")]
LeaseSeconds = Annotated[float, Field(gt=0, le=7 * 86400)]
EXPIRED: dict[int | str, dict[str, Any]] = {409: {"description": "the lease has expired or was given back (`conflict`)"}}


class LeaseRequest(
    Body,
    json_schema_extra={"example": {"max_groups": 8, "max_staleness": 2, "wait_seconds": 30, "consumer": "trainer-0"}},
):
    max_groups: int | None = Field(None, ge=1, le=65536)
    """Default: as many as fit into max_trajectories, or one if that is absent too."""
    max_trajectories: int | None = Field(None, ge=1, le=2**31)
    """Maximum number of rows, in whole groups."""
    max_staleness: int | None = Field(None, ge=0, lt=2**53)
    """How many versions a group's oldest token may lag behind the current weights."""
    wait_seconds: float = Field(0.0, ge=0, le=3600)
    """How long to wait for a ready group."""
    lease_seconds: LeaseSeconds | None = None
    """How long the lease lasts. Default: the service's setting."""
    consumer: str = Field("", max_length=256)
    """Name of the caller. Ready groups are shared among consumers."""
    policy: str | None = Field(None, max_length=200)
    """Only rows of this model. Default: all."""
    run: RunName | None = None
    """Only groups of this run. Default: of every run."""
    roles: list[Role] | None = Field(None, min_length=1)
    """Only rows of these roles. Default: all trained roles. After the ack, the groups' other rows are never delivered."""
    logprob_modes: list[TrainedMode] | None = Field(None, min_length=1)
    """Only tokens whose logprobs have these modes; the others are quarantined as `logprob_mode` in the batch's accounting. Default: all
    that the service trains. After the ack they are never delivered."""
    builder: str | None = Field(None, min_length=1, max_length=200)
    """The row builder. Default: the service's setting, which also determines how the rows of groups are counted."""
    complete_only: bool = False
    """Only groups whose sessions are all complete. The others stay for consumers that accept them."""


class ExtendRequest(Body, json_schema_extra={"example": {"lease_seconds": 600}}):
    lease_seconds: LeaseSeconds | None = None
    """Counted from now. Default: the service's setting."""


class LeasedGroupShape(Body):
    group_id: str
    stale: bool = False
    """Present only if true, where the service delivers stale groups flagged."""
    sessions: list[LeasedSession]
    trajectories: list[TrajectoryView]


class LeaseShape(
    Body,
    json_schema_extra={
        "example": {
            "lease_id": "5b2f",
            "expires_at": 1767226300.0,
            "weight_version": 12,
            "weight_versions": {"": 12},
            "groups": [{"group_id": "task-1", "sessions": [{"session_id": "first", **ACCOUNTING}], "trajectories": [ROW]}],
        }
    },
):
    lease_id: str
    expires_at: float
    weight_version: int
    """The default policy's."""
    weight_versions: dict[str, int]
    groups: list[LeasedGroupShape]


class SettledLease(Body, json_schema_extra={"example": {"lease_id": "5b2f", "groups": ["task-1"]}}):
    lease_id: str
    groups: list[str]


class ExtendedLease(Body, json_schema_extra={"example": {"lease_id": "5b2f", "expires_at": 1767226900.0}}):
    lease_id: str
    expires_at: float


class GroupCounts(Body, json_schema_extra={"example": {"groups": {"ready": 3, "leased": 1}, "dead_letters": []}}):
    groups: dict[str, int]
    """Groups by state."""
    dead_letters: list[DeadLetterShape]


@router.post(
    "/lease",
    description=f"Whole groups, oldest first, until `expires_at`. Groups not acknowledged by then go to another consumer. {ENCODINGS}",
    responses={
        200: {"model": LeaseShape, "description": "a batch"},
        204: {"description": "nothing became ready in time"},
        404: {"description": "there is no such policy (`not_found`)"},
    },
)
async def lease_batch(
    request: Request, services: Served, body: Annotated[LeaseRequest, Depends(JsonBody(LeaseRequest).read)]
) -> Response:
    form = choose_form(request)
    async with watch_disconnect(request.receive) as gone:
        batch = await _lease(services, body, form, waits=body.wait_seconds > 0)
        if isinstance(batch, Nothing) and body.wait_seconds > 0:
            batch = await _wait_for_batch(services, body, form, gone)
        if isinstance(batch, EncodedBatch) and gone.done():
            await give_back(services, batch.lease.lease_id)
    return BatchResponse(services, batch) if isinstance(batch, EncodedBatch) else Response(status_code=204)


@router.post("/{lease_id}/ack", responses={200: {"model": SettledLease, "description": "done"}, **EXPIRED})
async def ack_lease(services: Served, lease_id: LeaseId) -> Response:
    """Its groups are never delivered again. May be repeated."""
    return _settled_response(lease_id, await services.delivery.ack(lease_id, await services.clock.now()))


@router.post("/{lease_id}/nack", responses={200: {"model": SettledLease, "description": "done"}, **EXPIRED})
async def nack_lease(services: Served, lease_id: LeaseId) -> Response:
    """Its groups are ready again, in their old place."""
    return _settled_response(lease_id, await services.delivery.nack(lease_id, await services.clock.now()))


@router.post("/{lease_id}/extend", responses={200: {"model": ExtendedLease, "description": "done"}, **EXPIRED})
async def extend_lease(
    services: Served, lease_id: LeaseId, body: Annotated[ExtendRequest, Depends(JsonBody(ExtendRequest).read)]
) -> Response:
    """Moves its deadline, counted from now."""
    seconds = body.lease_seconds or LEASE_SECONDS
    expires_at = await services.delivery.extend(lease_id, seconds, await services.clock.now())
    return json_response({"lease_id": lease_id, "expires_at": expires_at})


@router.get("", responses={200: {"model": GroupCounts, "description": "the counts"}})
async def count_groups(services: Served) -> Response:
    """Groups by state, and the newest dead letters."""
    counts, (letters, _) = await asyncio.gather(services.delivery.count_groups(), services.delivery.dead_letters())
    return json_response({"groups": dict(counts), "dead_letters": [letter_as_wire(letter) for letter in letters]})


def _settled_response(lease_id: str, refs: Sequence[str]) -> Response:
    return json_response({"lease_id": lease_id, "groups": [group_name(ref) for ref in refs]})


async def _wait_for_batch(
    services: Services, body: LeaseRequest, form: Encoding, gone: asyncio.Task[None]
) -> EncodedBatch | Nothing:
    """Retry after every arrival or ended lease until the time is up, the caller has hung up or the service is stopping."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + body.wait_seconds
    async with _release_claim(services, body.consumer or DEFAULT_CONSUMER, gone), services.delivery.watch() as arrivals:
        while True:
            mark, left = arrivals.mark, deadline - loop.time()
            batch = await _lease(services, body, form, waits=left > 0)
            if isinstance(batch, EncodedBatch) or left <= 0 or gone.done() or services.stopping.is_set():
                return batch
            pause = min(left, RECHECK_SECONDS, await _seconds_until(services, batch.due_at))
            await _wait_for_first((arrivals.wait(mark, pause), services.stopping.wait()), gone)


async def _lease(services: Services, body: LeaseRequest, form: Encoding, *, waits: bool) -> EncodedBatch | Nothing:
    """The groups ready for this consumer, with their rows."""
    if body.builder is not None:
        await asyncio.to_thread(find_builder, body.builder)
    while True:
        versions, settings = await load_current_versions(services), services.settings
        if body.policy is not None and body.policy not in versions:
            raise NotFound(f"there is no model {body.policy!r}", param="policy")
        behind = body.max_staleness
        lines = {
            policy: PolicyLine(version, None if behind is None else max(0, version - behind))
            for policy, version in versions.items()
        }
        line = lines.pop(DEFAULT_POLICY)
        terms = LeaseQuery(
            consumer=body.consumer or DEFAULT_CONSUMER,
            max_groups=body.max_groups,
            max_trajectories=body.max_trajectories,
            oldest_version=line.oldest_version,
            lease_seconds=body.lease_seconds or LEASE_SECONDS,
            max_deliveries=settings.group.max_deliveries,
            now=await services.clock.now(),
            waits=waits,
            stale_groups=settings.group.stale,
            version=line.version,
            policy=body.policy,
            run=body.run,
            complete_only=body.complete_only,
            named=lines,
        )
        lease = await services.delivery.lease(terms)
        if isinstance(lease, Nothing):
            return lease
        try:
            rows = RowTerms(form, body.roles, body.builder, body.complete_only, body.logprob_modes)
            groups, left = await encode_groups(services, lease, rows)
        except BaseException:
            # These groups do not reach the caller: it hung up, which cancels this task, or the store failed.
            with contextlib.suppress(VerbatimError):
                await asyncio.shield(give_back(services, lease.lease_id))
            raise
        if groups:
            return EncodedBatch(lease, line.version, versions, rows, groups, left)


async def _seconds_until(services: Services, due_at: float | None) -> float:
    """Slightly more than the time left, so that `due_at` has passed; a day if it is None."""
    return 86400.0 if due_at is None else max(0.0, due_at - await services.clock.now()) + 0.01


async def _wait_for_first(events: Iterable[Coroutine[Any, Any, Any]], gone: asyncio.Task[None]) -> None:
    """Return when any of them has happened."""
    tasks = [asyncio.create_task(event) for event in events]
    try:
        await asyncio.wait((*tasks, gone), return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


@contextlib.asynccontextmanager
async def _release_claim(services: Services, consumer: str, gone: asyncio.Task[None]) -> AsyncIterator[None]:
    """Remove the consumer's claim if its request breaks off, so that other consumers need not yield to it."""
    ended = False
    try:
        yield
        ended = not gone.done()
    finally:
        if not ended:
            with contextlib.suppress(VerbatimError):
                await asyncio.shield(services.delivery.leave(consumer))
