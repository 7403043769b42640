"""Seats: which call may use which replica now, and the calls that wait because none has room.

A call takes a seat on the first replica in its session's preference that has room: its own one, or when that is saturated the next
by the same hash. When all are, it waits in its policy's fair queue. The numbers are this process's own.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Protocol

from proxy.engine.replica import Replica
from proxy.errors import EngineFailed, EngineUnavailable

LOOK_SECONDS = 2.0
"""How often a waiting call looks whether anybody still wants it."""
RETRY_AFTER_SECONDS = 5.0
"""What a call that waited in vain is told: the engines are busy for longer than a moment."""


class PoolObserver(Protocol):
    """Is told what the pool does, by policy."""

    def waited(self, policy: str, seconds: float) -> None:
        """A call got a seat, or gave up waiting for one."""
        ...

    def tried_again(self, policy: str) -> None:
        """A call that a replica did not take goes to another one."""
        ...

    def ejected(self, policy: str) -> None:
        """A replica that served was taken out: it failed."""
        ...


@dataclass(frozen=True, slots=True)
class Caller:
    """Who wants a seat. `cut` is set when the call must end; `look` raises when nobody can want it any more."""

    session_id: str
    cut: asyncio.Event
    look: Callable[[], Awaitable[None]]


class Seats:
    def __init__(
        self,
        replicas_of: Callable[[str], Sequence[Replica]],
        queue_seconds: float,
        observer: PoolObserver,
    ) -> None:
        self._replicas_of = replicas_of
        self._queue_seconds = queue_seconds
        self._observer = observer
        self._queues: dict[str, FairQueue] = {}

    def depths(self) -> Mapping[str, int]:
        """Waiting calls by policy."""
        return {policy: len(queue) for policy, queue in self._queues.items()}

    async def take(self, policy: str, caller: Caller, tried: set[Replica]) -> Replica:
        """A replica, one that was not tried if any of those serves, with a seat on it that `free` gives back.

        Raises EngineUnavailable when none has room in time, EngineFailed when the call is cut, and what `caller.look` raises."""
        queue = self._queues.setdefault(policy, FairQueue())
        replica = None if queue else _first_free(self._serving(policy), caller.session_id, tried)
        if replica is not None:
            replica.in_flight += 1
            self._observer.waited(policy, 0.0)
            return replica
        started = time.monotonic()
        try:
            return await self._queued(queue, policy, caller, tried)
        finally:
            self._observer.waited(policy, time.monotonic() - started)

    async def _queued(self, queue: FairQueue, policy: str, caller: Caller, tried: set[Replica]) -> Replica:
        call = Waiting(caller.session_id, tried)
        queue.join(call)
        self.serve(policy)
        try:
            if not call.given.done():
                await self._wait(call, caller, policy)
        except BaseException:
            queue.leave(call)
            if call.given.done():
                self.free(call.given.result())
            raise
        return call.given.result()

    def free(self, replica: Replica) -> None:
        replica.in_flight -= 1
        self.serve(replica.policy)

    def serve(self, policy: str) -> None:
        """Hand out what seats there are: after one was freed, and when a replica came or returned."""
        queue = self._queues.get(policy)
        if not queue:
            return
        serving = self._serving(policy)

        def choose(call: Waiting) -> Replica | None:
            return _first_free(serving, call.session_id, call.tried)

        while any(replica.has_room for replica in serving) and queue.serve(choose):
            pass

    def _serving(self, policy: str) -> list[Replica]:
        return [replica for replica in self._replicas_of(policy) if replica.healthy]

    async def _wait(self, call: Waiting, caller: Caller, policy: str) -> None:
        cut = asyncio.ensure_future(caller.cut.wait())
        try:
            async with asyncio.timeout(self._queue_seconds or None):
                while True:
                    await asyncio.wait((call.given, cut), timeout=LOOK_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                    if cut.done():
                        raise EngineFailed("the call was cut before it was sampled")
                    if call.given.done():
                        return
                    await caller.look()
        except TimeoutError as error:
            raise self._late(policy) from error
        finally:
            cut.cancel()

    def _late(self, policy: str) -> EngineUnavailable:
        error = EngineUnavailable(
            f"no engine had room for the call within {self._queue_seconds:g} seconds; waiting: {len(self._queues[policy])}"
        )
        error.retry_after_seconds = RETRY_AFTER_SECONDS
        return error


def _first_free(serving: Sequence[Replica], session_id: str, tried: Container[Replica]) -> Replica | None:
    """The session's first choice with room, among those that were not tried if any of them serves."""
    untried = [replica for replica in serving if replica not in tried] or serving
    free = [replica for replica in untried if replica.has_room]
    if len(free) < 2:
        return free[0] if free else None
    return preference(session_id, free)[0]


# FairQueue: calls that wait for a replica with room, served in turns by session.
#
# A session with a hundred calls waiting gets as many turns as one with a single call: each turn goes to the session that has waited
# longest for one, and to its oldest call.


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


# Which replica a session belongs to: rendezvous hashing, so that its prefix cache helps and few sessions move.
#
# Every replica has a weight for every session, and a session prefers replicas in the order of their weights. A replica that is lost
# gives each of its sessions to that session's next choice, one that is added takes over only those sessions that prefer it: about
# 1/n of them either way, and no session moves between two replicas that stay (Thaler and Ravishankar, "Using name-based mappings to
# increase hit rates", 1998).


def preference(session_id: str, replicas: Iterable[Replica]) -> list[Replica]:
    """The replicas in the order in which the session wants them; the same for the same names, in whatever order they are given."""
    return sorted(replicas, key=lambda replica: _weight(session_id, replica.name), reverse=True)


def _weight(session_id: str, name: str) -> bytes:
    return blake2b(f"{session_id}\0{name}".encode(), digest_size=8).digest()
