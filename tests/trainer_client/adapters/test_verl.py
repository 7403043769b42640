"""verl's DataProto, made from leased rows and put through verl's own advantage and loss functions."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given
from transformers import AutoModelForCausalLM

from examples.demo.tiny_model import make_tiny_model
from examples.trainers import verl_step
from reconstruct.records import pack_logprobs
from reconstruct.trajectory import Trajectory
from tests.support.sessions.adapter_batches import (
    batch_of,
    batches,
    expected,
    few,
    read,
    taught_batch,
    two_turns,
    without_versions,
)
from tests.support.sessions.trainer_libraries import verl_module
from tests.support.sessions.training_rows import trajectory
from trainer_client.adapters.verl import batch_keys, data_proto
from trainer_client.advantages import dr_grpo, grpo, leave_one_out
from trainer_client.batch import Batch
from trainer_client.distillation import reverse_kl
from trainer_client.errors import RowTooLong

if os.environ.get("CI") != "true":
    pytest.importorskip("tensordict", reason="verl is not installed: see tests/peers.txt")
DataProto: Any = verl_module("verl.protocol").DataProto
core_algos: Any = verl_module("verl.trainer.ppo.core_algos")


def proto_of(batch: Batch, **options: Any) -> Any:
    return data_proto(batch, DataProto, pad_id=0, **options)


def as_row(proto: Any, at: int) -> list[tuple[int, float | None, int | None]]:
    """The row again, from the tensors alone."""
    there, width = proto.batch["attention_mask"][at].bool(), proto.batch["prompts"].shape[1]
    ids = proto.batch["input_ids"][at][there].tolist()
    response = there[width:]
    mask, logprobs, versions = (
        proto.batch[name][at][response].tolist() for name in ("response_mask", "rollout_log_probs", "weight_versions")
    )
    start = len(ids) - len(mask)
    said = read(ids, [0] * start + mask, [0.0] * start + logprobs)
    known = [None] * start + [version if version >= 0 else None for version in versions]
    return [(token_id, logprob, version) for (token_id, logprob), version in zip(said, known, strict=True)]


def test_prompts_stand_at_the_right_and_responses_at_the_left() -> None:
    """Row a: prompt 1 2, sampled 101 102, tool 7 8, sampled 103, glue 9. Row b: prompt 1 2 3, sampled 101."""
    batch = batch_of([two_turns("a", reward=2.0), trajectory("b", prompt=(1, 2, 3), versions=(8,), reward=0.0)])
    tensors = proto_of(batch, response_length=7).batch
    assert tensors["prompts"].tolist() == [[0, 1, 2], [1, 2, 3]]
    assert tensors["responses"].tolist() == [[101, 102, 7, 8, 103, 9, 0], [101, 0, 0, 0, 0, 0, 0]]
    assert tensors["response_mask"].tolist() == [[1, 1, 0, 0, 1, 0, 0], [1, 0, 0, 0, 0, 0, 0]]
    assert tensors["attention_mask"].tolist() == [[0, 1, 1, 1, 1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 0, 0, 0, 0, 0, 0]]
    assert tensors["position_ids"].tolist() == [[0, 0, 1, 2, 3, 4, 5, 6, 7, 7], [0, 1, 2, 3, 3, 3, 3, 3, 3, 3]]
    assert tensors["rollout_log_probs"].tolist() == [[-0.5, -1.0, 0, 0, -1.5, 0, 0], [-0.5, 0, 0, 0, 0, 0, 0]]
    assert tensors["weight_versions"].tolist() == [[5, 5, -1, -1, 6, -1, -1], [8, -1, -1, -1, -1, -1, -1]]
    assert tensors["token_level_scores"].tolist() == [[0, 0, 0, 0, 0, 2, 0], [0] * 7]


def test_what_is_known_per_row_goes_along() -> None:
    proto = proto_of(batch_of([two_turns("a"), trajectory("b", versions=())]))
    assert {name: values.tolist() for name, values in proto.non_tensor_batch.items()} == {
        "uid": ["g1:0", "g1:0"], "rollout_id": ["s-a", "s-b"], "trajectory_id": ["a", "b"], "staleness": [4, 0],
        "min_global_steps": [5, None], "max_global_steps": [6, None], "__num_turns__": [2, 0],
    }  # fmt: skip


@few
@given(batch=batches())
def test_the_rows_can_be_read_back_from_the_tensors(batch: Batch) -> None:
    proto = proto_of(batch)
    assert [as_row(proto, at) for at in range(len(proto))] == [expected(row) for row in batch.rows]
    assert int(proto.batch["response_mask"].sum()) == sum(int(row.loss_mask.sum()) for row in batch.rows)
    np.testing.assert_array_equal(proto.batch["token_level_rewards"].sum(dim=1), batch.columns.rewards)


@few
@given(batch=batches())
def test_positions_are_those_that_verl_computes_from_the_mask(batch: Batch) -> None:
    tensors = proto_of(batch).batch
    compute = verl_module("verl.utils.model").compute_position_id_with_mask
    assert tensors["position_ids"].tolist() == compute(tensors["attention_mask"]).tolist()


@few
@given(batch=batches(rows_per_rollout=1))
def test_verls_own_advantages_are_ours_where_each_rollout_is_one_row(batch: Batch) -> None:
    sizes = np.bincount(batch.columns.group_index)[batch.columns.group_index]
    compared = sizes > 1  # a rollout alone in its group: verl keeps its reward, here it is 0
    tensors, uid = proto_of(batch).batch, proto_of(batch).non_tensor_batch["uid"]
    mask = tensors["response_mask"]
    for name, options, estimator in [
        ("grpo", {"norm_adv_by_std_in_grpo": True}, grpo),
        ("grpo", {"norm_adv_by_std_in_grpo": False}, dr_grpo),
        ("rloo", {}, leave_one_out),
    ]:
        theirs, _ = core_algos.get_adv_estimator_fn(name)(tensors["token_level_rewards"].clone(), mask, uid, **options)
        ours = proto_of(batch, advantages=batch.advantages(estimator)).batch["advantages"]
        np.testing.assert_allclose(theirs[compared], ours[compared], atol=2e-3, rtol=1e-5)


@few
@given(batch=batches())
def test_advantages_handed_over_stand_at_the_trained_tokens(batch: Batch) -> None:
    values = batch.advantages(grpo)
    tensors = proto_of(batch, advantages=values).batch
    np.testing.assert_array_equal(tensors["advantages"], values[:, None] * tensors["response_mask"].numpy())
    np.testing.assert_array_equal(tensors["advantages"], tensors["returns"])


def test_a_step_with_verls_loss_trains_on_the_recorded_logprobs(tmp_path: Path) -> None:
    """The rows are given the logprobs of the model itself, so that every ratio is 1 and the loss minus the mean advantage
    over the trained tokens: row a has 3 of advantage 1, row b has 2 of advantage -1."""
    verl_module("verl.workers.config")
    model = AutoModelForCausalLM.from_pretrained(make_tiny_model(tmp_path, layers=1, hidden_size=64))
    rows = [two_turns("a", reward=3.0), trajectory("b", reward=1.0)]
    batch = batch_of([replace(row, logprobs=logprobs_of(model, row)) for row in rows])
    before = [parameter.clone() for parameter in model.parameters()]
    metrics = verl_step.step(model, torch.optim.SGD(model.parameters(), lr=0.1), batch)
    assert metrics["loss"] == pytest.approx(-(3 - 2) / 5 / np.sqrt(2), abs=1e-4)
    assert metrics["actor/ppo_kl"] == pytest.approx(0, abs=1e-5)
    assert any((old != new).any() for old, new in zip(before, model.parameters(), strict=True))


@torch.no_grad()
def logprobs_of(model: Any, row: Trajectory) -> Any:
    ids = torch.from_numpy(row.token_ids.astype(np.int64))[None]
    scores = model(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
    return pack_logprobs(np.concatenate([[0.0], scores.numpy()]) * row.loss_mask)


def test_batches_of_one_width_can_be_concatenated() -> None:
    parts = [proto_of(batch_of([two_turns(name)]), prompt_length=4, response_length=8) for name in ("a", "b")]
    assert DataProto.concat(parts).batch["input_ids"].shape == (2, 12)


def test_a_response_is_cut_at_its_end_on_request_and_a_prompt_never() -> None:
    batch = batch_of([two_turns()])
    with pytest.raises(RowTooLong, match="response of 6 tokens, the limit is 3"):
        proto_of(batch, response_length=3)
    assert proto_of(batch, response_length=3, truncate=True).batch["responses"].tolist() == [[101, 102, 7]]
    with pytest.raises(RowTooLong, match="prompt has 2 tokens, the limit is 1"):
        proto_of(batch, prompt_length=1, truncate=True)


def test_the_keys_of_a_rollout_end_with_a_row_that_trains() -> None:
    rows = [
        trajectory("a1", session="a"), trajectory("a2", session="a", versions=()), trajectory("b", session="b_c"),
    ]  # fmt: skip
    assert batch_keys(batch_of(rows)) == ["g1:0_0_1", "g1:0_0_0", "g1:0_1_0"]


def test_the_keys_of_a_rollout_that_was_cut_end_with_a_row_that_still_trains() -> None:
    """Row long keeps nothing but its prompt: as the rollout's last row it would give every row of it an advantage of 0."""
    rows = [trajectory("short", session="a"), trajectory("long", session="a", prompt=(1, 2, 3, 4, 5))]
    batch = batch_of(rows, [trajectory("b")])
    assert batch_keys(batch)[:2] == ["g1:0_0_0", "g1:0_0_1"]
    mask = proto_of(batch, max_length=4, truncate=True).batch["response_mask"]
    assert mask.tolist() == [[1, 1], [0, 0], [1, 1]]
    assert batch_keys(batch, mask) == ["g1:0_0_1", "g1:0_0_0", "g2:1_0_0"]
    with pytest.raises(ValueError, match="2 lines for 3 rows"):
        batch_keys(batch, mask[:2])


