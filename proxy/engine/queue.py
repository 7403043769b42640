"""FairQueue: calls that wait for a replica with room, served in turns by session.

A session with a hundred calls waiting gets as many turns as one with a single call: each turn goes to the session that has waited
longest for one, and to its oldest call.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from proxy.engine.replica import Replica


@dataclass(slots=True, eq=False)
class Waiting:
    """One call without a replica yet. `given` is the replica whose seat it got."""

    session_id: str
    tried: set[Replica]
    given: asyncio.Future[Replica] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


Choose = Callable[[Waiting], Replica | None]


class FairQueue:
    def __init__(self) -> None:
        self._sessions: OrderedDict[str, deque[Waiting]] = OrderedDict()

    def __len__(self) -> int:
        return sum(len(calls) for calls in self._sessions.values())

    def join(self, call: Waiting) -> None:
        self._sessions.setdefault(call.session_id, deque()).append(call)

    def leave(self, call: Waiting) -> None:
        """Without effect on one that is not waiting any more."""
        calls = self._sessions.get(call.session_id)
        if calls is None or call not in calls:
            return
        calls.remove(call)
        if not calls:
            del self._sessions[call.session_id]

    def serve(self, choose: Choose) -> bool:
        """Give one seat to the first session in turn for whose call `choose` finds a replica. False: to nobody."""
        for session_id, calls in self._sessions.items():
            replica = choose(calls[0])
            if replica is not None:
                self._give(session_id, replica)
                return True
        return False

    def _give(self, session_id: str, replica: Replica) -> None:
        calls = self._sessions[session_id]
        replica.in_flight += 1
        calls.popleft().given.set_result(replica)
        self._sessions.move_to_end(session_id)
        if not calls:
            del self._sessions[session_id]
