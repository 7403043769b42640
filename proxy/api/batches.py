"""Batches: lease ready groups, acknowledge them, give them back, hold them longer. For the trainer."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine, Iterable
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request, Response
from pydantic import Field

from proxy.api.access import Served, trainer_only
from proxy.api.answers import Form, form_of, json_response
from proxy.api.bodies import Body, body_of
from proxy.api.closing import group_name
from proxy.api.dead_letters import letter_as_wire
from proxy.api.leased_groups import Batch, RowTerms, encode_groups
from proxy.api.version_lines import DEFAULT, current_versions
from proxy.errors import NotFound, VerbatimError
from proxy.rows import find_builder
from proxy.services import Services
from proxy.settings import Role
from proxy.store.delivery_store import LeaseTerms
from proxy.store.groups import Nothing, PolicyLine

router = APIRouter(prefix="/batches", dependencies=[Depends(trainer_only)])

RECHECK_SECONDS = 5.0
"""How soon a waiting lease looks by itself, should nobody tell it that something came."""
UNNAMED = "a trainer"

LeaseSeconds = Annotated[float, Field(gt=0, le=7 * 86400)]


class LeaseRequest(Body):
    max_groups: int | None = Field(None, ge=1, le=65536)
    """At most so many groups; left out: as many as fit into max_trajectories, or one where that is left out too."""
    max_trajectories: int | None = Field(None, ge=1, le=2**31)
    """At most so many rows, in whole groups."""
    max_staleness: int | None = Field(None, ge=0, lt=2**53)
    """Versions that the oldest token of a group may lie behind the current weights."""
    wait_seconds: float = Field(0.0, ge=0, le=3600)
    """How long to wait for something to become ready."""
    lease_seconds: LeaseSeconds | None = None
    """How long it is held; left out: as the service is set."""
    consumer: str = Field("", max_length=256)
    """Who asks: ready groups are shared among consumers."""
    policy: str | None = Field(None, max_length=200)
    """Only rows of this model; left out: of all."""
    roles: list[Role] | None = Field(None, min_length=1)
    """Only rows of these roles; left out: of all that are trained. The others of the same groups are nobody's any more once it is
    acknowledged."""
    builder: str | None = Field(None, min_length=1, max_length=200)
    """How sessions are made into rows; left out: as the service is set, by whose rows groups are counted."""
    complete_only: bool = False
    """Only groups all of whose sessions are complete; the others stay for who takes them."""


class ExtendRequest(Body):
    lease_seconds: LeaseSeconds | None = None
    """From now on; left out: as the service is set."""


@router.post("/lease")
async def lease(request: Request, services: Served, body: Annotated[LeaseRequest, Depends(body_of(LeaseRequest))]) -> Response:
    form = form_of(request)
    async with _hung_up(request) as gone:
        batch = await _take(services, body, form, waits=body.wait_seconds > 0)
        if isinstance(batch, Nothing) and body.wait_seconds > 0:
            batch = await _wait_for(services, body, form, gone)
        if isinstance(batch, Batch) and gone.done():
            await _give_back(services, batch.lease_id)
    return batch.response(form) if isinstance(batch, Batch) else Response(status_code=204)


@router.post("/{lease_id}/ack")
async def ack(services: Served, lease_id: str) -> Response:
    return _settled(lease_id, await services.delivery.ack(lease_id, await services.clock.now()))


@router.post("/{lease_id}/nack")
async def nack(services: Served, lease_id: str) -> Response:
    return _settled(lease_id, await services.delivery.nack(lease_id, await services.clock.now()))


@router.post("/{lease_id}/extend")
async def extend(services: Served, lease_id: str, body: Annotated[ExtendRequest, Depends(body_of(ExtendRequest))]) -> Response:
    seconds = body.lease_seconds or services.settings.lease_seconds
    expires_at = await services.delivery.extend(lease_id, seconds, await services.clock.now())
    return json_response({"lease_id": lease_id, "expires_at": expires_at})


@router.get("")
async def overview(services: Served) -> Response:
    """Groups by state, and the newest dead letters with their reasons."""
    counts, (letters, _) = await asyncio.gather(services.delivery.counts(), services.delivery.dead_letters())
    return json_response({"groups": dict(counts), "dead_letters": [letter_as_wire(letter) for letter in letters]})


async def _wait_for(services: Services, body: LeaseRequest, form: Form, gone: asyncio.Task[None]) -> Batch | Nothing:
    """Ask again whenever something came or a lease of others ended, until the time is over, the caller has hung up or the service
    stops."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + body.wait_seconds
    async with _waiting(services, body.consumer or UNNAMED, gone), services.delivery.watch() as arrivals:
        while True:
            mark, left = arrivals.mark, deadline - loop.time()
            batch = await _take(services, body, form, waits=left > 0)
            if isinstance(batch, Batch) or left <= 0 or gone.done() or services.stopping.is_set():
                return batch
            pause = min(left, RECHECK_SECONDS, await _seconds_until(services, batch.due_at))
            await _first((arrivals.after(mark, pause), services.stopping.wait()), gone)


