"""Rows as padded and packed arrays: every token where it belongs, and back again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from reconstruct.trajectory import Trajectory, encode_row
from tests.support.sessions.training_rows import groups, trajectory
from trainer_client.advantages import dr_grpo
from trainer_client.arrays import PackedBatch, first_fit_decreasing
from trainer_client.batch import Batch
from trainer_client.errors import RowTooLong
from trainer_client.wire import Group, decode_trajectory, versions_by_token


def two_rows() -> Batch:
    """Under version 7:

    a: 1 2 | 101 102 103    versions 5 5 6
    b: 9   | 101            version  7
    """
    a = trajectory("a", prompt=[1, 2], versions=[5, 5, 6], reward=1.0)
    b = trajectory("b", prompt=[9], versions=[7], reward=0.0)
    return Batch(groups([a, b]), weight_version=7)


def test_padded_at_the_right() -> None:
    data = two_rows().padded(pad_id=99)
    assert data.token_ids.tolist() == [[1, 2, 101, 102, 103], [9, 101, 99, 99, 99]]
    assert data.attention_mask.tolist() == [[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]]
    assert data.position_ids.tolist() == [[0, 1, 2, 3, 4], [0, 1, 0, 0, 0]]
    assert data.loss_mask.tolist() == [[False, False, True, True, True], [False, True, False, False, False]]
    assert data.inference_logprobs.tolist() == [[0, 0, -0.5, -1, -1.5], [0, -0.5, 0, 0, 0]]
    assert data.weight_versions.tolist() == [[-1, -1, 5, 5, 6], [-1, 7, -1, -1, -1]]


def test_padded_at_the_left() -> None:
    data = two_rows().padded(pad_id=99, side="left")
    assert data.token_ids.tolist()[1] == [99, 99, 99, 9, 101]
    assert data.attention_mask.tolist()[1] == [0, 0, 0, 1, 1]
    assert data.position_ids.tolist()[1] == [0, 0, 0, 0, 1]


def test_a_version_may_be_a_time_in_milliseconds() -> None:
    """The service takes them up to 2**53; as int32 they raised in the trainer, which then could read no lease."""
    version = 1_790_000_000_000
    row = trajectory("a", prompt=[1, 2], versions=[version, version + 1], reward=1.0)
    batch = Batch(groups([decode_trajectory(encode_row(row))]), weight_version=version + 1)
    expected = [-1, -1, version, version + 1]
    assert batch.padded().weight_versions.tolist() == [expected]
    assert batch.packed(8)[0].weight_versions.tolist() == expected
    assert sorted(batch.tree(8)[0].weight_versions.tolist()) == expected[2:]
    assert batch.staleness.tolist() == [1]


def test_values_of_rows_come_along() -> None:
    batch = two_rows()
    data = batch.padded(advantages=batch.advantages(dr_grpo))
    assert data.rewards.tolist() == [1, 0] and data.advantages.tolist() == [0.5, -0.5]
    assert data.staleness.tolist() == [2, 0]
    assert (data.group_index.tolist(), data.rollout_index.tolist(), data.row_index.tolist()) == ([0, 0], [0, 1], [0, 1])


def test_the_rows_of_each_model_are_compared_where_a_group_comes_once_for_each() -> None:
    """So does one of which the rows of a model were leased alone, and given back."""
    default = [trajectory(f"a{at}", session=f"s{at}", reward=float(at)) for at in range(2)]
    critic = [trajectory(f"b{at}", session=f"s{at}", reward=float(at), policy="critic") for at in range(2)]
    batch = Batch([Group("g", tuple(default)), Group("g", tuple(critic))], 7, weight_versions={"critic": 6})
    assert batch.columns.rollout_index.tolist() == [0, 1, 2, 3]
    assert batch.advantages(dr_grpo).tolist() == [-0.5, 0.5, -0.5, 0.5]


def test_a_row_without_a_reward_has_none_and_is_not_taken_for_a_failure() -> None:
    batch = Batch(groups([trajectory("a", reward=None), trajectory("b", reward=0.0)]), weight_version=7)
    np.testing.assert_array_equal(batch.padded().rewards, [np.nan, 0])
    with pytest.raises(ValueError, match="row 0 has no finite reward"):
        batch.advantages(dr_grpo)


def test_the_length_is_rounded_up() -> None:
    assert two_rows().padded(multiple_of=4).token_ids.shape == (2, 8)
    assert two_rows().padded(multiple_of=5, max_length=10).token_ids.shape == (2, 5)


def test_a_micro_batch_takes_its_rows_and_their_advantages() -> None:
    data = two_rows().padded(rows=[1], advantages=[10.0, 20.0])
    assert data.token_ids.tolist() == [[9, 101]]
    assert (data.row_index.tolist(), data.advantages.tolist(), data.rollout_index.tolist()) == ([1], [20], [1])


def test_a_row_over_the_limit_raises_or_loses_its_end_on_request() -> None:
    with pytest.raises(RowTooLong, match="'a' has 5 tokens, the limit is 3"):
        two_rows().padded(max_length=3)
    data = two_rows().padded(max_length=3, truncate=True)
    assert data.token_ids.tolist() == [[1, 2, 101], [9, 101, 0]]
    assert data.cut_tokens.tolist() == [2, 0]


def test_a_row_over_the_budget_raises_or_loses_its_end_on_request() -> None:
    with pytest.raises(RowTooLong, match="'a' has 5 tokens, the limit is 4"):
        two_rows().packed(4)
    first, second = two_rows().packed(4, truncate=True)
    assert (first.token_ids.tolist(), first.cut_tokens.tolist()) == ([1, 2, 101, 102], [1])
    assert second.token_ids.tolist() == [9, 101]


def test_packed_rows_lie_end_to_end() -> None:
    batch = two_rows()
    (data,) = batch.packed(8, advantages=[10.0, 20.0])
    assert data.token_ids.tolist() == [1, 2, 101, 102, 103, 9, 101]
    assert data.position_ids.tolist() == [0, 1, 2, 3, 4, 0, 1]
    assert data.segment_index.tolist() == [0, 0, 0, 0, 0, 1, 1]
    assert data.weight_versions.tolist() == [-1, -1, 5, 5, 6, -1, 7]
    assert (data.cu_seqlens.tolist(), data.max_seqlen) == ([0, 5, 7], 5)
    assert np.asarray(data.advantages)[data.segment_index].tolist() == [10, 10, 10, 10, 10, 20, 20]


def test_packing_fills_the_first_sequence_with_room() -> None:
    # longest first: 6 | 5 | 4 to the 6 | 3 to the 5 | 2 to the second
    assert first_fit_decreasing({0: 2, 1: 3, 2: 4, 3: 5, 4: 6}, 10) == [[4, 2], [3, 1, 0]]


def test_a_row_that_is_asked_for_twice_is_there_twice() -> None:
    (data,) = two_rows().packed(8, rows=[1, 1])
    assert (data.token_ids.tolist(), data.row_index.tolist()) == ([9, 101, 9, 101], [1, 1])


@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_that_holds_no_token_is_refused(limit: int) -> None:
    with pytest.raises(ValueError, match="the limit is"):
        two_rows().packed(limit, truncate=True)
    with pytest.raises(ValueError, match="the limit is"):
        two_rows().padded(max_length=limit, truncate=True)


@pytest.mark.parametrize(
    "arguments", [{"side": "top"}, {"framework": "jax"}, {"max_length": 10, "multiple_of": 4}, {"advantages": [1.0]}]
)
def test_arguments_that_make_no_sense_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        two_rows().padded(**arguments)


def test_no_rows_are_no_arrays() -> None:
    empty = Batch(groups([]), weight_version=1)
    assert empty.padded().token_ids.shape == (0, 0) and empty.packed(8) == []


def test_a_batch_without_a_lease_needs_no_service() -> None:
    with two_rows() as batch:
        batch.ack()
    assert (batch.lease_id, batch.expires_at, batch.extend()) == (None, None, None)


def test_torch_gets_the_same_values_and_types() -> None:
    batch = two_rows()
    array, tensor = batch.padded(advantages=[1.0, 2.0]), batch.padded(framework="torch", advantages=[1.0, 2.0])
    for name in ("token_ids", "loss_mask", "inference_logprobs", "weight_versions", "advantages", "row_weight"):
        np.testing.assert_array_equal(getattr(tensor, name).numpy(), getattr(array, name))
    assert (tensor.token_ids.dtype, tensor.loss_mask.dtype) == (torch.int64, torch.bool)
    assert tensor.to("cpu").rewards.tolist() == [1, 0]
    (pack,) = batch.packed(8, framework="torch")
    assert pack.cu_seqlens.dtype == torch.int32 and pack.max_seqlen == 5
    assert [piece.tolist() for piece in pack.split(pack.token_ids)] == [[1, 2, 101, 102, 103], [9, 101]]


def test_writing_into_the_arrays_leaves_the_rows_alone() -> None:
    batch = two_rows()
    batch.padded(framework="torch").rewards.zero_()
    batch.padded().token_ids[:] = 0
    assert batch.columns.rewards.tolist() == [1, 0] and batch.rows[0].token_ids.tolist() == [1, 2, 101, 102, 103]


def row_strategy() -> st.SearchStrategy[Trajectory]:
    prompts = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=6)
    versions = st.lists(st.integers(0, 3), max_size=6)
    return st.builds(lambda prompt, versions: trajectory(prompt=prompt, versions=versions), prompts, versions)


def assert_is_row(row: Trajectory, ids: Any, mask: Any, logprobs: Any, versions: Any) -> None:
    np.testing.assert_array_equal(ids, row.token_ids)
    np.testing.assert_array_equal(mask, row.loss_mask == 1)
    np.testing.assert_array_equal(logprobs, row.logprobs)
    np.testing.assert_array_equal(versions, versions_by_token(row))


@given(st.lists(row_strategy(), max_size=12), st.integers(12, 40))
def test_unpacking_gives_the_rows_back(rows: list[Trajectory], budget: int) -> None:
    batch = Batch(groups(rows), weight_version=3)
    packs = batch.packed(budget)
    assert sorted(int(at) for pack in packs for at in pack.row_index) == list(range(len(rows)))
    for pack in packs:
        assert len(pack.token_ids) <= budget
        assert_holds_rows(pack, rows)


@given(st.lists(row_strategy(), max_size=12), st.integers(1, 6))
def test_what_packing_cuts_is_the_end_and_is_counted(rows: list[Trajectory], budget: int) -> None:
    packs = Batch(groups(rows), weight_version=3).packed(budget, truncate=True)
    assert sorted(int(at) for pack in packs for at in pack.row_index) == list(range(len(rows)))
    for pack in packs:
        assert len(pack.token_ids) <= budget
        for at, ids, mask, cut in zip(
            pack.row_index, pack.split(pack.token_ids), pack.split(pack.loss_mask), pack.cut_tokens, strict=True
        ):
            row = rows[at]
            assert ids.tolist() == row.token_ids[:budget].tolist()
            assert mask.sum() + cut == row.loss_mask.sum(), "every trained token is there or counted"


def assert_holds_rows(pack: PackedBatch, rows: list[Trajectory]) -> None:
    tokens = (pack.token_ids, pack.loss_mask, pack.inference_logprobs, pack.weight_versions)
    for at, *fields in zip(pack.row_index, *map(pack.split, tokens), strict=True):
        assert_is_row(rows[at], *fields)
    assert [piece.tolist() for piece in pack.split(pack.position_ids)] == [
        list(range(len(rows[at].token_ids))) for at in pack.row_index
    ]


@given(st.lists(row_strategy(), min_size=1, max_size=8), st.sampled_from(["left", "right"]), st.integers(1, 9))
def test_taking_the_padding_off_gives_the_rows_back(rows: list[Trajectory], side: Any, multiple_of: int) -> None:
    data = Batch(groups(rows), weight_version=3).padded(pad_id=7, side=side, multiple_of=multiple_of)
    assert data.token_ids.shape[1] % multiple_of == 0
    for at, row in enumerate(rows):
        real = data.attention_mask[at] == 1
        fields = (data.token_ids, data.loss_mask, data.inference_logprobs, data.weight_versions)
        assert_is_row(row, *(field[at][real] for field in fields))
        assert (data.token_ids[at][~real] == 7).all() and not data.loss_mask[at][~real].any()
        assert data.position_ids[at][real].tolist() == list(range(len(row.token_ids)))
