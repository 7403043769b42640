"""The course of one push over its replicas: how far each has come, for whoever watches, and how long each stood still."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from proxy.engine.replica_update import Push, Step
from proxy.errors import EngineFailed, VerbatimError
from proxy.store.weight_store import WeightState, WeightStore

Watcher = Callable[[dict[str, Any]], None]
"""Hears `{replica, step}` at each step of a replica, `{replica, step: "failed", error}`, and `{step: "receiving"}` when a
trainer that sends its weights itself is to begin."""


def unwatched(event: dict[str, Any]) -> None:
    """Nobody watches."""


@dataclass(slots=True)
class Outcome:
    """What became of one replica: `error` None when it runs on the new weights. `paused_seconds` it sampled nothing."""

    name: str
    watch: Watcher
    started: float = field(default_factory=time.monotonic)
    seconds: float = 0.0
    paused_seconds: float = 0.0
    error: VerbatimError | None = None
    paused_at: float | None = None

    def tell(self, step: Step) -> None:
        now = time.monotonic()
        if step == "paused":
            self.paused_at = now
        elif step == "resumed" and self.paused_at is not None:
            self.paused_seconds, self.paused_at = now - self.paused_at, None
        self.watch({"replica": self.name, "step": step})

    def end(self, error: VerbatimError | None = None) -> None:
        now = time.monotonic()
        self.seconds, self.error = now - self.started, error
        if self.paused_at is not None:
            self.paused_seconds = now - self.paused_at
        done = {"step": "done"} if error is None else {"step": "failed", "error": error.message}
        self.watch({"replica": self.name, **done})

    def as_wire(self) -> dict[str, Any]:
        times = {"seconds": round(self.seconds, 4), "paused_seconds": round(self.paused_seconds, 4)}
        return {"ok": self.error is None, **times, **({"error": self.error.message} if self.error else {})}


class Commit:
    """Makes the version current when the first replica holds it, once."""

    def __init__(self, weights: WeightStore, push: Push, fence: int) -> None:
        self._weights = weights
        self._policy = push.policy
        self._state = WeightState(push.version, push.path, push.kind, time.time())
        self._fence = fence
        self._turn = asyncio.Lock()
        self._asked = False
        self.done = False

    async def __call__(self) -> None:
        async with self._turn:
            if not self.done:
                self._asked = True
                await self._weights.advance(self._state, self._policy, self._fence)
                self.done = True

    async def settle(self) -> None:
        """An answer of the store that was lost leaves open whether the version is current: find out, and make it so if a
        replica has it. Raises StoreUnavailable or Conflict when that cannot be said or done."""
        if self._asked and not self.done:
            if await self._weights.current(self._policy) == self._state:
                self.done = True
            else:
                await self()


class Meeting:
    """Where replicas that must load at the same time wait for each other: one that is missing would keep the others waiting in
    the middle of the transfer. `leave` is for one that does not come."""

    def __init__(self, names: Sequence[str], watch: Watcher) -> None:
        self._missing = set(names)
        self._lost = ""
        self._watch = watch
        self._over = asyncio.Event()

    async def arrive(self, name: str) -> None:
        """Raises EngineFailed when one does not come."""
        self._missing.discard(name)
        if not self._missing and not self._over.is_set():
            self._over.set()
            self._watch({"step": "receiving"})
        await self._over.wait()
        if self._lost:
            raise EngineFailed(f"nothing was sent, for {self._lost} cannot take part")

    def leave(self, name: str) -> None:
        if not self._over.is_set():
            self._lost = name
            self._over.set()
