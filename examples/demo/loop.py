"""The loop while it runs: the agents sample, the trainer learns and pushes its weights, until its last step.

In rounds, those of one step are sampled while the trainer trains on those of the step before; then the agents wait for it.
Asynchronously they never wait for a step: where a group has ended the next one begins, under whatever weights there are, unless
the service holds it back because its tokens would be too old by the time the trainer takes them.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from examples.demo.driver import Agent, Driver, Outcome, Service
from examples.demo.engine_use import Stint
from examples.demo.environment import corridors
from examples.demo.fleet import Fleet, running, unless_one_ends
from examples.demo.plan import Plan
from examples.demo.processes import Child
from examples.demo.screen import Screen
from examples.demo.trainer_log import TrainerLog
from examples.demo.verdict import SessionFacts

DrawTasks = Callable[[random.Random], Iterator[tuple[str, ...]]]
"""Draws tasks without end."""
AHEAD = 1
"""Rounds that may be sampled ahead of the trainer: with one, sampling and training overlap."""


@dataclass(frozen=True, slots=True)
class Loop:
    """What the loop leaves behind: the agent's outcomes, the sessions as the service has them, the trainer's line per step, and the images
    of the sessions by their digests."""

    outcomes: Sequence[Outcome]
    sessions: Sequence[SessionFacts]
    steps: Sequence[dict[str, Any]]
    images: Mapping[str, bytes] = field(default_factory=dict)

    @property
    def rewards(self) -> list[list[float]]:
        """Per step, as the agent earned them: one per rollout that the step trained on."""
        earned = {outcome["job_id"]: outcome["reward"] for outcome in self.outcomes}
        return [[earned[session_id] for session_id in step["session_ids"]] for step in self.steps]


async def closed_loop(plan: Plan, screen: Screen, draw_tasks: DrawTasks = corridors) -> Loop:
    """Start everything, run the loop to its end, collect what was recorded. Raises ChildDied when a process does not last."""
    async with running(plan) as fleet:
        service, agent = Service(fleet.served.url, fleet.served.admin_token), Agent(fleet.agent)
        driver = Driver(service, agent, draw_tasks(random.Random(plan.seed)), plan.job, plan.groups, plan.rollouts)
        watchers = [child.finished() for child in fleet.children]
        async with contextlib.aclosing(service):
            return await unless_one_ends(_run(plan, screen, fleet, driver), agent.read_outcomes(), *watchers)


async def _run(plan: Plan, screen: Screen, fleet: Fleet, driver: Driver) -> Loop:
    service = driver.service
    with screen.phase("vLLM, the service, the agent and the trainer start"):
        await service.wait_until_ready(plan.replicas)
    trained = TrainerLog(plan.trainer_log, screen)
    with screen.phase("sample, learn, push the weights, again"):
        async with trained.watched():
            if plan.asynchronous:
                outcomes = await _without_rounds(driver, fleet.trainer)
            else:
                outcomes = await _in_rounds(plan, driver, trained, screen)
                await fleet.trainer.finished()
    steps = trained.read()
    with screen.phase("collect what was recorded"):
        taken = {session_id for step in steps for session_id in step["session_ids"]}
        sessions = await facts_of(service, [outcome["job_id"] for outcome in outcomes], taken)
        images = await images_of(service, sessions)
    return Loop(outcomes, sessions, steps, images)


async def images_of(service: Service, sessions: Sequence[SessionFacts]) -> dict[str, bytes]:
    """Each image of the sessions' rows once."""
    rows = [row for session in sessions for row in session.trajectories]
    owners = {item["digest"]: row["session_id"] for row in rows for item in row["media"]}
    return {digest: await service.download(f"/sessions/{owner}/media/{digest}") for digest, owner in owners.items()}


async def _in_rounds(plan: Plan, driver: Driver, trained: TrainerLog, screen: Screen) -> list[Outcome]:
    outcomes: list[Outcome] = []
    # What is sampled a round ahead is a version old when its turn comes.
    ahead = min(AHEAD, plan.max_staleness)
    for step in range(1, plan.steps + 1):
        await trained.reached(step - 1 - ahead)
        started = time.monotonic()
        new = await driver.round(step)
        reward, tokens = sum(one["reward"] for one in new) / len(new), sum(one["completion_tokens"] for one in new)
        screen.sampled(step, reward=reward, tokens=tokens, seconds=time.monotonic() - started)
        outcomes += new
    return outcomes


async def _without_rounds(driver: Driver, trainer: Child) -> list[Outcome]:
    stopping = asyncio.Event()

    async def stop() -> None:
        await trainer.finished()
        stopping.set()

    outcomes, _ = await asyncio.gather(driver.stream(stopping), stop())
    return outcomes


async def facts_of(service: Service, session_ids: Sequence[str], taken: set[str]) -> list[SessionFacts]:
    narrow = asyncio.Semaphore(16)

    async def facts(session_id: str) -> SessionFacts:
        async with narrow:
            calls = await service.calls(session_id)
            rows = await service.trajectories(session_id)
        stints = [Stint.of(call) for call in calls if call["engine_seconds"] is not None]
        return SessionFacts(len(calls), stints, rows["trajectories"], rows["accounting"], trained=session_id in taken)

    return await asyncio.gather(*(facts(session_id) for session_id in session_ids))
