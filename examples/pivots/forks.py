"""Where to fork rollouts, values of their calls by Monte Carlo, and advantages per turn from them.

A *state* is what a turn is sampled after: the ids before it with their images, of one model. A fork (docs/forks.md) is a sample of the
value of the state at its pivot: its reward is what came of going on from there. Forks of forks are samples of the states at their own
pivots, and of no earlier one, since what they replay was not sampled for them. A fork that diverged before its pivot is a sample of none.

            ┌─ fork 2: 1       pivot at turn 2 of the origin, rewards 1, 0, 1: V(s2) = 2/3 ± 1/3
    s1 ─ s2 ├─ fork 3: 0       the origin's turn 1 moved the rollout from s1 to s2,
            ├─ fork 4: 1       its turn 2 from s2 to the end, where the reward is 0
            └─ origin: 0

    columns = batch.columns
    turns = turns_of(batch.rows)
    credit = vine(columns.rewards, columns.group_index, columns.rollout_index, turns, batch.rows)
    per_token = turns.lay_out(credit.advantages, data)

Put the origin and its forks, which are groups of their own, into one batch: `Batch.join`.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np
from numpy.typing import ArrayLike, NDArray

from examples.pivots.turns import Turns
from reconstruct.media import Media, overlapping
from reconstruct.trajectory import Trajectory
from reconstruct.values import Value, estimate
from trainer_client.advantages import Advantages, RolloutIndex

Floats = NDArray[np.float64]
State = tuple[str, bytes, tuple[Media, ...]]
"""The model, a digest of the ids, and the images among them."""


@dataclass(frozen=True, slots=True, eq=False)
class Vine:
    """Each field has shape (turns,). `value` float64: what the state before the turn is worth, NaN if nothing says so; `error` float64:
    its standard error, NaN below two samples; `samples` int64; `advantages` float32."""

    value: Floats
    error: Floats
    samples: NDArray[np.int64]
    advantages: Advantages


def vine(
    rewards: ArrayLike, group_index: ArrayLike, rollout_index: ArrayLike, turns: Turns, rows: Sequence[Trajectory]
) -> Vine:
    """Per turn: the value of the next state that is known less that of the state before the turn; at the row's end its reward stands for
    the former.

    The value of a state is the mean reward of the forks that were sampled from it, a rollout's own reward left out: a baseline that
    contained it would not be independent of what is judged. Where no fork says what a turn's state is worth, the last known state
    before it in the row counts, so the turns between two pivots share one advantage; before the first, the mean of the other
    rollouts of the group. 0 where there is neither.

    Source: Kazemnejad et al., "VinePPO: Refining Credit Assignment in RL Training of LLMs", arXiv:2410.01679: there every step of a
    rollout is a pivot, and A = r + V(next) - V, undiscounted.
    """
    table = RolloutIndex.of(rewards, group_index, rollout_index)
    states, groups = _Samples(_collect_samples(rows, table)), _Samples(_collect_groups(table))
    lengths = sorted({pivot for row in rows if (pivot := _find_pivot(row)) is not None})
    value, error = np.full(len(turns.row), np.nan), np.full(len(turns.row), np.nan)
    count, gained = np.zeros(len(turns.row), dtype=np.int64), np.zeros(len(turns.row))
    borders = np.searchsorted(turns.row, np.arange(len(rows) + 1)).tolist()
    for index, row in enumerate(rows):
        rollout = int(table.rollout_of_row[index])
        walked = [(place, states.without(rollout, state)) for place, state in _walk_states(row, lengths)]
        known = [(place, found) for place, found in walked if found.samples]
        others = groups.without(rollout, int(table.group[rollout]))
        for turn in range(borders[index], borders[index + 1]):
            start = turns.start[turn]
            before = next((found for place, found in reversed(known) if place <= start), others)
            after = next((found.mean for place, found in known if place > start), table.row_reward[index])
            value[turn], error[turn], count[turn] = before.mean, before.error, before.samples
            gained[turn] = after - before.mean if before.samples else 0.0
    return Vine(value, error, count, gained.astype(np.float32))


def branch_gains(
    rewards: ArrayLike,
    group_index: ArrayLike,
    rollout_index: ArrayLike,
    turns: Turns,
    rows: Sequence[Trajectory],
    *,
    discount: float = 1.0,
    prior: float = 1.0,
) -> Advantages:
    """Per turn: the sum of discount ** (turns from here) * gain over this and the later turns of its row. The gain of a turn is
    n / (n + prior) * (mean reward of the n rollouts of the group that sampled the same ids from the same state - mean reward of all
    that were sampled from it), 0 where all sampled the same. It needs no forks: rollouts share their states as far as they agree.

    After Su and Wen, "Learning CLI Agents with Structured Action Credit under Selective Observation", arXiv:2605.08013 (A³): its
    tree-level channel. There states and actions are clusters of parsed shell commands, here they are exact; its gate and its
    fusion with the other two channels are left out.
    """
    table = RolloutIndex.of(rewards, group_index, rollout_index)
    gains = np.zeros(len(turns.row))
    for group in range(len(table.size)):
        mine = np.flatnonzero(table.group[table.rollout_of_row[turns.row]] == group)
        for visits in _group_by_state(turns, rows, mine).values():
            _add_gains(gains, table.reward, {ids: _rollouts_of(table, turns, at) for ids, at in visits.items()}, visits, prior)
    returns = np.zeros(len(turns.row))
    following: dict[int, float] = {}
    for turn in range(len(turns.row) - 1, -1, -1):
        row = int(turns.row[turn])
        returns[turn] = following[row] = gains[turn] + discount * following.get(row, 0.0)
    return returns.astype(np.float32)


# Pivots: where to fork a rollout. They are indexes of turns or of calls, in the order of the arrays given.


def find_uncertain(entropy: ArrayLike, rollout_index: ArrayLike, *, count: int = 1) -> NDArray[np.int64]:
    """In each rollout, the at most `count` turns whose entropy rose most above that of its first turn; indexes of shape (pivots,),
    ascending. Only turns where it rose.

    After Dong et al., "Agentic Reinforced Policy Optimization", arXiv:2507.19849 (ARPO). There a rollout branches after a tool result
    with a probability that grows with the rise of the entropy of the next reply's first tokens (20 in the authors' code) over that
    at the rollout's beginning; here the greatest rises are chosen, for rollouts that are already over.
    """
    spread, rollouts = np.asarray(entropy, dtype=np.float64), np.asarray(rollout_index)
    if spread.shape != rollouts.shape:
        raise ValueError(f"shapes differ: {spread.shape}, {rollouts.shape}")
    chosen: list[int] = []
    for rollout in np.unique(rollouts):
        mine = np.flatnonzero(rollouts == rollout)
        rise = spread[mine] - spread[mine[0]]
        best = np.argsort(-np.nan_to_num(rise, nan=-np.inf), kind="stable")[:count]
        chosen += mine[best[np.nan_to_num(rise[best], nan=-np.inf) > 0]].tolist()
    return np.array(sorted(chosen), dtype=np.int64)


def find_first_failure(failed: ArrayLike, rollout_index: ArrayLike) -> NDArray[np.int64]:
    """In each rollout, the first turn that failed; indexes of shape (pivots,), ascending. `failed` bool of shape (turns,), as of
    `find_failed`, or by any judge.

    After Yuan et al., "Agent-R: Training Language Model Agents to Reflect via Iterative Self-Training", arXiv:2501.11425, and Shi et
    al., "R³L: Reflect-then-Retry Reinforcement Learning with Language-Guided Exploration, Pivotal Credit, and Positive
    Amplification", arXiv:2601.03715: both let the model name its first error, and go on from there.
    """
    wrong, rollouts = np.asarray(failed, dtype=np.bool_), np.asarray(rollout_index)
    if wrong.shape != rollouts.shape:
        raise ValueError(f"shapes differ: {wrong.shape}, {rollouts.shape}")
    at = np.flatnonzero(wrong)
    _, first = np.unique(rollouts[at], return_index=True)
    return np.sort(at[first]).astype(np.int64)


@dataclass(frozen=True, slots=True)
class _Samples:
    """Of each state (or group), the reward of each rollout that is a sample of its value, by the rollout's number."""

    rewards: Mapping[Hashable, Mapping[int, float]]
    # What is left depends on the reward that is left out alone, and rewards are few.
    _known: dict[tuple[Hashable, float | None], Value] = field(default_factory=dict)

    def without(self, rollout: int, key: Hashable) -> Value:
        """The value that the other rollouts' rewards speak of."""
        samples = self.rewards.get(key, {})
        own = samples.get(rollout)
        if (key, own) not in self._known:
            self._known[key, own] = estimate(reward for other, reward in samples.items() if other != rollout)
        return self._known[key, own]


