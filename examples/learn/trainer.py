"""The trainer of the demo on exercises for a command-line agent: it submits tasks, leases the groups they become, and pushes weights.

Before its first step and after its last one it has the policy solve held-out exercises, whose groups it leases without learning from them.
"""

from __future__ import annotations

import random
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import httpx
import numpy as np
import typer
from numpy.typing import NDArray

from examples.demo.trainer import (
    Delta,
    Learner,
    Log,
    MaxStaleness,
    ModelDir,
    Recipe,
    Url,
    WeightsDir,
    credit_rollouts,
    leased,
    write,
)
from examples.learn.agents import AGENTS, CliAgent, make_task
from examples.learn.exercises import KINDS, draw_exercises
from examples.tasks_loop.tasks import task_id
from examples.tasks_loop.trainer import Steps, Tasks, connected
from trainer_client import TrainerClient
from trainer_client.advantages import Estimator, grpo


def shuffle_rewards(estimator: Estimator, rng: random.Random) -> Estimator:
    """The estimator on rewards that change places among the rollouts of each group."""

    def estimate(rewards: Any, group_index: Any, rollout_index: Any) -> NDArray[np.float32]:
        moved = np.array(rewards)
        for group in np.unique(group_index):
            rollouts = np.unique(rollout_index[group_index == group])
            given = [moved[rollout_index == rollout][0] for rollout in rollouts]
            rng.shuffle(given)
            for rollout, reward in zip(rollouts, given, strict=True):
                moved[rollout_index == rollout] = reward
        return estimator(moved, group_index, rollout_index)

    return estimate


def train(
    url: Url,
    model_dir: ModelDir,
    weights_dir: WeightsDir,
    log: Log,
    steps: Annotated[int, typer.Option()],
    groups: Annotated[int, typer.Option(help="Tasks per step.")],
    rollouts: Annotated[int, typer.Option(help="Rollouts per task.")],
    learning_rate: Annotated[float, typer.Option()],
    agent: Annotated[str, typer.Option(help=", ".join(AGENTS))],
    held_out: Annotated[int, typer.Option(help="Held-out exercises of each kind, solved once before and once after.")],
    held_out_log: Annotated[Path, typer.Option(help="Their rewards, as one JSON object.")],
    max_staleness: MaxStaleness = 1,
    seed: Annotated[int, typer.Option()] = 0,
    push: Annotated[bool, typer.Option(help="Publish the weights after every step.")] = True,
    shuffle: Annotated[bool, typer.Option(help="Give each rollout the reward of another of its group.")] = False,
    delta: Delta = False,
) -> None:
    """Train for `steps` steps. The tokens are read from VERBATIM_ADMIN_TOKEN, for the tasks, and VERBATIM_TRAINER_TOKEN."""
    cli, exercises = AGENTS[agent], draw_exercises(random.Random(seed), "train")
    # So small a model forgets how to copy a name when its weights move fast, and an entropy bonus unsettles what it need not choose.
    recipe = Recipe(learning_rate, epochs=2, warm_up=8, entropy_bonus=0.0)
    estimator = shuffle_rewards(grpo, random.Random(seed)) if shuffle else grpo
    learner = Learner(model_dir, seed, recipe, partial(credit_rollouts, estimator=estimator))

    def make(step: int) -> list[dict[str, Any]]:
        return [make_task(task_id(step, number), next(exercises), cli, rollouts) for number in range(groups)]

    with connected(url) as (admin, client):
        before = solve_held_out(admin, client, cli, held_out, "before")
        Steps(steps, groups, max_staleness, weights_dir, log, push, delta).run(client, Tasks(admin, make), learner)
        write(held_out_log, {"before": before, "after": solve_held_out(admin, client, cli, held_out, "after")})


def solve_held_out(admin: httpx.Client, client: TrainerClient, cli: CliAgent, count: int, when: str) -> dict[str, list[float]]:
    """The rewards of `count` exercises of each kind, the same whenever it is called, under the weights that the engine has now."""
    exercises = islice(draw_exercises(random.Random(0), "held-out"), count * len(KINDS))
    bodies = [make_task(f"held-out-{when}-{number}", exercise, cli, 1) for number, exercise in enumerate(exercises)]
    kinds = {body["task_id"]: body["metadata"]["label"] for body in bodies}
    tasks = Tasks(admin, lambda step: bodies)
    tasks.submit(0)
    rewards: dict[str, list[float]] = {kind: [] for kind in KINDS}
    if not bodies:
        return rewards
    with leased(client, len(bodies), 0, waiting=partial(tasks.check, 0)) as batch:
        for group in batch.groups:
            rewards[kinds[group.group_id]].append(float(group.trajectories[0].reward or 0.0))
    return rewards


if __name__ == "__main__":
    typer.run(train)
