"""Resample on correct: of a group that was rolled out too often, keep any failures but mostly the cleaner successes.

Source: Shang et al., "rStar2-Agent: Agentic Reasoning Technical Report", arXiv:2508.20722 (GRPO-RoC, equations 4 and 5). There 2G rollouts
are made of which G are kept, half of the failures and half of the successes.

    batch.advantages(among(grpo, kept))                                             # `kept` by resample_on_correct
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from trainer_client.advantages import Advantages, Estimator, RolloutIndex

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
