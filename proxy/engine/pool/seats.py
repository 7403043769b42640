"""Seats on replicas: which one a call gets, and the calls that wait because none has room, or because weights change (`Gate`).

A session prefers replicas in the order of `rank_replicas`. A call goes to the first of them that has room; if none has, it waits in
its policy's fair queue. The numbers are this process's own.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Awaitable, Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b

from proxy.engine.replica import Replica
from proxy.errors import EngineUnavailable
from proxy.metrics import Metrics

LOOK_SECONDS = 2.0
"""How often a waiting call checks whether its caller still wants it."""
RETRY_AFTER_SECONDS = 5.0
"""Retry-After of a call that waited in vain: the engines will be busy for more than a moment."""


@dataclass(frozen=True, slots=True)
class Caller:
    """`look` raises when the call is no longer wanted."""

    session_id: str
    look: Callable[[], Awaitable[None]]


def rank_replicas(session_id: str, replicas: Iterable[Replica]) -> list[Replica]:
    """The replicas in the session's order of preference, by rendezvous hashing of their names.

    A session stays on one replica, so that its prefix cache helps. A lost replica gives each of its sessions to that session's next
    choice, a new one takes over only the sessions that prefer it, about 1/n either way; no session moves between two replicas that
    stay (Thaler and Ravishankar, "Using name-based mappings to increase hit rates", 1998)."""

    def weigh(replica: Replica) -> bytes:
        return blake2b(f"{session_id}\0{replica.name}".encode(), digest_size=8).digest()

    return sorted(replicas, key=weigh, reverse=True)


@dataclass(slots=True, eq=False)
class WaitingCall:
    """A call without a replica. `assigned` resolves to the one it gets."""

    session_id: str
    tried: set[Replica]
    assigned: asyncio.Future[Replica] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Seats:
    """`replicas_of` gives the replicas of a policy."""

    def __init__(self, replicas_of: Callable[[str], Sequence[Replica]], queue_seconds: float, metrics: Metrics) -> None:
        self._replicas_of = replicas_of
        self._queue_seconds = queue_seconds
        self._metrics = metrics
        self._queues: dict[str, FairQueue] = {}

    def depths(self) -> Mapping[str, int]:
        """The number of waiting calls by policy."""
        return {policy: len(queue) for policy, queue in self._queues.items()}

    async def acquire(self, policy: str, caller: Caller, tried: set[Replica]) -> Replica:
        """A replica with room, if possible one that was not tried; `release` must follow.

        Raises EngineUnavailable if none has room in time, and what `caller.look` raises."""
        if policy not in self._queues:
            self._queues[policy] = FairQueue()
        queue = self._queues[policy]
        replica = None if queue else _choose(self._serving(policy), caller.session_id, tried)
        if replica is not None:
            replica.in_flight += 1
            self._metrics.observe_wait(policy, 0.0)
            return replica
        started = time.monotonic()
        try:
            return await self._wait_in_queue(queue, policy, caller, tried)
        finally:
            self._metrics.observe_wait(policy, time.monotonic() - started)

    def release(self, replica: Replica) -> None:
        replica.in_flight -= 1
        # A seat of an engine is one for any of its policies: the one whose calls had none for longest is first.
        waiting = {each.policy for each in replica.engine if self._queues.get(each.policy)}
        for policy in sorted(waiting, key=lambda policy: self._queues[policy].last_turn):
            self.dispatch(policy)

    async def sleep(self, seconds: float, caller: Caller) -> None:
        """Returns after so many seconds. Raises what `caller.look` raises."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            await asyncio.sleep(min(left, LOOK_SECONDS))
            await caller.look()

    def dispatch(self, policy: str) -> None:
        """Assign waiting calls to replicas with room: after a release, and when a replica joins or returns."""
        queue = self._queues.get(policy)
        if not queue:
            return
        serving = self._serving(policy)

        def choose(call: WaitingCall) -> Replica | None:
            return _choose(serving, call.session_id, call.tried)

        while any(replica.has_room for replica in serving) and queue.assign_next(choose):
            pass

    def _serving(self, policy: str) -> list[Replica]:
        return [replica for replica in self._replicas_of(policy) if replica.healthy]

    async def _wait_in_queue(self, queue: FairQueue, policy: str, caller: Caller, tried: set[Replica]) -> Replica:
        call = WaitingCall(caller.session_id, tried)
        queue.join(call)
        self.dispatch(policy)
        try:
            if not call.assigned.done():
                await self._wait(call, caller, policy)
        except BaseException:
            queue.leave(call)
            if call.assigned.done():
                self.release(call.assigned.result())
            raise
        return call.assigned.result()

    async def _wait(self, call: WaitingCall, caller: Caller, policy: str) -> None:
        try:
            async with asyncio.timeout(self._queue_seconds or None):
                while True:
                    await asyncio.wait((call.assigned,), timeout=LOOK_SECONDS)
                    if call.assigned.done():
                        return
                    await caller.look()
        except TimeoutError as error:
            waiting = len(self._queues[policy])
            late = EngineUnavailable(
                f"no engine had room for the call within {self._queue_seconds:g} seconds; waiting: {waiting}"
            )
            late.retry_after_seconds = RETRY_AFTER_SECONDS
            raise late from error


