"""TRL's AsyncGRPOTrainer on leased rows: agents run elsewhere, TRL packs the rows, computes the loss and takes the optimizer steps.

    client = TrainerClient(url, token)
    trainer = LeasedAsyncGRPOTrainer(
        "Qwen/Qwen3-8B",
        LeasedRows(url, token, Rows(max_length=16_384), max_staleness=4),
        AsyncGRPOConfig(output_dir="out", max_steps=100, per_device_train_batch_size=1, gradient_accumulation_steps=8, ...),
        weights=PublishTransfer(client, "/shared/weights"),
    )
    trainer.train()

It differs from `trl.LeasedGRPOTrainer` in what TRL does with the rows: tokens that rows share are computed once, micro-batches are of
`token_budget` tokens, and what is published are the whole weights that TRL gathers, adapters merged. Written against TRL 1.16, where the
trainer is experimental and needs an NVIDIA GPU with FlashAttention 3, or ROCm.
"""

from __future__ import annotations

import os
import queue
import sys
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from datasets import Dataset
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

from contract.errors import ClientClosed
from trainer_client.adapters.microbatches import Rows
from trainer_client.adapters.torch_dataset import BatchShare, LeasedRows
from trainer_client.client import Mode, TrainerClient
from trainer_client.errors import VersionConflict


class PublishTransfer:
    """A weight transfer of TRL: writes the weights below `directory`, which the engines can read, and pushes them as the next version,
    every `weight_sync_steps` optimizer steps. The sync before the first step pushes nothing: the engines serve those weights.

    `dtype` of the written floating-point weights: default the model's. `mode` and `keep_last` as for `TrainerClient.publish`, whose
    errors end the training."""

    def __init__(
        self,
        client: TrainerClient,
        directory: str | os.PathLike[str],
        *,
        keep_last: int = 3,
        mode: Mode = "keep",
        dtype: torch.dtype | None = None,
    ) -> None:
        self.version: int | None = None
        """The version last seen or pushed; None before the training starts."""
        self._client, self._directory = client, directory
        self._keep_last, self._mode, self._dtype = keep_last, mode, dtype

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Publish what `iterator` yields, on the CPU one tensor after another. Raises VersionConflict."""
        served = int(self._client.weights()["current"]["version"])
        if self.version is None:
            for _ in iterator:  # each is gathered by all processes, which wait for this one
                pass
            self.version = served
            return
        # Another publisher's version would be overwritten, and rows sampled under weights unknown here.
        if served != self.version:
            raise VersionConflict(
                f"version {served} is being served, not {self.version}: there is another publisher", status=409
            )
        state = {name: self._copy(weight) for name, weight in iterator}
        self._client.publish(state, served + 1, mode=self._mode, directory=self._directory, keep_last=self._keep_last)
        self.version = served + 1

    def _copy(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.to("cpu", self._dtype if self._dtype and weight.is_floating_point() else weight.dtype)

    # The service brings the engines to new weights by itself: there is nothing to set up, pause, resume or destroy.
    def init_weight_transfer(self) -> None: ...

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def destroy(self) -> None: ...


class LeasedAsyncGRPOTrainer(AsyncGRPOTrainer):
    """`rows` are leased rows split by `Rows`, with advantages; `weights` is a weight transfer of TRL, as PublishTransfer.

    Rows are leased when TRL asks for one, which is one micro-batch ahead of its training. Leases are acked after the first weight
    transfer that follows the step which trained the last of their rows; all others are given back when the training ends, also with an
    error. The main process leases for all.

    TRL would drop rows that are too old or too long after they were leased. Here the rows say both: `max_staleness` of `LeasedRows`
    replaces that of AsyncGRPOConfig, and `max_length` of `Rows` must not be over the `token_budget`, whose default it is. Without both
    a micro-batch is `per_device_train_batch_size` rows per process."""

    def __init__(self, model: str, rows: LeasedRows, args: AsyncGRPOConfig, *, weights: Any, **options: Any) -> None:
        if not isinstance(rows.cut, Rows) or rows.advantages is None:
            raise ValueError("the rows must be split by `Rows` and have advantages")
        if rows.cut.vision is not None:
            raise ValueError("TRL's AsyncGRPOTrainer takes no images: use LeasedGRPOTrainer")
        if args.max_steps <= 0:
            raise ValueError("max_steps is not set: leased rows have no epochs")
        longest, budget = rows.cut.max_length, args.token_budget
        if budget is None:
            args.token_budget = longest or 0
        elif budget > 0 and (longest is None or longest > budget):
            raise ValueError(
                f"rows may have {longest or 'any number of'} tokens and token_budget is {budget}: TRL drops longer ones"
            )
        self._leased = _LeasedRollouts(rows)
        super().__init__(
            model=model,
            args=args,
            train_dataset=Dataset.from_dict({"prompt": [""]}),
            rollout_worker=self._leased,
            weight_transfer=weights,
            **options,
        )
        self.args.max_staleness = sys.maxsize

    def training_step(self, model: Any, inputs: dict[str, Any], *args: Any, **options: Any) -> Any:
        """As AsyncGRPOTrainer's; counts the rows of the micro-batch, of all processes."""
        rows = round(float(inputs["global_n_forward_tokens"][0]) / float(inputs["mean_seq_len"][0]))
        loss = super().training_step(model, inputs, *args, **options)
        self._leased.trained += rows
        return loss


