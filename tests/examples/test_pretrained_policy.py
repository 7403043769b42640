"""The policy of the learning runs: the objective on trees is the demo's on flat rows, and what is put aside is taken up whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from examples.demo.tiny_model import make_tiny_model
from examples.demo.trainer import Recipe, accumulate
from examples.pretrained.policy import Policy
from reconstruct.records import RAW, pack_ids, pack_logprobs
from reconstruct.scores import unscored
from tests.support.sessions.training_rows import groups, trajectory
from trainer_client.advantages import grpo
from trainer_client.batch import Batch
from trainer_client.publish import write_weights

PROMPT = [5, 6, 7, 8]


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "model", layers=2, hidden_size=64, initializer_range=0.1)


def row(policy: Policy, name: str, sampled: list[int], reward: float, group: str = "g", shift: float = 0.0, **more: Any) -> Any:
    """A row that the engine sampled under the policy's own weights, but for `shift` on its logprobs."""
    with torch.no_grad():
        scores = policy.model(torch.tensor([PROMPT + sampled])).logits[0, len(PROMPT) - 1 : -1].log_softmax(-1)
    stored = scores.gather(-1, torch.tensor(sampled)[:, None])[:, 0] + shift
    return trajectory(
        name,
        prompt=PROMPT,
        versions=[0] * len(sampled),
        token_ids=pack_ids(PROMPT + sampled),
        logprobs=pack_logprobs([0.0] * len(PROMPT) + stored.tolist()),
        reward=reward,
        group_id=group,
        **more,
    )


def taught(policy: Policy, told: Mapping[str, Mapping[int, float]]) -> Batch:
    """Rows whose sampled ids lie so much higher under the teacher."""
    rows = []
    for name, above in told.items():
        made = row(policy, name, list(above), 1.0)
        known = np.full(len(made.logprobs), np.nan, np.float32)
        known[len(PROMPT) :] = made.logprobs[len(PROMPT) :] + np.array(list(above.values()), np.float32)
        none = unscored(len(known), "teacher", RAW, "")
        rows.append(replace(made, scores={"teacher": replace(none, logprobs=known)}))
    return Batch(groups(rows), 0)


def rewarded(policy: Policy) -> Batch:
    """Siblings that part at their first, second and third sampled token."""
    said = {"a": [11, 12, 13], "b": [11, 12, 14], "c": [11, 15], "d": [16]}
    return Batch(groups([row(policy, name, ids, float(name in "ac"), shift=0.1) for name, ids in said.items()]), 0)


def gradients(model: Any) -> torch.Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("token_budget", [1, 1024], ids=["a sequence per row", "one tree"])
def test_the_gradient_on_trees_is_the_sum_of_those_on_single_rows(token_budget: int, model_dir: Path) -> None:
    """Also where the rows are longer than a sequence should be."""
    recipe = Recipe(1e-3, max_gradient=1e9, token_budget=token_budget, entropy_bonus=0.0)
    policy, single = Policy(model_dir, recipe), Policy(model_dir, recipe).model
    batch = rewarded(policy)
    advantages = batch.advantages(grpo)
    trees: list[Any] = [batch.tree(100, rows=[at], advantages=advantages, framework="torch")[0] for at in range(len(batch))]
    sampled = sum(len(tree.trained_index) for tree in trees)
    loss = sum((accumulate(single, tree, sampled, recipe, tree.advantages[tree.segment_index])["loss"] for tree in trees), 0.0)
    learned = policy.reinforce(batch, advantages)
    assert learned["loss"] == pytest.approx(loss / sampled, abs=1e-6)
    assert (learned["learned_groups"], learned["learned_tokens"]) == (1, sampled)
    assert torch.allclose(gradients(policy.model), gradients(single), atol=1e-6)
    assert gradients(single).abs().max() > 1e-3


def test_groups_that_teach_make_one_step_and_the_others_change_nothing(model_dir: Path) -> None:
    """The weights are those of a step on the two groups alone."""
    policy, other = (Policy(model_dir, Recipe(1e-3, entropy_bonus=0.0)) for _ in range(2))
    said = {"x": {"a": [11, 12, 13], "b": [14]}, "y": {"c": [15, 12], "d": [16, 17, 18, 19]}, "z": {"e": [12], "f": [13]}}
    made: list[Any] = []
    for name, of in said.items():
        made += groups([row(policy, each, ids, float(each in "acef"), name) for each, ids in of.items()])
    every, teaching = Batch(made, 0), Batch(made[:2], 0)
    learned = policy.reinforce(every, every.advantages(grpo))
    assert (learned["learned_groups"], learned["learned_tokens"]) == (2, 10)
    assert learned == other.reinforce(teaching, teaching.advantages(grpo))
    assert all(torch.equal(other.weights()[name], tensor) for name, tensor in policy.weights().items())


