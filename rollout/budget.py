"""How long a stretch of a rollout may take. What it only waits for, a slot or a service that is away, is not its own doing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from rollout.failures import Failure, RolloutFailed


class Budget:
    """The time that is left; given by `within`."""

    def __init__(self, limit: asyncio.Timeout) -> None:
        self._limit = limit

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """In this block no time passes."""
        until, loop = self._limit.when(), asyncio.get_running_loop()
        if until is None or self._limit.expired():
            yield
            return
        left = until - loop.time()
        self._limit.reschedule(None)
        try:
            yield
        finally:
            self._limit.reschedule(loop.time() + left)


@asynccontextmanager
async def within(seconds: float, failure: Failure) -> AsyncIterator[Budget]:
    """What takes longer ends as `failure`. Raises `RolloutFailed`."""
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            yield Budget(limit)
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise RolloutFailed(failure, f"it took longer than {seconds:g} s") from error
