"""Advantages from one reward per row: GRPO, Dr. GRPO and leave-one-out."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from trainer_client.advantages.rollouts import Advantages, Rollouts


def grpo(rewards: ArrayLike, group_index: ArrayLike, rollout_index: ArrayLike, *, epsilon: float = 1e-6) -> Advantages:
    """(reward - mean of the group) / (standard deviation of the group + epsilon).

    The deviation is the sample's (n - 1). Source: Shao et al., "DeepSeekMath: Pushing the Limits of Mathematical Reasoning
    in Open Language Models", arXiv:2402.03300, section 4.1 (outcome supervision).
    """
    table = Rollouts.of(rewards, group_index, rollout_index)
    mean = table.group_sum(table.reward) / table.size
    spread = np.sqrt(table.group_sum((table.reward - mean[table.group]) ** 2) / np.maximum(table.size - 1, 1))
    return table.of_rows(table.row_reward - table.by_row(mean), table.by_row(spread) + epsilon)


def dr_grpo(rewards: ArrayLike, group_index: ArrayLike, rollout_index: ArrayLike) -> Advantages:
    """reward - mean of the group.

    Dividing by the deviation weighs questions by their difficulty, so it is left out. The same paper sums token losses over a
    constant length instead of each row's own; that belongs to the loss, not here. Source: Liu et al., "Understanding
    R1-Zero-Like Training: A Critical Perspective", arXiv:2503.20783.
    """
    table = Rollouts.of(rewards, group_index, rollout_index)
    mean = table.group_sum(table.reward) / table.size
    return table.of_rows(table.row_reward - table.by_row(mean))


def leave_one_out(rewards: ArrayLike, group_index: ArrayLike, rollout_index: ArrayLike) -> Advantages:
    """reward - mean of the group's other rollouts.

    Source: Ahmadian et al., "Back to Basics: Revisiting REINFORCE Style Optimization for Learning from Human Feedback in
    LLMs", arXiv:2402.14740.
    """
    table = Rollouts.of(rewards, group_index, rollout_index)
    others = np.maximum(table.size - 1, 1)[table.group]
    baseline = (table.group_sum(table.reward)[table.group] - table.reward) / others
    return table.of_rows(table.row_reward - baseline[table.rollout_of_row])