class _LeasedRollouts:
    """TRL's rollout worker and, in one, the queue it fills. TRL trains the rows in the order in which it takes them, so that their
    number says which they are."""

    def __init__(self, rows: LeasedRows) -> None:
        self.rollout_buffer: Any = self
        self.metrics_queue: queue.Queue[dict[str, float]] = queue.Queue()
        self.trained = 0
        """Rows trained since the last ack."""
        self._rows = rows
        self._leased: Iterator[BatchShare] = iter(())
        self._taken: deque[BatchShare] = deque()
        self._trainer_version = 0
        self._groups: tuple[Any, int] = (None, -1)

    def start(self) -> None:
        self._taken.clear()
        self.trained = 0
        self._leased = iter(self._rows)

    def stop(self) -> None:
        if hasattr(self._leased, "close"):
            self._leased.close()
        self._taken.clear()

    def update_model_version(self, model_version: int) -> None:
        """Called by TRL when new weights are served. Acks the rows trained before. Raises LeaseLost."""
        self._trainer_version = model_version
        parts = [self._taken.popleft() for _ in range(self.trained)]
        self.trained = 0
        if parts:
            self._rows.ack(*parts)

    def check_health(self, stale_after_s: float) -> None:
        """Rows that do not come are waited for; a service that fails raises in `get`."""

    def get(self, timeout: float | None = None) -> RolloutSample:
        """The next row, however long it takes. Raises ClientClosed, and what `TrainerClient.batches` raises."""
        part = next(self._leased, None)
        if part is None:
            raise ClientClosed("the rows were closed during the training")
        self._taken.append(part)
        return self._sample(part)

    def qsize(self) -> int:
        return 0

    def _sample(self, part: BatchShare) -> RolloutSample:
        row: Any = part.data
        group = (part.share.lease_id, int(row.group_index[0]))
        if group != self._groups[0]:
            self._groups = (group, self._groups[1] + 1)
        return RolloutSample(
            prompt=[],
            completion=[],
            input_ids=row.token_ids.numpy(),
            completion_mask=row.loss_mask.int().numpy(),
            old_log_probs=row.inference_logprobs.numpy(),
            advantage=float(row.advantages[0]),
            model_version=self._trainer_version - int(row.staleness[0]),
            group_id=self._groups[1],
            metrics={"reward": float(row.rewards[0])},
        )
