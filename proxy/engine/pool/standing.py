"""Standing: which replicas serve, why the others do not, and what ejects and readmits them.

`Watches` visits each replica.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from proxy.engine.apis.probe import NotListening, Unreadable
from proxy.engine.pool.seats import Seats
from proxy.engine.replica import Replica
from proxy.errors import EngineUnavailable
from proxy.metrics import Metrics

log = logging.getLogger(__name__)


class Standing:
    """The only writer of `Replica.healthy` and `Replica.reason`. `replicas_of` gives the replicas of a policy.

    What happens to an engine happens to all its replicas; an adapter serves only while the base model does."""

    def __init__(self, replicas_of: Callable[[str], Sequence[Replica]], seats: Seats, metrics: Metrics) -> None:
        self._replicas_of = replicas_of
        self._seats = seats
        self._metrics = metrics

    def fail_call(self, replica: Replica, reason: str, *, refused: bool) -> None:
        """Eject the engine after a refused connection, or after too many broken calls in a row if other engines serve its policies."""
        many = replica.health.fail_call()
        if refused or (many and all(self.is_served_elsewhere(each) for each in replica.engine if each.healthy)):
            self._eject(replica, reason)

    def fail_probe(self, replica: Replica, error: EngineUnavailable) -> None:
        """Eject the replica after too many failed probes in a row, if nothing listens any more, or if no call could be read."""
        many = replica.health.fail_probe()
        if replica.healthy and not many and not isinstance(error, (NotListening, Unreadable)):
            log.info("engine %s: a probe failed: %s", replica.name, error.message)
            return
        for each in replica.engine:
            each.alive, each.stalled = isinstance(error, Unreadable), False
        self._eject(replica, error.message)

    def pass_probe(self, replica: Replica) -> None:
        """It answers; whether its weights let it serve is up to `admit`."""
        replica.alive = True
        replica.health.pass_probe()

    def admit(self, replica: Replica) -> None:
        """It answers and its weights are current: it serves, unless it has to answer more probes."""
        if replica.draining:
            return
        if replica.health.has_recovered:
            self._set_up(replica)
        else:
            missing = replica.health.missing_probes
            self.set_down(replica, f"it failed repeatedly; {missing} more good probes and it serves again")

    def leave(self, replica: Replica, store_problem: str) -> None:
        """The store could not tell which weights it should hold. That says nothing about the engine: what serves goes on."""
        if not replica.healthy:
            self.set_down(replica, f"its weights are not known: {store_problem}", store_problem)

    def stall(self, replica: Replica, seconds: float) -> None:
        """It holds calls and showed no sign of life for that long: it gets no more until it does."""
        for each in replica.engine:
            each.stalled = True
        replica.pulse.stalled_at = time.perf_counter()
        self._eject(replica, f"it is stalled: it has calls, and sampled nothing for {seconds:g} seconds")

    def revive(self, replica: Replica) -> None:
        """It samples again, and serves once its weights are known."""
        for each in replica.engine:
            each.stalled = False
        log.info("engine %s samples again", replica.name)

    def admit_updated(self, replica: Replica) -> None:
        """It serves, unless it has to answer more probes."""
        if replica.health.has_recovered:
            self._set_up(replica)

    def set_down(self, replica: Replica, reason: str, store_problem: str = "") -> None:
        """Stop serving, for a reason that does not count as a failure. `store_problem`: it is the store's."""
        if replica.healthy or replica.reason != reason:
            log.warning("engine %s does not serve: %s", replica.title, reason)
        replica.healthy, replica.reason, replica.store_problem = False, reason, store_problem
        for adapter in replica.adapters:
            self.set_down(adapter, reason, store_problem)

    def is_served_elsewhere(self, replica: Replica) -> bool:
        """Whether another engine serves its policy."""
        return any(other.healthy for other in self._replicas_of(replica.policy) if other.host is not replica.host)

    def _eject(self, replica: Replica, reason: str) -> None:
        replica = replica.host
        if replica.healthy:
            replica.health.eject()
            self._metrics.count_ejection(replica.policy)
        self.set_down(replica, reason)

    def _set_up(self, replica: Replica) -> None:
        if replica.draining or replica.stalled:
            return
        if not replica.healthy:
            log.info("engine %s serves: %s, weights %s", replica.title, replica.description, replica.weight_version)
        replica.healthy, replica.reason, replica.store_problem = True, "", ""
        self._seats.dispatch(replica.policy)


WATCH_SECONDS = 2.0
RETRY_SECONDS = 1.0
"""Between two visits of a replica that serves, and of one that does not or may soon not."""


@dataclass(frozen=True, slots=True)
class _Watch:
    """`wake` makes the next visit come now, `visited` is set after the first."""

    wake: asyncio.Event = field(default_factory=asyncio.Event)
    visited: asyncio.Event = field(default_factory=asyncio.Event)


class Watches:
    """One task per replica that calls `visit` now and then, and at once after `wake`."""

    def __init__(self, visit: Callable[[Replica], Awaitable[None]]) -> None:
        self._visit = visit
        self._watches: dict[Replica, _Watch] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping = False

    def begin(self, replica: Replica) -> None:
        watch = self._watches[replica] = _Watch()
        task = asyncio.create_task(self._watch(replica, watch))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def end(self, replica: Replica) -> None:
        """It is draining: begin no more visits."""
        self.wake(replica)
        self._watches.pop(replica, None)

    def wake(self, replica: Replica) -> None:
        """Visit it at once."""
        if replica in self._watches:
            self._watches[replica].wake.set()

    async def wait_for_first_visits(self) -> None:
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
        # Checks a flag too: before Python 3.12 asyncio.wait_for, which redis-py uses, can swallow a cancellation.
        while not self._stopping and not replica.draining:
            watch.wake.clear()
            await self._visit(replica)
            watch.visited.set()
            calm = replica.healthy and not replica.health.is_doubtful
            try:
                async with asyncio.timeout(WATCH_SECONDS if calm else RETRY_SECONDS):
                    await watch.wake.wait()
            except TimeoutError:
                continue
            # Woken by a failed call: pause, or calls that fail in a row would make this a busy loop.
            await asyncio.sleep(RETRY_SECONDS / 4)
