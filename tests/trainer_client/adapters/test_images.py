"""Rows with images in the trainers' own forms: what a model makes of them is what the recorded row says."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from reconstruct.records import pack_logprobs
from tests.support.sessions.pictures import Sighted, three_rows
from tests.support.sessions.trainer_libraries import recorded, verl_module
from trainer_client.adapters.microbatches import Packed, Padded, Rows
from trainer_client.adapters.nemo_rl import train_data
from trainer_client.adapters.openrlhf import experiences
from trainer_client.adapters.prime_rl import training_samples
from trainer_client.adapters.skyrl import generator_output
from trainer_client.adapters.slime import samples
from trainer_client.adapters.split_rows import split_rows
from trainer_client.adapters.torch_dataset import BatchShare, LeasedRows, LeasePart
from trainer_client.adapters.verl import data_proto
from trainer_client.advantages import grpo
from trainer_client.batch import Batch
from trainer_client.errors import UnseenImages

if os.environ.get("CI") != "true":
    for library in ("tensordict", "openrlhf", "trl"):
        pytest.importorskip(library, reason=f"{library} is not installed: see tests/peers.txt")
with pytest.MonkeyPatch.context() as patch:
    patch.setitem(sys.modules, "vllm", None)
    from openrlhf.trainer.ppo_utils.experience import Experience
    from openrlhf.utils.vlm_utils import merge_mm_train_inputs
    from trl import GRPOConfig

    from trainer_client.adapters.trl import LeasedGRPOTrainer

TOLERANCE = 1e-4


@pytest.fixture
def recorded_rows(sighted: Sighted) -> Batch:
    """Three rows whose logprobs are the model's own."""
    batch = three_rows(sighted)
    said = [pack_logprobs(sighted.alone(batch, row) * row.loss_mask) for row in batch.rows]
    changed = [
        replace(row, logprobs=logprobs, reward=float(at))
        for at, (row, logprobs) in enumerate(zip(batch.rows, said, strict=True))
    ]
    return sighted.album.batch(changed)


@torch.no_grad()
def test_verl_is_given_inputs_under_which_its_actor_says_what_the_engine_said(sighted: Sighted, recorded_rows: Batch) -> None:
    data = data_proto(recorded_rows, verl_module("verl.protocol").DataProto, pad_id=0, vision=sighted.vision)
    inputs = list(data.non_tensor_batch["multi_modal_inputs"])
    assert inputs[2] == {}
    positions = data.batch["position_ids"]
    if sighted.vision.rope_merge is None:
        # verl joins tiles of rows that have as many; here each row goes alone.
        parts = [(slice(at, at + 1), each) for at, each in enumerate(inputs)]
    else:
        assert positions.shape[1] == 4 and [int(each["images_seqlens"].sum()) for each in inputs[:2]] == [64, 76]
        merged = verl_module("verl.utils.model").extract_multi_modal_inputs(inputs)
        merged.pop("images_seqlens")
        # As verl's engine hands positions of four lines to a model.
        positions = positions.transpose(0, 1)
        parts = [(slice(0, 3), merged)]
    for rows, images in parts:
        own = positions[rows] if positions.dim() == 2 else positions[:, rows]
        logits = sighted.model(
            data.batch["input_ids"][rows], attention_mask=data.batch["attention_mask"][rows], position_ids=own, **images
        ).logits
        start = data.batch["prompts"].shape[1]
        chosen = torch.log_softmax(logits[:, start - 1 : -1], -1).gather(-1, data.batch["responses"][rows].unsqueeze(-1))[
            ..., 0
        ]
        mask = data.batch["response_mask"][rows].bool()
        torch.testing.assert_close(chosen[mask], data.batch["rollout_log_probs"][rows][mask], atol=TOLERANCE, rtol=0)


def test_slime_and_miles_samples_have_the_tensors_of_their_images(sighted: Sighted, recorded_rows: Batch) -> None:
    for library in ("slime", "miles"):
        made = [
            rollout[0]
            for (rollout,) in zip(*samples(recorded_rows, recorded(f"{library}.Sample"), vision=sighted.vision), strict=True)
        ]
        wanted = [recorded_rows.packed(1000, "torch", rows=[at], vision=sighted.vision)[0].vision_inputs for at in range(3)]
        assert not made[2].multimodal_train_inputs
        for sample, inputs in zip(made[:2], wanted, strict=False):
            assert sample.multimodal_train_inputs.keys() == inputs.keys()
            assert all(torch.equal(sample.multimodal_train_inputs[name], tensor) for name, tensor in inputs.items())


