"""The trainer of one arm of `examples.pivots.compare`, by the way in which it assigns credit (`CREDITS`).

A step leases the rollouts of its tasks. With `--credit forks` each of them is then taken back to the call whose entropy rose most above
that of its first, and from there `--samples` forks are sampled and leased.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any

import numpy as np
import torch
import typer
from numpy.typing import NDArray

from examples.demo.environment import corridors
from examples.demo.trainer import (
    Credit,
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
from examples.pivots.entropy import mean_entropy, modulate, turn_entropy
from examples.pivots.forks import branch_gains, find_uncertain, vine
from examples.pivots.turns import Turns, turns_of
from examples.tasks_loop.tasks import task, task_id
from examples.tasks_loop.trainer import Tasks, connected
from trainer_client import Batch
from trainer_client.advantages import grpo

FIRST_TOKENS = 20
"""Of a reply, over which its entropy is taken."""


def find_pivots(batch: Batch) -> list[tuple[int, str]]:
    """The row and the id of the call at which each rollout is worth taking up again; none for one that grew no less certain."""
    turns = turns_of(batch.rows)
    logprobs = (batch.rows[row].logprobs[start:end] for row, start, end in zip(turns.row, turns.start, turns.end, strict=True))
    entropy = mean_entropy(logprobs, first=FIRST_TOKENS)
    chosen = find_uncertain(entropy, batch.columns.rollout_index[turns.row])
    return [(int(row), batch.rows[row].call_ids[turns.number[at]]) for at, row in zip(chosen, turns.row[chosen], strict=True)]


def make_forks(batch: Batch, bodies: Mapping[str, Mapping[str, Any]], samples: int) -> list[dict[str, Any]]:
    """A task for each pivot: that of the rollout, replayed as far as the pivot."""
    forks = []
    for number, (row, call_id) in enumerate(find_pivots(batch)):
        origin = batch.rows[row]
        fork = {"session_id": origin.session_id, "until": call_id, "on_divergence": "fail"}
        body = bodies[batch.groups[int(batch.columns.group_index[row])].group_id]
        forks.append({**body, "task_id": f"{body['task_id']}-fork-{number}", "num_samples": samples, "fork": fork})
    return forks


def credit_states(batch: Batch) -> Callable[[Any], torch.Tensor]:
    """Every turn gets what the values of its states say (VinePPO), of the size that GRPO's advantages have."""
    columns, turns = batch.columns, turns_of(batch.rows)
    credit = vine(columns.rewards, columns.group_index, columns.rollout_index, turns, batch.rows).advantages
    return lay_out(turns, credit / (credit.std() + 1e-6))


def credit_sure_turns(batch: Batch) -> Callable[[Any], torch.Tensor]:
    """GRPO's advantages, more for turns of which the policy was sure and less for the others of the group (AEM)."""
    turns = turns_of(batch.rows)
    entropy = turn_entropy(batch.rows, turns)
    return lay_out(turns, modulate(batch.advantages(grpo)[turns.row], entropy, batch.columns.group_index[turns.row]))


def credit_branches(batch: Batch) -> Callable[[Any], torch.Tensor]:
    """GRPO's advantages and, of the same size, what the branch that a turn took got above the others of its state (A³)."""
    columns, turns = batch.columns, turns_of(batch.rows)
    gains = branch_gains(columns.rewards, columns.group_index, columns.rollout_index, turns, batch.rows)
    return lay_out(turns, batch.advantages(grpo)[turns.row] + gains / (gains.std() + 1e-6))


def lay_out(turns: Turns, advantages: NDArray[np.float32]) -> Callable[[Any], torch.Tensor]:
    return lambda tree: torch.from_numpy(turns.lay_out(advantages, tree))


FORKS = "forks"
CREDITS: Mapping[str, Credit] = {
    "grpo": credit_rollouts,
    FORKS: credit_states,
    "entropy": credit_sure_turns,
    "branches": credit_branches,
}


def count_tokens(batches: Sequence[Batch]) -> dict[str, int]:
    sessions = [session for batch in batches for group in batch.groups for session in group.sessions]
    return {
        "sampled_tokens": sum(session.sampled_tokens for session in sessions),
        "exported_tokens": sum(session.exported_tokens for session in sessions),
    }


def train(
    url: Url,
    model_dir: ModelDir,
    weights_dir: WeightsDir,
    log: Log,
    steps: Annotated[int, typer.Option()],
    groups: Annotated[int, typer.Option(help="Tasks per step.")],
    rollouts: Annotated[int, typer.Option(help="Rollouts per task.")],
    learning_rate: Annotated[float, typer.Option()],
    credit: Annotated[str, typer.Option(help=", ".join(CREDITS))] = "grpo",
    samples: Annotated[int, typer.Option(help="Forks of each rollout, where the credit comes from forks.")] = 2,
    max_staleness: MaxStaleness = 0,
    seed: Annotated[int, typer.Option()] = 0,
) -> None:
    """Train for `steps` steps. The tokens are read from VERBATIM_ADMIN_TOKEN, for the tasks, and VERBATIM_TRAINER_TOKEN."""
    learner = Learner(model_dir, seed, Recipe(learning_rate), CREDITS[credit])
    doors = corridors(random.Random(seed))
    with connected(url) as (admin, client):
        for step in range(1, steps + 1):
            bodies = {name: task(name, next(doors), rollouts) for name in (task_id(step, number) for number in range(groups))}
            with contextlib.ExitStack() as leases:

                def gather(made: Sequence[Mapping[str, Any]], step: int = step, leases: Any = leases) -> Batch:
                    tasks = Tasks(admin, lambda _: made)
                    tasks.submit(step)
                    return leases.enter_context(leased(client, len(made), max_staleness, waiting=partial(tasks.check, step)))

                batches = [gather([*bodies.values()])]
                rewards = batches[0].columns.rewards
                if credit == FORKS and (forks := make_forks(batches[0], bodies, samples)):
                    batches.append(gather(forks))
                batch = Batch.join(batches)
                learner.learn(batch)
                client.publish(learner.weights(), step, directory=weights_dir)
            counted = {"rollouts": len(rewards), "forks": len(batch) - len(rewards), **count_tokens(batches)}
            write(log, {"step": step, "reward": float(np.mean(rewards)), **counted})


if __name__ == "__main__":
    typer.run(train)
