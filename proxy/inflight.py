"""The calls in flight in this process, so that closing a session or the service can cut them and wait until they are recorded."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Running:
    """One call under way. `cut` is set when it must end now; `ask_engine` tells the engine so once there is a job."""

    session_id: str
    call_id: str
    cut: asyncio.Event = field(default_factory=asyncio.Event)
    done: asyncio.Event = field(default_factory=asyncio.Event)
    ask_engine: Callable[[], Awaitable[None]] | None = None

    async def abort(self) -> None:
        """Ask for the end, once; the call records what was sampled and then is `done`."""
        if self.cut.is_set() or self.done.is_set():
            return
        self.cut.set()
        if self.ask_engine is not None:
            await self.ask_engine()


class Inflight:
    def __init__(self) -> None:
        self._running: dict[str, set[Running]] = {}

    def __len__(self) -> int:
        return sum(len(calls) for calls in self._running.values())

    def call_ids(self) -> set[str]:
        return {running.call_id for calls in self._running.values() for running in calls}

    def of(self, session_id: str) -> set[str]:
        """The ids of the session's calls."""
        return {running.call_id for running in self._running.get(session_id, ())}

    def enter(self, running: Running) -> None:
        self._running.setdefault(running.session_id, set()).add(running)

    def leave(self, running: Running) -> None:
        running.done.set()
        calls = self._running.get(running.session_id, set())
        calls.discard(running)
        if not calls:
            self._running.pop(running.session_id, None)

    async def cut(self, session_id: str) -> None:
        """Abort the session's calls in this process; returns when they are recorded."""
        await _end(list(self._running.get(session_id, ())))

    async def drain(self, seconds: float) -> None:
        """Let calls in flight finish for `seconds`, then cut the rest and wait until they are recorded."""
        everyone = [running for calls in self._running.values() for running in calls]
        waits = [asyncio.ensure_future(running.done.wait()) for running in everyone]
        if waits:
            if seconds:
                log.info("calls in flight: %d, which have up to %g s to end before they are cut", len(waits), seconds)
            await asyncio.wait(waits, timeout=seconds)
            for wait in waits:
                wait.cancel()
        await _end([running for running in everyone if not running.done.is_set()])


async def _end(calls: list[Running]) -> None:
    await asyncio.gather(*(running.abort() for running in calls))
    await asyncio.gather(*(running.done.wait() for running in calls))
