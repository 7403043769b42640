"""Takes that wait: one read of arrivals for all idle nodes of this process, and when rollouts of silent nodes may be given to others.

An idle node is one request a minute and no command of its own: at each arrival, and every `LOOK_SECONDS` for the leases that run out
unannounced, a few of the nodes with equal room look, and where one finds something, more do.

Nodes renew their leases over this service, so while it or its store is away all of them fall silent, whatever they do. Until this process
has had its store for as long as the longest lease, every node that lives could renew its own, and nothing is taken from any.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Hashable
from contextlib import suppress

from contract.attempts import Room, TakenRollout
from proxy.errors import StoreUnavailable
from proxy.store.connection import StoreConnection
from proxy.store.tasks.tasks import TaskStore
from proxy.store.tasks.work import WorkStore

log = logging.getLogger(__name__)

LOOK_SECONDS = 2.0
LAPSE_SECONDS = 3 * LOOK_SECONDS
"""Without an answer of the store for longer, it, or this process, was away."""
LOOKERS = 4
"""Nodes with equal room that look at once."""
LOOKS_AT_ONCE = 16
"""Of all nodes. They have connections of their own, so that no take waits for what calls and requests do."""
NEVER_SECONDS = 1e9
"""A lease that no silence is longer than."""


class Takes:
    """`run` it as long as the process serves. `stopping` is set when it shuts down: whoever waits gets nothing."""

    def __init__(self, connection: StoreConnection, stopping: asyncio.Event) -> None:
        self._redis = connection
        self._stopping = stopping
        self._waiting: dict[Hashable, dict[asyncio.Event, None]] = {}
        """Room -> what wakes each node that waits with it, who looked last at the end."""
        self._looks = asyncio.Semaphore(LOOKS_AT_ONCE)
        self._had_since: float | None = None
        """Since when the store has answered without a lapse; None: it does not answer."""
        self._answered_at = 0.0
        self._longest_lease = 0.0

    async def run(self) -> None:
        """Never returns."""
        arrivals, tasks = WorkStore(self._redis), TaskStore(self._redis)
        stopping = asyncio.create_task(self._wake_at_stop())
        try:
            while True:
                try:
                    await arrivals.wait(LOOK_SECONDS)
                    await self._note_answer(tasks)
                except StoreUnavailable:
                    # Whoever takes is told.
                    self._had_since = None
                    await asyncio.sleep(LOOK_SECONDS)
                except Exception:
                    log.exception("arrivals of rollouts are not read for now")
                    await asyncio.sleep(LOOK_SECONDS)
                for room in list(self._waiting):
                    self._wake(room)
        finally:
            stopping.cancel()

    def may_recover(self, lease_seconds: float) -> bool:
        """Whether a node that was silent for its lease is lost: it could have renewed it here."""
        had = self._had_since
        return had is not None and asyncio.get_running_loop().time() - had >= max(lease_seconds, self._longest_lease)

    async def take(
        self, node: str, room: Room, lease_seconds: float, token: str, wait_seconds: float, gone: asyncio.Task[None]
    ) -> TakenRollout | None:
        """A rollout for the node, as `WorkStore.take`, after `wait_seconds` at the latest; None once the caller is `gone`. Raises
        `StoreUnavailable`."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_seconds
        kind = (tuple(sorted(room.labels.items())), room.runtimes, room.cpus, room.memory_mb)
        turn = asyncio.Event()
        gone.add_done_callback(lambda _: turn.set())
        # It waits while it looks: what arrives meanwhile is not missed.
        waiting = self._waiting.setdefault(kind, {})
        waiting[turn] = None
        try:
            # Whoever is gone is handed nothing: it would have to be put back.
            while not gone.done() and not self._stopping.is_set():
                turn.clear()
                taken = await self._look(node, room, lease_seconds, token)
                if taken is not None:
                    self._wake(kind)
                    return taken
                if (left := deadline - loop.time()) <= 0:
                    return None
                with suppress(TimeoutError):
                    await asyncio.wait_for(turn.wait(), left)
            return None
        finally:
            del waiting[turn]
            if not waiting and self._waiting.get(kind) is waiting:
                del self._waiting[kind]

    async def _look(self, node: str, room: Room, lease_seconds: float, token: str) -> TakenRollout | None:
        work = WorkStore(self._redis)
        async with self._looks:
            lease = lease_seconds if self.may_recover(lease_seconds) else NEVER_SECONDS
            return await work.take(node, room, lease, await work.now(), token)

    def _wake(self, kind: Hashable) -> None:
        waiting = self._waiting[kind]
        for turn in list(waiting)[:LOOKERS]:
            del waiting[turn]
            waiting[turn] = None
            turn.set()

    async def _note_answer(self, tasks: TaskStore) -> None:
        now = asyncio.get_running_loop().time()
        if self._had_since is None or now - self._answered_at > LAPSE_SECONDS:
            self._longest_lease = max((node.lease_seconds for node in await tasks.list_nodes()), default=0.0)
            self._had_since = now
        self._answered_at = now

    async def _wake_at_stop(self) -> None:
        await self._stopping.wait()
        for waiting in list(self._waiting.values()):
            for turn in waiting:
                turn.set()
