"""A node: takes rollouts of the service and runs each through its stages, as many at once as its slots allow.

Heartbeats renew its leases while the process lives. When it drains, it takes no more rollouts, puts back those that have not started
to run, and lets the others finish; what still runs after `drain_seconds` is queued again for other nodes.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from contract.attempts import AttemptId, Failure, FailureRecord, NodeState, Room, Superseded, TakenRollout
from contract.errors import ResourceConflict, ServiceError, ServiceUnavailable
from rollout.course import Course
from rollout.logs import AttemptLogs, KeptLogs
from rollout.offer import WorkingKinds
from rollout.stages import Permit
from rollout.steps import NodeContext

log = logging.getLogger(__name__)

BEATS_PER_LEASE = 4
IDLE_BEAT_SECONDS = 25.0
"""Between two heartbeats of a node that holds nothing: it is listed for a minute after one."""
WAIT_SECONDS = 50.0
"""How long a request for a rollout waits for one."""
LOOK_SECONDS = 2.0
"""Pause after such a request that failed."""
STOP_SECONDS = 30.0
"""How long to wait for the removal of a stopped rollout's runtimes."""


@dataclass(frozen=True, slots=True)
class NodeSettings:
    """A node without a heartbeat for `lease_seconds` loses its rollouts. When it drains, running rollouts may take `drain_seconds`. Of the
    logs of ended attempts it keeps `log_mb`."""

    labels: Mapping[str, str] = field(default_factory=dict)
    cpus: float = 1.0
    memory_mb: int = 1024
    lease_seconds: float = 30.0
    drain_seconds: float = 3600.0
    log_mb: int = 8192


