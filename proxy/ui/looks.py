"""Looks: sessions as the pages show them, built by `proxy.rows` as the API builds them, and kept while nothing changes."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from proxy.errors import NotFound
from proxy.rows import Built, build_rows
from proxy.services import Services
from proxy.store.session_store import Intent, SessionState
from proxy.ui.call_lines import CallLine, call_lines
from reconstruct.forest import Forest
from reconstruct.records import Call
from reconstruct.trajectory import Trajectory

KEPT = 4
KEPT_TOKENS = 16_000_000
"""Tokens in a session's rows beyond which it is not kept in memory, but built for every request."""


@dataclass(frozen=True)
class Look:
    """A session at one moment. `in_flight` are the ids of calls under way; `refused` says why calls are quarantined."""

    state: SessionState
    built: Built
    delivered: frozenset[str]
    intents: Sequence[Intent]
    in_flight: frozenset[str]
    refused: Mapping[str, str]
    lines: Sequence[CallLine]

    @property
    def session_id(self) -> str:
        return self.state.info.session_id

    @property
    def forest(self) -> Forest:
        return self.built.settled.forest

    @cached_property
    def calls(self) -> Mapping[str, Call]:
        """All of them by id, those without a place in the tree included."""
        return {**self.forest.calls, **{call.call_id: call for call in self.built.settled.stray}}

    def call(self, call_id: str) -> Call:
        """Raises NotFound."""
        if call_id not in self.calls:
            raise NotFound(f"session {self.session_id} has no call {call_id}")
        return self.calls[call_id]

    def row(self, trajectory_id: str) -> Trajectory:
        """Raises NotFound."""
        for row in self.built.rows:
            if row.trajectory_id == trajectory_id:
                return row
        raise NotFound(f"session {self.session_id} has no trajectory {trajectory_id}")

    @cached_property
    def row_of(self) -> Mapping[str, Trajectory]:
        """The row that a call is trained in, or where none trains it the first one it is part of."""
        found: dict[str, Trajectory] = {}
        for row in self.built.rows:
            for call_id in row.call_ids:
                found.setdefault(call_id, row)
        return found


_Stamp = tuple[SessionState, frozenset[str], tuple[str, ...], frozenset[str]]


class Looks:
    """The last few sessions that were looked at."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._kept: OrderedDict[str, tuple[_Stamp, Look]] = OrderedDict()

    async def at(self, session_id: str) -> Look:
        """The session as it is now. Raises NotFound."""
        sessions = self._services.sessions
        state, delivered, intents = await asyncio.gather(
            sessions.load(session_id), sessions.delivered(session_id), sessions.intents(session_id)
        )
        if state is None:
            self._kept.pop(session_id, None)
            raise NotFound(f"there is no session {session_id}")
        unclosed = state.status in ("open", "closing")
        in_flight = frozenset(await self._services.peers.in_flight(intents)) if unclosed and intents else frozenset()
        stamp = (state, frozenset(delivered), tuple(intent.call_id for intent in intents), in_flight)
        kept = self._kept.get(session_id)
        if kept is not None and kept[0] == stamp:
            self._kept.move_to_end(session_id)
            return kept[1]
        records = await sessions.records(session_id)
        look = await asyncio.to_thread(self._build, state, records, intents, stamp[1], in_flight)
        self._keep(stamp, look)
        return look

    def _build(
        self,
        state: SessionState,
        records: Sequence[bytes],
        intents: Sequence[Intent],
        delivered: frozenset[str],
        in_flight: frozenset[str],
    ) -> Look:
        left = [intent for intent in intents if intent.call_id not in in_flight]
        built = build_rows(self._services.settings, state, records, left, delivered)
        refused = {item.call_id: item.reason for item in built.accounting.quarantined}
        return Look(state, built, delivered, intents, in_flight, refused, call_lines(built.settled, delivered, refused))

    def _keep(self, stamp: _Stamp, look: Look) -> None:
        self._kept.pop(look.session_id, None)
        if sum(len(row.token_ids) for row in look.built.rows) <= KEPT_TOKENS:
            self._kept[look.session_id] = (stamp, look)
        while len(self._kept) > KEPT:
            self._kept.popitem(last=False)