def test_two_groups_of_one_name_stay_two() -> None:
    batch = batch_of([trajectory("a")], [trajectory("b")])
    renamed = Batch([replace(group, group_id="same") for group in batch.groups], 9)
    assert proto_of(renamed).non_tensor_batch["uid"].tolist() == ["same:0", "same:1"]
    assert without_versions(as_row(proto_of(renamed), 0)) == without_versions(expected(batch.rows[0]))


@few
@given(batch=batches().map(taught_batch))
def test_the_teachers_numbers_stand_where_the_token_is_predicted(batch: Batch) -> None:
    """verl's entry i is about token i + 1, in the whole sequence."""
    for top_k, width in ((0, 1), (2, 2)):
        tensors = proto_of(batch, teacher="teacher", teacher_top_k=top_k).batch
        logprobs, ids = tensors["teacher_logprobs"], tensors["teacher_ids"]
        assert ids.dtype == torch.int32 and logprobs.shape == ids.shape == (*tensors["input_ids"].shape, width)
        for at, row in enumerate(batch.rows):
            there = tensors["attention_mask"][at].bool()
            own, of_ids = logprobs[at][there].numpy(), ids[at][there].numpy()
            places, score = np.flatnonzero(row.loss_mask), row.scores["teacher"]
            np.testing.assert_array_equal(
                own[places - 1], score.top_logprobs[places] if top_k else score.logprobs[places, None]
            )
            np.testing.assert_array_equal(of_ids[places - 1], score.top_ids[places] if top_k else row.token_ids[places, None])
            others = np.setdiff1d(np.arange(len(row.token_ids)), places - 1)
            assert not own[others].any() and not of_ids[others].any()
            assert not logprobs[at][~there].any()


