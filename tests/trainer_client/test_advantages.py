"""Baselines on rewards a reader can check: mean, sample deviation and the mean of the others, by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.sessions.training_rows import groups, trajectory
from trainer_client.advantages import dr_grpo, grpo, leave_one_out, reinforce
from trainer_client.batch import Batch

ESTIMATORS = [grpo, dr_grpo, leave_one_out]


def test_dr_grpo_takes_off_the_mean_of_the_group() -> None:
    # group 0: 1, 2, 6 (mean 3); group 1: 10, 20 (mean 15)
    assert dr_grpo([1, 2, 6, 10, 20], [0, 0, 0, 1, 1], [0, 1, 2, 3, 4]).tolist() == [-2, -1, 3, -5, 5]


def test_grpo_divides_by_the_deviation_of_the_sample() -> None:
    # 1, 3, 5: mean 3, deviation sqrt((4 + 0 + 4) / 2) = 2
    np.testing.assert_allclose(grpo([1, 3, 5], [0, 0, 0], [0, 1, 2]), [-1, 0, 1], atol=1e-6)


def test_leave_one_out_compares_with_the_others() -> None:
    # 1 against (2 + 6) / 2; 2 against (1 + 6) / 2; 6 against (1 + 2) / 2
    assert leave_one_out([1, 2, 6], [0, 0, 0], [0, 1, 2]).tolist() == [-3, -1.5, 4.5]


def test_reinforce_compares_with_nothing() -> None:
    assert reinforce([1, 2, 6, -4], [0, 0, 0, 1], [0, 0, 1, 2]).tolist() == [1, 2, 6, -4]


@pytest.mark.case(48)
@pytest.mark.parametrize(("estimator", "expected"), [(dr_grpo, [2, 2, 2, -2]), (leave_one_out, [4, 4, 4, -4])])
def test_a_rollout_of_three_rows_counts_once(estimator: object, expected: list[float]) -> None:
    # rollout 0: reward 4 in three rows; rollout 1: reward 0 in one. The mean is 2, not 3.
    assert estimator([4, 4, 4, 0], [0, 0, 0, 0], [7, 7, 7, 9]).tolist() == expected  # type: ignore[operator]


def test_a_rollout_of_three_rows_counts_once_in_the_deviation() -> None:
    # 4 and 0: deviation sqrt((4 + 4) / 1) = 2 * sqrt(2)
    np.testing.assert_allclose(
        grpo([4, 4, 4, 0], [0] * 4, [7, 7, 7, 9]), np.sqrt([0.5, 0.5, 0.5, 0.5]) * [1, 1, 1, -1], atol=1e-6
    )


def test_rows_of_one_rollout_with_rewards_of_their_own_keep_them() -> None:
    # rollout 0: rewards 6 and 2 (counts as 4); rollout 1: 0. The mean is 2.
    assert dr_grpo([6, 2, 0], [0, 0, 0], [0, 0, 1]).tolist() == [4, 0, -2]


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_rollout_alone_has_nothing_to_be_compared_with(estimator: object) -> None:
    assert estimator([5, 1, 3], [0, 1, 1], [0, 1, 2])[0] == 0  # type: ignore[operator]


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_equal_rewards_give_no_signal(estimator: object) -> None:
    assert estimator([3, 3, 3], [0, 0, 0], [0, 1, 2]).tolist() == [0, 0, 0]  # type: ignore[operator]


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_row_without_a_reward_is_refused(estimator: object) -> None:
    batch = Batch(groups([trajectory("a"), trajectory("b", reward=None)]), weight_version=5)
    with pytest.raises(ValueError, match="row 1 has no finite reward"):
        batch.advantages(estimator)  # type: ignore[arg-type]


def test_a_rollout_in_two_groups_is_refused() -> None:
    with pytest.raises(ValueError, match="two groups"):
        dr_grpo([1, 2], [0, 1], [0, 0])


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_no_rows_give_no_advantages(estimator: object) -> None:
    assert Batch((), weight_version=0).advantages(estimator).tolist() == []  # type: ignore[arg-type]


@given(st.lists(st.tuples(st.integers(-9, 9), st.integers(0, 3)), min_size=1, max_size=20), st.randoms())
def test_the_order_of_rows_does_not_matter(rows: list[tuple[int, int]], random: object) -> None:
    rewards, members = np.array(rows, dtype=float).T
    order = list(range(len(rows)))
    random.shuffle(order)  # type: ignore[attr-defined]
    index = np.arange(len(rows))
    for estimator in ESTIMATORS:
        whole = estimator(rewards, members.astype(int), index)
        np.testing.assert_allclose(estimator(rewards[order], members[order].astype(int), index), whole[order], atol=1e-5)


@given(st.lists(st.integers(-9, 9), min_size=2, max_size=12))
def test_dr_grpo_of_a_group_sums_to_nothing(rewards: list[int]) -> None:
    assert abs(dr_grpo(rewards, [0] * len(rewards), range(len(rewards))).sum()) < 1e-4
