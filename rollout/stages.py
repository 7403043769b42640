"""The stages of a node, each with a fixed number of slots, and the time budgets of a rollout.

A rollout is *ahead* from when it is taken until its harness starts: being prepared, or ready. There are `ready` more permits for that than
run slots, so prepared runtimes wait without a run slot and take one as soon as it is free; with `ready=0` a rollout is prepared in the
slot it will run in. Each stage holds back the one before: a finished harness keeps its run slot until there is one to evaluate it, full
run slots fill the ready buffer, and a full ready buffer stops taking from the queue.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial

from contract.attempts import Failure
from contract.tasks import Task
from rollout.attempts import RolloutFailed


@dataclass(frozen=True, slots=True)
class Slots:
    """How many rollouts may be in each stage. `ready` may be 0."""

    prepare: int = 2
    ready: int = 2
    run: int = 4
    evaluate: int = 2


class Permit:
    """A place in a stage. `leave` gives it back; calling it again does nothing."""

    def __init__(self, leave: Callable[[], None]) -> None:
        self._leave: Callable[[], None] | None = leave

    def leave(self) -> None:
        if self._leave is not None:
            leave, self._leave = self._leave, None
            leave()


class Stage:
    """`busy` rollouts are in the stage, `waiting` wait to enter."""

    def __init__(self, size: int) -> None:
        self._free = asyncio.Semaphore(size)
        self.busy = 0
        self.waiting = 0

    async def enter(self) -> Permit:
        self.waiting += 1
        try:
            await self._free.acquire()
        finally:
            self.waiting -= 1
        self.busy += 1
        return Permit(self._free_slot)

    @asynccontextmanager
    async def entered(self) -> AsyncIterator[None]:
        permit = await self.enter()
        try:
            yield
        finally:
            permit.leave()

    def _free_slot(self) -> None:
        self.busy -= 1
        self._free.release()


MICRO = 1_000_000


class Capacity:
    """A node's unreserved CPUs and memory; `freed` is set whenever some are given back."""

    def __init__(self, cpus: float, memory_mb: int) -> None:
        # Integers: floats do not add up again when fractions of a CPU are given back.
        self._free_micro_cpus = round(cpus * MICRO)
        self.free_memory_mb = memory_mb
        self.freed = asyncio.Event()

    @property
    def free_cpus(self) -> float:
        return self._free_micro_cpus / MICRO

    def reserve(self, task: Task) -> Permit:
        """Reserve `task`'s demand, which must be free, until the permit is given back."""
        cpus, memory_mb = task.demand
        micro_cpus = round(cpus * MICRO)
        self._add(-micro_cpus, -memory_mb)
        return Permit(partial(self._add, micro_cpus, memory_mb))

    def _add(self, micro_cpus: int, memory_mb: int) -> None:
        self._free_micro_cpus += micro_cpus
        self.free_memory_mb += memory_mb
        self.freed.set()


class Stages:
    def __init__(self, slots: Slots, capacity: Capacity) -> None:
        self.slots = slots
        self.capacity = capacity
        self.ahead = Stage(slots.run + slots.ready)
        """From taking a rollout to the end of its run."""
        self.prepare = Stage(slots.prepare)
        self.run = Stage(slots.run)
        self.evaluate = Stage(slots.evaluate)

    @property
    def busy(self) -> Mapping[str, int]:
        """Rollouts by stage; `ready` ones wait for a run slot."""
        return {
            "prepare": self.prepare.busy,
            "ready": self.run.waiting,
            "run": self.run.busy,
            "evaluate": self.evaluate.busy,
        }


class Budget:
    """The time left of a `within` block."""

    def __init__(self, limit: asyncio.Timeout) -> None:
        self._limit = limit

    @contextmanager
    def pause(self) -> Iterator[None]:
        """The budget does not run in this block: waiting for a slot or an unavailable service is not the rollout's doing."""
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
    """Raises `RolloutFailed` with `failure` if the block takes longer."""
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            yield Budget(limit)
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise RolloutFailed(failure, f"it took longer than {seconds:g} s") from error