def _collect_samples(rows: Sequence[Trajectory], table: RolloutIndex) -> dict[Hashable, dict[int, float]]:
    found: dict[Hashable, dict[int, float]] = {}
    for row, rollout in zip(rows, table.rollout_of_row.tolist(), strict=True):
        if (pivot := _find_pivot(row)) is not None:
            ((_, state),) = _walk_states(row, [pivot])
            found.setdefault(state, {})[rollout] = float(table.reward[rollout])
    return found


def _collect_groups(table: RolloutIndex) -> dict[Hashable, dict[int, float]]:
    found: dict[Hashable, dict[int, float]] = {}
    for rollout, (group, reward) in enumerate(zip(table.group.tolist(), table.reward.tolist(), strict=True)):
        found.setdefault(group, {})[rollout] = reward
    return found


def _find_pivot(row: Trajectory) -> int | None:
    """Where in the row its fork was sampled in the place of the pivot."""
    pivot = (row.metadata.get("replay") or {}).get("pivot")
    return None if pivot is None else int(pivot)


def _walk_states(row: Trajectory, lengths: Sequence[int]) -> Iterator[tuple[int, State]]:
    """The row's states after each of the ascending `lengths` that it reaches."""
    digest, done = blake2b(digest_size=16), 0
    for length in lengths:
        if length > len(row.token_ids):
            return
        digest.update(row.token_ids[done:length].tobytes())
        done = length
        # Equal ids may stand for different images.
        yield length, (row.policy, digest.digest(), tuple(overlapping(row.media, 0, length)))


Visits = dict[bytes, list[int]]
"""The turns that sampled the same ids from one state, by those ids."""


def _group_by_state(turns: Turns, rows: Sequence[Trajectory], chosen: NDArray[np.int64]) -> dict[State, Visits]:
    found: dict[State, Visits] = {}
    for turn in chosen.tolist():
        row, start, end = rows[turns.row[turn]], int(turns.start[turn]), int(turns.end[turn])
        ((_, state),) = _walk_states(row, [start])
        found.setdefault(state, {}).setdefault(row.token_ids[start:end].tobytes(), []).append(turn)
    return found


def _rollouts_of(table: RolloutIndex, turns: Turns, at: Sequence[int]) -> NDArray[np.int64]:
    return np.unique(table.rollout_of_row[turns.row[at]])


def _add_gains(gains: Floats, reward: Floats, taken: Mapping[bytes, NDArray[np.int64]], visits: Visits, prior: float) -> None:
    if len(taken) < 2:
        return
    everyone = reward[np.unique(np.concatenate(list(taken.values())))].mean()
    for ids, rollouts in taken.items():
        support = len(rollouts) / (len(rollouts) + prior)
        gains[visits[ids]] = support * (reward[rollouts].mean() - everyone)
