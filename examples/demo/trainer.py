"""The trainer: GRPO in torch, in a process of its own that knows the service's URL and the trainer's token.

Each step leases whole groups, takes a few optimizer steps on them and publishes the new weights; only then is the batch
acknowledged, so a trainer that dies is given it again. Two things make the update exact on tokens that an older policy
sampled: the ratio between the policies is taken against the logprobs the engine stored, and the loss mask trains
every sampled token once and no other.

Rows go through the model as trees: what the rollouts of a task share is computed once, and loss and gradients are those of flat rows.

Objective: Shao et al., "DeepSeekMath", arXiv:2402.03300, section 4.1, without the KL term; one average over all tokens
and a wider upper clip as in Yu et al., "DAPO", arXiv:2503.14476; a small entropy bonus so that a tiny model goes on trying.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from trainer_client import Batch, TrainerClient, Vision, load_model, write_weights
from trainer_client.advantages import Estimator, grpo

WHOLE = "whole"


@dataclass(frozen=True, slots=True)
class Recipe:
    """`minibatches` optimizer steps for each of the `epochs` over a training step's rows; `token_budget` distinct tokens go through the
    model at once, or the longest row. The learning rate is reached after `warm_up` optimizer steps."""

    learning_rate: float
    epochs: int = 1
    minibatches: int = 4
    warm_up: int = 1
    token_budget: int = 1024
    clip_low: float = 0.2
    clip_high: float = 0.28
    entropy_bonus: float = 0.01
    max_gradient: float = 1.0


Credit = Callable[[Batch], Callable[[Any], torch.Tensor]]
"""For a batch, what gives the advantages of a tree's trained tokens, of shape (trained,)."""


def credit_rollouts(batch: Batch, estimator: Estimator = grpo) -> Callable[[Any], torch.Tensor]:
    """One baseline per group, in which each rollout counts once; all tokens of a rollout have the same advantage."""
    advantages = torch.from_numpy(batch.advantages(estimator))
    return lambda tree: advantages[torch.as_tensor(tree.row_index)][tree.segment_index]


Url = Annotated[str, typer.Option(help="The service.")]
ModelDir = Annotated[str, typer.Option(help="Weights to start from: what the engine serves as version 0.")]
WeightsDir = Annotated[Path, typer.Option(help="Where new versions are written, readable by the engine.")]
Log = Annotated[Path, typer.Option(help="One JSON line per step is appended here.")]
Delta = Annotated[bool, typer.Option(help="Publish bfloat16 weights as what changed; the last ones are saved whole, too.")]
MaxStaleness = Annotated[int, typer.Option(help="Versions that a group may lie behind.")]


def train(
    url: Url,
    model_dir: ModelDir,
    weights_dir: WeightsDir,
    log: Log,
    steps: Annotated[int, typer.Option()],
    groups: Annotated[int, typer.Option(help="Groups per step.")],
    learning_rate: Annotated[float, typer.Option()],
    max_staleness: MaxStaleness = 2,
    seed: Annotated[int, typer.Option()] = 0,
    push: Annotated[bool, typer.Option(help="Publish the weights after every step.")] = True,
    delta: Delta = False,
) -> None:
    """Train for `steps` steps. The token is read from VERBATIM_TRAINER_TOKEN."""
    learner = Learner(model_dir, seed, Recipe(learning_rate))
    with TrainerClient(url, os.environ["VERBATIM_TRAINER_TOKEN"]) as client:
        for step in range(1, steps + 1):
            started = time.monotonic()
            with leased(client, groups, max_staleness) as batch:
                line = {"step": step, "wait_seconds": time.monotonic() - started, **learner.learn(batch)}
                if push:
                    line["push_seconds"] = publish(client, learner, step, weights_dir, delta)
            write(log, line)
        if push and delta:
            save_whole(learner, weights_dir, steps)


