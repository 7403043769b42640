"""The newest sessions as they are now, for lists that filter and sort: only what has changed is read again.

A list looks at the newest `LISTED` sessions, of one run or of all. Each time the store tells a stamp of each, about a hundred bytes; a
session whose stamp is known is taken from memory. What is remembered is bounded in bytes, and forgetting it changes nothing.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from proxy.services import Services
from proxy.store.keys import listing_member, parse_member
from proxy.store.states import SessionState

LISTED = 3000
"""Sessions that one list looks at, the newest; older ones are on a further list."""
STAMPS_AT_ONCE, LOADED_AT_ONCE = 500, 100
REMEMBERED_BYTES = 48 * 2**20
FIXED_BYTES = 2500
"""What a remembered session takes beside its metadata."""


@dataclass(frozen=True, slots=True)
class Window:
    """`sessions`, newest first. `cursor`: where older ones begin, None if there are none."""

    sessions: Sequence[SessionState]
    cursor: str | None


class SessionCatalogue:
    def __init__(self, services: Services) -> None:
        self._sessions = services.sessions
        self._known: OrderedDict[str, tuple[bytes, SessionState, int]] = OrderedDict()
        self._bytes = 0

    async def load(
        self, *, run: str | None, after: float | None = None, cursor: str | None = None, limit: int = LISTED
    ) -> Window:
        members = await self._sessions.listing.list_members(run=run, after=after, cursor=cursor, limit=limit)
        following = members[-1] if len(members) == limit else None
        named = {member: parse_member(member)[0] for member in members}
        found = {state.info.session_id: state for state in await self.load_sessions([*named.values()])}
        # An entry may be that of a deleted session, whose id another one has now.
        return Window(
            [state for member, name in named.items() if (state := found.get(name)) and is_listed(state, member, run)], following
        )

    async def load_sessions(self, session_ids: Sequence[str]) -> list[SessionState]:
        """Those of the sessions that exist, in this order."""
        found: dict[str, SessionState] = {}
        for first in range(0, len(session_ids), STAMPS_AT_ONCE):
            part = session_ids[first : first + STAMPS_AT_ONCE]
            stamps = dict(zip(part, await self._sessions.listing.load_stamps(part), strict=True))
            changed = []
            for session_id, stamp in stamps.items():
                known = self._known.get(session_id)
                if known is not None and known[0] == stamp:
                    self._known.move_to_end(session_id)
                    found[session_id] = known[1]
                elif stamp:
                    changed.append(session_id)
            for at in range(0, len(changed), LOADED_AT_ONCE):
                found |= await self._read(changed[at : at + LOADED_AT_ONCE], stamps)
        return [found[each] for each in session_ids if each in found]

    async def _read(self, session_ids: Sequence[str], stamps: dict[str, bytes]) -> dict[str, SessionState]:
        states = await self._sessions.listing.load_many(session_ids)
        found = {name: state for name, state in zip(session_ids, states, strict=True) if state is not None}
        for name, state in found.items():
            # What has changed since its stamp was told has another stamp the next time.
            self._remember(name, stamps[name], state)
        await asyncio.sleep(0)
        return found

    def _remember(self, session_id: str, stamp: bytes, state: SessionState) -> None:
        self._forget(session_id)
        size = FIXED_BYTES + 4 * len(msgspec.msgpack.encode([state.info.metadata, state.reward_metadata, state.error]))
        self._known[session_id] = (stamp, state, size)
        self._bytes += size
        while self._bytes > REMEMBERED_BYTES:
            self._forget(next(iter(self._known)))

    def _forget(self, session_id: str) -> None:
        if (known := self._known.pop(session_id, None)) is not None:
            self._bytes -= known[2]


def is_listed(state: SessionState, member: str, run: str | None) -> bool:
    return member == listing_member(state.info.created_at, state.info.session_id) and run in (None, state.info.run)
