"""Standing: which replicas serve, and why the others do not: what takes one out and what brings it back.

`Replica.healthy` and `Replica.reason` are written here and nowhere else; `health` counts what is decided by.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from proxy.engine.replica import NotListening, Replica
from proxy.engine.seats import PoolObserver, Seats
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
