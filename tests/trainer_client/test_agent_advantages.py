"""Dr. MAS, on rewards a reader can check."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.sessions.training_rows import groups, trajectory
from trainer_client.advantages import agent_names, agent_wise, dr_grpo, grpo
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
