"""The other processes that serve the same store: we tell them that we live, and end our calls of sessions that they close.

A call under way has an intent in the store, signed by its process. While that process lives the call is in flight; when it does
not, the call is dangling, for nobody will ever record it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Collection, Coroutine, Iterator, Sequence
from typing import Any

from proxy.errors import StoreUnavailable
from proxy.store.service import PeerStore
from proxy.store.sessions import SessionStore
from proxy.store.states import Intent
from proxy.timeline import Inflight

log = logging.getLogger(__name__)

BEAT_SECONDS = 2.5
LIFE_SECONDS = 10.0
"""How long a process counts as alive after its last beat."""
DEAD_SECONDS = 3.0
"""How long a process must seem dead until nobody waits for it: one that lost its Redis for a while has beaten again by then."""
ASK_SECONDS = 1.0
POLL_SECONDS = 0.05
LISTEN_SECONDS = 5.0
RETRY_SECONDS = 0.5


class Peers:
    def __init__(
        self, process: str, store: PeerStore, sessions: SessionStore, inflight: Inflight, close_wait_seconds: float
    ) -> None:
        self.process = process
        self._store = store
        self._sessions = sessions
        self._inflight = inflight
        self._close_wait_seconds = close_wait_seconds
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Begin to beat and to listen."""
        self._spawn(self._beat_forever())
        self._spawn(self._listen_forever())

    async def stop(self) -> None:
        """Nothing is under way here any more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        with contextlib.suppress(StoreUnavailable):
            await self._sessions.abandon_intents(())
            await self._sessions.settle_answers()
            await self._store.leave(self.process)

    async def cut(self, session_id: str) -> None:
        """End the session's calls wherever they run; returns when they are recorded, at the latest after `close_wait_seconds`.

        The session must be closing, so that no call begins. Raises `StoreUnavailable`."""
        here = self._spawn(self._inflight.cut(session_id))
        deadline = time.monotonic() + self._close_wait_seconds
        await self._cut_elsewhere(session_id, deadline)
        _, late = await asyncio.wait([here], timeout=max(0.0, deadline - time.monotonic()))
        if late:
            log.warning("session %s: its calls did not end within %g s", session_id, self._close_wait_seconds)

    async def in_flight(self, intents: Collection[Intent]) -> set[str]:
        """The ids of those calls that are under way somewhere."""
        alive = await self._store.find_alive({intent.process for intent in intents} - {"", self.process})
        here = self._inflight.list_running()
        return {
            intent.call_id
            for intent in intents
            if (intent.call_id in here if intent.process == self.process else intent.process in alive)
        }

    async def give_up_dead(self, session_id: str) -> bool:
        """Gives up the session's calls of processes that are dead, which hold some of its budget; whether there were any."""
        held = [each for each in await self._sessions.load_intents(session_id) if each.process not in ("", self.process)]
        alive = await self.in_flight(held)
        dead = [each for each in held if each.call_id not in alive]
        for each in dead:
            await self._sessions.give_up(session_id, each)
        return bool(dead)

    async def _cut_elsewhere(self, session_id: str, deadline: float) -> None:
        asked_at = float("-inf")
        seen_alive: dict[str, float] = {}
        while others := await self._find_other_holders(session_id):
            now = time.monotonic()
            if now - asked_at >= ASK_SECONDS:
                await self._store.request_cut(session_id)
                asked_at = now
            alive = await self._store.find_alive(others)
            seen_alive |= {process: now for process in others if process in alive or process not in seen_alive}
            if all(now - seen_alive[process] >= DEAD_SECONDS for process in others):
                return
            if now >= deadline:
                log.warning("session %s: other processes did not end its calls in time", session_id)
                return
            await asyncio.sleep(POLL_SECONDS)

    async def _find_other_holders(self, session_id: str) -> set[str]:
        """The other processes that have calls of the session under way, as far as the store knows."""
        return await self._sessions.find_holders(session_id) - {self.process}

    async def _beat_forever(self) -> None:
        while True:
            with _keep_going("beat"):
                await self._store.beat(self.process, LIFE_SECONDS)
                running = self._inflight.list_running()
                await self._sessions.abandon_intents(running)
                await self._sessions.keep_active(running)
                await asyncio.sleep(BEAT_SECONDS - RETRY_SECONDS)
            await asyncio.sleep(RETRY_SECONDS)

    async def _listen_forever(self) -> None:
        mark = ""
        while True:
            with _keep_going("listen"):
                session_ids, mark = await self._store.read_cuts(mark, LISTEN_SECONDS)
                self._cut_all(session_ids)
                continue
            await asyncio.sleep(RETRY_SECONDS)

    def _cut_all(self, session_ids: Sequence[str]) -> None:
        for session_id in dict.fromkeys(session_ids):
            self._spawn(self._end_here(session_id))

    async def _end_here(self, session_id: str) -> None:
        """Another process closes the session: it waits until this one has no call of it, and has told what became of its replies."""
        await self._inflight.cut(session_id)
        with contextlib.suppress(StoreUnavailable):
            await self._sessions.settle_answers(session_id)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


@contextlib.contextmanager
def _keep_going(what: str) -> Iterator[None]:
    """What goes wrong inside must not end it for good: others would take this process for dead."""
    try:
        yield
    except StoreUnavailable:
        log.debug("cannot %s: the store is away", what)
    except Exception:
        log.exception("cannot %s", what)
