"""The sized stages of a node, and what they hold back.

A rollout is *ahead* from its taking until its harness starts: being prepared, or ready. With `ready` more permits than run slots,
prepared runtimes wait without holding a run slot, and a run slot that becomes free is taken at once. With `ready=0` a rollout is
prepared in the slot it will run in. Each stage holds back the one before: a harness that ended keeps its run slot until the
evaluation has a slot for it, full run slots fill the ready buffer, and a full ready buffer takes nothing more from the queue.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial

from rollout.attempts import Failure, RolloutFailed
from rollout.task import Task


@dataclass(frozen=True, slots=True)
class Slots:
    """How many rollouts of a node may be in each stage. `ready` may be 0."""

    prepare: int = 2
    ready: int = 2
    run: int = 4
    evaluate: int = 2


class Permit:
    """A place in a stage. It is given back once, however often `leave` is called."""

    def __init__(self, leave: Callable[[], None]) -> None:
        self._leave: Callable[[], None] | None = leave

    def leave(self) -> None:
        if self._leave is not None:
            leave, self._leave = self._leave, None
            leave()


class Stage:
    """So many at a time. `busy` of them are in it, `waiting` wait to be let in."""

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
        return Permit(self._left)

    @asynccontextmanager
    async def entered(self) -> AsyncIterator[None]:
        permit = await self.enter()
        try:
            yield
        finally:
            permit.leave()

    def _left(self) -> None:
        self.busy -= 1
        self._free.release()


MICRO = 1_000_000


class Capacity:
    """CPUs and memory that rollouts have reserved of a node's own; `freed` is set whenever some came back."""

    def __init__(self, cpus: float, memory_mb: int) -> None:
        # In whole numbers: parts of a CPU that are taken and given back as floats do not come back whole.
        self._free_micro_cpus = round(cpus * MICRO)
        self.free_memory_mb = memory_mb
        self.freed = asyncio.Event()

    @property
    def free_cpus(self) -> float:
        return self._free_micro_cpus / MICRO

    def reserve(self, task: Task) -> Permit:
        """`task`'s demand, which must have been free, until the permit is given back."""
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
        """Everything between the taking and the end of the run."""
        self.prepare = Stage(slots.prepare)
        self.run = Stage(slots.run)
        self.evaluate = Stage(slots.evaluate)

    @property
    def busy(self) -> Mapping[str, int]:
        """Rollouts by stage; `ready` are prepared and wait for a run slot."""
        return {
            "prepare": self.prepare.busy,
            "ready": self.run.waiting,
            "run": self.run.busy,
            "evaluate": self.evaluate.busy,
        }


# How long a stretch of a rollout may take. What it only waits for, a slot or a service that is away, is not its own doing.


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
