"""Agent-wise comparison: the rows of each agent of a multi-agent harness are measured against that agent's rows alone."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from reconstruct.trajectory import Trajectory
from trainer_client.advantages.rollouts import Advantages, Estimator


def agent_names(rows: Sequence[Trajectory]) -> tuple[str, ...]:
    """Per row: its role, and behind a slash the agent where the harness named one: "main", "subagent/search"."""
    return tuple(f"{row.role}/{row.agent}" if row.agent else row.role for row in rows)


def agent_wise(estimator: Estimator, agents: Sequence[Hashable], *, each_row: bool = False) -> Estimator:
    """`estimator` within each agent of each group: `agent_wise(grpo, agents)` is Dr. MAS.

    There a row of agent k gets (reward - mean of k) / deviation of k, over the rows of k in the group. The paper's statistics
    run over every step of the agent: an agent that is called more often in some rollouts weighs these more. `each_row` counts
    so (a row stands for a step, which it is for rows of one call each); otherwise a rollout counts once for each agent, as in
    all estimators here. An agent that only one rollout of the group used gets 0; the paper does not say what it should get.

    Source: Feng et al., "Dr. MAS: Stable Reinforcement Learning for Multi-Agent LLM Systems", arXiv:2602.08847, equation 5;
    grouping by (question, agent) as in the authors' code.
    """
    agent_index = _numbered(agents)

    def within_agents(rewards: ArrayLike, group_index: ArrayLike, rollout_index: ArrayLike) -> Advantages:
        groups, rollouts = np.asarray(group_index), np.asarray(rollout_index)
        if not groups.shape == rollouts.shape == agent_index.shape:
            raise ValueError(f"{agent_index.size} agents for {groups.size} rows")
        compared = np.arange(rollouts.size) if each_row else pairs(rollouts, agent_index)
        return estimator(rewards, pairs(groups, agent_index), compared)

    return within_agents


def _numbered(keys: Sequence[Hashable]) -> NDArray[np.int64]:
    seen: dict[Hashable, int] = {}
    return np.array([seen.setdefault(key, len(seen)) for key in keys], dtype=np.int64)


def pairs(first: NDArray[np.int64], second: NDArray[np.int64]) -> NDArray[np.int64]:
    """One number per distinct pair."""
    if not first.size:
        return first
    _, numbers = np.unique(np.stack((first, second)), axis=1, return_inverse=True)
    return np.asarray(numbers, dtype=np.int64).reshape(-1)
