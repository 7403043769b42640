"""Importance ratios against sums a reader can do, and against the formulas written out in plain arithmetic."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.sessions.training_rows import groups, trajectory
from trainer_client.batch import Batch
from trainer_client.importance import (
    batch_statistics,
    log_ratios,
    masked_weights,
    ratio_statistics,
    row_of_token,
    statistics_by,
    truncated_weights,
)

LOGS = st.lists(st.floats(-8, 8), min_size=1, max_size=30)


def test_equal_logprobs_are_on_policy() -> None:
    found = ratio_statistics(log_ratios([-1.0, -2.0], [-1.0, -2.0], [1, 1]))
    assert found == {
        "tokens": 2, "ratio_mean": 1, "ratio_min": 1, "ratio_max": 1, "kl_k1": 0, "kl_k2": 0, "kl_k3": 0,
        "effective_sample_size": 1, "clipped_low": 0, "clipped_high": 0,
    }  # fmt: skip
    assert all(type(value) is float for value in found.values())


def test_ratios_of_a_half_and_two() -> None:
    # log r = -log 2 and log 2: mean r 1.25; (2.5)² / (2 * 4.25); k3: (0.5 - 1 + log 2 + 2 - 1 - log 2) / 2
    found = ratio_statistics(log_ratios([-math.log(2), 0.0], [0.0, -math.log(2)], [True, True]))
    assert found["ratio_mean"] == pytest.approx(1.25)
    assert (found["ratio_min"], found["ratio_max"]) == pytest.approx((0.5, 2))
    assert found["effective_sample_size"] == pytest.approx(6.25 / 8.5)
    assert found["kl_k1"] == pytest.approx(0) and found["kl_k2"] == pytest.approx(math.log(2) ** 2 / 2)
    assert found["kl_k3"] == pytest.approx(0.25)
    assert (found["clipped_low"], found["clipped_high"]) == (0.5, 0.5)


@given(LOGS)
def test_statistics_are_the_formulas_written_out(logs: list[float]) -> None:
    found, n = ratio_statistics(logs, low=0.9, high=1.3), len(logs)
    ratios = [math.exp(each) for each in logs]
    expected = {
        "tokens": n,
        "ratio_mean": sum(ratios) / n,
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "kl_k1": -sum(logs) / n,
        "kl_k2": sum(each * each / 2 for each in logs) / n,
        "kl_k3": sum(ratio - 1 - math.log(ratio) for ratio in ratios) / n,
        "effective_sample_size": sum(ratios) ** 2 / (n * sum(ratio * ratio for ratio in ratios)),
        "clipped_low": sum(each < math.log(0.9) for each in logs) / n,
        "clipped_high": sum(each > math.log(1.3) for each in logs) / n,
    }
    assert found == {name: pytest.approx(value, rel=1e-9, abs=1e-9) for name, value in expected.items()}
    assert found["kl_k3"] >= 0 and 0 < found["effective_sample_size"] <= 1


def test_estimates_agree_with_the_divergence_they_estimate() -> None:
    """Two distributions over four tokens: the expectations of k1 and k3 under the engine's are its divergence from the other."""
    engine, trainer = np.array([0.4, 0.3, 0.2, 0.1]), np.array([0.1, 0.2, 0.3, 0.4])
    divergence = float((engine * np.log(engine / trainer)).sum())
    drawn = np.repeat(np.arange(4), [400, 300, 200, 100])
    found = ratio_statistics(log_ratios(np.log(trainer)[drawn], np.log(engine)[drawn], np.ones(1000)))
    assert found["kl_k1"] == pytest.approx(divergence) and found["kl_k3"] == pytest.approx(divergence)
    assert found["ratio_mean"] == pytest.approx(1), "importance ratios have mean 1 under the engine's distribution"


