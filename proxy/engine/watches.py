"""Watches: one task for each replica, which visits it now and then, and at once when there is a reason to."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from proxy.engine.replica import Replica

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