class Learner:
    """The model and its optimizer, on the GPU where there is one."""

    def __init__(self, model_dir: str, seed: int, recipe: Recipe, credit: Credit = credit_rollouts) -> None:
        torch.manual_seed(seed)
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        # Float32 weights also where the engine serves bfloat16: steps this small would be rounded away.
        model, self._vision = load_model(model_dir)
        self._model = model.to(self._device)
        self._recipe = recipe
        self._credit = credit
        parameters = self._model.parameters()
        self._optimizer = torch.optim.AdamW(parameters, lr=recipe.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
        shape = torch.optim.lr_scheduler.LambdaLR(self._optimizer, lambda done: min(1.0, (done + 1) / recipe.warm_up))
        self._optimizer.register_step_post_hook(lambda *_: shape.step())

    def learn(self, batch: Batch) -> dict[str, Any]:
        """Train on `batch`; what there is to report."""
        started = time.monotonic()
        line = one_step(self._model, self._optimizer, batch, self._recipe, self._credit, self._vision)
        return line | {"train_seconds": time.monotonic() - started}

    def weights(self) -> dict[str, torch.Tensor]:
        """As the engine serves them."""
        dtype = torch.bfloat16 if self._device == "cuda" else torch.float32
        return {name: tensor.to(dtype) for name, tensor in self._model.state_dict().items()}


def publish(client: TrainerClient, learner: Learner, step: int, directory: Path, delta: bool) -> float:
    """The seconds of the push."""
    dtype = torch.bfloat16 if delta else None
    return client.publish(learner.weights(), step, directory=directory, delta=delta, dtype=dtype).seconds


def save_whole(learner: Learner, directory: Path, step: int) -> None:
    """What the engines are to hold after the last step, for whoever compares: in `WHOLE`, by another way than deltas take."""
    weights = {name: tensor.to(torch.bfloat16) for name, tensor in learner.weights().items()}
    write_weights(weights, directory / WHOLE, step)


def write(log: Path, line: Mapping[str, Any]) -> None:
    with log.open("a") as lines:
        lines.write(json.dumps(line) + "\n")


@contextlib.contextmanager
def leased(
    client: TrainerClient, groups: int, max_staleness: int, *, waiting: Callable[[], None] = lambda: None
) -> Iterator[Batch]:
    """`groups` groups as one batch, collected from as many leases as it takes; all are given back when the block raises. `waiting` is
    called whenever nothing came for a while."""
    with contextlib.ExitStack() as leases:
        parts: list[Batch] = []
        while (missing := groups - sum(len(part.groups) for part in parts)) > 0:
            part = client.lease(max_groups=missing, max_staleness=max_staleness, wait_seconds=20)
            if part is not None:
                parts.append(leases.enter_context(part))
            else:
                waiting()
        yield Batch.join(parts)


def one_step(
    model: Any,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    recipe: Recipe,
    credit: Credit = credit_rollouts,
    vision: Vision | None = None,
) -> dict[str, Any]:
    """Train on `batch`; what there is to report. `vision`: of a model that sees
    the images of rows."""
    advantages_of = credit(batch)
    budget = max(recipe.token_budget, *(len(row.token_ids) for row in batch.rows))
    sums = {"loss": 0.0, "clipped": 0.0, "off_policy": 0.0}
    tokens = 0
    for rows in (part for _ in range(recipe.epochs) for part in torch.randperm(len(batch)).chunk(recipe.minibatches)):
        trees = batch.tree(budget, rows=rows.tolist(), framework="torch", vision=vision)
        sampled = sum(len(tree.trained_index) for tree in trees)
        if not sampled:
            continue
        optimizer.zero_grad()
        for tree in trees:
            advantages = advantages_of(tree).to(model.device)
            for name, value in accumulate(model, tree.to(model.device), sampled, recipe, advantages).items():
                sums[name] += value
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.max_gradient)
        optimizer.step()
        tokens += sampled
    rewards = {row.session_id: float(row.reward or 0.0) for row in batch.rows}
    return {
        "reward": sum(rewards.values()) / len(rewards),
        "session_ids": list(rewards),
        "rows": len(batch),
        "tokens": tokens // recipe.epochs,
        "ages": ages(batch),
        **{name: value / max(1, tokens) for name, value in sums.items()},
    }


def ages(batch: Batch) -> list[int]:
    """Per group, by how many versions the trainer is ahead of its oldest token."""
    return [int(batch.staleness[batch.columns.group_index == group].max()) for group in range(len(batch.groups))]


def predict(model: Any, tree: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """log p of the whole vocabulary at the tokens that predict trained ones, and for each trained token its row there."""
    # Siblings are predicted by one token, whose logits are computed once.
    sources, place = torch.unique(tree.logit_index, return_inverse=True)
    logits = model(
        tree.token_ids[None],
        attention_mask=tree.attention_mask(model.dtype),
        position_ids=tree.position_ids[None] if tree.rope_position_ids is None else tree.rope_position_ids[:, None],
        logits_to_keep=sources,
        **tree.vision_inputs,
    ).logits[0]
    return logits.float().log_softmax(-1), place


def accumulate(model: Any, tree: Any, sampled: int, recipe: Recipe, advantages: torch.Tensor) -> dict[str, float]:
    """Add the gradient of the clipped objective, its tokens weighted 1/`sampled`; sums over this tree's trained tokens, whose
    `advantages` are of shape (trained,)."""
    logprobs, place = predict(model, tree)
    chosen = logprobs[place, tree.token_ids[tree.trained_index]]
    ratio = (chosen - tree.inference_logprobs).exp()
    clipped = ratio.clamp(1 - recipe.clip_low, 1 + recipe.clip_high)
    objective = torch.minimum(ratio * advantages, clipped * advantages)
    entropy = -(logprobs.exp() * logprobs).sum(-1)[place]
    loss = -(objective + recipe.entropy_bonus * entropy).sum()
    (loss / sampled).backward()
    return {
        "loss": loss.item(),
        "clipped": (clipped != ratio).sum().item(),
        "off_policy": (ratio.detach() - 1).abs().sum().item(),
    }


if __name__ == "__main__":
    typer.run(train)
