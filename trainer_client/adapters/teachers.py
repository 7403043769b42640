"""What a scorer says of rows, in the forms that trainers take for distillation from a teacher.

A trained token without a score is refused: whatever stood in its place would be trained on. TRL's asynchronous distillation gets its
samples here; written against TRL 1.16:

    from trl.experimental.async_distillation.async_rollout_worker import RolloutSample
    for sample in distillation_samples(batch, RolloutSample, "teacher", top_k=8): ...
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from reconstruct.details import NO_TOKEN
from reconstruct.scores import Score, unscored
from reconstruct.trajectory import Trajectory
from trainer_client.arrays import limit_lengths, require_no_images, require_one_mode
from trainer_client.batch import Batch


def read_score(row: Trajectory, scorer: str, length: int) -> Score:
    """The row's score by `scorer`. Raises ValueError if one of the trained tokens among the first `length` has none."""
    score = row.scores.get(scorer) or unscored(len(row.token_ids), "", "", f"there is no score {scorer!r}")
    lacking = np.flatnonzero((row.loss_mask[:length] == 1) & ~score.known[:length])
    if lacking.size:
        why = score.error or "the scorer left it out"
        raise ValueError(
            f"trajectory {row.trajectory_id!r} has {lacking.size} trained tokens without a score by {scorer!r}, the first is token "
            f"{lacking[0]} ({why}): require the scorer, or leave the row out"
        )
    return score


def logprobs_of(row: Trajectory, scorer: str, length: int) -> NDArray[np.float32]:
    """The scorer's logprobs of the first `length` tokens, each at the token itself; 0.0 where nothing is trained. Raises ValueError."""
    return np.where(row.loss_mask[:length] == 1, read_score(row, scorer, length).logprobs[:length], 0).astype(np.float32)


def best_and_own(row: Trajectory, scorer: str, length: int, top_k: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Ids and logprobs of the `top_k` best at each of the first `length` tokens and, where it is none of them, the token itself; both of
    shape (length, top_k + 1), at the token itself, padded with -1 and -inf. Raises ValueError."""
    score = read_score(row, scorer, length)
    width = min(top_k, score.top_k)
    ids = np.full((length, top_k + 1), NO_TOKEN, np.int64)
    logprobs = np.full((length, top_k + 1), -np.inf, np.float32)
    there = (row.loss_mask[:length] == 1)[:, None] & (score.top_ids[:length, :width] != NO_TOKEN)
    ids[:, :width][there] = score.top_ids[:length, :width][there]
    logprobs[:, :width][there] = score.top_logprobs[:length, :width][there]
    own = row.token_ids[:length]
    outside = np.flatnonzero((row.loss_mask[:length] == 1) & (ids != own[:, None]).all(1))
    place = (ids != NO_TOKEN).sum(1)[outside]
    ids[outside, place], logprobs[outside, place] = own[outside], score.logprobs[:length][outside]
    return ids, logprobs


def distillation_samples(
    batch: Batch, sample_type: Any, scorer: str, *, top_k: int = 8, max_length: int | None = None, truncate: bool = False
) -> list[Any]:
    """`sample_type`s (TRL's `RolloutSample` of asynchronous distillation) of the rows that train something, in their order. `top_k` is
    the trainer's `teacher_top_k`, `prompt_id` the index of the row's group in the batch.

    A row over `max_length` tokens raises RowTooLong, or loses its end with `truncate`. Raises: RowTooLong, MixedLogprobModes,
    UnseenImages, and ValueError for a trained token without a score."""
    require_one_mode(batch.rows)
    require_no_images(batch.rows, "this adapter does not carry them")
    lengths = limit_lengths(batch.rows, max_length, truncate=truncate)
    made = []
    for index, (row, length) in enumerate(zip(batch.rows, lengths, strict=True)):
        if not row.loss_mask[:length].any():
            continue
        ids, logprobs = best_and_own(row, scorer, length, top_k)
        made.append(
            sample_type(
                prompt=[],
                completion=[],
                input_ids=row.token_ids[:length].astype(np.int64),
                completion_mask=row.loss_mask[:length].astype(np.int64),
                teacher_topk_ids=ids,
                teacher_topk_logprobs=logprobs,
                model_version=int(batch.row_versions[index] - batch.staleness[index]),
                metrics={},
                teacher_id=scorer,
                prompt_id=int(batch.columns.group_index[index]),
            )
        )
    return made
