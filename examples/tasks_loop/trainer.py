"""The trainer of the demo, which here has the rollouts made too: it submits tasks, leases the groups they become, and pushes weights.

It knows the service's URL and two tokens. The tasks of the next step are submitted before those of this one are trained on, so that
the nodes work meanwhile; what they sample is then a version old when its turn comes.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from functools import partial
from typing import Annotated

import httpx
import typer

from examples.demo.environment import corridors
from examples.demo.trainer import Learner, Log, MaxStaleness, ModelDir, Url, WeightsDir, leased, write
from examples.tasks_loop.tasks import task, task_id
from trainer_client.client import TrainerClient

OVER = ("completed", "cancelled")


class Tasks:
    """The tasks of each step: `groups` corridors, `rollouts` attempts at each."""

    def __init__(self, admin: httpx.Client, doors: Iterator[tuple[str, ...]], groups: int, rollouts: int) -> None:
        self._admin = admin
        self._doors = doors
        self._groups = groups
        self._rollouts = rollouts

    def submit(self, step: int) -> None:
        for number in range(self._groups):
            body = task(task_id(step, number), next(self._doors), self._rollouts)
            self._admin.post("/tasks", json=body).raise_for_status()

    def check(self, step: int) -> None:
        """Raises RuntimeError when one of the step's tasks has ended without a rollout to train on: its group never comes."""
        for number in range(self._groups):
            name = task_id(step, number)
            state = self._admin.get(f"/tasks/{name}").raise_for_status().json()
            if state["status"] in OVER and not state["usable"]:
                raise RuntimeError(f"{name} has no rollout to train on: {state['rollouts']}; see verbatim tasks show {name}")


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
    learner = Learner(model_dir, learning_rate, seed)
    headers = {"Authorization": f"Bearer {os.environ['VERBATIM_ADMIN_TOKEN']}"}
    with httpx.Client(base_url=url, headers=headers, timeout=60) as admin:
        tasks = Tasks(admin, corridors(random.Random(seed)), groups, rollouts)
        tasks.submit(1)
        with TrainerClient(url, os.environ["VERBATIM_TRAINER_TOKEN"]) as client:
            for step in range(1, steps + 1):
                started = time.monotonic()
                with leased(client, groups, max_staleness, waiting=partial(tasks.check, step)) as batch:
                    waited = time.monotonic() - started
                    if step < steps:
                        tasks.submit(step + 1)
                    line = {"step": step, "wait_seconds": waited, **learner.learn(batch)}
                    line["push_seconds"] = client.publish(learner.weights(), step, directory=weights_dir).seconds
                write(log, line)


if __name__ == "__main__":
    typer.run(train)
