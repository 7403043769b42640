"""NeMo RL: a batch as message logs with their rewards, or as the data that a GRPO step trains on.

Written against NeMo RL 0.6.0 (NVIDIA-NeMo/RL, commit 7ea279a).

    from nemo_rl.distributed.batched_data_dict import BatchedDataDict
    data = train_data(batch, BatchedDataDict, pad_id=tokenizer.pad_token_id, advantages=batch.advantages(leave_one_out))
    data["prev_logprobs"] = policy.get_logprobs(data)["logprobs"]
    policy.train(data, loss_fn)

**Baselines.** NeMo RL's estimators group rows by equal prompts and count every row. The rows of an agent's rollouts do not
all start with the same prompt, so advantages are passed in. If each rollout has one row,
`adv_estimator.compute_advantage(prompt_ids=rollout_batch["group"], …)` works as well: the estimators only compare which
rows are equal.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from trainer_client.adapters.split_rows import check_advantages, check_rewards, find_runs, split_rows
from trainer_client.batch import Batch

Message = dict[str, Any]


def message_logs(batch: Batch, *, max_length: int | None = None, truncate: bool = False) -> list[list[Message]]:
    """Per row its messages, which laid end to end are the row: one with the role "assistant" per sampled stretch, with
    `generation_logprobs`, one with the role "user" per stretch between, without them.

    `token_ids` int64, `generation_logprobs` float32; `content` is empty, since rows have no text. What else a step needs per
    token is added by NeMo RL's `add_grpo_token_loss_masks_and_generation_logprobs`. Raises: RowTooLong, ValueError.
    """
    import torch

    def message(row: Any, start: int, end: int, sampled: bool) -> Message:
        found: Message = {"role": "assistant" if sampled else "user", "content": ""}
        found["token_ids"] = torch.from_numpy(row.token_ids[start:end].astype(np.int64))
        if sampled:
            found["generation_logprobs"] = torch.from_numpy(row.logprobs[start:end].copy())
        return found

    return [
        [message(split.row, *run) for run in find_runs(split.row.loss_mask[: split.end])]
        for split in split_rows(batch, max_length=max_length, truncate=truncate)
    ]


def rollout_batch(batch: Batch, dict_type: Any, *, max_length: int | None = None, truncate: bool = False) -> Any:
    """A `dict_type` (BatchedDataDict) as NeMo RL's rollouts return it: `message_log`, `total_reward` float32,
    `loss_multiplier` float32 (1, or 0 for a row that trains nothing), `length` int64 tokens, `truncated` bool and `idx`;
    besides `group` int64 of shape (rows, 1), `rollout` int64 and `staleness` int64. Raises: RowTooLong, ValueError.
    """
    import torch

    rows = split_rows(batch, max_length=max_length, truncate=truncate)
    return dict_type(
        {
            "message_log": message_logs(batch, max_length=max_length, truncate=truncate),
            "total_reward": torch.tensor(check_rewards(batch)),
            "loss_multiplier": torch.tensor([float(row.loss_mask.any()) for row in rows]),
            "length": torch.tensor([row.end for row in rows]),
            "truncated": torch.tensor([row.truncated for row in rows]),
            "idx": list(range(len(rows))),
            "group": torch.tensor(batch.columns.group_index).unsqueeze(1),
            "rollout": torch.tensor(batch.columns.rollout_index),
            "staleness": torch.tensor(batch.staleness),
        }
    )


def train_data(
    batch: Batch,
    dict_type: Any,
    *,
    pad_id: int,
    advantages: Any,
    multiple_of: int = 1,
    max_length: int | None = None,
    truncate: bool = False,
) -> Any:
    """A `dict_type` (BatchedDataDict) with all rows in their order, padded on the right to a `multiple_of`.

    Of shape (rows, length): `input_ids`, `token_mask` int64, `generation_logprobs` float32 and `advantages` float32, the last
    two 0 where nothing was sampled. Of shape (rows,): `input_lengths` int32, `sample_mask` float32 (0 for a row that trains
    nothing). `prev_logprobs` and `reference_policy_logprobs` come from the policy. Raises: RowTooLong, ValueError.
    """
    import torch

    values = torch.from_numpy(check_advantages(batch, advantages))
    rows = batch.padded(
        pad_id, max_length=max_length, multiple_of=multiple_of, truncate=truncate, framework="torch", advantages=advantages
    )
    mask = rows.loss_mask.to(torch.int64)
    return dict_type(
        {
            "input_ids": rows.token_ids,
            "input_lengths": rows.attention_mask.sum(dim=1).to(torch.int32),
            "generation_logprobs": rows.inference_logprobs,
            "token_mask": mask,
            "sample_mask": mask.any(dim=1).to(torch.float32),
            "advantages": values.unsqueeze(1) * mask,
        }
    )
