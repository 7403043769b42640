"""The entropy of turns, from recorded logprobs, and credit by it.

A turn's entropy is the mean over its tokens of the entropy of the distribution that each was drawn from, in nats. Two estimates of it:

    sampled     -log p of the token: one number per token, which every row has; unbiased, and noisy
    top         -Σ p log p over the tokens recorded as most probable (`top_logprobs`, docs/trainers.md): less noise, and too small by
                what the others have

Both speak of the distribution that the logprobs are of: see the mode of the row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from examples.pivots.turns import Turns
from reconstruct.trajectory import Trajectory
from trainer_client.advantages import Advantages

Floats = NDArray[np.float64]
Estimate = Literal["sampled", "top"]


def turn_entropy(
    rows: Sequence[Trajectory], turns: Turns, *, first: int | None = None, estimate: Estimate = "sampled"
) -> Floats:
    """The entropy of each turn, or of its `first` tokens, float64 of shape (turns,). Raises ValueError for "top" where a row has no
    `top_logprobs`."""
    return mean_entropy((_logprobs_of(rows[row], estimate)[start:end] for row, start, end in _places(turns)), first=first)


def mean_entropy(calls: Iterable[ArrayLike], *, first: int | None = None) -> Floats:
    """The entropy of each call, float64 of shape (calls,), NaN for one without tokens: `logprobs` of its sampled tokens, of shape
    (tokens,), as `GET /sessions/{id}/calls` has them, or of the most probable tokens in each place, of shape (tokens, k). `first`: over
    its first tokens alone."""
    return np.array([_mean_of(np.asarray(logprobs, dtype=np.float64)[:first]) for logprobs in calls], dtype=np.float64)


def modulate(advantages: ArrayLike, entropy: ArrayLike, group_index: ArrayLike, *, strength: float = 1.0) -> Advantages:
    """Each turn's advantage times exp(-strength * h) / mean of exp(-strength * h), where h is the turn's entropy scaled to 0 ... 1 between
    the least and the greatest of its group, and the mean is over the group. Replies that the model was sure of weigh more, others less;
    the weights of a group have mean 1. All arrays have shape (turns,).

    After Zhao et al., "AEM: Adaptive Entropy Modulation for Multi-Turn Agentic Reinforcement Learning", arXiv:2605.00425: the form
    of the factor is theirs; that `strength` is 1 unless given, and which turns are a group, are choices of this function and its caller.
    """
    given, spread = np.asarray(advantages, dtype=np.float64), np.asarray(entropy, dtype=np.float64)
    _, groups = np.unique(np.asarray(group_index), return_inverse=True)
    if not given.shape == spread.shape == groups.shape:
        raise ValueError(f"shapes differ: {given.shape}, {spread.shape}, {groups.shape}")
    if not np.isfinite(spread).all():
        raise ValueError(f"turn {int(np.argmin(np.isfinite(spread)))} has no finite entropy")
    factors = np.ones(given.shape)
    for group in range(int(groups.max(initial=-1)) + 1):
        mine = groups == group
        least, width = spread[mine].min(), np.ptp(spread[mine])
        raw = np.exp(-strength * (spread[mine] - least) / (width or 1.0))
        factors[mine] = raw / raw.mean()
    return (given * factors).astype(np.float32)


def _places(turns: Turns) -> Iterable[tuple[int, int, int]]:
    return zip(turns.row.tolist(), turns.start.tolist(), turns.end.tolist(), strict=True)


def _logprobs_of(row: Trajectory, estimate: Estimate) -> NDArray[np.float32]:
    if estimate == "sampled":
        return row.logprobs
    if estimate != "top":
        raise ValueError(f"estimate is {estimate!r}, not 'sampled' or 'top'")
    if row.details is None or row.details.top_logprobs is None:
        raise ValueError(f"trajectory {row.trajectory_id!r} has no top_logprobs")
    return row.details.top_logprobs


def _mean_of(logprobs: Floats) -> float:
    if not len(logprobs):
        return float("nan")
    if logprobs.ndim == 1:
        return float(-logprobs.mean())
    # Where fewer tokens than k were reported the rest is NaN, and -inf stands for a probability of 0.
    finite = np.where(np.isfinite(logprobs), logprobs, 0.0)
    terms = np.where(np.isfinite(logprobs), np.exp(finite) * finite, 0.0)
    return float(-terms.sum(axis=1).mean())
