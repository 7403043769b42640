"""Dead letters: groups that are not delivered any more, with the reason; delivered again or taken off the list. For the admin."""

from __future__ import annotations

import re
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Response

from proxy.api.access import Served, admin_only
from proxy.api.answers import json_response
from proxy.api.closing import group_name, policy_of
from proxy.errors import NotFound, RequestError
from proxy.store.groups import DeadLetter

router = APIRouter(prefix="/batches/dead", dependencies=[Depends(admin_only)])

CURSOR = re.compile(r"[0-9.]+(e\+[0-9]+)?:[0-9]+[:/].+", re.DOTALL)


@router.get("")
async def listing(
    services: Served,
    cursor: str | None = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    reason: str | None = None,
) -> Response:
    """Newest first; with `reason`, those whose reason contains it."""
    if cursor is not None and not CURSOR.fullmatch(cursor):
        raise RequestError(f"cursor: {cursor!r} is not one that this service gave", param="cursor")
    letters, following = await services.delivery.dead_letters(limit, cursor, reason)
    return json_response({"dead_letters": [letter_as_wire(letter) for letter in letters], "cursor": following})


@router.post("/{group:path}/retry")
async def retry(services: Served, group: str) -> Response:
    """Ready again, as if never delivered; a group that was given up incomplete waits for its members again."""
    done = await services.delivery.retry_dead(_names(group), policy_of(services.settings), await services.clock.now())
    return _done(group, done)


@router.delete("/{group:path}")
async def drop(services: Served, group: str) -> Response:
    """Off the list for good; its sessions stay until they are deleted."""
    return _done(group, await services.delivery.drop_dead(_names(group)))


def letter_as_wire(letter: DeadLetter) -> dict[str, Any]:
    return {
        "letter_id": letter.letter_id,
        "group_id": group_name(letter.group_id),
        "session_ids": list(letter.session_ids),
        "deliveries": letter.deliveries,
        "reason": letter.reason,
        "died_at": letter.died_at,
    }


def _names(group: str) -> tuple[str, ...]:
    """What the store may know it by: a letter's id, a group's, or that of a session without a group."""
    return group, f"g:{group}", f"s:{group}"


def _done(group: str, letters: Any) -> Response:
    if not letters:
        raise NotFound(f"there is no dead letter of {group!r}")
    return json_response({"letters": list(letters)})