def test_more_best_ids_than_the_teacher_gave_are_refused() -> None:
    with pytest.raises(ValueError, match="has the 2 best ids by 'teacher', not 3"):
        proto_of(taught_batch(batch_of([two_turns()])), teacher="teacher", teacher_top_k=3)


@pytest.mark.parametrize("estimate", ["k1", "k2", "k3"])
def test_verls_own_divergence_of_the_teacher_is_ours(estimate: Literal["k1", "k2", "k3"]) -> None:
    """In float64. Of rows as a trainer has them: verl's at position i is of token i + 1."""
    batch = taught_batch(batch_of([two_turns("a"), trajectory("b", versions=(5, 5, 6))]))
    tensors = proto_of(batch, teacher="teacher").batch
    width = tensors["prompts"].shape[1]
    theirs = core_algos.kl_penalty(
        tensors["rollout_log_probs"].double(), tensors["teacher_logprobs"][:, width - 1 : -1, 0].double(), estimate
    )
    padded = batch.padded()
    ours = reverse_kl(padded.inference_logprobs, padded.scores["teacher"].logprobs, padded.loss_mask, estimate=estimate)
    mask = tensors["response_mask"].bool()
    np.testing.assert_allclose(theirs[mask], ours[padded.loss_mask], rtol=1e-12, atol=1e-15)
