"""Differences between stored and recomputed logprobs, joined over rows."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import permutations
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from cli.audit import TOLERANCE, left_out_lines, logprob_problems, recompute_logprobs
from examples.demo.tiny_model import make_tiny_model
from reconstruct.records import pack_ids, pack_logprobs
from reconstruct.spans import ModeSpan
from reconstruct.trajectory import Trajectory
from tests.support.sessions.training_rows import spans, trajectory
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
    np.testing.assert_allclose(recompute(Table(table), row), [0.0, float(said[0, 2]), float(said[2, 1])], rtol=1e-6)


# On trees


def row(name: str, ids: list[int], trained: dict[int, int]) -> Trajectory:
    """`trained`: the positions under the mask, each with its weight version."""
    mask = np.zeros(len(ids), dtype=np.int8)
    mask[list(trained)] = 1
    versions = tuple(span for at, version in trained.items() for span in spans(at, [version]))
    return trajectory(
        name, token_ids=pack_ids(ids), loss_mask=mask, logprobs=pack_logprobs(mask * 0.0), weight_versions=versions
    )


@pytest.mark.case(82)
def test_an_audit_on_trees_says_what_it_says_row_by_row(tmp_path: Path) -> None:
    """Rows that part after 7 8, one that ends within another, and one of its own; sampled under two versions. One logprob is off by
    0.5, in the part that two rows share."""
    model = str(make_tiny_model(tmp_path / "model", layers=2, hidden_size=64))
    loaded = AutoModelForCausalLM.from_pretrained(model)
    rows = [
        row("a", [7, 8, 9, 4, 6], {2: 0, 3: 0, 4: 1}),
        row("b", [7, 8, 5, 6], {1: 0, 3: 1}),
        row("c", [7, 8], {1: 0}),
        row("d", [30, 31, 32], {2: 1}),
        row("e", [7, 8, 9], {}),
    ]
    rows = [replace(each, logprobs=recompute(loaded, each) * each.loss_mask) for each in rows]
    rows[1] = replace(rows[1], logprobs=rows[1].logprobs + np.array([0, 0.5, 0, 0], dtype=np.float32))
    models = [model, f"0={model}", f"1={model}", f"9={model}"]
    flat, trees = (recompute_logprobs(rows, models, trees=each) for each in (False, True))
    for name in models:
        assert trees[name].tokens == flat[name].tokens
        assert trees[name].largest == pytest.approx(flat[name].largest, abs=1e-5)
        assert trees[name].mean == pytest.approx(flat[name].mean, abs=1e-5)
    assert [trees[name].tokens for name in models] == [7, 4, 3, 0]
    assert (trees[model].trajectory_id, trees[model].position) == ("b", 1)
    assert trees[model].largest == pytest.approx(0.5, abs=1e-4) and trees[models[2]].largest < 1e-5


@pytest.mark.case(64)
def test_only_raw_logprobs_are_compared_and_the_audit_says_what_it_left_out(tmp_path: Path) -> None:
    """What a grammar masked is another distribution's: the engine is not to blame."""
    model = str(make_tiny_model(tmp_path / "model", layers=2, hidden_size=64))
    loaded = AutoModelForCausalLM.from_pretrained(model)
    right = row("a", [7, 8, 9, 4], {2: 0, 3: 0})
    right = replace(right, logprobs=recompute(loaded, right) * right.loss_mask)
    masked = trajectory("b", mode="masked")
    mixed = replace(right, trajectory_id="c", logprob_modes=(ModeSpan("unknown", 2, 3), ModeSpan("raw", 3, 4)))
    for trees in (False, True):
        difference = recompute_logprobs([right, masked, mixed], [model], trees=trees)[model]
        assert difference.tokens == 3 and difference.largest < 1e-5
    lines = left_out_lines([right, masked, mixed])
    assert [line.partition(":")[0] for line in lines] == ["2 tokens are not compared", "1 tokens are not compared"]
    assert "grammar" in lines[0] and "VERBATIM_ENGINE_LOGPROB_MODES" in lines[1]
