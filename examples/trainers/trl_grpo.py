"""GRPO with TRL: its trainer, its losses and settings, on rows that agents made elsewhere.

    pip install trl
    VERBATIM_URL=http://127.0.0.1:8700 VERBATIM_TRAINER_TOKEN=... \
        python -m examples.trainers.trl_grpo --model Qwen/Qwen3-0.6B --weights /shared/weights

Start it with the weights that the engines serve. It waits for groups and ends after `--steps` optimizer steps.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import torch
import typer
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig

from trainer_client import TrainerClient
from trainer_client.adapters.microbatches import Rows
from trainer_client.adapters.torch_dataset import LeasedRows
from trainer_client.adapters.trl import LeasedGRPOTrainer, PublishWeights


def train(
    model: Annotated[str, typer.Option(help="The weights that the engines serve now.")],
    weights: Annotated[Path, typer.Option(help="Where new versions are written, readable by the engines.")],
    out: Annotated[Path, typer.Option(help="TRL's own output.")] = Path("trl-out"),
    steps: int = 100,
    rows: Annotated[int, typer.Option(help="Rows that go through the model at once.")] = 4,
    accumulate: Annotated[int, typer.Option(help="So many times that per optimizer step.")] = 4,
    learning_rate: float = 1e-6,
) -> None:
    """Train on what the service leases. The service and the token are read from the environment."""
    url, token = os.environ["VERBATIM_URL"], os.environ["VERBATIM_TRAINER_TOKEN"]
    cpu = not torch.cuda.is_available()
    config = GRPOConfig(
        output_dir=str(out),
        max_steps=steps,
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=accumulate,
        num_generations=2,  # must divide the batch, and means nothing here: groups are the service's
        learning_rate=learning_rate,
        # Per token: over a long row of several turns the product of all ratios is soon beyond any bound.
        vllm_importance_sampling_mode="token_truncate",
        logging_steps=1,
        report_to="none",
        use_cpu=cpu,
        bf16=not cpu,
    )
    with TrainerClient(url, token) as client, LeasedRows(url, token, Rows(), max_staleness=4) as leased:
        trainer = LeasedGRPOTrainer(
            AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
            leased,
            config,
            publish=PublishWeights(client, weights),
            processing_class=AutoTokenizer.from_pretrained(model, padding_side="left"),
        )
        trainer.train()


if __name__ == "__main__":
    typer.run(train)
