"""The rewards of rows gathered by rollout and group, so that a rollout counts once however many rows it became."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Advantages = NDArray[np.float32]
Estimator = Callable[[ArrayLike, ArrayLike, ArrayLike], Advantages]
"""`(rewards, group_index, rollout_index)`, each of shape (rows,), to advantages of shape (rows,)."""


@dataclass(frozen=True, slots=True, eq=False)
class Rollouts:
    """`reward` and `group` per rollout, `size` in rollouts per group, `row_reward` and `rollout_of_row` per row."""

    reward: NDArray[np.float64]
    group: NDArray[np.int64]
    size: NDArray[np.int64]
    row_reward: NDArray[np.float64]
    rollout_of_row: NDArray[np.int64]

    @classmethod
    def of(cls, rewards: ArrayLike, group_index: ArrayLike, rollout_index: ArrayLike) -> Rollouts:
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
