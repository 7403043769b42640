"""TRL's GRPOTrainer on leased rows: agents run elsewhere, TRL computes the loss and takes the optimizer steps.

    client = TrainerClient(url, token)
    trainer = LeasedGRPOTrainer(
        model,
        LeasedRows(url, token, Rows(), max_groups=8),
        GRPOConfig(output_dir="out", max_steps=100, per_device_train_batch_size=8, ...),
        publish=PublishWeights(client, "/shared/weights"),
        processing_class=tokenizer,
    )
    trainer.train()

For each row TRL gets the ids before the first sampled token as prompt, all others as completion, the engine's logprobs, and the row's
loss mask as `env_mask`, so that it trains every sampled token of every turn and no tool output or template token. LeasedGRPOTrainer
corrects what TRL would otherwise get wrong. Rows with images need `Rows(vision=Vision.load(model))`. Written against TRL 1.16.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from accelerate.utils import gather_object
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from contract.errors import ClientClosed
from trainer_client.adapters.microbatches import Rows
from trainer_client.adapters.torch_dataset import BatchShare, LeasedRows
from trainer_client.arrays import PackedBatch
from trainer_client.client import Mode, TrainerClient
from trainer_client.errors import UnpublishableWeights, VersionConflict
from trainer_client.publish import version_folder


class PublishWeights(TrainerCallback):
    """Writes the model below `directory`, which the engines can read, and pushes it as the next version, every `every_steps` optimizer
    steps and at the end of the training. For any transformers Trainer.

    `dtype` of the written floating-point weights: default the model's; the engine's saves bytes. `mode` and `keep_last` as for
    `TrainerClient.publish`, whose errors end the training. Only the main process pushes.
    Raises UnpublishableWeights for sharded weights (FSDP, ZeRO-3) and for adapters."""

    def __init__(
        self,
        client: TrainerClient,
        directory: str | os.PathLike[str],
        *,
        every_steps: int = 1,
        keep_last: int = 3,
        mode: Mode = "keep",
        dtype: torch.dtype | None = None,
    ) -> None:
        self.version: int | None = None
        """The version last seen or pushed; None before the training starts."""
        self._client = client
        self._directory = directory
        self._every_steps, self._keep_last, self._mode, self._dtype = every_steps, keep_last, mode, dtype
        self._pushed_step = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if args.fsdp or any(hasattr(weight, "ds_id") or hasattr(weight, "full_tensor") for weight in model.parameters()):
            raise UnpublishableWeights("the weights are sharded over processes: gather them and call TrainerClient.publish")
        if hasattr(model, "peft_config"):
            raise UnpublishableWeights("the model has adapters: save them and call TrainerClient.publish with kind='lora'")
        if state.is_world_process_zero:
            self.version = self._fetch_version()
        self._pushed_step = state.global_step

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if state.global_step % self._every_steps == 0:
            self._publish(state, model)

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self._publish(state, model)

    def _publish(self, state: Any, model: Any) -> None:
        if not state.is_world_process_zero or self._pushed_step == state.global_step:
            return
        # Another publisher's version would be overwritten, and rows sampled under weights unknown here.
        if (served := self._fetch_version()) != self.version:
            raise VersionConflict(
                f"version {served} is being served, not {self.version}: there is another publisher", status=409
            )
        with version_folder(self._directory, served + 1) as folder:
            model.save_pretrained(folder.unfinished, state_dict=self._state(model))
        self._client.publish(folder.path, served + 1, mode=self._mode, directory=self._directory, keep_last=self._keep_last)
        self.version, self._pushed_step = served + 1, state.global_step

    def _fetch_version(self) -> int:
        return int(self._client.weights()["current"]["version"])

    def _state(self, model: Any) -> dict[str, torch.Tensor] | None:
        if self._dtype is None:
            return None
        return {
            name: weight.to(self._dtype) if weight.is_floating_point() else weight
            for name, weight in model.state_dict().items()
        }


class LeasedGRPOTrainer(GRPOTrainer):
    """`rows` are leased rows split by `Rows`, with advantages. A generation batch of TRL (`per_device_train_batch_size` times
    `steps_per_generation`) is that many rows, regardless of groups; left-over rows are in the next one.

    Leases are acked after the optimizer step that trained the last of their rows, and after `publish`; all others are given back when
    `train` ends, also with an error. Each process leases for itself.

    Four things differ from a GRPOTrainer with a rollout function. Advantages are those of `rows`, computed over whole groups: TRL
    would treat every `num_generations` consecutive rows as a group, but a rollout may have several rows. The importance ratio uses the
    recorded logprobs, as the `vllm_importance_sampling_…` settings say, although `use_vllm` is off, where TRL would ignore them. There is
    no dataset: the prompts are in the rows. And the model sees the rows' images, at their placeholders in prompts and completions: TRL
    takes none from a rollout function.
    """

    def __init__(
        self, model: Any, rows: LeasedRows, args: GRPOConfig, *, publish: PublishWeights | None = None, **options: Any
    ) -> None:
        if args.use_vllm:
            raise ValueError("use_vllm is set, but the engine belongs to the service")
        if not isinstance(rows.cut, Rows) or rows.advantages is None:
            raise ValueError("the rows must be split by `Rows` and have advantages")
        self._rows = rows
        self._leased: Iterator[BatchShare] = iter(())
        self._batch: list[BatchShare] = []
        self._pixels: dict[str, Any] = {}
        self._untrained: deque[tuple[int, list[BatchShare]]] = deque()
        callbacks = [*(options.pop("callbacks", None) or ()), *([publish] if publish else [])]
        super().__init__(
            model=model,
            reward_funcs=stored_reward,
            args=args,
            train_dataset=_placeholders(args),
            rollout_func=self._lease_rows,
            callbacks=callbacks,
            **options,
        )
        # TRL uses the engine's logprobs only with use_vllm; set after __init__, it starts no client.
        self.use_vllm = True
        self.vllm_generation = _PushedByCallback()
        self._last_loaded_step = -1
        self.add_callback(_AckAfterStep(self))

    def train(self, *args: Any, **options: Any) -> Any:
        """As GRPOTrainer's; gives back open leases at the end."""
        self._leased = leased = iter(self._rows)
        try:
            return super().train(*args, **options)
        finally:
            self._batch, self._untrained = [], deque()
            leased.close()  # type: ignore[attr-defined]

    def ack_trained(self) -> None:
        """Ack the rows whose last use has passed. Raises LeaseLost."""
        trained: list[BatchShare] = []
        while self._untrained and self._untrained[0][0] <= self._step:
            trained += self._untrained.popleft()[1]
        # No process may ack before the main one has published.
        self.accelerator.wait_for_everyone()
        if trained:
            self._rows.ack(*trained)

    def _lease_rows(self, prompts: Sequence[Any], trainer: Any) -> dict[str, list[Any]]:
        self._batch = list(islice(self._leased, len(prompts)))
        if len(self._batch) < len(prompts):
            raise ClientClosed("the rows were closed during the training")
        uses = self.args.steps_per_generation * self.num_iterations
        self._untrained.append((self._step + uses, self._batch))
        self._pixels = {
            name: value.to(self.accelerator.device) if isinstance(value, torch.Tensor) else value
            for name, value in pixels_of(_rows(self._batch)).items()
        }
        return rollouts_of(_rows(self._batch))

    def _get_per_token_logps_and_entropies(self, model: Any, input_ids: Any, *args: Any, **options: Any) -> Any:
        """While a generation batch is scored TRL knows of no images."""
        if self._pixels:
            options |= self._pixels | self._token_types(input_ids)
        return super()._get_per_token_logps_and_entropies(model, input_ids, *args, **options)

    def _token_types(self, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """Needed by models with M-RoPE, whose positions depend on where images stand."""
        vision = self._rows.cut.vision  # type: ignore[attr-defined]
        return {} if vision.rope_merge is None else {"mm_token_type_ids": (input_ids == vision.placeholder_id).long()}

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        scored = self._score(inputs)
        advantages = torch.cat([row.advantages for row in _rows(self._batch)])  # type: ignore[misc]
        scored["advantages"] = advantages.to(scored["advantages"])
        # The log keeps one generation batch: these push out TRL's own.
        self._logs["advantages"].extend(gather_object(advantages.tolist()))
        self._metrics["train"].pop("frac_reward_zero_std", None)
        return scored

    def _score(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """TRL's, with the images of the rows. `_generate` leases them."""
        try:
            scored: dict[str, Any] = super()._generate_and_score_completions(inputs)
            if self._pixels:
                ids = torch.cat([scored["prompt_ids"], scored["completion_ids"]], dim=1)
                scored |= self._pixels | self._token_types(ids)
            return scored
        finally:
            self._pixels = {}


def pixels_of(rows: Sequence[PackedBatch]) -> dict[str, Any]:
    """The images of rows of one trajectory each, as TRL's GRPOTrainer keeps those of a batch: the model's parameters, and `num_images` by
    which TRL cuts them into rows. Empty without images."""
    found = [row.vision_inputs for row in rows]
    names = {name: tensor for inputs in found for name, tensor in inputs.items()}
    if not names:
        return {}
    if "pixel_attention_mask" in names:
        # One line of tiles per row, filled up with tiles that the model drops.
        tiles = max(inputs["pixel_values"].shape[1] for inputs in found if inputs)
        tables = {name: torch.cat([_fill(inputs.get(name), like, tiles) for inputs in found]) for name, like in names.items()}
        return {**tables, "num_images": [1] * len(rows)}
    counts = "image_grid_thw" if "image_grid_thw" in names else "pixel_values"
    return {
        **{name: torch.cat([inputs.get(name, like[:0]) for inputs in found]) for name, like in names.items()},
        "num_images": [len(inputs[counts]) if inputs else 0 for inputs in found],
    }


def _fill(tiles: torch.Tensor | None, like: torch.Tensor, count: int) -> torch.Tensor:
    filled = like.new_zeros((1, count, *like.shape[2:]))
    if tiles is not None:
        filled[:, : tiles.shape[1]] = tiles
    return filled


def rollouts_of(rows: Sequence[PackedBatch]) -> dict[str, list[Any]]:
    """The result of a TRL rollout function for rows of one trajectory each: `prompt_ids`, `completion_ids`, `logprobs` and `env_mask` as
    long as the completion, and `reward` for the reward function, None if there is none."""
    starts = [int(row.loss_mask.int().argmax()) for row in rows]
    pairs = list(zip(rows, starts, strict=True))
    return {
        "prompt_ids": [row.token_ids[:start].tolist() for row, start in pairs],
        "completion_ids": [row.token_ids[start:].tolist() for row, start in pairs],
        "logprobs": [row.inference_logprobs[start:].tolist() for row, start in pairs],
        "env_mask": [row.loss_mask[start:].int().tolist() for row, start in pairs],
        "reward": [None if row.rewards[0].isnan() else float(row.rewards[0]) for row in rows],
    }


def _rows(parts: Sequence[BatchShare]) -> list[PackedBatch]:
    return [part.data for part in parts]  # type: ignore[misc]


def stored_reward(reward: list[float | None], **_: Any) -> list[float | None]:
    """The sessions' rewards, as a TRL reward function for its metrics."""
    return reward


def _placeholders(args: GRPOConfig) -> Dataset:
    """A dataset as long as one generation batch, for a loop that runs to `max_steps`."""
    if args.max_steps <= 0:
        raise ValueError("max_steps is not set: leased rows have no epochs")
    return Dataset.from_dict({"prompt": [""] * (args.generation_batch_size // args.num_generations)})


class _PushedByCallback:
    """Called by TRL before it generates; PublishWeights has already pushed after the step."""

    def sync_weights(self) -> None:
        return


class _AckAfterStep(TrainerCallback):
    """The last callback of a step, so that acked rows have been trained on and published."""

    def __init__(self, trainer: LeasedGRPOTrainer) -> None:
        self._trainer = trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._trainer.ack_trained()
