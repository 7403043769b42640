"""slime and miles: a batch as `Sample`s, as a rollout function returns them.

Written against slime 0.3.1 (THUDM/slime, commit 624b824) and miles 0.1.0 (radixark/miles, commit 31f1ca9); the two classes
have the fields used here in common.

    from slime.utils.types import Sample          # or miles.utils.types
    return RolloutFnTrainOutput(samples=samples(batch, Sample))

**Baselines.** All rows of a rollout have the same `rollout_id`, by which both weigh the loss once per rollout.
miles also counts a rollout once in the baseline, and rejects rows of one rollout with different rewards. slime
normalises by position and ignores rollouts: pass `--custom-reward-post-process-path
trainer_client.adapters.slime.post_process_rewards` (also for miles), or pass `advantages`, which then become the
`reward`, together with `--disable-rewards-normalization`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trainer_client.adapters.split_rows import (
    SplitRow,
    check_advantages,
    check_rewards,
    group_by_rollout,
    image_tensors,
    split_rows,
    weight_versions,
)
from trainer_client.adapters.teachers import logprobs_of
from trainer_client.advantages import dr_grpo, grpo
from trainer_client.batch import Batch
from trainer_client.vision import Vision


def samples(
    batch: Batch,
    sample_type: Any,
    *,
    max_length: int | None = None,
    truncate: bool = False,
    advantages: Any = None,
    vision: Vision | None = None,
    teacher: str | None = None,
) -> list[list[list[Any]]]:
    """`sample_type`s nested as groups, their rollouts, and the rows of each: the shape that both use for a rollout with
    several samples.

    `tokens` is the row; `loss_mask` and `rollout_log_probs` have `response_length` entries, from the first sampled token on.
    `group_index`, `rollout_id` and `index` are counted over the batch, so make the samples of one step from one batch
    (`Batch([*a.groups, *b.groups], version)` joins two). `weight_versions` has one entry per span. `metadata` has
    `trajectory_id`, `session_id`, `task_id`, `role`, `staleness`, `weight_spans` ([version, start, end] in `tokens`),
    `cut_tokens` and `raw_reward`. `advantages` (one per row), if given, are the `reward`. With `vision`, `multimodal_train_inputs` has the
    tensors of the row's images. `teacher`: the scorer whose logprobs are `teacher_log_probs`, as long as the response, 0.0 where nothing
    was sampled.

    A row over `max_length` tokens raises RowTooLong, or with `truncate` loses its end. Raises: RowTooLong, UnseenImages, VisionMismatch,
    ValueError, also for a trained token without a score.
    """
    raw = check_rewards(batch)
    rewards = raw if advantages is None else check_advantages(batch, advantages)
    rows = split_rows(batch, max_length=max_length, truncate=truncate, images=vision is not None)
    images = image_tensors(batch, rows, vision)

    def sample(index: int) -> Any:
        made = _sample(sample_type, batch, rows[index], float(rewards[index]), float(raw[index]))
        if images[index]:
            made.multimodal_train_inputs = images[index]
        if teacher is not None:
            made.teacher_log_probs = logprobs_of(rows[index].row, teacher, rows[index].end)[rows[index].start :].tolist()
        return made

    return [[[sample(index) for index in members] for members in rollouts] for rollouts in group_by_rollout(batch)]


def post_process_rewards(args: Any, samples: Sequence[Any]) -> tuple[list[float], list[float]]:
    """(raw rewards, advantages) per sample: the hook `--custom-reward-post-process-path`.

    trainer_client.advantages.grpo, or dr_grpo with `args.grpo_std_normalization` false, over `group_index` and `rollout_id`,
    for any order and number of samples.
    """
    estimator = grpo if args.grpo_std_normalization else dr_grpo
    raw = [float(sample.get_reward_value(args)) for sample in samples]
    groups = [sample.group_index for sample in samples]
    return raw, estimator(raw, groups, [sample.rollout_id for sample in samples]).tolist()


def _sample(sample_type: Any, batch: Batch, split: SplitRow, reward: float, raw_reward: float) -> Any:
    status = sample_type.Status.TRUNCATED if split.truncated else sample_type.Status.COMPLETED
    return sample_type(
        group_index=int(batch.columns.group_index[split.index]),
        index=split.index,
        rollout_id=int(batch.columns.rollout_index[split.index]),
        tokens=split.row.token_ids[: split.end].tolist(),
        response_length=len(split.response_ids),
        reward=reward,
        loss_mask=split.loss_mask.tolist(),
        weight_versions=[str(version) for version in weight_versions(split.row)],
        rollout_log_probs=split.logprobs.tolist(),
        status=status,
        metadata=_metadata(batch, split, raw_reward),
    )


def _metadata(batch: Batch, split: SplitRow, raw_reward: float) -> dict[str, Any]:
    row = split.row
    return {
        "trajectory_id": row.trajectory_id,
        "session_id": row.session_id,
        "task_id": row.task_id,
        "role": row.role,
        "staleness": int(batch.staleness[split.index]),
        "weight_spans": [[span.version, span.start, span.end] for span in row.weight_versions],
        "cut_tokens": split.cut_tokens,
        "raw_reward": raw_reward,
    }
