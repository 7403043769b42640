"""Advantages of rows from the rewards of their group: pure functions on numpy arrays.

Each takes `rewards`, `group_index` and `rollout_index`, all of shape (rows,), as `Batch.advantages` hands them over, and
returns float32 of shape (rows,). A rollout that became several rows counts once in its group's baseline and spread, with
the mean of its rows' rewards; each row's advantage is measured from its own reward. A rollout alone in its group has
nothing to be compared with: 0. A reward that is not finite raises ValueError: a row without a reward must be left out by
whoever knows why it has none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Advantages = NDArray[np.float32]


def grpo(rewards: ArrayLike, group_index: ArrayLike, rollout_index: ArrayLike, *, epsilon: float = 1e-6) -> Advantages:
    """(reward - mean of the group) / (standard deviation of the group + epsilon).

    The deviation is the sample's (n - 1). Source: Shao et al., "DeepSeekMath: Pushing the Limits of Mathematical Reasoning
    in Open Language Models", arXiv:2402.03300, section 4.1 (outcome supervision).
    """
    table = _Rollouts.of(rewards, group_index, rollout_index)
    mean = table.group_sum(table.reward) / table.size
    spread = np.sqrt(table.group_sum((table.reward - mean[table.group]) ** 2) / np.maximum(table.size - 1, 1))
    return table.of_rows(table.row_reward - table.by_row(mean), table.by_row(spread) + epsilon)


def dr_grpo(rewards: ArrayLike, group_index: ArrayLike, rollout_index: ArrayLike) -> Advantages:
    """reward - mean of the group.

    Dividing by the deviation weighs questions by their difficulty, so it is left out. The same paper sums token losses over a
    constant length instead of each row's own; that belongs to the loss, not here. Source: Liu et al., "Understanding
    R1-Zero-Like Training: A Critical Perspective", arXiv:2503.20783.
    """
    table = _Rollouts.of(rewards, group_index, rollout_index)
    mean = table.group_sum(table.reward) / table.size
    return table.of_rows(table.row_reward - table.by_row(mean))


def leave_one_out(rewards: ArrayLike, group_index: ArrayLike, rollout_index: ArrayLike) -> Advantages:
    """reward - mean of the group's other rollouts.

    Source: Ahmadian et al., "Back to Basics: Revisiting REINFORCE Style Optimization for Learning from Human Feedback in
    LLMs", arXiv:2402.14740.
    """
    table = _Rollouts.of(rewards, group_index, rollout_index)
    others = np.maximum(table.size - 1, 1)[table.group]
    baseline = (table.group_sum(table.reward)[table.group] - table.reward) / others
    return table.of_rows(table.row_reward - baseline[table.rollout_of_row])


@dataclass(frozen=True, slots=True, eq=False)
class _Rollouts:
    """`reward` and `group` per rollout, `size` in rollouts per group, `row_reward` and `rollout_of_row` per row."""

    reward: NDArray[np.float64]
    group: NDArray[np.int64]
    size: NDArray[np.int64]
    row_reward: NDArray[np.float64]
    rollout_of_row: NDArray[np.int64]

    @classmethod
    def of(cls, rewards: ArrayLike, group_index: ArrayLike, rollout_index: ArrayLike) -> _Rollouts:
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
