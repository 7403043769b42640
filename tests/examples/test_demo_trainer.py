"""The demo's trainer: what its objective does to a real model, on rows small enough to follow."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from examples.demo.tiny_model import make_tiny_model
from examples.demo.trainer import Recipe, accumulate, ages, one_step
from reconstruct.records import pack_ids, pack_logprobs
from tests.support.sessions.training_rows import groups, trajectory
from trainer_client.advantages import grpo
from trainer_client.batch import Batch

PROMPT, GOOD, BAD = [5, 6, 7], [11, 12], [21, 22]
RECIPE = Recipe(learning_rate=1e-3, minibatches=1, entropy_bonus=0.0)


@pytest.fixture
def model(tmp_path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(make_tiny_model(tmp_path, layers=1, hidden_size=64))


def logprobs_of(model: Any, sampled: list[int]) -> torch.Tensor:
    ids = torch.tensor([PROMPT + sampled])
    scores: torch.Tensor = model(ids).logits[0, len(PROMPT) - 1 : -1].log_softmax(-1)
    return scores.gather(-1, torch.tensor(sampled)[:, None])[:, 0]


def row(model: Any, name: str, sampled: list[int], reward: float, shift: float = 0.0, **changes: Any) -> Any:
    """A row that the engine sampled under `model`'s own weights, but for `shift` on its logprobs."""
    stored = [0.0] * len(PROMPT) + (logprobs_of(model, sampled) + shift).tolist()
    return trajectory(
        name,
        prompt=PROMPT,
        versions=[0] * len(sampled),
        token_ids=pack_ids(PROMPT + sampled),
        logprobs=pack_logprobs(stored),
        reward=reward,
        **changes,
    )


def gradients(model: Any, batch: Batch) -> torch.Tensor:
    model.zero_grad()
    (tree,) = batch.tree(100, advantages=batch.advantages(grpo), framework="torch")
    accumulate(model, tree, len(tree.trained_index), RECIPE, cast(Any, tree.advantages)[tree.segment_index])
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def test_a_step_makes_the_rewarded_tokens_likelier_and_the_others_less_likely(model: Any) -> None:
    batch = Batch(groups([row(model, "a", GOOD, 1.0), row(model, "b", BAD, 0.0)]), 0)
    before = logprobs_of(model, GOOD).sum().item(), logprobs_of(model, BAD).sum().item()
    line = one_step(model, torch.optim.SGD(model.parameters(), lr=0.1), batch, RECIPE)
    after = logprobs_of(model, GOOD).sum().item(), logprobs_of(model, BAD).sum().item()
    assert after[0] > before[0] and after[1] < before[1]
    assert (line["reward"], line["rows"], line["tokens"], line["clipped"]) == (0.5, 2, 4, 0.0)
    assert line["off_policy"] == pytest.approx(0.0, abs=1e-5)


def test_further_epochs_train_again_on_the_same_tokens_which_count_once(model: Any) -> None:
    batch = Batch(groups([row(model, "a", GOOD, 1.0), row(model, "b", BAD, 0.0)]), 0)
    line = one_step(model, torch.optim.SGD(model.parameters(), lr=0.1), batch, replace(RECIPE, epochs=2))
    assert line["tokens"] == 4
    assert line["off_policy"] > 0.0


def test_tokens_far_from_the_policy_that_sampled_them_are_clipped(model: Any) -> None:
    """A good row already twice as likely as when it was sampled, and a bad one half as likely, teach nothing more."""
    pair = [row(model, "a", GOOD, 1.0, shift=-np.log(2)), row(model, "b", BAD, 0.0, shift=np.log(2))]
    assert gradients(model, Batch(groups(pair), 0)).abs().max() == 0.0


def test_a_group_whose_rewards_are_equal_teaches_nothing(model: Any) -> None:
    pair = [row(model, "a", GOOD, 1.0), row(model, "b", BAD, 1.0)]
    assert gradients(model, Batch(groups(pair), 0)).abs().max() == 0.0


def test_a_rollout_in_two_rows_counts_once_in_the_baseline(model: Any) -> None:
    """Three rows of two rollouts: rewards 1 and 0, baseline 1/2, so the rows get +, + and - of one size."""
    rows = [
        row(model, "a", GOOD, 1.0, session="one"),
        row(model, "b", GOOD, 1.0, session="one"),
        row(model, "c", BAD, 0.0, session="two"),
    ]
    advantages = Batch(groups(rows), 0).advantages(grpo)
    assert advantages == pytest.approx([0.7071, 0.7071, -0.7071], abs=1e-3)


def test_the_gradient_does_not_depend_on_how_rows_are_put_together(model: Any) -> None:
    longer = [11, 12, 13, 14]
    batch = Batch(groups([row(model, "a", longer, 1.0), row(model, "b", BAD, 0.0)]), 0)
    together = gradients(model, batch)
    model.zero_grad()
    for index in (0, 1):
        (tree,) = batch.tree(100, rows=[index], advantages=batch.advantages(grpo), framework="torch")
        accumulate(model, tree, 6, RECIPE, cast(Any, tree.advantages)[tree.segment_index])
    apart = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    assert torch.allclose(together, apart, atol=1e-6)


def test_the_gradient_is_that_of_the_objective_on_each_row_alone(model: Any) -> None:
    """Two rows that begin alike, with an entropy bonus, against the formula on whole rows."""
    batch = Batch(groups([row(model, "a", [11, 12, 13], 1.0, shift=0.1), row(model, "b", [11, 22], 0.0, shift=-0.1)]), 0)
    advantages, recipe = batch.advantages(grpo), replace(RECIPE, entropy_bonus=0.5)
    (tree,) = batch.tree(100, advantages=advantages, framework="torch")
    assert len(tree.token_ids) == 7
    accumulate(model, tree, 5, recipe, cast(Any, tree.advantages)[tree.segment_index])
    ours = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    model.zero_grad()
    for each, advantage in zip(batch.rows, advantages.tolist(), strict=True):
        ids = torch.tensor(each.token_ids.tolist())
        table = model(ids[None]).logits[0, len(PROMPT) - 1 : -1].log_softmax(-1)
        ratio = (table.gather(-1, ids[len(PROMPT) :, None])[:, 0] - torch.tensor(each.logprobs[len(PROMPT) :].tolist())).exp()
        objective = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
        (-(objective - 0.5 * (table.exp() * table).sum(-1)).sum() / 5).backward()
    theirs = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    assert torch.allclose(ours, theirs, atol=1e-6)


def test_rows_that_train_nothing_change_nothing(model: Any) -> None:
    shown = row(model, "a", GOOD, 1.0, loss_mask=np.zeros(5, dtype=np.int8), weight_versions=())
    before = torch.cat([parameter.flatten().clone() for parameter in model.parameters()])
    line = one_step(model, torch.optim.SGD(model.parameters(), lr=0.1), Batch(groups([shown]), 0), RECIPE)
    assert line["tokens"] == 0 and line["loss"] == 0.0
    assert torch.equal(before, torch.cat([parameter.flatten() for parameter in model.parameters()]))


def test_a_group_is_as_old_as_its_oldest_token() -> None:
    """The trainer holds version 7: one group has tokens of 4 and 6 in two rows, the other of 7 alone."""
    old = [trajectory("a", versions=[6, 6], session="one"), trajectory("b", versions=[4, 6], session="two")]
    assert ages(Batch(groups(old, [trajectory("c", versions=[7])]), 7)) == [3, 0]
