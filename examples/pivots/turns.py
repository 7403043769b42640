"""Turn-level credit: an advantage for every turn of a rollout, from rewards per call.

A turn is the tokens sampled by one call, in the row that trains them. Rewards per call are those of
`POST /sessions/{id}/reward {"per_call": …}`.

    turns = turns_of(batch.rows)
    columns = batch.columns
    advantages = turn_level(columns.rewards, columns.group_index, columns.rollout_index, turns)
    data = batch.packed(token_budget)[0]
    per_token = turns.lay_out(advantages, data)      # beside data.loss_mask

Chunk-level importance weights (IPA) take the turns for `rows`:

    truncated_weights(ours, data.inference_logprobs, data.loss_mask, level="row_mean", rows=turns.locate(data))
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
from trainer_client import PackedBatch, PaddedBatch, TreeBatch
from trainer_client.advantages import Advantages, Estimator, grpo, number_pairs


@dataclass(frozen=True, slots=True, eq=False)
class Turns:
    """Each field has shape (turns,), in the order of the rows. `row`: the index of its row. `start:end`: its tokens in the row.
    `number`: how many turns of its rollout lie before it. `reward` float64: NaN where the call was given none."""

    row: NDArray[np.int64]
    start: NDArray[np.int64]
    end: NDArray[np.int64]
    number: NDArray[np.int64]
    reward: NDArray[np.float64]

    def lay_out(self, per_turn: ArrayLike, data: PackedBatch | PaddedBatch | TreeBatch) -> NDArray[np.float32]:
        """`per_turn` on the tokens of each turn, float32 of the shape of `data.loss_mask` (numpy); 0 on tokens that are not
        sampled. Turns behind a cut are left out, as their tokens are."""
        values = np.asarray(per_turn, dtype=np.float32)
        if values.shape != self.row.shape:
            raise ValueError(f"{values.size} values for {self.row.size} turns")
        turn = self.locate(data)
        return np.where(turn < 0, np.float32(0), np.append(values, np.float32(0))[turn])

    def locate(self, data: PackedBatch | PaddedBatch | TreeBatch) -> NDArray[np.int64]:
        """The turn of each token, int64 of the shape of `data.loss_mask` (numpy); -1 on tokens that are not sampled."""
        found = np.full(np.shape(data.loss_mask), -1, dtype=np.int64)
        rows = np.asarray(data.row_index)
        for places, positions, row in zip(_views(found, data), _positions(data), rows, strict=True):
            for turn in np.flatnonzero(self.row == row):
                places[(positions >= self.start[turn]) & (positions < self.end[turn])] = turn
        return found


def turns_of(rows: Sequence[Trajectory]) -> Turns:
    """The turns of `rows`: their calls where a row says which tokens are whose, otherwise each stretch of sampled tokens.

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


def find_failed(rows: Sequence[Trajectory], turns: Turns) -> NDArray[np.bool_]:
    """Which turns failed, bool of shape (turns,): the reward given to the call is below 0, or its reply has a tool call that the engine
    could not parse."""
    failed = np.nan_to_num(turns.reward, nan=0.0) < 0
    for index, row in enumerate(rows):
        spans = row.metadata.get("per_call_spans") or {}
        starts = [spans[call][0] for call in row.metadata.get("invalid_tool_calls") or () if call in spans]
        failed |= (turns.row == index) & np.isin(turns.start, starts)
    return failed


def purify(turns: Turns, failed: ArrayLike) -> NDArray[np.bool_]:
    """Which turns to train, bool of shape (turns,): all but those that failed and that a later turn of their row, which did not, makes up
    for. Weigh the loss with `turns.lay_out(purify(turns, failed), data)`, and divide it by the tokens that stay.

    After Xu et al., "CLEANER: Self-Purified Trajectories Boost Agentic Reinforcement Learning", arXiv:2601.15141. There the failure is
    replaced by its correction, and what follows is trained after a history that was never sampled from. Here contexts stay what they
    were: the failure is left out of the loss alone, and its correction is trained as what it was, the answer to an error. For a history
    without the failure, fork the rollout at it.
    """
    wrong = np.asarray(failed, dtype=np.bool_)
    if wrong.shape != turns.row.shape:
        raise ValueError(f"{wrong.size} values for {turns.row.size} turns")
    last = {row: int(turns.start[(turns.row == row) & ~wrong].max(initial=-1)) for row in set(turns.row.tolist())}
    return ~wrong | (turns.start > [last[row] for row in turns.row.tolist()])


def _find_turns(row: Trajectory) -> list[tuple[int, int, float]]:
    """Start, end and reward (NaN: none) of each turn."""
    rewards, spans = row.metadata.get("per_call_rewards") or {}, row.metadata.get("per_call_spans")
    if not rewards and spans is None:
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


def _views(table: NDArray[Any], data: PackedBatch | PaddedBatch | TreeBatch) -> list[NDArray[Any]]:
    """Views of `table`, which has the shape of `data.loss_mask`, on the tokens of each row of `data`."""
    if isinstance(data, PackedBatch):
        return data.split(table)
    if isinstance(data, PaddedBatch):
        masks = np.asarray(data.attention_mask) == 1
        return [line[mask.argmax() : mask.argmax() + mask.sum()] for line, mask in zip(table, masks, strict=True)]
    borders = np.searchsorted(np.asarray(data.segment_index), np.arange(len(data.row_index) + 1))
    return [table[start:end] for start, end in pairwise(borders)]


def _positions(data: PackedBatch | PaddedBatch | TreeBatch) -> list[NDArray[np.int64]]:
    """For each row of `data`, the positions in the row of the tokens that `_views` shows."""
    if isinstance(data, TreeBatch):
        return _views(np.asarray(data.position_ids)[np.asarray(data.trained_index)], data)
    return _views(np.asarray(data.position_ids), data)
