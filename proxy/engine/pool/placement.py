"""Placement: where one call is sampled, on a replica that has room for it and can be reached."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

from proxy.engine.pool.pool import EnginePool
from proxy.engine.pool.seats import Caller
from proxy.engine.replica import Replica
from proxy.errors import EngineBusy, EngineUnavailable
from proxy.timeline import ENGINE, QUEUE, CancelScope, Timeline, Waiting

T = TypeVar("T")

REPLICAS_TRIED = 3
"""How many replicas a call is offered to."""

FIRST_PAUSE, LONGEST_PAUSE = 0.25, 16.0
"""The least time, in seconds, between two requests of a call to engines that are busy: it doubles."""


@dataclass(slots=True, eq=False)
class Placement:
    """Where one call is sampled, and by which seat."""

    _pool: EnginePool
    _model: str
    _caller: Caller
    _scope: CancelScope
    _timeline: Timeline
    _tried: set[Replica] = field(default_factory=set)
    _replica: Replica | None = None
    _waits: int = 0
    _waited: float = 0.0

    async def run(self, sample: Callable[[Replica], Awaitable[T]]) -> T:
        """What `sample` gives of the first replica that can be reached; another one is tried only where nothing was sampled yet. Raises as
        `sample` and `Seats.acquire`, NotFound for an unknown model, and EngineUnavailable with every replica's reason if none serves."""
        try:
            while True:
                self._timeline.begin(QUEUE)
                with self._scope.interruptible(), Waiting(ENGINE):
                    replica = await self._find_seat()
                try:
                    return await sample(replica)
                except EngineUnavailable as error:
                    if self._timeline.first_token_at or self._scope.cancelled:
                        raise
                    if not self._try_another(replica) and not await self._wait_out(error):
                        raise
                    self._release()
        finally:
            self._release()

    async def _find_seat(self) -> Replica:
        """On a replica that serves, once no weight update holds calls back and there is room."""
        while True:
            policy = self._pool.find_policy(self._model)
            await self._pool.wait_for_gate(policy)
            self._pool.serving(policy)
            replica = self._replica = await self._pool.seats.acquire(policy, self._caller, self._tried)
            # While it waited, weights may have changed and the replica may have failed over them.
            await self._pool.wait_for_gate(policy)
            if replica.healthy:
                return replica
            self._release()

    def _try_another(self, replica: Replica) -> bool:
        """Whether the call may go to another replica after this one did not take it."""
        self._tried.add(replica)
        policy = self._pool.find_policy(self._model)
        left = any(each.healthy for each in self._pool.of(policy) if each not in self._tried)
        if not left or len(self._tried) >= REPLICAS_TRIED:
            return False
        self._pool.metrics.count_retry(policy)
        return True

    async def _wait_out(self, error: EngineUnavailable) -> bool:
        """Wait as long as the engine asks, without a seat; then all replicas are there again. False if it does not say, or if the call
        would wait longer than `queue_seconds` in all."""
        if not isinstance(error, EngineBusy):
            return False
        # An engine that says "at once" again and again is asked less and less often.
        seconds = max(error.retry_after_seconds, min(LONGEST_PAUSE, FIRST_PAUSE * 2**self._waits))
        if not self._pool.may_wait(self._waited + seconds):
            return False
        self._release()
        self._tried.clear()
        self._waits, self._waited = self._waits + 1, self._waited + seconds
        self._timeline.begin(QUEUE)
        with self._scope.interruptible(), Waiting(ENGINE):
            await self._pool.seats.sleep(seconds, self._caller)
        return True

    def _release(self) -> None:
        if self._replica is not None:
            self._pool.seats.release(self._replica)
            self._replica = None