def test_openrlhf_merges_the_images_of_experiences(sighted: Sighted, recorded_rows: Batch) -> None:
    made = experiences(recorded_rows, Experience, vision=sighted.vision)
    assert made[2].mm_train_inputs == [None]
    if sighted.vision.rope_merge is not None:
        merged = merge_mm_train_inputs([one.mm_train_inputs for one in made], "cpu")
        wanted = recorded_rows.padded(framework="torch", vision=sighted.vision).vision_inputs
        assert torch.equal(merged["pixel_values"], wanted["pixel_values"])
        assert torch.equal(merged["image_grid_thw"], wanted["image_grid_thw"])


def test_skyrl_takes_images_with_grids_and_no_others(sighted: Sighted, recorded_rows: Batch) -> None:
    def trajectory_id(instance_id: str, repetition_id: int) -> Any:
        return instance_id, repetition_id

    if sighted.vision.rope_merge is None:
        with pytest.raises(UnseenImages, match="pixel_attention_mask"):
            generator_output(recorded_rows, trajectory_id, vision=sighted.vision)
        return
    output = generator_output(recorded_rows, trajectory_id, vision=sighted.vision)
    assert [None if grid is None else len(grid) for grid in output["image_grid_thw"]] == [2, 2, None]
    assert output["pixel_values"][2] is None


def test_adapters_without_a_place_for_images_refuse_them(sighted: Sighted, recorded_rows: Batch) -> None:
    values = recorded_rows.advantages(grpo)
    for refused in (
        lambda: split_rows(recorded_rows),
        lambda: train_data(recorded_rows, dict, pad_id=0, advantages=values),
        lambda: training_samples(recorded_rows, dict, values, env_name="e"),
        lambda: data_proto(recorded_rows, None, pad_id=0),
        lambda: samples(recorded_rows, None),
        lambda: Rows()(recorded_rows, None),
    ):
        with pytest.raises(UnseenImages, match="has images"):
            refused()


def test_microbatches_carry_the_images_of_their_rows(sighted: Sighted, recorded_rows: Batch) -> None:
    cuts: list[Any] = [Rows(vision=sighted.vision), Padded(1, vision=sighted.vision), Packed(1000, vision=sighted.vision)]
    assert [[bool(part.vision_inputs) for part in cut(recorded_rows, None)] for cut in cuts] == [
        [True, True, False],
        [True, True, False],
        [True],
    ]


class _OneBatch(LeasedRows):
    """Rows that were leased already."""

    def __init__(self, batch: Batch, cut: Rows) -> None:
        super().__init__("http://nowhere", "", cut)
        self._batch = batch

    def __iter__(self) -> Iterator[BatchShare]:
        parts = self.cut(self._batch, self._batch.advantages(grpo))
        yield from (BatchShare(data, LeasePart("lease", len(parts))) for data in parts)

    def ack(self, *parts: BatchShare) -> None:
        self.acked = len(parts)


def test_trl_trains_what_the_engine_said_after_the_images(sighted: Sighted, recorded_rows: Batch, tmp_path: Path) -> None:
    """Its own forward passes, before the step and in it, see the pixels: otherwise the logprobs would be far from the recorded ones."""
    rows = _OneBatch(recorded_rows, Rows(vision=sighted.vision))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        trainer = LeasedGRPOTrainer(
            sighted.model,
            rows,
            GRPOConfig(
                output_dir=str(tmp_path),
                max_steps=1,
                per_device_train_batch_size=3,
                num_generations=3,
                learning_rate=0.0,
                beta=0.0,
                max_grad_norm=0.0,
                optim="sgd",
                use_cpu=True,
                bf16=False,
                gradient_checkpointing=False,
                report_to="none",
                save_strategy="no",
                logging_steps=1,
                disable_tqdm=True,
                vllm_importance_sampling_mode="token_truncate",
                vllm_importance_sampling_clip_max=1e9,
            ),
            processing_class=AutoTokenizer.from_pretrained(sighted.folder, padding_side="left"),
        )
    trainer.train()
    logged = trainer.state.log_history[0]
    assert logged["sampling/sampling_logp_difference/max"] < TOLERANCE
    values = recorded_rows.advantages(grpo)
    tokens = [int(row.loss_mask.sum()) for row in recorded_rows.rows]
    assert logged["loss"] == pytest.approx(-float(np.dot(values, tokens)) / sum(tokens), abs=TOLERANCE)
    assert logged["grad_norm"] > 0 and rows.acked == 3
