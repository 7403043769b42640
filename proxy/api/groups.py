"""Groups over HTTP: how far each is, and why a trainer has not got it. The admin lists and looks at them; /ui shows the same groups."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

from fastapi import APIRouter, Depends, Path, Response

from proxy.api.closing import RUN_ENDED, group_name
from proxy.api.filters import ListQuery, Where, parse_where
from proxy.api.requests import Body, PageSize, Served, json_response, require_admin
from proxy.errors import NotFound
from proxy.services import Services
from proxy.store.states import SessionState

router = APIRouter(prefix="/groups", tags=["groups"], dependencies=[Depends(require_admin)], default_response_class=Response)

READ_TOGETHER = 200
GROUPS_AMONG = 1000
"""Sessions, the newest, whose groups are listed."""
MOST_MEMBERS = 1000
LETTERS = 1000
"""Dead letters, the newest, among which a reason is looked for."""

Delivery = Literal["none", "announced", "filling", "ready", "leased", "acked", "dropped", "dead"]


class MemberShape(Body):
    session_id: str
    status: str
    reward: float | None
    error: str | None
    delivery: Delivery
    """The status of the round that it is in: none while it is open."""


GROUP: dict[str, Any] = {
    **{"group_id": "task-7", "size": 2, "sessions": 2, "closed": 1, "failed": 0, "rewards": [1.0], "delivery": "filling"},
    **{"reason": "1 of 2 members has closed; 1 is open", "created_at": 1767225600.0},
}
MEMBERS: list[dict[str, Any]] = [
    {"session_id": "first", "status": "completed", "reward": 1.0, "error": None, "delivery": "filling"},
    {"session_id": "second", "status": "open", "reward": None, "error": None, "delivery": "none"},
]


class GroupShape(Body, json_schema_extra={"example": GROUP}):
    group_id: str
    size: int
    """Members that make it whole."""
    sessions: int
    closed: int
    failed: int
    """Closed with nothing to train on."""
    rewards: list[float]
    delivery: Delivery
    """That of its newest member that is delivered or waits for it."""
    reason: str
    """One sentence: what it waits for, or what became of it."""
    created_at: float


class OneGroup(GroupShape, json_schema_extra={"example": {**GROUP, "members": MEMBERS}}):
    members: list[MemberShape]


class Groups(Body, json_schema_extra={"example": {"groups": [GROUP]}}):
    groups: list[GroupShape]


@dataclass(frozen=True, slots=True)
class GroupView:
    """The sessions of a group. `size` is the one they were opened with."""

    group_id: str
    size: int
    sessions: Sequence[SessionState]

    @property
    def closed(self) -> int:
        return sum(state.closed_at is not None for state in self.sessions)

    @property
    def failed(self) -> int:
        """Members that closed with nothing to train on. A completed one may still get a reward."""
        return sum(has_failed(state) for state in self.sessions)

    @property
    def newest(self) -> float:
        return max(state.info.created_at for state in self.sessions)


def has_failed(state: SessionState) -> bool:
    """Whether it closed with nothing to train on."""
    unrewarded = state.status == "timeout" and state.reward is None
    return state.closed_at is not None and (state.status not in RUN_ENDED or unrewarded)


async def newest_groups(services: Services, query: ListQuery) -> list[GroupView]:
    """The groups of the newest sessions of the run and time asked for, newest first."""
    found: list[SessionState] = []
    cursor = query.window_cursor
    while len(found) < GROUPS_AMONG:
        states, cursor = await services.sessions.listing.load_page(
            status=None,
            group_id=query.group or None,
            run=query.run or None,
            after=query.after,
            limit=READ_TOGETHER,
            cursor=cursor,
        )
        found += states
        if cursor is None:
            break
    return collect_groups(found, query)


def collect_groups(sessions: Iterable[SessionState], query: ListQuery) -> list[GroupView]:
    """The groups of these sessions that have the query's text in their id and a member that it accepts, in the sessions' order."""
    members: dict[str, list[SessionState]] = {}
    for state in sessions:
        named = state.info.group_id
        if named is not None and query.text.casefold() in named.casefold():
            members.setdefault(named, []).append(state)
    return [
        GroupView(name, max(each.info.group_size for each in states), states)
        for name, states in members.items()
        if any(map(query.accepts_member, states))
    ]


async def load_group(services: Services, group_id: str) -> GroupView | None:
    """The group with all its sessions, oldest first; None if it has none."""
    states: list[SessionState] = []
    cursor = None
    while len(states) < MOST_MEMBERS:
        part, cursor = await services.sessions.listing.load_page(
            status=None, group_id=group_id, limit=READ_TOGETHER, cursor=cursor
        )
        states += part
        if cursor is None:
            break
    if not states:
        return None
    return GroupView(group_id, max(state.info.group_size for state in states), states[::-1])


@router.get("", responses={200: {"model": Groups, "description": "the groups"}})
async def list_groups(
    services: Served,
    where: Where = None,
    limit: PageSize = 100,
) -> Response:
    """The groups of the thousand newest sessions, newest first; of older ones by `run`, `group` or `before`. `status` is a group's
    `delivery`; a group is listed if one of its members has what else is asked for. `q` is looked for in group ids."""
    asked = parse_where(where or (), get_args(Delivery))
    groups = await newest_groups(services, asked)
    groups = groups if asked.status else groups[:limit]
    described = [shown for shown, _ in await describe_groups(services, groups)]
    return json_response({"groups": [shown for shown in described if asked.status in ("", shown["delivery"])][:limit]})


@router.get("/{group_id:path}", responses={200: {"model": OneGroup, "description": "the group"}})
async def read_group(services: Served, group_id: Annotated[str, Path(description="URL-encoded.")]) -> Response:
    """A group with its members, oldest first."""
    group = await load_group(services, group_id)
    if group is None:
        raise NotFound(f"there is no group {group_id!r}")
    ((shown, standings),) = await describe_groups(services, [group])
    members = [
        {
            "session_id": state.info.session_id,
            "status": state.status,
            "reward": state.reward,
            "error": state.error,
            "delivery": each,
        }
        for state, each in zip(group.sessions, standings, strict=True)
    ]
    return json_response({**shown, "members": members})


async def describe_groups(services: Services, groups: Sequence[GroupView]) -> list[tuple[dict[str, Any], list[str]]]:
    """Each group as the wire has it, and where the round of each member stands."""
    ids = [state.info.session_id for group in groups for state in group.sessions]
    standings = dict(zip(ids, await services.delivery.load_standings(ids), strict=True)) if ids else {}
    letters: Mapping[str, str] = {}
    if "dead" in standings.values():
        found, _ = await services.delivery.dead_letters(LETTERS, None, None)
        letters = {group_name(letter.group_id): letter.reason for letter in reversed(found)}
    described = []
    for group in groups:
        own = [standings[state.info.session_id] for state in group.sessions]
        described.append((_describe(group, own, letters.get(group.group_id)), own))
    return described


def _describe(group: GroupView, standings: Sequence[str], letter: str | None) -> dict[str, Any]:
    by_age = sorted(zip(group.sessions, standings, strict=True), key=lambda pair: pair[0].info.created_at, reverse=True)
    delivery = next((standing for _, standing in by_age if standing != "none"), "none")
    return {
        "group_id": group.group_id,
        "size": group.size,
        "sessions": len(group.sessions),
        "closed": group.closed,
        "failed": group.failed,
        "rewards": [state.reward for state in group.sessions if state.reward is not None],
        "delivery": delivery,
        "reason": explain(group, delivery, letter),
        "created_at": group.newest,
    }


def explain(group: GroupView, delivery: str, letter: str | None) -> str:
    """What the group waits for, or what became of it. `letter`: the reason of its dead letter."""
    if delivery == "dead":
        return f"no longer delivered: {letter or 'see the dead letters'}"
    known = {
        "ready": "ready: waits for a trainer whose lease allows its weights",
        "leased": "leased: a trainer has it",
        "acked": "delivered: a trainer acknowledged it",
        "dropped": "dropped by the group's rule: too few usable members, or equal rewards",
    }
    return known.get(delivery) or _explain_waiting(group)


def _explain_waiting(group: GroupView) -> str:
    counted = Counter(_find_lack(state) for state in group.sessions)
    lacks = [f"{count} {lack}" for lack, count in counted.items() if lack]
    missing = group.size - len(group.sessions)
    lacks += [f"{missing} not opened yet"] if missing > 0 else []
    usable = counted[""]
    return f"waits: {usable} of {group.size} members usable" + (f"; {', '.join(lacks)}" if lacks else "")


def _find_lack(state: SessionState) -> str:
    """What keeps a member out of its group; "" if nothing does."""
    if state.closed_at is None:
        return state.status
    if has_failed(state):
        return "failed"
    return "without a reward" if state.reward is None else ""
