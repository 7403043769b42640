"""Route: one call's way to a replica that takes it.

`next` gives a replica with a seat on it; when that one could not be reached, `another` says whether the call may go on to the next.
Only who calls knows whether a token may have been sampled: then it must not ask.
"""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

from proxy.engine.replica import Replica
from proxy.engine.seats import Caller

if TYPE_CHECKING:
    from proxy.engine.pool import EnginePool

REPLICAS_TRIED = 3
"""How many replicas a call is offered to."""


class Route:
    """`async with pool.route(...) as route`: leaving the block gives the seat back."""

    def __init__(self, pool: EnginePool, model: str, caller: Caller) -> None:
        self._pool = pool
        self._model = model
        self._caller = caller
        self._tried: set[Replica] = set()
        self._seat: Replica | None = None

    async def __aenter__(self) -> Route:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._leave()

    async def next(self) -> Replica:
        """A replica that serves, once no weight update holds calls back and there is room. Raises as `Seats.take`, NotFound for a
        model that there is not, and EngineUnavailable with every replica's reason when none serves."""
        self._leave()
        while True:
            policy = self._pool.policy_for(self._model)
            await self._pool.admitted(policy)
            self._pool.serving(policy)
            seat = self._seat = await self._pool.seats.take(policy, self._caller, self._tried)
            # Weights may have changed while it waited, and the replica may have failed over them.
            await self._pool.admitted(policy)
            if seat.healthy:
                return seat
            self._leave()

    def another(self) -> bool:
        """Whether the call, which the replica it was given did not take, may try another one."""
        if self._seat is not None:
            self._tried.add(self._seat)
        policy = self._pool.policy_for(self._model)
        left = any(replica.healthy for replica in self._pool.of(policy) if replica not in self._tried)
        if not left or len(self._tried) >= REPLICAS_TRIED:
            return False
        self._pool.observer.tried_again(policy)
        return True

    def _leave(self) -> None:
        if self._seat is not None:
            self._pool.seats.free(self._seat)
            self._seat = None
