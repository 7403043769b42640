"""Advantages of rows from the rewards of their group: GRPO, Dr. GRPO, leave-one-out and plain REINFORCE, on numpy arrays.

An estimator takes `rewards`, `group_index` and `rollout_index`, all of shape (rows,), as `Batch.advantages` passes them, and returns
float32 of shape (rows,). A rollout with several rows counts once in its group's baseline and spread, with the mean of its rows'
rewards; each row's advantage uses its own reward. A rollout alone in its group gets 0. A reward that is not finite raises
ValueError: the caller must leave out rows without a reward.

    batch.advantages(grpo)
    batch.advantages(agent_wise(grpo, agent_names(batch.rows)))                     # Dr. MAS
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from reconstruct.trajectory import Trajectory

__all__ = [
    "Advantages",
    "Estimator",
    "RolloutIndex",
    "agent_names",
    "agent_wise",
    "dr_grpo",
    "grpo",
    "leave_one_out",
    "number_pairs",
    "reinforce",
]


def grpo(rewards: ArrayLike, group_index: ArrayLike, rollout_index: ArrayLike, *, epsilon: float = 1e-6) -> Advantages:
    """(reward - mean of the group) / (standard deviation of the group + epsilon).

    The deviation is the sample's (n - 1). Source: Shao et al., "DeepSeekMath: Pushing the Limits of Mathematical Reasoning
    in Open Language Models", arXiv:2402.03300, section 4.1 (outcome supervision).
    """
    table = RolloutIndex.of(rewards, group_index, rollout_index)
    mean = table.group_sum(table.reward) / table.size
    spread = np.sqrt(table.group_sum((table.reward - mean[table.group]) ** 2) / np.maximum(table.size - 1, 1))
    return table.of_rows(table.row_reward - table.by_row(mean), table.by_row(spread) + epsilon)


def dr_grpo(rewards: ArrayLike, group_index: ArrayLike, rollout_index: ArrayLike) -> Advantages:
    """reward - mean of the group.

    Dividing by the deviation weighs questions by their difficulty, so it is left out. The same paper sums token losses over a
    constant length instead of each row's own; that belongs to the loss, not here. Source: Liu et al., "Understanding
    R1-Zero-Like Training: A Critical Perspective", arXiv:2503.20783.
    """
    table = RolloutIndex.of(rewards, group_index, rollout_index)
    mean = table.group_sum(table.reward) / table.size
    return table.of_rows(table.row_reward - table.by_row(mean))


def leave_one_out(rewards: ArrayLike, group_index: ArrayLike, rollout_index: ArrayLike) -> Advantages:
    """reward - mean of the group's other rollouts.

    Source: Ahmadian et al., "Back to Basics: Revisiting REINFORCE Style Optimization for Learning from Human Feedback in
    LLMs", arXiv:2402.14740.
    """
    table = RolloutIndex.of(rewards, group_index, rollout_index)
    others = np.maximum(table.size - 1, 1)[table.group]
    baseline = (table.group_sum(table.reward)[table.group] - table.reward) / others
    return table.of_rows(table.row_reward - baseline[table.rollout_of_row])


def reinforce(rewards: ArrayLike, group_index: ArrayLike, rollout_index: ArrayLike) -> Advantages:
    """The reward itself, compared with nothing; also for a rollout alone in its group.

    Source: Williams, "Simple Statistical Gradient-Following Algorithms for Connectionist Reinforcement Learning", Machine Learning 8,
    1992, with a baseline of 0.
    """
    return RolloutIndex.of(rewards, group_index, rollout_index).row_reward.astype(np.float32)


# Agent-wise comparison: the rows of each agent of a multi-agent harness are measured against that agent's rows alone.


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
    agent_index = _number(agents)

    def within_agents(rewards: ArrayLike, group_index: ArrayLike, rollout_index: ArrayLike) -> Advantages:
        groups, rollouts = np.asarray(group_index), np.asarray(rollout_index)
        if not groups.shape == rollouts.shape == agent_index.shape:
            raise ValueError(f"{agent_index.size} agents for {groups.size} rows")
        compared = np.arange(rollouts.size) if each_row else number_pairs(rollouts, agent_index)
        return estimator(rewards, number_pairs(groups, agent_index), compared)

    return within_agents


def _number(keys: Sequence[Hashable]) -> NDArray[np.int64]:
    seen: dict[Hashable, int] = {}
    return np.array([seen.setdefault(key, len(seen)) for key in keys], dtype=np.int64)


def number_pairs(first: NDArray[np.int64], second: NDArray[np.int64]) -> NDArray[np.int64]:
    """One number per distinct pair."""
    if not first.size:
        return first
    _, numbers = np.unique(np.stack((first, second)), axis=1, return_inverse=True)
    return np.asarray(numbers, dtype=np.int64).reshape(-1)


# The rewards of rows gathered by rollout and group, so that a rollout counts once however many rows it became.


Advantages = NDArray[np.float32]
Estimator = Callable[[ArrayLike, ArrayLike, ArrayLike], Advantages]
"""`(rewards, group_index, rollout_index)`, each of shape (rows,), to advantages of shape (rows,)."""


@dataclass(frozen=True, slots=True, eq=False)
class RolloutIndex:
    """`reward` and `group` per rollout, `size` in rollouts per group, `row_reward` and `rollout_of_row` per row."""

    reward: NDArray[np.float64]
    group: NDArray[np.int64]
    size: NDArray[np.int64]
    row_reward: NDArray[np.float64]
    rollout_of_row: NDArray[np.int64]

    @classmethod
    def of(cls, rewards: ArrayLike, group_index: ArrayLike, rollout_index: ArrayLike) -> RolloutIndex:
        row_reward = np.asarray(rewards, dtype=np.float64)
        if not np.isfinite(row_reward).all():
            raise ValueError(f"row {int(np.argmin(np.isfinite(row_reward)))} has no finite reward")
        _, groups = np.unique(np.asarray(group_index), return_inverse=True)
        _, first, rollouts = np.unique(np.asarray(rollout_index), return_index=True, return_inverse=True)
        if not row_reward.shape == groups.shape == rollouts.shape:
            raise ValueError(f"shapes differ: {row_reward.shape}, {groups.shape}, {rollouts.shape}")
        if (groups[first][rollouts] != groups).any():
            raise ValueError("a rollout has rows in two groups")
        reward = np.bincount(rollouts, weights=row_reward) / np.bincount(rollouts)
        return cls(reward, groups[first], np.bincount(groups[first]), row_reward, rollouts)

    def group_sum(self, per_rollout: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.bincount(self.group, weights=per_rollout).astype(np.float64)

    def by_row(self, per_group: NDArray[np.float64]) -> NDArray[np.float64]:
        return per_group[self.group[self.rollout_of_row]]

    def of_rows(self, difference: NDArray[np.float64], scale: Any = 1.0) -> Advantages:
        alone = self.by_row(self.size.astype(np.float64)) == 1
        return np.where(alone, 0.0, difference / scale).astype(np.float32)
