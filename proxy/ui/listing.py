"""Lists of sessions and groups, with search and filters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

import msgspec

from proxy.api.closing import RUN_ENDED
from proxy.api.sessions import Status
from proxy.services import Services
from proxy.store.keys import listing_member
from proxy.store.states import SessionState
from proxy.ui.pictures import Rewards

PAGE = 50
READ_TOGETHER = 200
SEARCHED = 2000
"""Sessions searched for one page; the next page continues."""
GROUPS_AMONG = 1000
MOST_MEMBERS = 1000

STATUSES: tuple[str, ...] = get_args(Status)


@dataclass(frozen=True, slots=True)
class SessionFilter:
    """`text` is searched in ids, metadata, feedback and errors; rewards are inclusive. None and "": no limit."""

    text: str = ""
    status: str = ""
    at_least: float | None = None
    at_most: float | None = None

    @property
    def narrows(self) -> bool:
        return self != SessionFilter(status=self.status)

    def accepts(self, state: SessionState) -> bool:
        if self.at_least is not None and (state.reward is None or state.reward < self.at_least):
            return False
        if self.at_most is not None and (state.reward is None or state.reward > self.at_most):
            return False
        return not self.text or _finds_text(state, self.text.casefold())


@dataclass(frozen=True, slots=True)
class SessionPage:
    """`searched` counts the sessions read for it; `cursor` is where the next page begins, None at the end."""

    sessions: Sequence[SessionState]
    cursor: str | None
    searched: int


@dataclass(frozen=True, slots=True)
class Group:
    """The sessions of a group. `size` is the one they were opened with."""

    group_id: str
    size: int
    sessions: Sequence[SessionState]

    @property
    def rewards(self) -> Rewards | None:
        return Rewards.of((state.info.session_id, state.reward) for state in self.sessions)

    @property
    def closed(self) -> int:
        return sum(state.closed_at is not None for state in self.sessions)

    @property
    def failed(self) -> int:
        """Members that closed with nothing to train on. A completed one may still get a reward."""
        return sum(
            state.closed_at is not None
            and (state.status not in RUN_ENDED or (state.status == "timeout" and state.reward is None))
            for state in self.sessions
        )

    @property
    def newest(self) -> float:
        return max(state.info.created_at for state in self.sessions)


async def session_page(services: Services, wanted: SessionFilter, cursor: str | None) -> SessionPage:
    """The newest sessions that the filter accepts, from the cursor on."""
    found: list[SessionState] = []
    searched = 0
    limit = READ_TOGETHER if wanted.narrows else PAGE
    while searched < SEARCHED:
        states, cursor = await services.sessions.list_sessions(
            status=wanted.status or None, group_id=None, limit=limit, cursor=cursor
        )
        for at, state in enumerate(states):
            searched += 1
            if wanted.accepts(state):
                found.append(state)
                if len(found) == PAGE and (at + 1 < len(states) or cursor is not None):
                    return SessionPage(found, _cursor_after(state), searched)
        if cursor is None:
            break
    return SessionPage(found, cursor, searched)


async def newest_groups(services: Services, text: str) -> list[Group]:
    """The groups of the newest sessions whose ids contain the text, newest first."""
    members: dict[str, list[SessionState]] = {}
    cursor, searched = None, 0
    while searched < GROUPS_AMONG:
        states, cursor = await services.sessions.list_sessions(status=None, group_id=None, limit=READ_TOGETHER, cursor=cursor)
        searched += len(states)
        for state in states:
            named = state.info.group_id
            if named is not None and text.casefold() in named.casefold():
                members.setdefault(named, []).append(state)
        if cursor is None:
            break
    return [Group(name, max(each.info.group_size for each in states), states) for name, states in members.items()]


async def load_group(services: Services, group_id: str) -> Group | None:
    """The group with all its sessions, oldest first; None if it has none."""
    states: list[SessionState] = []
    cursor = None
    while len(states) < MOST_MEMBERS:
        part, cursor = await services.sessions.list_sessions(status=None, group_id=group_id, limit=READ_TOGETHER, cursor=cursor)
        states += part
        if cursor is None:
            break
    if not states:
        return None
    return Group(group_id, max(state.info.group_size for state in states), states[::-1])


def _finds_text(state: SessionState, wanted: str) -> bool:
    info = state.info
    named = (info.session_id, info.task_id or "", info.group_id or "", state.error or "")
    if any(wanted in name.casefold() for name in named):
        return True
    return wanted in msgspec.json.encode([info.metadata, state.reward_metadata]).decode().casefold()


def _cursor_after(state: SessionState) -> str:
    """The cursor of the page that begins after a session."""
    return listing_member(state.info.created_at, state.info.session_id)
