"""tinker: a batch as `tinker.Datum`s for `forward_backward`. Written against tinker 0.38.0 and tinker-cookbook 0.6.1.

    import tinker
    with batch:
        data = datums(batch, tinker, batch.advantages(grpo))
        training.forward_backward(data, loss_fn="importance_sampling").result()
        training.optim_step(tinker.AdamParams(learning_rate=1e-5)).result()

The arrays are those of the cookbook's `trajectory_to_data` for the same calls: `target_tokens` is the row from its second token on,
`logprobs`, `advantages` and `mask` are 0 where nothing was sampled. Tokens that two rows share are trained in one of them.

**Baselines.** tinker's losses take the advantages as they are. `batch.advantages` counts each rollout once.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from trainer_client.adapters.split_rows import check_advantages
from trainer_client.arrays import limit_lengths, require_no_images, require_one_mode
from trainer_client.batch import Batch


def datums(batch: Batch, tinker: Any, advantages: Any, *, max_length: int | None = None, truncate: bool = False) -> list[Any]:
    """A Datum for each row that trains something, in their order, of n - 1 tokens for a row of n. `tinker`: the module.

    `advantages`: one per row of the batch. A row over `max_length` tokens raises RowTooLong, or loses its end with `truncate`. Raises:
    RowTooLong, MixedLogprobModes, UnseenImages, ValueError."""
    require_one_mode(batch.rows)
    require_no_images(batch.rows, "this adapter does not carry them")
    values = check_advantages(batch, advantages)
    lengths = limit_lengths(batch.rows, max_length, truncate=truncate)
    found = []
    for row, length, value in zip(batch.rows, lengths, values, strict=True):
        mask = row.loss_mask[:length].astype(np.float32)
        if not mask.any():
            continue
        if mask[0]:
            raise ValueError(f"row {row.trajectory_id} begins with a sampled token, which no input of the model precedes")
        arrays = {
            "target_tokens": row.token_ids[1:length].astype(np.int64),
            "logprobs": row.logprobs[1:length].astype(np.float32),
            "advantages": mask[1:] * np.float32(value),
            "mask": mask[1:],
        }
        found.append(
            tinker.Datum(
                model_input=tinker.ModelInput.from_ints(row.token_ids[: length - 1].tolist()),
                loss_fn_inputs={name: tinker.TensorData.from_numpy(array) for name, array in arrays.items()},
            )
        )
    return found
