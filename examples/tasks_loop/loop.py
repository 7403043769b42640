"""The closed loop through tasks: `python -m examples.tasks_loop.loop`, which needs bubblewrap.

The demo's model, training and verdict, but nobody opens sessions or starts agents: the trainer submits tasks, `verbatim node` runs
each rollout in a sandbox and has it graded, and the trainer leases the groups that the tasks become. vLLM, the service with an
embedded Redis, the node and the trainer are processes that meet over HTTP (service and node also in Redis); this one starts them and
judges what they leave.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import zlib
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer

from examples.demo.demo import exit_code, make_demo_model
from examples.demo.driver import Outcome, Service
from examples.demo.environment import KEYS
from examples.demo.fleet import Served, serving, trainer, unless_one_ends
from examples.demo.loop import Loop, facts_of
from examples.demo.plan import Plan
from examples.demo.processes import Child
from examples.demo.screen import Phase, Screen
from examples.demo.trainer_log import TrainerLog
from examples.tasks_loop.tasks import task_id
from rollout.runtimes import catalogue

AHEAD = 1
"""The tasks of the next step are submitted before the trainer trains on those of this one."""
SLOTS = ("--prepare", "3", "--ready", "4", "--run", "8", "--evaluate", "3")


@dataclass(frozen=True, slots=True)
class Parts:
    """What a loop through tasks has of its own: its trainer, a module with further words for its command line, the node's slots and
    variables, and how many rollouts the trainer asks for beside those of its steps."""

    trainer: Sequence[str]
    slots: Sequence[str] = SLOTS
    node_env: Mapping[str, str] = field(default_factory=dict)
    untrained: int = 0


async def closed_loop(parts: Parts, plan: Plan, screen: Screen) -> Loop:
    """Start everything, run the loop to its end, collect what was recorded. Raises ChildDied when a process does not last."""
    if (lacking := await catalogue.load("local").probe()) is not None:
        raise RuntimeError(f"agents are to work in sandboxes, and this machine lacks what they need: {lacking}")
    async with contextlib.AsyncExitStack() as stack:
        served = await stack.enter_async_context(serving(plan))
        service = await stack.enter_async_context(contextlib.aclosing(Service(served.url, served.admin_token)))
        with screen.phase("vLLM and the service start"):
            await unless_one_ends(service.wait_until_ready(plan.replicas), *(child.finished() for child in served.children))
        rollouts = await stack.enter_async_context(node(parts, plan, served))
        learning = await stack.enter_async_context(_trainer(parts, plan, served))
        watchers = [child.finished() for child in [*served.children, rollouts, learning]]
        return await unless_one_ends(_run(parts, plan, screen, service, learning), *watchers)


async def _run(parts: Parts, plan: Plan, screen: Screen, service: Service, learning: Child) -> Loop:
    trained = TrainerLog(plan.trainer_log, screen)
    asked = plan.steps * plan.groups * plan.rollouts + parts.untrained
    with screen.phase("submit tasks, lease groups, learn, push the weights, again") as phase:
        async with trained.watched(), _counted(asked, phase, service):
            await learning.finished()
    steps = trained.read()
    with screen.phase("collect what was recorded"):
        outcomes = await _outcomes(plan, service)
        taken = {session_id for step in steps for session_id in step["session_ids"]}
        sessions = await facts_of(service, [outcome["job_id"] for outcome in outcomes], taken)
    return Loop(outcomes, sessions, steps)


@contextlib.asynccontextmanager
async def _counted(asked: int, phase: Phase, service: Service) -> AsyncIterator[None]:
    """While the block runs, and when it has come to its end, the phase tells how many rollouts have ended."""

    async def count() -> None:
        tasks = await service.listed("/tasks", "tasks")
        phase.reached(sum(task["rollouts"].get("completed", 0) for task in tasks), asked, "rollouts")

    async def keep_counting() -> None:
        while True:
            # A service that is gone is told of by who watches it.
            with contextlib.suppress(RuntimeError, httpx.HTTPError):
                await count()
            await asyncio.sleep(1)

    counting = asyncio.create_task(keep_counting())
    try:
        yield
    finally:
        counting.cancel()
    await count()


async def _outcomes(plan: Plan, service: Service) -> list[Outcome]:
    """What each rollout's agent was told and earned. Raises RuntimeError when one did not complete."""
    outcomes: list[Outcome] = []
    for step in range(1, plan.steps + 1):
        for number in range(plan.groups):
            name = task_id(step, number)
            outcomes += [_outcome(name, rollout) for rollout in (await service.get(f"/tasks/{name}/rollouts"))["rollouts"]]
    return outcomes


def _outcome(name: str, rollout: dict[str, Any]) -> Outcome:
    verdict = rollout["verdict"]
    if rollout["status"] != "completed":
        why = verdict["failure"]["message"] if verdict and verdict["failure"] else "no verdict"
        raise RuntimeError(f"rollout {rollout['index']} of {name} ended as {rollout['status']}: {why}; logs {rollout['logs']}")
    told = verdict["metadata"]["completion_tokens"]
    return {"job_id": rollout["session_id"], "reward": verdict["reward"], "completion_tokens": told}


def node(parts: Parts, plan: Plan, served: Served) -> Child:
    data = served.data_dir
    name = f"loop-{zlib.crc32(os.fsencode(plan.out)):08x}"
    # Sandboxes are told apart by their node's name on the whole machine; one that goes on removes what a killed one left.
    where = ["--name", name, "--data-dir", str(plan.out / "logs" / "rollouts"), "--runtime", "local"]
    whose = ["--url", served.url]
    env = {**parts.node_env, "VERBATIM_ADMIN_TOKEN": served.admin_token, "VERBATIM_LOCAL_DIR": str(data / "runtimes")}
    argv = [sys.executable, "-m", "cli.main", "node", *where, *whose, *parts.slots, "--drain-seconds", "0"]
    return Child("the node", argv, plan.log("node"), env=env)


def _trainer(parts: Parts, plan: Plan, served: Served) -> Child:
    # It submits the tasks too.
    env = {"VERBATIM_ADMIN_TOKEN": served.admin_token}
    return trainer(plan, served, *parts.trainer, "--rollouts", str(plan.rollouts), env=env)


def main(
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = 12,
    groups: Annotated[int, typer.Option(min=1, help="Tasks per step, each of which becomes a group.")] = 8,
    rollouts: Annotated[int, typer.Option(min=2, help="Rollouts per task.")] = 8,
    learning_rate: Annotated[float, typer.Option()] = 5e-4,
    seed: Annotated[int, typer.Option()] = 0,
    out: Annotated[Path, typer.Option(help="Where everything is left.")] = Path("demo-out-tasks"),
) -> None:
    """Run the closed loop through tasks, on a tiny model, and judge it. Exit code 0: every check holds; 1: one does not; 130:
    interrupted."""
    plan = Plan(
        out=out.resolve(),
        steps=steps,
        seed=seed,
        groups=groups,
        rollouts=rollouts,
        learning_rate=learning_rate,
        max_staleness=AHEAD,
    )
    loop = partial(closed_loop, Parts(["examples.tasks_loop.trainer"]))
    sys.exit(exit_code(plan, loop, make_demo_model, chance=1 / KEYS))


if __name__ == "__main__":
    typer.run(main)
