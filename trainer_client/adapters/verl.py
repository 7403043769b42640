"""verl: a batch as a `DataProto`, as its agent loop hands one to the trainer. Written against verl 0.9.1.

    from verl import DataProto
    with batch:
        data = data_proto(batch, DataProto, pad_id=tokenizer.pad_token_id, advantages=batch.advantages(grpo))

**Baselines.** `compute_advantage` groups rows by `uid` and counts every row: if each rollout has one row, it gives the same as
trainer_client.advantages (except for a rollout alone in its group, where verl keeps the reward itself). If a rollout has
several rows, pass `advantages` and skip `compute_advantage`, or
call verl's `compute_advantage_for_multi_trajectories` with `batch_keys(batch, data.batch["response_mask"])`, which takes the
reward of one row per rollout.

**Old logprobs.** `rollout_log_probs` are the engine's. `old_log_probs` is for the trainer to set: to the same tensor
(`algorithm.rollout_correction.bypass_mode`) or to the actor's own, with rollout correction between the two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from trainer_client.adapters.split_rows import (
    SplitRow,
    check_advantages,
    check_rewards,
    find_runs,
    group_by_rollout,
    group_names,
    read_images,
    split_rows,
    tensors_of,
    weight_versions,
)
from trainer_client.adapters.teachers import read_score
from trainer_client.arrays import limit_lengths
from trainer_client.batch import Batch
from trainer_client.errors import RowTooLong
from trainer_client.vision import RowVision, Vision

Values = Callable[[SplitRow], NDArray[Any]]


def data_proto(
    batch: Batch,
    proto_type: Any,
    *,
    pad_id: int,
    prompt_length: int | None = None,
    response_length: int | None = None,
    max_length: int | None = None,
    truncate: bool = False,
    advantages: Any = None,
    vision: Vision | None = None,
    teacher: str | None = None,
    teacher_top_k: int = 0,
) -> Any:
    """A `proto_type` (verl.DataProto) with all rows in their order, on the CPU.

    Prompts are padded on the left to `prompt_length` and responses on the right to `response_length` (default: the longest
    of the batch; give both for batches that are to be concatenated). Tensors of shape (rows, response): `responses`,
    `response_mask`, `rollout_log_probs`, `weight_versions` (-1 where not sampled), `token_level_scores` and
    `token_level_rewards` (the reward at the response's last token), and with `advantages` (one per row) also `advantages`
    and `returns`, 0 where the mask is 0. Of shape (rows, prompt): `prompts`; of both: `input_ids`, `attention_mask`,
    `position_ids`. Not tensors, one per row: `uid` (the group), `rollout_id`, `trajectory_id`, `staleness`,
    `min_global_steps` and `max_global_steps` (oldest and newest weight version; None without sampled tokens) and
    `__num_turns__` (sampled stretches).

    With `vision`, `multi_modal_inputs` has the tensors of each row's images, with `images_seqlens` where the model takes grids; of models
    with M-RoPE `position_ids` have shape (rows, 4, length): the token's, then frames, rows and columns. verl joins the rows' tensors along
    their first dimension, so rows of a model that takes tiles (Idefics3) need the same number of tiles in one micro-batch.

    `teacher`: the scorer whose numbers are `teacher_logprobs` and `teacher_ids` (int32), of shape (rows, length, K): of the `teacher_top_k`
    best ids, or with 0 of the token itself (K = 1). As verl has them, entry i is about token i + 1; elsewhere 0.0 and `pad_id`.

    A row over `max_length` tokens, or with a response over `response_length`, raises RowTooLong or loses its end with
    `truncate`; a prompt over `prompt_length` always raises it. Raises: RowTooLong, UnseenImages, VisionMismatch, ValueError,
    also for a trained token without a score.
    """
    rewards = check_rewards(batch)
    rows = split_rows(batch, max_length=max_length, truncate=truncate, images=vision is not None)
    if response_length is not None:
        rows = [_shorten(row, response_length, truncate=truncate) for row in rows]
    prompts = _Rectangle(rows, "left", _width("prompt", [len(row.prompt_ids) for row in rows], prompt_length))
    responses = _Rectangle(rows, "right", _width("response", [len(row.response_ids) for row in rows], response_length))
    tensors = _tensors(prompts, responses, pad_id, rewards)
    if advantages is not None:
        values = check_advantages(batch, advantages)
        tensors["advantages"] = responses.fill(0, np.float32, lambda row: values[row.index] * row.loss_mask)
        tensors["returns"] = tensors["advantages"].copy()
    if teacher is not None:
        tensors |= _teach(rows, teacher, teacher_top_k, tensors["input_ids"].shape[1], tensors["prompts"].shape[1], pad_id)
    others = _non_tensors(batch, rows)
    if vision is not None:
        seen = read_images(batch, rows, vision)
        others["multi_modal_inputs"] = _objects([_with_lengths(tensors_of(row)) for row in seen])
        if vision.rope_merge is not None:
            tensors["position_ids"] = _rope_positions(seen, tensors["position_ids"], tensors["attention_mask"] == 1)
    return proto_type.from_dict(tensors={name: _tensor(table) for name, table in tensors.items()}, non_tensors=others)


def batch_keys(batch: Batch, response_mask: Any = None) -> list[str]:
    """Per row `{uid}_{rollout}_{row of the rollout}`, for verl's `compute_advantage_for_multi_trajectories`.

    That function takes the advantage of a rollout from its row with the highest number and from a token with mask 1, so rows
    that train nothing come first. Where rows were truncated, give the result's `response_mask`: a row that lost all its
    sampled tokens trains nothing either. Raises: ValueError for a mask of another number of rows.
    """
    trains = _train(batch, response_mask)
    uids, keys = group_names(batch), [""] * len(batch.rows)
    for rollouts in group_by_rollout(batch):
        for number, members in enumerate(rollouts):
            for at, index in enumerate(sorted(members, key=lambda index: trains[index])):
                keys[index] = f"{uids[index]}_{number}_{at}"
    return keys


def _train(batch: Batch, response_mask: Any) -> list[bool]:
    if response_mask is None:
        return [bool(row.loss_mask.any()) for row in batch.rows]
    if len(response_mask) != len(batch.rows):
        raise ValueError(f"response_mask has {len(response_mask)} lines for {len(batch.rows)} rows")
    return [bool(line.any()) for line in response_mask]


class _Rectangle:
    """Builds tables of one line per row, `width` wide, padded on `side`."""

    def __init__(self, rows: Sequence[SplitRow], side: Literal["left", "right"], width: int) -> None:
        self._rows, self._side, self._width = rows, side, width

    def fill(self, padding: Any, dtype: Any, values: Values) -> NDArray[Any]:
        table = np.full((len(self._rows), self._width), padding, dtype=dtype)
        for line, row in zip(table, self._rows, strict=True):
            found = values(row)
            line[self._width - len(found) if self._side == "left" else 0 :][: len(found)] = found
        return table


def _tensors(prompts: _Rectangle, responses: _Rectangle, pad_id: int, rewards: NDArray[np.float32]) -> dict[str, NDArray[Any]]:
    prompt_ids = prompts.fill(pad_id, np.int64, lambda row: row.prompt_ids)
    response_ids = responses.fill(pad_id, np.int64, lambda row: row.response_ids)
    prompt_there = prompts.fill(0, np.int64, lambda row: np.ones(len(row.prompt_ids)))
    response_there = responses.fill(0, np.int64, lambda row: np.ones(len(row.response_ids)))
    attention_mask = np.concatenate([prompt_there, response_there], axis=1)
    scores = responses.fill(0, np.float32, lambda row: _place_last(float(rewards[row.index]), len(row.response_ids)))
    return {
        "prompts": prompt_ids,
        "responses": response_ids,
        "input_ids": np.concatenate([prompt_ids, response_ids], axis=1),
        "attention_mask": attention_mask,
        "position_ids": np.maximum(np.cumsum(attention_mask, axis=1) - 1, 0),
        "response_mask": responses.fill(0, np.int64, lambda row: row.loss_mask),
        "rollout_log_probs": responses.fill(0, np.float32, lambda row: row.logprobs),
        "weight_versions": responses.fill(-1, np.int64, lambda row: row.versions),
        "token_level_scores": scores,
        "token_level_rewards": scores.copy(),
    }


def _teach(
    rows: Sequence[SplitRow], teacher: str, top_k: int, width: int, prompt_width: int, pad_id: int
) -> dict[str, NDArray[Any]]:
    logprobs = np.zeros((len(rows), width, top_k or 1), dtype=np.float32)
    ids = np.full((len(rows), width, top_k or 1), pad_id, dtype=np.int32)
    for at, split in enumerate(rows):
        score, row = read_score(split.row, teacher, split.end), split.row
        if top_k > score.top_k and row.loss_mask[: split.end].any():
            raise ValueError(f"trajectory {row.trajectory_id!r} has the {score.top_k} best ids by {teacher!r}, not {top_k}")
        trained = np.flatnonzero(row.loss_mask[: split.end])
        places = trained - 1 + prompt_width - split.start
        logprobs[at, places] = score.top_logprobs[trained, :top_k] if top_k else score.logprobs[trained, None]
        ids[at, places] = score.top_ids[trained, :top_k] if top_k else row.token_ids[trained, None]
    return {"teacher_logprobs": logprobs, "teacher_ids": ids}


def _non_tensors(batch: Batch, rows: Sequence[SplitRow]) -> dict[str, NDArray[Any]]:
    versions = [weight_versions(row.row) for row in rows]
    return {
        "uid": _objects(group_names(batch)),
        "rollout_id": _objects([row.row.rollout_id for row in rows]),
        "trajectory_id": _objects([row.row.trajectory_id for row in rows]),
        "staleness": _objects(batch.staleness.tolist()),
        "min_global_steps": _objects([min(spans, default=None) for spans in versions]),
        "max_global_steps": _objects([max(spans, default=None) for spans in versions]),
        "__num_turns__": np.array([sum(run[2] for run in find_runs(row.loss_mask)) for row in rows], dtype=np.int32),
    }


def _with_lengths(images: dict[str, Any]) -> dict[str, Any]:
    """With verl's `images_seqlens`: the patches of each frame."""
    if (grids := images.get("image_grid_thw")) is None:
        return images
    return images | {"images_seqlens": (grids[:, 1] * grids[:, 2]).repeat_interleave(grids[:, 0])}


def _rope_positions(seen: Sequence[RowVision], positions: NDArray[np.int64], there: NDArray[np.bool_]) -> NDArray[np.int64]:
    """As verl's agent loop lays them out: padding has 1 as the token's position and 0 in the other three."""
    table = np.zeros((len(seen), 4, positions.shape[1]), dtype=np.int64)
    table[:, 0] = np.where(there, positions, 1)
    for line, mask, row in zip(table, there, seen, strict=True):
        assert row.rope_positions is not None
        line[1:, mask] = row.rope_positions
    return table


def _shorten(row: SplitRow, limit: int, *, truncate: bool) -> SplitRow:
    length = row.end - row.start
    if length <= limit:
        return row
    if not truncate:
        raise RowTooLong(f"trajectory {row.row.trajectory_id!r} has a response of {length} tokens, the limit is {limit}")
    (end,) = limit_lengths([row.row], row.start + limit, truncate=True)
    return SplitRow(row.row, row.index, row.start, end, int(row.row.loss_mask[end:].sum()))


def _width(what: str, lengths: Sequence[int], fixed: int | None) -> int:
    longest = max(lengths, default=0)
    if fixed is not None and longest > fixed:
        raise RowTooLong(f"a {what} has {longest} tokens, the limit is {fixed}")
    return longest if fixed is None else fixed


def _place_last(value: float, length: int) -> NDArray[np.float32]:
    line = np.zeros(length, dtype=np.float32)
    line[-1] = value
    return line


def _objects(values: Sequence[Any]) -> NDArray[Any]:
    array = np.empty(len(values), dtype=object)
    array[:] = values
    return array


def _tensor(table: NDArray[Any]) -> Any:
    import torch

    return torch.from_numpy(table)
