"""The lists of sessions: pages of them, and of many at once their states, or what tells whether those changed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from proxy.store import keys
from proxy.store.connection import Script, StoreConnection
from proxy.store.states import SessionInfo, SessionState, parse_state

LOADED_AT_ONCE = 32
LOOKED_AT = 2048
"""Listed sessions that one page looks at."""


class SessionListing:
    """All sessions by creation time, also those of each group and of each run.

    The lists are in other slots than the sessions, written before a session and cleaned after it: readers skip an entry whose session
    is missing, was created at another time or is of another group. A page that has found something ends after `LOOKED_AT` entries: a
    short page may have a cursor, an empty one is the last.
    """

    def __init__(self, connection: StoreConnection, load: Callable[[str], Awaitable[SessionState | None]]) -> None:
        self._redis = connection
        self._load = load

    async def add(self, info: SessionInfo) -> None:
        member = keys.listing_member(info.created_at, info.session_id)
        await asyncio.gather(*(self._redis.execute("ZADD", key, 0, member) for key in _lists(info)))

    async def remove(self, info: SessionInfo) -> None:
        member = keys.listing_member(info.created_at, info.session_id)
        await asyncio.gather(*(self._redis.execute("ZREM", key, member) for key in _lists(info)))

    async def leave(self, changed: SessionInfo, info: SessionInfo) -> None:
        """The session did not become what `changed` says: it is in the lists of `info` alone."""
        member = keys.listing_member(info.created_at, info.session_id)
        left = set(_lists(changed)).difference(_lists(info))
        await asyncio.gather(*(self._redis.execute("ZREM", key, member) for key in left))

    async def load_page(
        self,
        *,
        status: str | None,
        group_id: str | None,
        run: str | None = None,
        after: float | None = None,
        accepts: Callable[[SessionState], bool] | None = None,
        limit: int,
        cursor: str | None,
    ) -> tuple[list[SessionState], str | None]:
        """A page of those opened at `after` or later that `accepts`, newest first, and the next one's cursor; None: it was the last."""
        key = keys.SESSIONS if run is None else keys.run_sessions(run)
        key = key if group_id is None else keys.group_sessions(group_id)
        first = "-" if after is None else f"[{keys.listing_member(after, '')}"
        found: list[SessionState] = []
        looked_at = 0
        while looked_at < LOOKED_AT or not found:
            before = "+" if cursor is None else f"({cursor}"
            raw = await self._redis.execute("ZREVRANGEBYLEX", key, before, first, "LIMIT", 0, LOADED_AT_ONCE)
            members = [member.decode() for member in raw]
            for member, state in zip(members, await self._load_members(members), strict=True):
                cursor = member
                if state is None or status not in (None, state.status) or not _is_of(state.info, group_id, run):
                    continue
                if accepts is None or accepts(state):
                    found.append(state)
                    if len(found) == limit:
                        return found, cursor
            if len(members) < LOADED_AT_ONCE:
                return found, None
            looked_at += len(members)
        return found, cursor

    async def list_members(self, *, run: str | None, after: float | None, cursor: str | None, limit: int) -> list[str]:
        """The newest sessions opened at `after` or later, behind the cursor: each is the cursor of what follows it. Some may be gone."""
        key = keys.SESSIONS if run is None else keys.run_sessions(run)
        first = "-" if after is None else f"[{keys.listing_member(after, '')}"
        before = "+" if cursor is None else f"({cursor}"
        raw = await self._redis.execute("ZREVRANGEBYLEX", key, before, first, "LIMIT", 0, limit)
        return [member.decode() for member in raw]

    async def load_stamps(self, session_ids: Sequence[str]) -> list[bytes]:
        """Of each session a text that changes with its state, number of calls and accounting; empty if there is none."""
        return await self._redis.run_each(Script.read("stamps"), [(keys.state(each), keys.calls(each)) for each in session_ids])

    async def load_many(self, session_ids: Sequence[str]) -> list[SessionState | None]:
        """The states; their number should be small, since the store does nothing else meanwhile."""
        parts = [(keys.state(each), keys.calls(each)) for each in session_ids]
        return [parse_state(answer) for answer in await self._redis.run_each(Script.read("snapshots"), parts)]

    async def _load_members(self, members: list[str]) -> list[SessionState | None]:
        states = await asyncio.gather(*(self._load(keys.parse_member(member)[0]) for member in members))
        return [
            state if state and member == keys.listing_member(state.info.created_at, state.info.session_id) else None
            for member, state in zip(members, states, strict=True)
        ]


def _is_of(info: SessionInfo, group_id: str | None, run: str | None) -> bool:
    return group_id in (None, info.group_id) and run in (None, info.run)


def _lists(info: SessionInfo) -> tuple[str, ...]:
    every = (keys.SESSIONS, keys.run_sessions(info.run))
    return every if info.group_id is None else (*every, keys.group_sessions(info.group_id))
