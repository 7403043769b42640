"""SkyRL's generator: each training batch is made of leased groups; the prompts of SkyRL's dataset only say how many.

Hand `VerbatimGenerator` to the trainer where an entry point makes its generator (`BasePPOExp.get_generator`), with
`generator.step_wise_trajectories=true`. The groups must be filled with `generator.n_samples_per_prompt` rollouts. With
`trainer.hf_save_interval=1` and `exports` (`trainer.export_path`, which the engines can read) the weights of each step are
published when the next one is asked for.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from trainer_client import TrainerClient
from trainer_client.adapters.skyrl import generator_output
from trainer_client.adapters.steps import Steps


class VerbatimGenerator:
    """Has the one method of SkyRL's GeneratorInterface. A step is acknowledged when the next one is asked for."""

    def __init__(
        self,
        client: TrainerClient,
        groups: int,
        trajectory_id_type: Any,
        *,
        max_length: int | None = None,
        exports: str | Path | None = None,
    ) -> None:
        """`groups` is SkyRL's `trainer.train_batch_size`, `trajectory_id_type` its TrajectoryID."""
        self._steps = Steps(client, groups)
        self._trajectory_id_type = trajectory_id_type
        self._max_length = max_length
        self._exports = exports
        self._step: int | None = None

    async def generate(self, input_batch: Any) -> dict[str, Any]:
        """A GeneratorOutput of one step. Raises ValueError if SkyRL has not trained on the one before."""
        batch = await asyncio.to_thread(self._steps.take, self._find_saved(input_batch["batch_metadata"].global_step))
        return generator_output(
            batch, self._trajectory_id_type, max_length=self._max_length, truncate=self._max_length is not None
        )

    def _find_saved(self, step: int) -> Path | None:
        """What SkyRL saved after the step before. The first step of a run has none: the engines serve what it starts from."""
        before, self._step = self._step, step
        if before == step:
            raise ValueError(
                f"SkyRL asked for step {step} again without training on the groups it has, which would now be acknowledged: set "
                "trainer.algorithm.dynamic_sampling.type=null and trainer.eval_interval=-1. To leave out groups whose rewards are all "
                "equal, set zero_variance: drop in VERBATIM_GROUP of the service"
            )
        if before is None or self._exports is None:
            return None
        return Path(self._exports) / f"global_step_{step - 1}" / "policy"
