"""The list of sessions, newest first, in pages.

The list lives in another slot than the sessions: it is written before a session and cleaned after it, so an entry without its
session (or of an earlier session of the same id) is skipped. A page looks at a bounded number of entries; one that finds few
matches among them is short and has a cursor all the same. The end is a cursor of None.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from proxy.store import keys
from proxy.store.connection import StoreConnection
from proxy.store.session_store import SessionInfo, SessionState

LOADED_AT_ONCE = 32
LOOKED_AT = 2048


class SessionListing:
    def __init__(self, connection: StoreConnection, load: Callable[[str], Awaitable[SessionState | None]]) -> None:
        self._redis = connection
        self._load = load

    async def add(self, info: SessionInfo) -> None:
        member = keys.listing_member(info.created_at, info.session_id)
        await asyncio.gather(*(self._redis.execute("ZADD", key, 0, member) for key in _lists(info)))

    async def remove(self, info: SessionInfo) -> None:
        member = keys.listing_member(info.created_at, info.session_id)
        await asyncio.gather(*(self._redis.execute("ZREM", key, member) for key in _lists(info)))

    async def page(
        self, *, status: str | None, group_id: str | None, limit: int, cursor: str | None
    ) -> tuple[list[SessionState], str | None]:
        key = keys.SESSIONS if group_id is None else keys.group_sessions(group_id)
        found: list[SessionState] = []
        for _ in range(LOOKED_AT // LOADED_AT_ONCE):
            members = await self._members(key, cursor)
            for member, state in zip(members, await self._states(members), strict=True):
                cursor = member
                if state is not None and status in (None, state.status):
                    found.append(state)
                    if len(found) == limit:
                        return found, cursor
            if len(members) < LOADED_AT_ONCE:
                return found, None
        return found, cursor

    async def _members(self, key: str, cursor: str | None) -> list[str]:
        before = "+" if cursor is None else f"({cursor}"
        raw = await self._redis.execute("ZREVRANGEBYLEX", key, before, "-", "LIMIT", 0, LOADED_AT_ONCE)
        return [member.decode() for member in raw]

    async def _states(self, members: list[str]) -> list[SessionState | None]:
        states = await asyncio.gather(*(self._load(keys.listed(member)) for member in members))
        return [
            state if state and member == keys.listing_member(state.info.created_at, state.info.session_id) else None
            for member, state in zip(members, states, strict=True)
        ]


def _lists(info: SessionInfo) -> tuple[str, ...]:
    return (keys.SESSIONS,) if info.group_id is None else (keys.SESSIONS, keys.group_sessions(info.group_id))
