"""Dr. MAS and resample-on-correct, on rewards a reader can check."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.sessions.training_rows import groups, trajectory
from trainer_client.advantages import (
    agent_names,
    agent_wise,
    among,
    dr_grpo,
    format_penalty,
    grpo,
    resample_on_correct,
    tool_error_penalty,
)
from trainer_client.batch import Batch


def test_an_agent_is_measured_against_itself() -> None:
    # One group, two rollouts, each with a row of the solver (1, 3) and one of the verifier (10, 20).
    rewards, rollouts, agents = [1, 10, 3, 20], [0, 0, 1, 1], ["solver", "verifier"] * 2
    assert agent_wise(dr_grpo, agents)(rewards, [0] * 4, rollouts).tolist() == [-1, -5, 1, 5]
    # Over all of them, rollout 0 counts 5.5 and rollout 1 11.5: the solver's rows would be far below the mean of both.
    assert dr_grpo(rewards, [0] * 4, rollouts).tolist() == [-7.5, 1.5, -5.5, 11.5]


def test_an_agent_called_often_counts_once_per_rollout_or_by_its_rows() -> None:
    # The searcher: three rows of reward 3 in rollout 0, one of reward 1 in rollout 1. Mean 2 over rollouts, 2.5 over rows.
    rewards, rollouts, agents = [3, 3, 3, 1], [0, 0, 0, 1], ["search"] * 4
    assert agent_wise(dr_grpo, agents)(rewards, [0] * 4, rollouts).tolist() == [1, 1, 1, -1]
    assert agent_wise(dr_grpo, agents, each_row=True)(rewards, [0] * 4, rollouts).tolist() == [0.5, 0.5, 0.5, -1.5]


def test_an_agent_of_one_rollout_has_nothing_to_be_compared_with() -> None:
    assert agent_wise(grpo, ["a", "b", "a"])([1, 5, 3], [0, 0, 0], [0, 0, 1])[1] == 0


@given(
    st.lists(st.tuples(st.integers(-5, 5), st.integers(0, 2), st.integers(0, 3), st.integers(0, 2)), min_size=1, max_size=20)
)
def test_agent_wise_grpo_is_grpo_over_each_agents_rows(rows: list[tuple[int, int, int, int]]) -> None:
    rewards, group, member, agent = np.array(rows).T
    rollout = group * 10 + member
    whole = agent_wise(grpo, agent.tolist())(rewards, group, rollout)
    for one in set(agent.tolist()):
        mine = agent == one
        np.testing.assert_allclose(whole[mine], grpo(rewards[mine], group[mine], rollout[mine]), atol=1e-6)


def test_agents_are_named_by_role_and_name() -> None:
    rows = [trajectory("a"), trajectory("b", role="subagent", agent="search"), trajectory("c", role="subagent")]
    batch = Batch(groups(rows), weight_version=5)
    assert agent_names(batch.rows) == ("main", "subagent/search", "subagent")
    assert batch.advantages(agent_wise(grpo, agent_names(batch.rows))).shape == (3,)
    with pytest.raises(ValueError, match="2 agents for 3 rows"):
        batch.advantages(agent_wise(grpo, ["a", "b"]))


def test_no_rows_have_no_agents() -> None:
    assert agent_wise(grpo, [])([], [], []).tolist() == []


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
