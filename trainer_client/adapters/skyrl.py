"""SkyRL: a batch as a `GeneratorOutput`, as a generator returns it.

Written against skyrl 0.3.0, and NovaSky-AI/SkyRL at commit a956457, whose further keys are optional.

    from skyrl.train.generators.base import TrajectoryID
    output = generator_output(batch, TrajectoryID)

**Baselines.** With `generator.step_wise_trajectories=true` SkyRL takes the reward of the last row of each trajectory, groups
trajectories by `trajectory_ids[…].instance_id`, and gives the advantage to all rows of the trajectory: a rollout that became
several rows counts once. It knows one reward per rollout, so rows of one rollout with different rewards raise ValueError.
Without that setting every rollout must be one row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trainer_client.adapters.split_rows import check_rewards, group_by_rollout, group_names, image_tensors, split_rows
from trainer_client.batch import Batch
from trainer_client.errors import UnseenImages
from trainer_client.vision import Vision


def generator_output(
    batch: Batch,
    trajectory_id_type: Any,
    *,
    max_length: int | None = None,
    truncate: bool = False,
    vision: Vision | None = None,
) -> dict[str, Any]:
    """The keys of GeneratorOutput, each a list of one entry per row; the rows of a rollout stand together.

    `prompt_token_ids`, `response_ids`, `loss_masks` and `rollout_logprobs`: a row's lists of one length but the first.
    `rewards`: floats. `trajectory_ids`: `trajectory_id_type(instance_id=group, repetition_id=rollout in the group)`.
    `is_last_step`: true on a rollout's last row. `stop_reasons`: the row's finish reason. `rollout_metrics`: mean and greatest
    staleness, and the sampled tokens that `truncate` cut. With `vision`, `pixel_values` and `image_grid_thw` have a tensor per row, None
    for a row without images: SkyRL takes images of models with such grids only.

    A row over `max_length` tokens raises RowTooLong, or loses its end with `truncate`. Raises: RowTooLong, UnseenImages, VisionMismatch,
    ValueError.
    """
    rewards = check_rewards(batch)
    rows = split_rows(batch, max_length=max_length, truncate=truncate, images=vision is not None)
    names, images = group_names(batch), image_tensors(batch, rows, vision)
    order: list[int] = []
    trajectory_ids: list[Any] = []
    is_last_step: list[bool] = []
    for rollouts in group_by_rollout(batch):
        for number, members in enumerate(rollouts):
            _check_one_reward(batch, members)
            order += members
            trajectory_ids += [trajectory_id_type(instance_id=names[index], repetition_id=number) for index in members]
            is_last_step += [index == members[-1] for index in members]
    ordered = [rows[index] for index in order]
    pixels = _take_pixels([images[index] for index in order])
    return {
        "prompt_token_ids": [row.prompt_ids.tolist() for row in ordered],
        "response_ids": [row.response_ids.tolist() for row in ordered],
        "rewards": [float(rewards[index]) for index in order],
        "loss_masks": [row.loss_mask.tolist() for row in ordered],
        "stop_reasons": [row.row.finish_reason for row in ordered],
        "rollout_metrics": {
            "verbatim/staleness_mean": float(batch.staleness.mean()),
            "verbatim/staleness_max": int(batch.staleness.max()),
            "verbatim/cut_tokens": sum(row.cut_tokens for row in ordered),
        },
        "rollout_logprobs": [row.logprobs.tolist() for row in ordered],
        "trajectory_ids": trajectory_ids,
        "trajectory_generation_times": None,
        "rollout_expert_indices": None,
        "is_last_step": is_last_step,
        "env_metrics": None,
        **pixels,
    }


def _take_pixels(images: Sequence[dict[str, Any]]) -> dict[str, list[Any] | None]:
    names = ("pixel_values", "image_grid_thw")
    if not any(images):
        return dict.fromkeys(names)
    if other := {name for row in images for name in row} ^ set(names):
        raise UnseenImages(f"SkyRL takes {' and '.join(names)} of images; this model differs in {', '.join(sorted(other))}")
    return {name: [row.get(name) for row in images] for name in names}


def _check_one_reward(batch: Batch, members: Sequence[int]) -> None:
    found = {batch.rows[index].reward for index in members}
    if len(found) > 1:
        raise ValueError(f"rollout {batch.rows[members[0]].rollout_id!r} has rows with rewards {sorted(map(str, found))}")
