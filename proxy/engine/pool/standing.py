"""Standing: which replicas serve, and why the others do not: what takes one out and what brings it back.

`Replica.healthy` and `Replica.reason` are written here and nowhere else; `health` counts what is decided by.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from proxy.engine.pool.seats import PoolObserver, Seats
from proxy.engine.replica import NotListening, Replica
from proxy.errors import EngineUnavailable

log = logging.getLogger(__name__)


class Standing:
    """`replicas_of` gives those of a policy; `seats` hands out those of a replica that comes back."""

    def __init__(self, replicas_of: Callable[[str], Sequence[Replica]], seats: Seats, observer: PoolObserver) -> None:
        self._replicas_of = replicas_of
        self._seats = seats
        self._observer = observer

    def call_failed(self, replica: Replica, reason: str, *, refused: bool) -> None:
        """A call there broke: a connection that was refused takes the replica out, otherwise too many in a row do, if another one
        of its policy serves."""
        many = replica.health.call_failed()
        others = any(other.healthy for other in self._replicas_of(replica.policy) if other is not replica)
        if refused or (many and others):
            self._eject(replica, reason)

    def probe_failed(self, replica: Replica, error: EngineUnavailable) -> None:
        """Too many in a row take it out; so does one where nothing listens any more."""
        many = replica.health.probe_failed()
        if replica.healthy and not many and not isinstance(error, NotListening):
            log.info("engine %s: a probe failed: %s", replica.name, error.message)
            return
        replica.alive = False
        self._eject(replica, error.message)

    def probe_worked(self, replica: Replica) -> None:
        """It answers; that its weights let it serve is for `admit` to say."""
        replica.alive = True
        replica.health.probe_worked()

    def admit(self, replica: Replica) -> None:
        """It answers and its weights are current: it serves, or is told how often it still has to answer."""
        if replica.draining:
            return
        if replica.health.recovered:
            self._up(replica)
        else:
            self.down(replica, f"it failed repeatedly; {replica.health.missing_probes} more good probes and it serves again")

    def updated(self, replica: Replica) -> None:
        """Its weights were just made current: it serves, unless it still has to show that it lives."""
        if replica.health.recovered:
            self._up(replica)

    def down(self, replica: Replica, reason: str) -> None:
        """It does not serve, for a reason that does not count as a failure of its own."""
        if replica.healthy or replica.reason != reason:
            log.warning("engine %s does not serve: %s", replica.name, reason)
        replica.healthy, replica.reason = False, reason

    def _eject(self, replica: Replica, reason: str) -> None:
        if replica.healthy:
            replica.health.ejected()
            self._observer.ejected(replica.policy)
        self.down(replica, reason)

    def _up(self, replica: Replica) -> None:
        if replica.draining:
            return
        if not replica.healthy:
            log.info("engine %s serves (%s, weights %s)", replica.name, replica.api, replica.weight_version)
        replica.healthy, replica.reason = True, ""
        self._seats.serve(replica.policy)


# Watches: one task for each replica, which visits it now and then, and at once when there is a reason to.


WATCH_SECONDS = 2.0
RETRY_SECONDS = 1.0
"""Between two visits of a replica that serves, and of one that does not or may not for long."""


@dataclass(frozen=True, slots=True)
class _Watch:
    """`wake` makes the next visit come now, `visited` is set after the first."""

    wake: asyncio.Event = field(default_factory=asyncio.Event)
    visited: asyncio.Event = field(default_factory=asyncio.Event)


class Watches:
    """`visit` finds out what becomes of a replica."""

    def __init__(self, visit: Callable[[Replica], Awaitable[None]]) -> None:
        self._visit = visit
        self._watches: dict[Replica, _Watch] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping = False

    def begin(self, replica: Replica) -> None:
        """Visit it, now and from now on."""
        watch = self._watches[replica] = _Watch()
        task = asyncio.create_task(self._watch(replica, watch))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def end(self, replica: Replica) -> None:
        """It is draining: no visit begins any more."""
        self.look_at(replica)
        self._watches.pop(replica, None)

    def look_at(self, replica: Replica) -> None:
        """Visit it at once."""
        if replica in self._watches:
            self._watches[replica].wake.set()

    async def visited(self) -> None:
        """Return when every replica was visited once."""
        for watch in list(self._watches.values()):
            await watch.visited.wait()

    async def stop(self) -> None:
        self._stopping = True
        for watch in self._watches.values():
            watch.wake.set()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _watch(self, replica: Replica, watch: _Watch) -> None:
        # Not only until cancelled: before Python 3.12 asyncio.wait_for, which redis-py sends with, can swallow a cancellation.
        while not self._stopping and not replica.draining:
            watch.wake.clear()
            await self._visit(replica)
            watch.visited.set()
            calm = replica.healthy and not replica.health.doubtful
            try:
                async with asyncio.timeout(WATCH_SECONDS if calm else RETRY_SECONDS):
                    await watch.wake.wait()
            except TimeoutError:
                continue
            # Woken by a failed call: a moment's pause, so that calls failing in a row do not become a busy loop.
            await asyncio.sleep(RETRY_SECONDS / 4)


# Gate: holds calls back while weights change, those of one policy or all.


class Gate:
    def __init__(self) -> None:
        self._holds: Counter[str | None] = Counter()
        self._opened = asyncio.Event()

    def is_open(self, policy: str) -> bool:
        return not self._holds[policy] and not self._holds[None]

    async def passed(self, policy: str) -> None:
        """Returns when nothing holds the policy's calls."""
        while not self.is_open(policy):
            await self._opened.wait()

    @contextmanager
    def hold(self, policy: str | None = None) -> Iterator[None]:
        """Inside, calls of the policy wait in `passed`, None: those of every policy."""
        self._holds[policy] += 1
        try:
            yield
        finally:
            self._holds[policy] -= 1
            # Whoever waits looks again; later comers wait for the next change.
            self._opened.set()
            self._opened = asyncio.Event()
