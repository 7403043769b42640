"""PushLock: a policy's one push lock, held and renewed, so that two pushes never interleave, whichever process runs them.

Who takes it gets a fencing token, greater than every one before. The store makes a version current only under the last token
given, and an engine loads nothing under an older one: a process that was stopped for so long that another took over can do
neither when it goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import uuid
from types import TracebackType

from proxy.errors import Conflict, StoreUnavailable
from proxy.store.weight_store import WeightStore

RENEWALS = 6
"""How often the lock is renewed in the time it lasts."""
RETRY_SECONDS = 0.1


class PushLock:
    """`async with PushLock(weights, policy, lease_seconds, wait_seconds)`: raises Conflict when another owner held it all that
    time. `lease_seconds` is how long it outlives a process that dies.

    `check()` raises StoreUnavailable once the lock was lost: it could not be renewed for longer than it lasts.
    """

    def __init__(self, weights: WeightStore, policy: str, lease_seconds: float, wait_seconds: float) -> None:
        self.fence = 0
        self._weights = weights
        self._policy = policy
        self._lease_seconds = lease_seconds
        self._wait_seconds = wait_seconds
        self._owner = f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:8]}"
        self._held_until = 0.0
        self._released = False
        self._renewal: asyncio.Task[None] | None = None

    async def __aenter__(self) -> PushLock:
        deadline = _now() + self._wait_seconds
        while not await self._take():
            if _now() >= deadline:
                raise Conflict("another weight push is running")
            await asyncio.sleep(RETRY_SECONDS)
        self._renewal = asyncio.create_task(self._renew())
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._released = True
        if self._renewal is not None:
            self._renewal.cancel()
            await asyncio.wait([self._renewal])
        # When the store is away the lock ends by itself after its lease.
        with contextlib.suppress(StoreUnavailable):
            await self._weights.unlock(self._owner, self._policy)

    def check(self) -> None:
        if _now() >= self._held_until:
            raise StoreUnavailable("the push lock could not be renewed in the store")

    async def _take(self) -> bool:
        asked = _now()
        fence = await self._weights.lock(self._owner, self._lease_seconds, self._policy, self.fence)
        if fence:
            self.fence, self._held_until = fence, asked + self._lease_seconds
        return bool(fence)

    async def _renew(self) -> None:
        # Not only until cancelled: before Python 3.12 a command to Redis can swallow a cancellation.
        while not self._released:
            await asyncio.sleep(self._lease_seconds / RENEWALS)
            with contextlib.suppress(StoreUnavailable):
                if not await self._take():
                    self._held_until = 0.0
                    return


def _now() -> float:
    return asyncio.get_running_loop().time()
