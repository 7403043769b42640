"""The trainer of the demo, which here has the rollouts made too: it submits tasks, leases the groups they become, and pushes weights.

It knows the service's URL and two tokens. The tasks of the next step are submitted before those of this one are trained on, so that
the nodes work meanwhile; what they sample is then a version old when its turn comes.
"""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer

from examples.demo.environment import corridors
from examples.demo.trainer import (
    Learner,
    Log,
    MaxStaleness,
    ModelDir,
    Recipe,
    Url,
    WeightsDir,
    leased,
    publish,
    save_whole,
    write,
)
from examples.tasks_loop.tasks import task, task_id
from trainer_client import TrainerClient

OVER = ("completed", "cancelled")
UNDELIVERED = ("dropped", "dead")


class Tasks:
    """The tasks of each step: `make(step)` gives their bodies."""

    def __init__(self, admin: httpx.Client, make: Callable[[int], Sequence[Mapping[str, Any]]]) -> None:
        self._admin = admin
        self._make = make
        self._names: dict[int, list[str]] = {}

    def submit(self, step: int) -> None:
        bodies = self._make(step)
        self._names[step] = [body["task_id"] for body in bodies]
        for body in bodies:
            self._admin.post("/tasks", json=body).raise_for_status()

    def check(self, step: int) -> None:
        """Raises RuntimeError when the group of one of the step's tasks never comes."""
        for name in self._names[step]:
            if reason := explain_absence(self._admin, name):
                raise RuntimeError(f"{name} gives nothing to train on: {reason}; see verbatim tasks show {name}")


def explain_absence(admin: httpx.Client, name: str) -> str | None:
    """Why the group of the task never comes, None if it came or may come."""
    task = admin.get(f"/tasks/{name}").raise_for_status().json()
    if task["status"] not in OVER:
        return None
    if not task["usable"]:
        return f"no rollout can be trained on, {task['rollouts']}"
    # A rollout that ended well may lack what its group needs, such as required scores.
    group = admin.get(f"/groups/{name}").raise_for_status().json()
    return str(group["reason"]) if group["delivery"] in UNDELIVERED else None


@contextlib.contextmanager
def connected(url: str) -> Iterator[tuple[httpx.Client, TrainerClient]]:
    """To submit tasks with, and to lease their groups: the tokens are read from VERBATIM_ADMIN_TOKEN and VERBATIM_TRAINER_TOKEN."""
    headers = {"Authorization": f"Bearer {os.environ['VERBATIM_ADMIN_TOKEN']}"}
    with (
        httpx.Client(base_url=url, headers=headers, timeout=60) as admin,
        TrainerClient(url, os.environ["VERBATIM_TRAINER_TOKEN"]) as client,
    ):
        yield admin, client


@dataclass(frozen=True, slots=True)
class Steps:
    """Training in steps of `groups` groups each; without `push` the engine never gets the new weights, with
    `delta` as what changed."""

    steps: int
    groups: int
    max_staleness: int
    weights_dir: Path
    log: Path
    push: bool = True
    delta: bool = False

    def run(self, client: TrainerClient, tasks: Tasks, learner: Learner) -> None:
        tasks.submit(1)
        for step in range(1, self.steps + 1):
            started = time.monotonic()
            with leased(client, self.groups, self.max_staleness, waiting=partial(tasks.check, step)) as batch:
                waited = time.monotonic() - started
                if step < self.steps:
                    tasks.submit(step + 1)
                line = {"step": step, "wait_seconds": waited, **learner.learn(batch)}
                if self.push:
                    line["push_seconds"] = publish(client, learner, step, self.weights_dir, self.delta)
            write(self.log, line)
        if self.push and self.delta:
            save_whole(learner, self.weights_dir, self.steps)


def train(
    url: Url,
    model_dir: ModelDir,
    weights_dir: WeightsDir,
    log: Log,
    steps: Annotated[int, typer.Option()],
    groups: Annotated[int, typer.Option(help="Tasks per step.")],
    rollouts: Annotated[int, typer.Option(help="Rollouts per task.")],
    learning_rate: Annotated[float, typer.Option()],
    max_staleness: MaxStaleness = 1,
    seed: Annotated[int, typer.Option()] = 0,
) -> None:
    """Train for `steps` steps. The tokens are read from VERBATIM_ADMIN_TOKEN, for the tasks, and VERBATIM_TRAINER_TOKEN."""
    learner, doors = Learner(model_dir, seed, Recipe(learning_rate)), corridors(random.Random(seed))

    def make(step: int) -> list[dict[str, Any]]:
        return [task(task_id(step, number), next(doors), rollouts) for number in range(groups)]

    with connected(url) as (admin, client):
        Steps(steps, groups, max_staleness, weights_dir, log).run(client, Tasks(admin, make), learner)


if __name__ == "__main__":
    typer.run(train)
