"""Dead letters over HTTP: groups no longer delivered, with the reason. The admin lists, retries and drops them."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Query, Response

from proxy.api.closing import build_group_defaults, group_name
from proxy.api.requests import Body, PageCursor, PageSize, Served, json_response, require_admin
from proxy.errors import NotFound, RequestError
from proxy.store.groups import DeadLetter

router = APIRouter(
    prefix="/batches/dead", tags=["batches"], dependencies=[Depends(require_admin)], default_response_class=Response
)

CURSOR = re.compile(r"[0-9]+(\.[0-9]+)?(e\+[0-9]+)?:[0-9]+[:/].+", re.DOTALL)
Group = Annotated[
    str,
    Path(description="A dead letter's `letter_id`, a group's id, or the id of a session without a group; URL-encoded."),
]


class DeadLetterShape(Body):
    letter_id: str
    group_id: str
    session_ids: list[str]
    deliveries: int
    reason: str
    died_at: float


LETTER: dict[str, Any] = json.loads("""
{"letter_id": "1:g:task-7", "group_id": "task-7", "session_ids": ["a", "b"], "deliveries": 0,
 "reason": "incomplete: 1 of 2 members are usable", "died_at": 1767225700.0}
""")


class DeadLetters(Body, json_schema_extra={"example": {"dead_letters": [LETTER], "cursor": None}}):
    dead_letters: list[DeadLetterShape]
    cursor: str | None


class LetterIds(Body, json_schema_extra={"example": {"letters": ["1:g:task-7"]}}):
    letters: list[str]


@router.get("", responses={200: {"model": DeadLetters, "description": "a page"}})
async def list_dead_letters(
    services: Served,
    cursor: PageCursor = None,
    limit: PageSize = 100,
    reason: Annotated[str | None, Query(description="Only letters whose reason contains this.")] = None,
) -> Response:
    """Groups no longer delivered, newest first."""
    if cursor is not None and not CURSOR.fullmatch(cursor):
        raise RequestError(f"cursor: {cursor!r} is not a cursor of this service", param="cursor")
    letters, following = await services.delivery.dead_letters(limit, cursor, reason)
    return json_response({"dead_letters": [letter_as_wire(letter) for letter in letters], "cursor": following})


@router.post(
    "/{group:path}/retry",
    responses={
        200: {"model": LetterIds, "description": "done"},
        409: {"description": "a later group with its id exists (`conflict`)"},
    },
)
async def retry_dead_letter(services: Served, group: Group) -> Response:
    """Makes the group ready again with its deliveries reset. A group given up as incomplete waits for its members again."""
    refs, defaults = _possible_refs(group), build_group_defaults(services.settings)
    return _letters_response(group, await services.delivery.retry_dead(refs, defaults, await services.clock.now()))


@router.delete("/{group:path}", responses={200: {"model": LetterIds, "description": "done"}})
async def drop_dead_letter(services: Served, group: Group) -> Response:
    """Removes it from the list for good. Its sessions stay until they are deleted."""
    return _letters_response(group, await services.delivery.drop_dead(_possible_refs(group)))


def letter_as_wire(letter: DeadLetter) -> dict[str, Any]:
    return {**asdict(letter), "group_id": group_name(letter.group_id)}


def _possible_refs(group: str) -> tuple[str, ...]:
    """The store's names it may stand for: a letter's id, a group's, or that of a session without a group."""
    return group, f"g:{group}", f"s:{group}"


def _letters_response(group: str, letters: Sequence[str]) -> Response:
    if not letters:
        raise NotFound(f"there is no dead letter of {group!r}")
    return json_response({"letters": list(letters)})
