"""Resample-on-correct, on rewards a reader can check."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.pivots.resampling import among, format_penalty, resample_on_correct, tool_error_penalty
from trainer_client.advantages import dr_grpo


def test_penalties_are_those_of_the_paper() -> None:
    assert tool_error_penalty([0, 1, 4, 0], [4, 4, 4, 0]).tolist() == [0, 0.25, 1, 0.5]
    assert format_penalty([1, 0, 3, 9], [4, 4, 4, 4]).tolist() == [0, 1, 0.5, 1]
    with pytest.raises(ValueError, match="more tool errors"):
        tool_error_penalty([2], [1])


def resampled(rewards: list[float], penalties: list[float], keep: int, seed: int = 0) -> list[int]:
    index = np.arange(len(rewards))
    kept = resample_on_correct(rewards, [0] * len(rewards), index, penalties, keep=keep, generator=np.random.default_rng(seed))
    return [int(at) for at in index[kept]]


def test_half_of_the_failures_and_the_cleaner_successes_are_kept() -> None:
    # Failures 0-3, successes 4-7 of which 4 and 6 had no trouble: 2 of each are kept, and the clean ones first.
    for seed in range(20):
        kept = resampled([0, 0, 0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 0, 1, 0, 0.5], 4, seed)
        assert kept[2:] == [4, 6] and len(kept) == 4


def test_successes_are_drawn_by_the_inverse_of_their_penalty() -> None:
    # One of two successes is kept; penalties 1 and 3: the first in three draws of four.
    first = sum(0 in resampled([1, 1], [1, 3], 1, seed) for seed in range(2000))
    assert 0.7 < first / 2000 < 0.8


def test_failures_are_drawn_whatever_their_penalty() -> None:
    drawn = [resampled([0, 0, 1, 1], [9, 0, 1, 1], 2, seed)[0] for seed in range(400)]
    assert 0.35 < drawn.count(0) / 400 < 0.65


@given(st.lists(st.booleans(), min_size=1, max_size=16), st.integers(1, 16), st.integers(0, 99))
def test_a_group_keeps_its_number_and_its_mix(correct: list[bool], keep: int, seed: int) -> None:
    kept = resampled([float(each) for each in correct], [0.1] * len(correct), keep, seed)
    assert len(kept) == min(keep, len(correct))
    if keep < len(correct):
        assert sum(not correct[at] for at in kept) == correct.count(False) * keep // len(correct)


def test_a_rollout_keeps_all_its_rows_or_none_and_others_do_not_count() -> None:
    rewards, rollouts = [1, 1, 1, 0, 0, 1], [0, 0, 1, 2, 3, 1]
    generator = np.random.default_rng(3)
    kept = resample_on_correct(rewards, [0] * 6, rollouts, [0, 0, 1, 0, 0, 1], keep=2, generator=generator)
    assert kept[[0, 1]].all() and not kept[[2, 5]].any() and kept[[3, 4]].sum() == 1
    advantages = among(dr_grpo, kept)(rewards, [0] * 6, rollouts)
    assert advantages[[0, 1]].tolist() == [0.5, 0.5] and advantages[~kept].tolist() == [0, 0, 0]
    assert advantages[kept].sum() == 0.5, "two rows of the success, one of the failure"
