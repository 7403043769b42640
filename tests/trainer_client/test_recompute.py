"""Differences between stored and recomputed logprobs, joined over rows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import permutations
from types import SimpleNamespace

import numpy as np
import torch

from cli.audit import TOLERANCE, logprob_problems
from tests.support.sessions.training_rows import trajectory
from trainer_client.recompute import Difference, recompute


def test_a_difference_that_is_no_number_stays_the_largest_wherever_it_comes() -> None:
    """It used to be forgotten when a row with a number came after it, and the whole passed for near."""
    nan = Difference(1, math.nan, math.nan, "broken", 3)
    for order in permutations((nan, Difference(2, 0.1, 0.05, "a", 1), Difference(2, 0.2, 0.1, "b", 4))):
        total = sum(order, Difference())
        assert math.isnan(total.largest) and math.isnan(total.mean)
        assert (total.tokens, total.trajectory_id, total.position) == (5, "broken", 3)


def test_the_largest_of_several_rows_is_named_and_the_mean_is_over_tokens() -> None:
    total = Difference(1, 0.2, 0.2, "a", 1) + Difference(3, 0.5, 0.4, "b", 2) + Difference()
    assert total == Difference(4, 0.5, (0.2 + 3 * 0.4) / 4, "b", 2)


def test_an_audit_refuses_a_difference_that_is_no_number() -> None:
    """It used to pass, since NaN is not greater than any tolerance."""
    differences = {
        "near": Difference(5, TOLERANCE, 1e-6, "a", 1),
        "far": Difference(5, 0.5, 0.1, "b", 2),
        "broken": Difference(5, math.nan, math.nan, "c", 3),
    }
    assert logprob_problems(differences, TOLERANCE) == [
        "far: a logprob is off by 0.5 (row b, token 2)",
        "broken: a logprob is off by nan (row c, token 3)",
    ]


@dataclass
class Table:
    """A model whose line i has the logits of what follows token i."""

    lines: torch.Tensor
    device: str = "cpu"

    def __call__(self, ids: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=self.lines[ids])


def test_each_token_is_scored_by_what_the_model_says_after_the_one_before_it() -> None:
    table = torch.tensor([[0.0, 1.0, 2.0], [5.0, 3.0, 4.0], [6.0, 8.0, 7.0]])
    row = trajectory(prompt=[0], versions=(5, 5), token_ids=np.array([0, 2, 1], dtype=np.int32))
    said = torch.log_softmax(table, dim=-1)
    np.testing.assert_allclose(recompute(Table(table), row), [0.0, said[0, 2], said[2, 1]], rtol=1e-6)
