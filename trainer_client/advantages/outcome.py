"""Advantages from one reward per row: GRPO, Dr. GRPO, leave-one-out and plain REINFORCE."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from reconstruct.trajectory import Trajectory


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


# Resample on correct: of a group that was rolled out too often, keep any failures but mostly the cleaner successes.
#
# Source: Shang et al., "rStar2-Agent: Agentic Reasoning Technical Report", arXiv:2508.20722 (GRPO-RoC, equations 4
# and 5). There 2G rollouts are made of which G are kept, half of the failures and half of the successes.


CLEANEST = 1e-6
"""Added to a penalty before its inverse is taken: rollouts without any go first, in any order, and then the others by weight."""


def tool_error_penalty(errors: ArrayLike, calls: ArrayLike) -> NDArray[np.float64]:
    """errors / tool calls, and 0.5 where no tool was called (equation 4). Shapes as given."""
    failed, made = np.asarray(errors, dtype=np.float64), np.asarray(calls, dtype=np.float64)
    if (failed < 0).any() or (failed > made).any():
        raise ValueError("a rollout has more tool errors than tool calls, or a negative number")
    return np.where(made == 0, 0.5, failed / np.maximum(made, 1))


def format_penalty(answers: ArrayLike, turns: ArrayLike) -> NDArray[np.float64]:
    """1 where there is no answer, otherwise min(1, (answers - 1) / turns) (equation 5). Shapes as given."""
    given, taken = np.asarray(answers, dtype=np.float64), np.asarray(turns, dtype=np.float64)
    return np.where(given == 0, 1.0, np.minimum(1.0, (given - 1) / np.maximum(taken, 1)))


def resample_on_correct(
    rewards: ArrayLike,
    group_index: ArrayLike,
    rollout_index: ArrayLike,
    penalties: ArrayLike,
    *,
    keep: int,
    generator: np.random.Generator,
) -> NDArray[np.bool_]:
    """Which rows to keep, bool of shape (rows,): all rows of `keep` rollouts per group; a group of no more is kept whole.

    Of n rollouts, the failures (mean reward of their rows not above 0) keep floor(failures * keep / n), drawn uniformly; successes
    fill the rest, drawn one after the other with probability inversely proportional to their penalty. `penalties` of shape
    (rows,), not negative; a rollout's is the mean over its rows.
    """
    table = RolloutIndex.of(rewards, group_index, rollout_index)
    penalty = RolloutIndex.of(penalties, group_index, rollout_index).reward
    if (penalty < 0).any() or keep < 1:
        raise ValueError("penalties may not be negative, and at least one rollout is kept")
    kept = np.zeros(len(table.reward), dtype=np.bool_)
    for group in range(len(table.size)):
        members = np.flatnonzero(table.group == group)
        kept[members[_chosen(table.reward[members] > 0, penalty[members], keep, generator)]] = True
    return kept[table.rollout_of_row]


def among(estimator: Estimator, kept: ArrayLike) -> Estimator:
    """`estimator` over the kept rows as if there were no others; those get 0. Leave them out of the loss: a row of no
    advantage still counts in a mean over tokens."""
    mask = np.asarray(kept, dtype=np.bool_)

    def of_kept(rewards: ArrayLike, group_index: ArrayLike, rollout_index: ArrayLike) -> Advantages:
        advantages = np.zeros(mask.shape, dtype=np.float32)
        advantages[mask] = estimator(*(np.asarray(column)[mask] for column in (rewards, group_index, rollout_index)))
        return advantages

    return of_kept


def _chosen(
    correct: NDArray[np.bool_], penalty: NDArray[np.float64], keep: int, generator: np.random.Generator
) -> NDArray[np.int64]:
    """Indexes of the rollouts of one group that are kept."""
    good, bad = np.flatnonzero(correct), np.flatnonzero(~correct)
    if len(correct) <= keep:
        return np.arange(len(correct))
    failures = len(bad) * keep // len(correct)
    # The largest of log-weight + Gumbel noise are a draw without replacement by weight (Efraimidis and Spirakis 2006).
    order = np.argsort(np.log(penalty[good] + CLEANEST) - generator.gumbel(size=len(good)))
    return np.concatenate((generator.permutation(bad)[:failures], good[order[: keep - failures]]))


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