def _choose(serving: Sequence[Replica], session_id: str, tried: Container[Replica]) -> Replica | None:
    """The session's first choice with room, among replicas that were not tried if any of those serves."""
    untried = [replica for replica in serving if replica not in tried] or serving
    free = [replica for replica in untried if replica.has_room]
    if len(free) < 2:
        return free[0] if free else None
    return rank_replicas(session_id, free)[0]


class FairQueue:
    """Waiting calls, served in turns by session: each turn goes to the session that has waited longest for one, and to its oldest
    call. So a session with a hundred waiting calls gets as many turns as one with a single call."""

    def __init__(self) -> None:
        self._sessions: OrderedDict[str, deque[WaitingCall]] = OrderedDict()
        self.last_turn = 0.0
        """When a call got a replica; monotonic seconds."""

    def __len__(self) -> int:
        return sum(map(len, self._sessions.values()))

    def __bool__(self) -> bool:
        return bool(self._sessions)

    def join(self, call: WaitingCall) -> None:
        self._sessions.setdefault(call.session_id, deque()).append(call)

    def leave(self, call: WaitingCall) -> None:
        """Has no effect on a call that no longer waits."""
        calls = self._sessions.get(call.session_id)
        if calls is None or call not in calls:
            return
        calls.remove(call)
        if not calls:
            del self._sessions[call.session_id]

    def assign_next(self, choose: Callable[[WaitingCall], Replica | None]) -> bool:
        """Assign a replica to the first session in turn for whose call `choose` finds one. False if it finds none."""
        for session_id, calls in self._sessions.items():
            replica = choose(calls[0])
            if replica is not None:
                self._assign(session_id, replica)
                return True
        return False

    def _assign(self, session_id: str, replica: Replica) -> None:
        calls = self._sessions[session_id]
        replica.in_flight += 1
        self.last_turn = time.monotonic()
        calls.popleft().assigned.set_result(replica)
        self._sessions.move_to_end(session_id)
        if not calls:
            del self._sessions[session_id]


class Gate:
    """Holds calls back while weights change, those of one policy or all."""

    def __init__(self) -> None:
        self._holds: Counter[str | None] = Counter()
        self._released = asyncio.Event()

    def is_open(self, policy: str) -> bool:
        return not self._holds[policy] and not self._holds[None]

    async def wait(self, policy: str) -> None:
        """Returns when nothing holds the policy's calls."""
        while self._holds[policy] or self._holds[None]:
            await self._released.wait()

    @contextmanager
    def hold(self, policy: str | None = None) -> Iterator[None]:
        """Inside, calls of the policy wait in `wait`; None: those of every policy."""
        self._holds[policy] += 1
        try:
            yield
        finally:
            self._holds[policy] -= 1
            # Wake everyone who waits; later comers wait for the next change.
            self._released.set()
            self._released = asyncio.Event()
