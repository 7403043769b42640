"""Advantages per turn: rewards of calls, from a row's metadata to its tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from examples.pivots.turns import purify, turn_level, turn_returns, turns_of
from reconstruct.records import pack_ids, pack_logprobs
from reconstruct.trajectory import Trajectory
from tests.support.sessions.training_rows import groups, trajectory
from trainer_client.advantages import dr_grpo, reinforce
from trainer_client.batch import Batch
from trainer_client.importance import masked_weights, truncated_weights


def talk(name: str, reward: float, rewards: dict[str, float] | None = None, **changes: Any) -> Trajectory:
    """0 | 11 12 | 0 | 13: two turns, the calls `one` and `two`; sampled are 11, 12 and 13."""
    metadata = {"per_call_rewards": rewards, "per_call_spans": {"one": [1, 3], "two": [4, 5]}} if rewards else {}
    mask = np.array([0, 1, 1, 0, 1], dtype=np.int8)
    fields: dict[str, Any] = {"token_ids": pack_ids([0, 11, 12, 0, 13]), "loss_mask": mask}
    fields |= {"logprobs": pack_logprobs(mask * -0.5), "weight_versions": (), "call_ids": ("one", "two")}
    return trajectory(name, reward=reward, metadata=metadata, **{**fields, **changes})


def batch_of(*rows: Trajectory) -> Batch:
    return Batch(groups(rows), weight_version=5)


def columns(batch: Batch) -> tuple[Any, Any, Any]:
    return batch.columns.rewards, batch.columns.group_index, batch.columns.rollout_index


def test_turns_are_the_sampled_stretches_of_a_row() -> None:
    turns = turns_of([talk("a", 1.0), trajectory("b", prompt=[7, 8], versions=[5, 5])])
    assert turns.row.tolist() == [0, 0, 1]
    assert list(zip(turns.start.tolist(), turns.end.tolist(), strict=True)) == [(1, 3), (4, 5), (2, 4)]
    assert turns.number.tolist() == [0, 1, 0]
    assert np.isnan(turns.reward).all()


def test_turns_of_one_rollout_are_numbered_over_its_rows() -> None:
    turns = turns_of([talk("a", 1.0, session="s"), talk("b", 1.0, session="s"), talk("c", 1.0)])
    assert turns.number.tolist() == [0, 1, 2, 3, 0, 1]


def test_a_turn_has_its_own_advantage_beside_the_outcomes() -> None:
    # Outcomes 1 and 0: +-0.5. Rewards of the first turn 4 and 0: +-2. The second turn has none.
    batch = batch_of(talk("a", 1.0, {"one": 4.0}), talk("b", 0.0, {"one": 0.0}))
    turns = turns_of(batch.rows)
    assert turn_level(*columns(batch), turns, estimator=dr_grpo).tolist() == [2.5, 0.5, -2.5, -0.5]
    assert turn_level(*columns(batch), turns, coefficient=0.5, estimator=dr_grpo).tolist() == [1.5, 0.5, -1.5, -0.5]


def test_without_rewards_of_turns_every_turn_has_the_outcomes_advantage() -> None:
    batch = batch_of(talk("a", 1.0), talk("b", 0.0))
    assert turn_level(*columns(batch), turns_of(batch.rows), estimator=dr_grpo).tolist() == [0.5, 0.5, -0.5, -0.5]


def test_a_return_adds_what_comes_later() -> None:
    # Returns of the first turn: 4 + 0.5 * 1 and 0 + 0.5 * 0; of the second: 1 and 0.
    batch = batch_of(talk("a", 1.0, {"one": 4.0}), talk("b", 0.0, {"one": 0.0}))
    found = turn_returns(*columns(batch), turns_of(batch.rows), discount=0.5, estimator=dr_grpo)
    assert found.tolist() == [2.25, 0.5, -2.25, -0.5]


def test_a_return_runs_over_all_rows_of_its_rollout() -> None:
    # Rollout s: turns 0 to 3 over two rows; the reward that counts is its last row's, 8. Rollout c: two turns, 0.
    batch = batch_of(talk("a", 1.0, session="s"), talk("b", 8.0, {"one": 2.0}, session="s"), talk("c", 0.0))
    found = turn_returns(*columns(batch), turns_of(batch.rows), estimator=dr_grpo)
    assert found.tolist() == [5, 5, 0, 0, -5, -5], "turns 2 and 3 have nothing to be compared with"


def test_turns_that_touch_are_told_apart_by_their_calls() -> None:
    mask = np.array([0, 1, 1, 1], dtype=np.int8)
    spans = {"one": [1, 2], "two": [2, 4], "none": [4, 4]}
    metadata = {"per_call_rewards": {"two": 3.0}, "per_call_spans": spans}
    row = trajectory("a", token_ids=pack_ids([0, 1, 2, 3]), loss_mask=mask, metadata=metadata, weight_versions=())
    turns = turns_of([row])
    assert list(zip(turns.start.tolist(), turns.end.tolist(), strict=True)) == [(1, 2), (2, 4)]
    np.testing.assert_array_equal(turns.reward, [np.nan, 3.0])


@pytest.mark.parametrize("spans", [None, {"one": [1, 3]}, {"one": [1, 3], "two": [3, 5]}, {"one": [0, 3], "two": [4, 5]}])
def test_a_reward_whose_tokens_are_not_known_is_refused(spans: Any) -> None:
    metadata = {"per_call_rewards": {"one": 1.0, "two": 1.0}, "per_call_spans": spans}
    with pytest.raises(ValueError, match="trajectory 'a'"):
        turns_of([replace(talk("a", 1.0), metadata=metadata)])


@pytest.mark.parametrize("side", ["left", "right"])
def test_values_of_turns_lie_on_their_tokens_padded(side: Any) -> None:
    batch = batch_of(talk("a", 1.0), trajectory("b", prompt=[7], versions=[5]))
    data = batch.padded(rows=[1, 0], side=side)
    table = turns_of(batch.rows).lay_out([1.0, 2.0, 3.0], data)
    assert table[1].tolist() == [0, 1, 1, 0, 2]
    assert table[0].tolist() == ([0, 0, 0, 0, 3] if side == "left" else [0, 3, 0, 0, 0])
    np.testing.assert_array_equal(table != 0, data.loss_mask)


def test_values_of_turns_lie_on_their_tokens_packed_and_cut() -> None:
    batch = batch_of(talk("a", 1.0), talk("b", 1.0))
    turns = turns_of(batch.rows)
    (data,) = batch.packed(10)
    assert turns.lay_out([1, 2, 3, 4], data).tolist() == [0, 1, 1, 0, 2, 0, 3, 3, 0, 4]
    first, second = batch.packed(2, truncate=True)
    assert turns.lay_out([1, 2, 3, 4], first).tolist() == [0, 1]
    assert turns.lay_out([1, 2, 3, 4], second).tolist() == [0, 3]
    assert first.cut_tokens.tolist() == [2]
    with pytest.raises(ValueError, match="3 values for 4 turns"):
        turns.lay_out([1, 2, 3], data)


@pytest.mark.case(82)
def test_values_of_turns_lie_on_their_tokens_in_a_tree() -> None:
    """a: 0 | 11 12 | 0 | 13. b: 0 | 11 | 4 | 14: one trained token that both rows share, with a value of each."""
    mask = np.array([0, 1, 0, 1], dtype=np.int8)
    other: dict[str, Any] = {"token_ids": pack_ids([0, 11, 4, 14]), "loss_mask": mask, "logprobs": pack_logprobs(mask * -0.5)}
    batch = batch_of(talk("a", 1.0), trajectory("b", weight_versions=(), **other))
    turns = turns_of(batch.rows)
    (data,) = batch.tree(10)
    assert data.row_index.tolist() == [1, 0], "sorted by their ids"
    assert turns.locate(data).tolist() == [2, 3, 0, 0, 1]
    assert turns.lay_out([1, 2, 3, 4], data).tolist() == [3, 4, 1, 1, 2]
    assert data.token_ids[data.trained_index].tolist() == [11, 14, 11, 12, 13]


def test_values_of_turns_lie_on_the_same_tokens_in_every_form_of_a_batch() -> None:
    batch = batch_of(talk("a", 1.0), talk("b", 1.0, token_ids=pack_ids([0, 11, 15, 0, 13])), talk("c", 0.0))
    turns = turns_of(batch.rows)
    values = np.arange(1, len(turns.row) + 1, dtype=np.float32)

    def by_place(data: Any) -> set[tuple[int, int, float]]:
        """Row, position in it, and value of each sampled token."""
        laid = turns.lay_out(values, data)
        assert laid.shape == np.shape(data.loss_mask) and (laid != 0).tolist() == np.asarray(data.loss_mask).tolist()
        if laid.ndim == 2:
            places = [(int(data.row_index[line]), int(data.position_ids[line, at])) for line, at in np.argwhere(laid)]
            return {(*place, float(each)) for place, each in zip(places, laid[laid != 0], strict=True)}
        depth = data.position_ids[data.trained_index] if hasattr(data, "trained_index") else data.position_ids
        rows = data.row_index[data.segment_index]
        return {(int(row), int(at), float(each)) for row, at, each in zip(rows, depth, laid, strict=True) if each}

    forms = [batch.padded(side="left"), *batch.packed(20), *batch.tree(20, framework="torch")]
    assert len(forms) == 3
    first, *others = (by_place(form) for form in forms)
    assert len(first) == 9 and all(other == first for other in others)


def test_a_chunks_ratio_is_the_geometric_mean_of_its_tokens_alone() -> None:
    """IPA's importance weights. Turn one: ratios 4 and 1, so 2; turn two: 1/8, below the bound of the mask."""
    batch = batch_of(talk("a", 1.0))
    (data,) = batch.packed(5)
    ours = data.inference_logprobs + np.log([1, 4, 1, 1, 1 / 8]).astype(np.float32) * data.loss_mask
    rows = turns_of(batch.rows).locate(data)
    given: tuple[Any, ...] = (ours, data.inference_logprobs, data.loss_mask)
    found = truncated_weights(*given, cap=10.0, level="row_mean", rows=rows)
    assert found.weights.tolist() == pytest.approx([0, 2, 2, 0, 1 / 8])
    kept = masked_weights(*given, low=0.5, high=5.0, level="row_mean", rows=rows)
    assert kept.kept.tolist() == [False, True, True, False, False]


def test_a_chunks_return_without_a_baseline_is_the_discounted_reward() -> None:
    """IPA's returns: the last chunk of a row gets its reward, the one before it half of that."""
    batch = batch_of(talk("a", 8.0), talk("b", 2.0))
    found = turn_returns(*columns(batch), turns_of(batch.rows), discount=0.5, estimator=reinforce)
    assert found.tolist() == [4, 8, 1, 2]


def test_a_failure_that_a_later_turn_makes_up_for_is_not_trained() -> None:
    """a fails, then does not. b does not, then fails: nothing makes up for that, and its reward says what it was."""
    turns = turns_of([talk("a", 1.0), talk("b", 0.0)])
    assert purify(turns, [True, False, False, True]).tolist() == [False, True, True, True]
    assert purify(turns, [True, True, True, False]).tolist() == [True, True, False, True]
    batch = batch_of(talk("a", 1.0), talk("b", 0.0))
    (data,) = batch.packed(10)
    assert turns.lay_out(purify(turns, [True, False, False, True]), data).tolist() == [0, 0, 0, 0, 1, 0, 1, 1, 0, 1]
    with pytest.raises(ValueError, match="1 values for 4 turns"):
        purify(turns, [True])
