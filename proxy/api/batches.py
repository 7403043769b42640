"""Batches: lease ready groups, acknowledge them, give them back, hold them longer. For the trainer."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request, Response
from pydantic import Field

from proxy import rows
from proxy.api.access import Served, trainer_only
from proxy.api.answers import Form, answer, form_of, json_response
from proxy.api.bodies import Body, body_of
from proxy.api.closing import group_name
from proxy.errors import NotFound, VerbatimError
from proxy.services import Services
from proxy.store.base import Lease, LeasedGroup
from reconstruct.errors import ReconstructError
from reconstruct.trajectory import as_wire

log = logging.getLogger(__name__)

router = APIRouter(prefix="/batches", dependencies=[Depends(trainer_only)])

RECHECK_SECONDS = 0.25
"""How soon a waiting lease sees what other processes filled, and leases that expired."""

LeaseSeconds = Annotated[float, Field(gt=0, le=7 * 86400)]


class LeaseRequest(Body):
    max_groups: int | None = Field(None, ge=1, le=65536)
    max_trajectories: int | None = Field(None, ge=1, le=2**31)
    max_staleness: int | None = Field(None, ge=0, lt=2**53)
    wait_seconds: float = Field(0.0, ge=0, le=3600)
    lease_seconds: LeaseSeconds | None = None
    consumer: str = Field("", max_length=256)


class ExtendRequest(Body):
    lease_seconds: LeaseSeconds | None = None


@router.post("/lease")
async def lease(request: Request, services: Served, body: Annotated[LeaseRequest, Depends(body_of(LeaseRequest))]) -> Response:
    form = form_of(request)
    loop = asyncio.get_running_loop()
    deadline = loop.time() + body.wait_seconds
    while not await request.is_disconnected():
        batch = await _take(services, body, form)
        if batch is not None:
            return answer(batch, form)
        left = deadline - loop.time()
        if left <= 0:
            break
        await services.delivery.wait(min(RECHECK_SECONDS, left))
    return Response(status_code=204)


@router.post("/{lease_id}/ack")
async def ack(services: Served, lease_id: str) -> Response:
    return _settled(lease_id, await services.delivery.ack(lease_id, time.time()))


@router.post("/{lease_id}/nack")
async def nack(services: Served, lease_id: str) -> Response:
    return _settled(lease_id, await services.delivery.nack(lease_id, time.time()))


@router.post("/{lease_id}/extend")
async def extend(services: Served, lease_id: str, body: Annotated[ExtendRequest, Depends(body_of(ExtendRequest))]) -> Response:
    seconds = body.lease_seconds or services.settings.lease_seconds
    expires_at = await services.delivery.extend(lease_id, seconds, time.time())
    return json_response({"lease_id": lease_id, "expires_at": expires_at})


@router.get("")
async def overview(services: Served) -> Response:
    """Groups by state, and the dead letters with their reasons."""
    counts, letters = await asyncio.gather(services.delivery.counts(), services.delivery.dead_letters())
    dead = [
        {
            "group_id": group_name(letter.group_id),
            "session_ids": list(letter.session_ids),
            "reason": letter.reason,
            "died_at": letter.died_at,
        }
        for letter in letters
    ]
    return json_response({"groups": dict(counts), "dead_letters": dead})


async def _take(services: Services, body: LeaseRequest, form: Form) -> dict[str, Any] | None:
    """The answer to a lease, or None when nothing is ready."""
    while True:
        version = (await services.weights.current()).version
        oldest = None if body.max_staleness is None else max(0, version - body.max_staleness)
        taken = await services.delivery.lease(
            consumer=body.consumer or "a trainer",
            max_groups=body.max_groups,
            max_trajectories=body.max_trajectories,
            oldest_version=oldest,
            lease_seconds=body.lease_seconds or services.settings.lease_seconds,
            max_deliveries=services.settings.max_deliveries,
            now=time.time(),
        )
        if taken is None:
            return None
        try:
            groups = await _groups(services, taken, form)
        except BaseException:
            # Nobody gets these groups: the caller went away, or the store did.
            with contextlib.suppress(VerbatimError):
                await asyncio.shield(services.delivery.nack(taken.lease_id, time.time()))
            raise
        if groups:
            return {
                "lease_id": taken.lease_id,
                "expires_at": taken.expires_at,
                "weight_version": version,
                "groups": groups,
            }


async def _groups(services: Services, taken: Lease, form: Form) -> list[dict[str, Any]]:
    """The leased groups with their rows. One that cannot be read goes to the dead letters, or it would come up again and
    again."""
    groups = []
    for group in taken.groups:
        try:
            trajectories = await _trajectories(services, group, form)
        except (NotFound, ReconstructError) as error:
            log.error("group %s cannot be delivered: %s", group_name(group.group_id), error)
            await services.delivery.bury(taken.lease_id, group.group_id, str(error), time.time())
            continue
        groups.append({"group_id": group_name(group.group_id), "trajectories": trajectories})
    return groups


async def _trajectories(services: Services, group: LeasedGroup, form: Form) -> list[dict[str, Any]]:
    members = await asyncio.gather(*(_member_rows(services, session_id, form) for session_id in group.session_ids))
    return [row for member in members for row in member]


async def _member_rows(services: Services, session_id: str, form: Form) -> list[dict[str, Any]]:
    state = await services.sessions.mark_leased(session_id)
    if state is None:
        raise NotFound(f"session {session_id} was deleted")
    built = await rows.session_rows(services, state)
    # Rows that are only shown, of roles that are not trained, stay with the session.
    return [as_wire(row, arrays=form.arrays) for row in built.rows if row.loss_mask.any()]


def _settled(lease_id: str, refs: Any) -> Response:
    return json_response({"lease_id": lease_id, "groups": [group_name(ref) for ref in refs]})
