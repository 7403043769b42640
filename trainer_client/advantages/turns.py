"""Turn-level credit: an advantage for every turn of a rollout, from rewards per call.

A turn is the tokens sampled by one call, in the row that trains them. Rewards per call are those of
`POST /sessions/{id}/reward {"per_call": …}`.

    turns = turns_of(batch.rows)
    columns = batch.columns
    advantages = turn_level(columns.rewards, columns.group_index, columns.rollout_index, turns)
    data = batch.packed(token_budget)[0]
    per_token = turns.lay_out(advantages, data)      # beside data.token_ids
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from reconstruct.trajectory import Trajectory
from trainer_client.advantages.outcome import Advantages, Estimator, grpo, number_pairs
from trainer_client.arrays import PackedBatch, PaddedBatch


@dataclass(frozen=True, slots=True, eq=False)
class Turns:
    """Each field has shape (turns,), in the order of the rows. `row`: the index of its row. `start:end`: its tokens in the row.
    `number`: how many turns of its rollout lie before it. `reward` float64: NaN where the call was given none."""

    row: NDArray[np.int64]
    start: NDArray[np.int64]
    end: NDArray[np.int64]
    number: NDArray[np.int64]
    reward: NDArray[np.float64]

    def lay_out(self, per_turn: ArrayLike, data: PackedBatch | PaddedBatch) -> NDArray[np.float32]:
        """`per_turn` on the tokens of each turn, float32 of the shape of `data.token_ids` (numpy); 0 on tokens that are not
        sampled. Turns behind a cut are left out, as their tokens are."""
        values = np.asarray(per_turn, dtype=np.float32)
        if values.shape != self.row.shape:
            raise ValueError(f"{values.size} values for {self.row.size} turns")
        table = np.zeros(np.shape(data.token_ids), dtype=np.float32)
        for place, row in zip(_places(table, data), np.asarray(data.row_index), strict=True):
            for turn in np.flatnonzero(self.row == row):
                place[self.start[turn] : self.end[turn]] = values[turn]
        return table


def turns_of(rows: Sequence[Trajectory]) -> Turns:
    """The turns of `rows`: their calls where any of these has a reward, otherwise each stretch of sampled tokens.

    Raises ValueError when the calls do not cover exactly the sampled tokens.
    """
    found: list[tuple[int, int, int, int, float]] = []
    before: Counter[str] = Counter()
    for index, row in enumerate(rows):
        for start, end, reward in _find_turns(row):
            found.append((index, start, end, before[row.rollout_id], reward))
            before[row.rollout_id] += 1
    table = np.array(found, dtype=np.float64).reshape(-1, 5)
    whole = table[:, :4].astype(np.int64)
    return Turns(whole[:, 0], whole[:, 1], whole[:, 2], whole[:, 3], table[:, 4])


def turn_level(
    rewards: ArrayLike,
    group_index: ArrayLike,
    rollout_index: ArrayLike,
    turns: Turns,
    *,
    coefficient: float = 1.0,
    estimator: Estimator = grpo,
) -> Advantages:
    """Per turn: the advantage of its row's outcome + coefficient * the advantage of the turn's own reward.

    The latter compares the turns of one number in a group, each rollout with the others; a turn without a reward (the last one,
    as a rule) has the outcome's alone. Source: Zeng et al., "Reinforcing Multi-Turn Reasoning in LLM Agents via Turn-Level Credit
    Assignment", arXiv:2505.11821 (MT-GRPO). The paper has two turns; the coefficient stands where the authors' code has it.
    """
    outcome = estimator(rewards, group_index, rollout_index)[turns.row]
    given = np.flatnonzero(np.isfinite(turns.reward))
    own = np.zeros(len(outcome), dtype=np.float32)
    own[given] = estimator(turns.reward[given], *_peers(group_index, rollout_index, turns, given))
    return (outcome + np.float32(coefficient) * own).astype(np.float32)


def turn_returns(
    rewards: ArrayLike,
    group_index: ArrayLike,
    rollout_index: ArrayLike,
    turns: Turns,
    *,
    discount: float = 1.0,
    estimator: Estimator = grpo,
) -> Advantages:
    """Per turn: the advantage of its return, which is the sum of discount ** (turns from here) * reward over this and the later
    turns of its rollout; the reward of the row of the rollout's last turn comes in with that turn. Turns of one number are compared.

    With two turns of which the first has a reward: the "cumulative" estimate of MT-GRPO's authors (source: see turn_level).
    """
    outcome, rollouts = np.asarray(rewards, dtype=np.float64), np.asarray(rollout_index)[turns.row]
    gained = np.nan_to_num(turns.reward, nan=0.0)
    returns = np.zeros(len(turns.row))
    following: dict[Any, float] = {}
    for turn in range(len(turns.row) - 1, -1, -1):
        rollout = rollouts[turn]
        later = discount * following[rollout] if rollout in following else outcome[turns.row[turn]]
        returns[turn] = following[rollout] = gained[turn] + later
    every = np.arange(len(turns.row))
    return estimator(returns, *_peers(group_index, rollout_index, turns, every))


def _peers(
    group_index: ArrayLike, rollout_index: ArrayLike, turns: Turns, which: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Group and rollout of each turn, where turns of one number in one group are a group."""
    groups, rollouts = np.asarray(group_index)[turns.row][which], np.asarray(rollout_index)[turns.row][which]
    return number_pairs(groups, turns.number[which]), number_pairs(rollouts, turns.number[which])


def _find_turns(row: Trajectory) -> list[tuple[int, int, float]]:
    """Start, end and reward (NaN: none) of each turn."""
    rewards, spans = row.metadata.get("per_call_rewards"), row.metadata.get("per_call_spans")
    if not rewards:
        return [(start, end, np.nan) for start, end in _runs(row.loss_mask)]
    if spans is None or rewards.keys() - spans.keys():
        raise ValueError(f"trajectory {row.trajectory_id!r} does not say which tokens its rewarded calls sampled")
    turns = sorted((int(start), int(end), float(rewards.get(call, np.nan))) for call, (start, end) in spans.items())
    covered = np.zeros(len(row.loss_mask), dtype=np.int64)
    for start, end, _ in turns:
        covered[start:end] += 1
    if (covered != row.loss_mask).any():
        at = int(np.argmax(covered != row.loss_mask))
        raise ValueError(f"trajectory {row.trajectory_id!r}: its calls and its loss mask differ at token {at}")
    return [turn for turn in turns if turn[0] < turn[1]]


def _runs(loss_mask: NDArray[Any]) -> Iterator[tuple[int, int]]:
    """Start and end of each stretch of sampled tokens."""
    borders = np.flatnonzero(np.diff(loss_mask, prepend=0, append=0))
    return ((int(start), int(end)) for start, end in list(pairwise(borders))[::2])


def _places(table: NDArray[np.float32], data: PackedBatch | PaddedBatch) -> list[NDArray[np.float32]]:
    """Views of `table` on the tokens of each row of `data`."""
    if isinstance(data, PackedBatch):
        return data.split(table)
    masks = np.asarray(data.attention_mask) == 1
    return [line[mask.argmax() : mask.argmax() + mask.sum()] for line, mask in zip(table, masks, strict=True)]