def test_small_differences_are_not_lost_to_rounding() -> None:
    # k3 of log r = 1e-9 is 5e-19; 1 + 1e-9 - 1 - 1e-9 in float64 would be noise of 1e-16.
    assert ratio_statistics([1e-9])["kl_k3"] == pytest.approx(5e-19, rel=1e-6)


def test_nothing_overflows_before_the_last_step() -> None:
    found = ratio_statistics([900.0, 900.0, -900.0])
    assert found["ratio_max"] == math.inf and found["ratio_mean"] == math.inf
    assert found["effective_sample_size"] == pytest.approx(2 / 3)
    assert truncated_weights([900.0], [0.0], [1], cap=3.0).weights.tolist() == [3.0]
    assert masked_weights([900.0, -900.0], [0.0, 0.0], [1, 1]).weights.tolist() == [0, 0]


def test_a_token_the_trainer_holds_to_be_impossible_has_ratio_nothing() -> None:
    ratios = log_ratios([-math.inf, -1.0], [-1.0, -1.0], [1, 1])
    found = ratio_statistics(ratios)
    assert (found["ratio_min"], found["ratio_mean"], found["kl_k3"]) == (0, 0.5, math.inf)
    assert found["effective_sample_size"] == 0.5
    assert ratio_statistics([-math.inf])["effective_sample_size"] == 0
    assert truncated_weights([-math.inf], [-1.0], [1]).weights.tolist() == [0]


@pytest.mark.parametrize(("trainer", "engine"), [(math.nan, -1.0), (math.inf, -1.0), (-1.0, math.nan), (-1.0, -math.inf)])
def test_a_logprob_that_is_none_is_refused_under_the_mask_and_ignored_outside(trainer: float, engine: float) -> None:
    with pytest.raises(ValueError, match="token 1 under the mask"):
        log_ratios([0.0, -1.0, trainer], [0.0, -1.0, engine], [0, 1, 1])
    assert log_ratios([-1.0, trainer], [-1.0, engine], [1, 0]).tolist() == [0]


def test_shapes_that_differ_are_refused() -> None:
    with pytest.raises(ValueError, match="shapes differ"):
        log_ratios([[0.0]], [0.0], [1])


def test_nothing_sampled_has_no_statistics() -> None:
    assert ratio_statistics(log_ratios([1.0], [2.0], [0])) == {"tokens": 0}
    assert truncated_weights([1.0], [2.0], [0], level="row", rows=[0]).weights.tolist() == [0]


def test_clipping_counts_where_it_stops_the_gradient() -> None:
    # r = 0.5 and 2 with either sign of advantage: PPO's minimum clips 0.5 for a negative one and 2 for a positive one.
    logs = np.log([0.5, 0.5, 2, 2])
    found = ratio_statistics(logs, advantages=[1, -1, 1, -1])
    assert (found["clipped_low"], found["clipped_high"]) == (0.25, 0.25)


@given(LOGS, st.floats(0.1, 10))
def test_truncated_weights_are_ratios_up_to_the_cap(logs: list[float], cap: float) -> None:
    found = truncated_weights(logs, np.zeros(len(logs)), np.ones(len(logs)), cap=cap)
    np.testing.assert_allclose(found.weights, [min(math.exp(each), cap) for each in logs], rtol=1e-5)
    assert found.kept.all()


@given(LOGS, st.floats(0.1, 1), st.floats(1, 10))
def test_masked_weights_are_ratios_within_the_bounds(logs: list[float], low: float, high: float) -> None:
    found = masked_weights(logs, np.zeros(len(logs)), np.ones(len(logs)), low=low, high=high)
    inside = [math.log(low) <= each <= math.log(high) for each in logs]
    assert found.kept.tolist() == inside
    np.testing.assert_allclose(
        found.weights, [math.exp(e) if keep else 0 for e, keep in zip(logs, inside, strict=True)], rtol=1e-5
    )


