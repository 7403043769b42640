"""OpenRLHF: a batch as `Experience`s, as its samples generator returns them. Written against OpenRLHF 0.11.2.

    from openrlhf.trainer.ppo_utils.experience import Experience
    rollout_samples = experiences(batch, Experience)
    made = experience_maker.make_experience_batch(rollout_samples)

**Baselines.** The experience maker splits the rewards, in order, into rows of `n_samples_per_prompt` and ignores groups and
rollouts, which is right only if every group has that many rollouts of one row each. Otherwise pass `advantages`: they
become the `rewards`, and per token the `advantages` and `returns`. Through the experience maker with
`--rollout.n_samples_per_prompt 1 --algo.advantage.estimator reinforce` (gamma 1, no KL in the reward) they become each
token's return, from which that estimator subtracts the mean over the batch's tokens (and, without
`--algo.advantage.no_std_norm`, divides by their deviation); to train on exactly those passed, restore `advantages`
and `returns` afterwards.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from trainer_client.adapters.split_rows import (
    SplitRow,
    check_advantages,
    check_rewards,
    find_runs,
    image_tensors,
    split_rows,
)
from trainer_client.batch import Batch
from trainer_client.vision import Vision


def experiences(
    batch: Batch,
    experience_type: Any,
    *,
    max_length: int | None = None,
    truncate: bool = False,
    advantages: Any = None,
    vision: Vision | None = None,
) -> list[Any]:
    """One `experience_type` per row, in their order, each a batch of one on the CPU.

    `sequences`, `attention_mask` int64 of shape (1, tokens). `action_mask` int64, `rollout_log_probs` float32 and, with
    `advantages` (one per row), `advantages` and `returns` float32, of shape (1, tokens - 1): the entry t - 1 belongs to token
    t. Of shape (1,): `rewards`, `scores` (always the row's reward), `response_length` (from the first to the last sampled
    token), `truncated`, `total_length`. `prompts` has the task id; `info` has `reward`, `staleness`, `group`, `rollout`,
    `cut_tokens` and `response_clip_ratio`, each of shape (1,). With `vision`, `mm_train_inputs` has the tensors of the row's images.

    A row over `max_length` tokens raises RowTooLong, or with `truncate` loses its end. Raises: RowTooLong, UnseenImages, VisionMismatch,
    ValueError.
    """
    raw = check_rewards(batch)
    values = None if advantages is None else check_advantages(batch, advantages)
    rows = split_rows(batch, max_length=max_length, truncate=truncate, images=vision is not None)
    return [
        _experience(experience_type, batch, row, raw[row.index], None if values is None else values[row.index], images or None)
        for row, images in zip(rows, image_tensors(batch, rows, vision), strict=True)
    ]


def agent_output(split: SplitRow) -> dict[str, Any]:
    """A row as OpenRLHF's `AgentExecutor.execute` returns it: `observation_tokens`, `action_ranges` (start, end) per sampled
    stretch, `rollout_log_probs` per token, `reward`, `scores`, `truncated`, `prompt` and `label` (the task id)."""
    task = split.row.task_id or ""
    return {
        "prompt": task,
        "label": task,
        "images": None,
        "mm_train_inputs": None,
        "reward": split.row.reward,
        "scores": split.row.reward,
        "observation_tokens": split.row.token_ids[: split.end].tolist(),
        "action_ranges": [run[:2] for run in find_runs(split.row.loss_mask[: split.end]) if run[2]],
        "rollout_log_probs": split.row.logprobs[: split.end].tolist(),
        "truncated": split.truncated,
        "extra_logs": {},
    }


def _experience(
    experience_type: Any, batch: Batch, split: SplitRow, reward: Any, advantage: Any, images: dict[str, Any] | None
) -> Any:
    import torch

    row, length = split.row, split.end
    mask = torch.from_numpy(row.loss_mask[1:length].astype(np.int64)).unsqueeze(0)
    per_token = None if advantage is None else mask * torch.tensor(advantage)
    return experience_type(
        sequences=torch.from_numpy(row.token_ids[:length].astype(np.int64)).unsqueeze(0),
        attention_mask=torch.ones(1, length, dtype=torch.int64),
        action_mask=mask,
        rollout_log_probs=torch.from_numpy(row.logprobs[1:length].copy()).unsqueeze(0),
        advantages=per_token,
        returns=None if per_token is None else per_token.clone(),
        rewards=torch.tensor([reward if advantage is None else advantage]),
        scores=torch.tensor([reward]),
        response_length=torch.tensor([_stretch(split)]),
        truncated=torch.tensor([split.truncated]),
        total_length=torch.tensor([float(length)]),
        prompts=[row.task_id or ""],
        labels=[row.task_id or ""],
        images=[None],
        mm_train_inputs=[images],
        info=_info(batch, split, reward),
    )


def _info(batch: Batch, split: SplitRow, reward: Any) -> dict[str, Any]:
    import torch

    return {
        "reward": torch.tensor([reward]),
        "staleness": torch.tensor([int(batch.staleness[split.index])]),
        "group": torch.tensor([int(batch.columns.group_index[split.index])]),
        "rollout": torch.tensor([int(batch.columns.rollout_index[split.index])]),
        "cut_tokens": torch.tensor([split.cut_tokens]),
        "response_clip_ratio": torch.tensor([split.end < len(split.row.token_ids)]),
    }


def _stretch(split: SplitRow) -> int:
    sampled = np.flatnonzero(split.loss_mask)
    return int(sampled[-1] - sampled[0] + 1) if sampled.size else 0
