"""prime-rl: a batch as `TrainingSample`s, which its own `prepare_batch` packs into micro-batches.

Written against prime-rl 0.8.0 (PrimeIntellect-ai/prime-rl, commit 559b447).

    from prime_rl.trainer.batch import build_bin_cost, prepare_batch
    from prime_rl.transports.rollouts import TrainingSample
    rows = training_samples(batch, TrainingSample, batch.advantages(dr_grpo), env_name="swe")
    grid = prepare_batch(rows, seq_len, num_train_workers, build_bin_cost(None))     # for a MicroBatchSender

**Baselines.** The trainer computes none: the producer sets the advantage of every token, so they are passed in and count
each rollout once. prime-rl's loss is a mean over all trained tokens of the step; rollouts are not weighed.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from reconstruct.trajectory import Trajectory
from trainer_client.adapters.split_rows import check_advantages
from trainer_client.adapters.teachers import logprobs_of
from trainer_client.arrays import limit_lengths, require_no_images, require_one_mode
from trainer_client.batch import Batch


def training_samples(
    batch: Batch,
    sample_type: Any,
    advantages: Any,
    *,
    env_name: str,
    temperature: float = 1.0,
    max_length: int | None = None,
    truncate: bool = False,
    teacher: str | None = None,
    ref_kl_weight: float = 1.0,
) -> list[Any]:
    """`sample_type`s of the rows that train something, in their order: `token_ids`, `mask`, `logprobs`, `temperatures` and
    `advantages`, each as long as the row and 0 where nothing was sampled (a token's temperature is always `temperature`).

    `advantages`: one per row of the batch. `temperature`: what the rollouts were sampled with; the rows do not say it.
    `teacher`: the scorer whose logprobs are `ref_logprobs`, at the tokens themselves, with `ref_kl_weights` of `ref_kl_weight`; both 0
    where nothing was sampled. A row over `max_length` tokens raises RowTooLong, or loses its end with `truncate`. Raises: RowTooLong,
    MixedLogprobModes, UnseenImages, ValueError, also for a trained token without a score.
    """
    require_one_mode(batch.rows)
    require_no_images(batch.rows, "this adapter does not carry them")
    values = check_advantages(batch, advantages)
    lengths = limit_lengths(batch.rows, max_length, truncate=truncate)
    return [
        sample_type(
            token_ids=row.token_ids[:length].tolist(),
            mask=row.loss_mask[:length].astype(np.bool_).tolist(),
            logprobs=row.logprobs[:length].tolist(),
            temperatures=[temperature] * length,
            env_name=env_name,
            advantages=(row.loss_mask[:length] * value).tolist(),
            **({} if teacher is None else _refer(row, teacher, length, ref_kl_weight)),
        )
        for row, length, value in zip(batch.rows, lengths, values, strict=True)
        if row.loss_mask[:length].any()
    ]


def _refer(row: Trajectory, teacher: str, length: int, weight: float) -> dict[str, Any]:
    return {
        "ref_logprobs": logprobs_of(row, teacher, length).tolist(),
        "ref_kl_weights": (row.loss_mask[:length] * weight).tolist(),
    }