def test_a_teacher_alone_gives_each_token_what_it_says_of_it(model_dir: Path) -> None:
    """Whatever was earned, and nothing where it says nothing; the same numbers at other tokens are another step."""
    told = {"a": {11: 0.5, 12: -2.0, 13: 0.0}, "b": {11: 0.5, 14: np.nan}, "c": {15: 1.25}}
    policy, single, mixed = (Policy(model_dir, Recipe(1e-3, max_gradient=1e9, entropy_bonus=0.0)) for _ in range(3))
    batch, advantages = taught(policy, told), iter([[0.5, -2.0, 0.0], [0.5, 0.0], [1.25]])
    for at in range(len(batch)):
        tree: Any = batch.tree(100, rows=[at], framework="torch")[0]
        accumulate(single.model, tree, 6, Recipe(1e-3, entropy_bonus=0.0), torch.tensor(next(advantages)))
    learned = policy.distil(batch, "teacher")
    assert (learned["learned_groups"], learned["learned_tokens"], learned["scored_tokens"]) == (1, 6, 5)
    assert learned["reverse_kl"] == pytest.approx(-(0.5 - 2.0 + 0.5 + 1.25) / 5, abs=1e-6)
    assert torch.allclose(gradients(policy.model), gradients(single.model), atol=1e-6)
    assert mixed.distil(batch, "teacher", np.random.default_rng(0))["reverse_kl"] == learned["reverse_kl"]
    assert not torch.allclose(gradients(mixed.model), gradients(single.model), atol=1e-3)


def test_recomputing_finds_the_one_token_that_is_off(model_dir: Path) -> None:
    policy = Policy(model_dir, Recipe(1e-3))
    rows = [row(policy, "a", [11, 12, 13], 1.0), row(policy, "b", [11, 14], 0.0)]
    assert policy.recompute(Batch(groups(rows), 0)).largest < 1e-5
    logprobs = np.array(rows[1].logprobs)
    logprobs[-1] -= 0.25
    off = row(policy, "c", [11, 14], 0.0)
    object.__setattr__(off, "logprobs", pack_logprobs(logprobs.tolist()))
    assert policy.recompute(Batch(groups([rows[0], off]), 0)).largest == pytest.approx(0.25, abs=1e-5)


def test_a_group_whose_rollouts_earned_the_same_teaches_nothing(model_dir: Path) -> None:
    policy = Policy(model_dir, Recipe(1e-3))
    before = {name: tensor.clone() for name, tensor in policy.weights().items()}
    batch = Batch(groups([row(policy, "a", [11], 1.0), row(policy, "b", [12], 1.0)]), 0)
    assert policy.reinforce(batch, batch.advantages(grpo))["learned_groups"] == 0
    assert all(torch.equal(before[name], tensor) for name, tensor in policy.weights().items())


def test_imitation_makes_the_demonstrated_tokens_likely(model_dir: Path) -> None:
    policy = Policy(model_dir, Recipe(1e-2))
    batch = Batch(groups([row(policy, "a", [11, 12, 13], 1.0)]), 0)
    losses = [policy.imitate(batch) for _ in range(5)]
    assert losses[-1] < losses[0] - 1


@pytest.mark.case(81)
def test_a_policy_taken_up_goes_on_as_if_it_had_not_been_put_aside(model_dir: Path, tmp_path: Path) -> None:
    """The optimizer's moments matter: a second step after both ways gives the same weights, to the bit."""
    policy = Policy(model_dir, Recipe(1e-3))
    first, second = rewarded(policy), rewarded(policy)
    policy.reinforce(first, first.advantages(grpo))
    folder = write_weights(policy.weights(), tmp_path, 1)
    policy.save_optimizer(tmp_path / "optimizer.pt")
    taken_up = Policy(model_dir, Recipe(1e-3))
    taken_up.load(folder, tmp_path / "optimizer.pt")
    for each in (policy, taken_up):
        each.reinforce(second, second.advantages(grpo))
    assert all(torch.equal(taken_up.weights()[name], tensor) for name, tensor in policy.weights().items())