def test_a_row_weighs_by_its_product_or_its_mean() -> None:
    # Rows 0 and 1: log r = log 2, log 2 | log 8, and one token that is not sampled.
    logs, mask, rows = np.log([2.0, 2.0, 9.0, 8.0]), [1, 1, 0, 1], [0, 0, 1, 1]
    product = truncated_weights(logs, np.zeros(4), mask, cap=6.0, level="row", rows=rows)
    np.testing.assert_allclose(product.weights, [4, 4, 0, 6], rtol=1e-6)
    mean = masked_weights(logs, np.zeros(4), mask, high=3.0, level="row_mean", rows=rows)
    np.testing.assert_allclose(mean.weights, [2, 2, 0, 0], rtol=1e-6)
    assert mean.kept.tolist() == [True, True, False, False]


@pytest.mark.parametrize("options", [{"level": "sentence", "rows": [0]}, {"level": "row"}, {"cap": 0.0}])
def test_options_that_make_no_sense_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        truncated_weights([0.0], [0.0], [1], **options)
    with pytest.raises(ValueError):
        masked_weights([0.0], [0.0], [1], low=2.0, high=1.0)


def test_statistics_are_kept_apart_by_key() -> None:
    found = statistics_by(np.log([2.0, 4.0, 1.0]), ["b", "b", "a"])
    assert (found["a/ratio_mean"], found["b/tokens"]) == (1, 2)
    assert found["b/ratio_mean"] == pytest.approx(3)
    assert [name for name in found if name.endswith("tokens")] == ["a/tokens", "b/tokens"]


def leased() -> Batch:
    """Under version 7. a (main): versions 5 5 6, recorded -0.5 -1 -1.5; b (subagent): version 7, recorded -0.5."""
    a = trajectory("a", prompt=[1, 2], versions=[5, 5, 6])
    b = trajectory("b", prompt=[9], versions=[7], role="subagent", agent="search")
    return Batch(groups([a, b]), weight_version=7)


@pytest.mark.parametrize("form", ["padded", "packed", "torch", "left"])
def test_a_batch_is_told_apart_by_staleness_and_role(form: str) -> None:
    batch = leased()
    forms: dict[str, Callable[[], Any]] = {
        "padded": lambda: batch.padded(),
        "left": lambda: batch.padded(rows=[1, 0], side="left"),
        "torch": lambda: batch.padded(framework="torch", multiple_of=4),
        "packed": lambda: batch.packed(9)[0],
    }
    data = forms[form]()
    trainer = data.inference_logprobs + math.log(2)  # every ratio is 2
    if form == "torch":
        trainer = trainer.to(torch.bfloat16).requires_grad_()
    found = batch_statistics(batch, data, trainer)
    tokens = {name: value for name, value in found.items() if name.endswith("tokens")}
    assert tokens == {
        "importance/tokens": 4,
        "importance/staleness/0/tokens": 1,
        "importance/staleness/1/tokens": 1,
        "importance/staleness/2/tokens": 2,
        "importance/role/main/tokens": 3,
        "importance/role/subagent/tokens": 1,
    }
    assert found["importance/staleness/2/ratio_mean"] == pytest.approx(2, rel=1e-2)


def test_clipping_in_a_batch_goes_by_the_signs_of_its_advantages() -> None:
    batch = leased()
    (data,) = batch.packed(9, advantages=[1.0, -1.0])
    found = batch_statistics(batch, data, data.inference_logprobs + math.log(2), prefix="")
    assert (found["clipped_high"], found["role/main/clipped_high"], found["role/subagent/clipped_high"]) == (0.75, 1, 0)


def test_places_know_their_row() -> None:
    batch = leased()
    assert row_of_token(batch.padded(rows=[1, 0])).tolist() == [[0] * 5, [1] * 5]
    assert row_of_token(batch.packed(9)[0]).tolist() == [0] * 5 + [1] * 2


def test_a_batch_of_nothing_has_nothing_to_log() -> None:
    batch = Batch((), weight_version=0)
    assert batch_statistics(batch, batch.padded(), np.zeros((0, 0))) == {"importance/tokens": 0}