class RolloutNode:
    """`run` it until `drain` is called; a second `drain` stops at once what still runs."""

    def __init__(self, parts: NodeContext, settings: NodeSettings) -> None:
        self._parts = parts
        self._settings = settings
        self._offer = WorkingKinds(parts.kinds, parts.stages.capacity.freed.set)
        self._kept_logs = KeptLogs(parts.logs, settings.log_mb << 20)
        self._courses: dict[AttemptId, tuple[Course, asyncio.Task[None]]] = {}
        self._draining = asyncio.Event()
        self._hurrying = asyncio.Event()
        self._holding = asyncio.Event()
        """Set when it has taken a rollout."""
        self._announced = asyncio.Event()
        """Set after the first heartbeat."""
        self._wanted = ""
        """The token of the rollout that is asked for."""
        self._started_at = 0.0
        """The time of the first heartbeat, by the service's clock; 0: there was none."""

    def drain(self) -> None:
        if self._draining.is_set():
            self._hurrying.set()
        self._draining.set()

    async def run(self) -> None:
        """Returns when the node is drained and holds nothing."""
        await self._sweep()
        await asyncio.to_thread(self._kept_logs.find)
        self._beating = asyncio.create_task(self._beat_forever())
        self._taking = asyncio.create_task(self._take_until_drained())
        try:
            await self._draining.wait()
            self._taking.cancel()
            await asyncio.wait([self._taking])
            await self._put_back()
            await self._await_courses()
            await self._hand_over()
        finally:
            self._beating.cancel()
            left = [task for _, task in self._courses.values()]
            for task in left:
                _cancel(task)
            await asyncio.wait([self._beating, self._taking, *left], timeout=STOP_SECONDS)
            await self._offer.close()
        with suppress(ServiceError):
            await self._parts.attempts.leave()

    async def _sweep(self) -> None:
        """Remove runtimes that an earlier process of this node left. A failure is only logged: names of runtimes are never reused."""
        for kind in self._parts.kinds.values():
            try:
                swept = await kind.sweep(self._parts.prefix)
            except Exception:
                log.exception("runtimes of kind %s that this node left behind cannot be removed", kind.name)
                continue
            if swept:
                log.warning("removed %d runtimes of kind %s that this node left behind", swept, kind.name)

    async def _take_until_drained(self) -> None:
        # Other nodes learn its lease from its heartbeat.
        await self._announced.wait()
        while True:
            permit = await self._parts.stages.ahead.enter()
            try:
                taken = await self._take()
            except BaseException:
                permit.leave()
                raise
            self._start(taken, permit)

    async def _take(self) -> TakenRollout:
        """Asks until it gets one, anew whenever it has another room; a repeated request gets what an answer that was lost had."""
        self._wanted, changed = uuid.uuid4().hex, self._parts.stages.capacity.freed
        try:
            while True:
                changed.clear()
                room = self._measure_room()
                changing = asyncio.create_task(changed.wait())
                asking = asyncio.create_task(self._ask(room))
                try:
                    await asyncio.wait([asking, changing], return_when=asyncio.FIRST_COMPLETED)
                    if asking.done() and (taken := asking.result()) is not None:
                        return taken
                finally:
                    for task in (asking, changing):
                        task.cancel()
                    await asyncio.wait([asking, changing])
        except asyncio.CancelledError:
            await self._decline()
            raise

    async def _ask(self, room: Room) -> TakenRollout | None:
        if room.cpus <= 0 or room.memory_mb <= 0 or not room.runtimes:
            await asyncio.sleep(WAIT_SECONDS)
            return None
        try:
            return await self._parts.attempts.take(room, self._settings.lease_seconds, self._wanted, WAIT_SECONDS)
        except (ServiceUnavailable, ResourceConflict) as error:
            log.warning("no rollout can be taken now: %s", error)
        except Exception:
            # Otherwise the node would live on and take nothing more, without a trace.
            log.exception("taking a rollout failed; it is left to its lease")
            self._wanted = uuid.uuid4().hex
        await asyncio.sleep(LOOK_SECONDS)
        return None

    async def _decline(self) -> None:
        """Put back what the service has handed to a draining node: lost with the node, it would cost the rollout an attempt."""
        attempts = self._parts.attempts
        with suppress(Superseded, ServiceError, TimeoutError):
            async with asyncio.timeout(STOP_SECONDS):
                if (
                    taken := await attempts.take(self._measure_room(), self._settings.lease_seconds, self._wanted, 0)
                ) is not None:
                    await attempts.put_back(taken.attempt)

    def _start(self, taken: TakenRollout, permit: Permit) -> None:
        # Before anything else is taken, or two rollouts would get the same room.
        reserved = self._parts.stages.capacity.reserve(taken.task)
        course = Course(taken, permit, reserved, self._parts, self._offer)
        task = asyncio.create_task(course.go(), name=f"rollout {taken.attempt.session_id}")
        self._courses[taken.attempt] = course, task
        self._holding.set()
        task.add_done_callback(lambda done: self._forget(taken.attempt, reserved, permit, done))

    def _forget(self, attempt: AttemptId, reserved: Permit, permit: Permit, done: asyncio.Task[None]) -> None:
        reserved.leave()
        permit.leave()
        if self._courses.get(attempt, (None, None))[1] is done:
            del self._courses[attempt]
        folder = AttemptLogs(self._parts.name, self._parts.logs, attempt).folder
        asyncio.get_running_loop().run_in_executor(None, self._kept_logs.add, folder)
        if not done.cancelled() and (error := done.exception()) is not None:
            log.error("rollout %s failed; it is retried once its lease expires", attempt.session_id, exc_info=error)

    def _measure_room(self) -> Room:
        capacity = self._parts.stages.capacity
        kinds = self._offer.choose([course.kind for course, _ in self._courses.values() if not course.begun])
        return Room(self._settings.labels, kinds, capacity.free_cpus, capacity.free_memory_mb)

    async def _beat_forever(self) -> None:
        while True:
            try:
                await self._beat()
                self._announced.set()
            except (ServiceError, TimeoutError) as error:
                log.warning("the heartbeat failed: %s", error or "no answer in time")
            except Exception:
                # Otherwise every lease would expire, without a trace.
                log.exception("the heartbeat failed and is retried")
            pause = self._settings.lease_seconds / BEATS_PER_LEASE
            if not self._announced.is_set():
                await asyncio.sleep(min(pause, LOOK_SECONDS))
            elif self._courses or await self._idle(max(pause, IDLE_BEAT_SECONDS)):
                await asyncio.sleep(pause)

    async def _idle(self, seconds: float) -> bool:
        """Wait while the node holds nothing, for so long at the most. Returns whether it holds something."""
        self._holding.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._holding.wait()
        return bool(self._courses)

    async def _beat(self) -> None:
        async with asyncio.timeout(self._settings.lease_seconds / 2):
            try:
                found, now = await self._parts.attempts.extend(self._describe(), list(self._courses))
            except ResourceConflict as error:
                # It was silent for its lease, and another node has its name: whoever asks gets what it had.
                log.warning("the heartbeat failed: %s", error)
                found, now = list(self._courses), self._started_at
        self._started_at = self._started_at or now
        for lost in found:
            if lost in self._courses:
                log.info("rollout %s is no longer this node's and is stopped", lost.session_id)
                _cancel(self._courses[lost][1])

    def _describe(self) -> NodeState:
        stages, slots = self._parts.stages, self._parts.stages.slots
        return NodeState(
            name=self._parts.name,
            labels=self._settings.labels,
            runtimes=sorted(self._offer.working),
            cpus=self._settings.cpus,
            memory_mb=self._settings.memory_mb,
            slots={"prepare": slots.prepare, "ready": slots.ready, "run": slots.run, "evaluate": slots.evaluate},
            busy=stages.busy,
            free_cpus=stages.capacity.free_cpus,
            free_memory_mb=stages.capacity.free_memory_mb,
            draining=self._draining.is_set(),
            started_at=self._started_at,
            lease_seconds=self._settings.lease_seconds,
        )

    async def _put_back(self) -> None:
        """Queue again what has not started to run; this costs the rollout no attempt."""

        async def put_back(attempt: AttemptId, task: asyncio.Task[None]) -> None:
            await _stop(task)
            with suppress(Superseded, ServiceError):
                await self._parts.attempts.put_back(attempt)

        waiting = [(attempt, task) for attempt, (course, task) in self._courses.items() if not course.begun]
        await asyncio.gather(*(put_back(*each) for each in waiting))

    async def _await_courses(self) -> None:
        if not self._courses:
            return
        log.info("draining: %d rollouts may still run for %g s", len(self._courses), self._settings.drain_seconds)
        with suppress(TimeoutError):
            async with asyncio.timeout(self._settings.drain_seconds):
                while self._courses and not self._hurrying.is_set():
                    hurry = asyncio.create_task(self._hurrying.wait())
                    await asyncio.wait(
                        [hurry, *(task for _, task in self._courses.values())], return_when=asyncio.FIRST_COMPLETED
                    )
                    hurry.cancel()

    async def _hand_over(self) -> None:
        """Stop what still runs and queue it again; a draining node costs the rollout no attempt."""
        failure = FailureRecord(Failure.NODE_LOST, f"node {self._parts.name} was stopped")

        async def hand_over(attempt: AttemptId, task: asyncio.Task[None]) -> None:
            await _stop(task)
            with suppress(Superseded, ServiceError):
                await self._parts.attempts.give_up(attempt, failure, stopped=True)

        running = [(attempt, task) for attempt, (_, task) in self._courses.items()]
        await asyncio.gather(*(hand_over(*each) for each in running))


async def _stop(task: asyncio.Task[None]) -> None:
    _cancel(task)
    await asyncio.wait([task], timeout=STOP_SECONDS)


def _cancel(task: asyncio.Task[None]) -> None:
    # Only once: a second cancellation would interrupt the removal of its runtimes.
    if not task.cancelling():
        task.cancel()