async def _first(coming: Iterable[Coroutine[Any, Any, Any]], gone: asyncio.Task[None]) -> None:
    """Return when any of them has happened."""
    tasks = [asyncio.create_task(each) for each in coming]
    try:
        await asyncio.wait((*tasks, gone), return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


@contextlib.asynccontextmanager
async def _waiting(services: Services, consumer: str, gone: asyncio.Task[None]) -> AsyncIterator[None]:
    """Takes the consumer's claim away when its request is broken off: nobody else need heed it any longer."""
    ended = False
    try:
        yield
        ended = not gone.done()
    finally:
        if not ended:
            with contextlib.suppress(VerbatimError):
                await asyncio.shield(services.delivery.leave(consumer))


@contextlib.asynccontextmanager
async def _hung_up(request: Request) -> AsyncIterator[asyncio.Task[None]]:
    """A task that is done when the caller has hung up. Its body must have been read."""

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task = asyncio.create_task(watch())
    try:
        yield task
    finally:
        task.cancel()


async def _seconds_until(services: Services, due_at: float | None) -> float:
    """A little more than until then, so that it has come; a day when never."""
    return 86400.0 if due_at is None else max(0.0, due_at - await services.clock.now()) + 0.01


async def _give_back(services: Services, lease_id: str) -> None:
    await services.delivery.give_back(lease_id, await services.clock.now())


async def _take(services: Services, body: LeaseRequest, form: Form, *, waits: bool) -> Batch | Nothing:
    """What is ready for this consumer, with its rows."""
    if body.builder is not None:
        await asyncio.to_thread(find_builder, body.builder)
    while True:
        versions, settings = await current_versions(services), services.settings
        if body.policy is not None and body.policy not in versions:
            raise NotFound(f"there is no model {body.policy!r}", param="policy")
        lines = {policy: _line(version, body.max_staleness) for policy, version in versions.items()}
        line = lines.pop(DEFAULT)
        terms = LeaseTerms(
            consumer=body.consumer or UNNAMED,
            max_groups=body.max_groups,
            max_trajectories=body.max_trajectories,
            oldest_version=line.oldest_version,
            lease_seconds=body.lease_seconds or settings.lease_seconds,
            max_deliveries=settings.max_deliveries,
            now=await services.clock.now(),
            waits=waits,
            stale_groups=settings.stale_groups,
            version=line.version,
            policy=body.policy,
            complete_only=body.complete_only,
            named=lines,
        )
        taken = await services.delivery.lease(terms)
        if isinstance(taken, Nothing):
            return taken
        try:
            groups = await encode_groups(services, taken, RowTerms(form, body.roles, body.builder, body.complete_only))
        except BaseException:
            # Nobody gets these groups: the caller went away, which is a cancellation, or the store did.
            with contextlib.suppress(VerbatimError):
                await asyncio.shield(_give_back(services, taken.lease_id))
            raise
        if groups:
            return Batch(taken.lease_id, taken.expires_at, line.version, versions, groups)


def _line(version: int, max_staleness: int | None) -> PolicyLine:
    return PolicyLine(version, None if max_staleness is None else max(0, version - max_staleness))


def _settled(lease_id: str, refs: Any) -> Response:
    return json_response({"lease_id": lease_id, "groups": [group_name(ref) for ref in refs]})
