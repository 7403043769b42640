"""Policy-gradient steps with verl's DataProto and verl's own loss on what a service collected.

    export VERBATIM_TRAINER_TOKEN=…
    python -m examples.trainers.verl_step http://127.0.0.1:8700 MODEL_DIR WEIGHTS_DIR --steps 10

MODEL_DIR is what the engine serves as version 0, WEIGHTS_DIR a folder it can read. One process and no Ray: to show the path
from a lease to the loss. In verl's own trainer the same `data_proto` takes the place of what the agent loop returns.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from trainer_client import Batch, TrainerClient
from trainer_client.adapters.verl import data_proto
from trainer_client.advantages import grpo


def train(url: str, model_dir: str, weights_dir: Path, steps: Annotated[int, typer.Option()] = 10) -> None:
    """Train for some steps, each published before its batch is acknowledged."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    with TrainerClient(url, os.environ["VERBATIM_TRAINER_TOKEN"]) as client:
        version = int(client.weights()["current"]["version"])
        for _, batch in zip(range(steps), client.batches(max_groups=8, max_staleness=2), strict=False):
            with batch:
                metrics = step(model, optimizer, batch)
                version += 1
                client.publish(model.state_dict(), version, directory=weights_dir, config=model.config, keep_last=3)
            print(f"version {version}: {metrics}")


def step(model: Any, optimizer: torch.optim.Optimizer, batch: Batch) -> dict[str, float]:
    """One optimizer step on the whole batch; verl's metrics with the loss."""
    from verl import DataProto
    from verl.trainer.ppo.core_algos import get_policy_loss_fn
    from verl.workers.config import ActorConfig

    data = data_proto(batch, DataProto, pad_id=0, advantages=batch.advantages(grpo))
    config = ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=len(data))
    loss, metrics = get_policy_loss_fn("vanilla")(
        old_log_prob=data.batch["rollout_log_probs"],
        log_prob=log_probs(model, data),
        advantages=data.batch["advantages"],
        response_mask=data.batch["response_mask"],
        loss_agg_mode="token-mean",
        config=config,
    )
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return {"loss": loss.item(), **metrics}


def log_probs(model: Any, data: Any) -> torch.Tensor:
    """The model's log-probability of every response token, of shape (rows, response)."""
    tensors = data.batch
    inputs = {name: tensors[name] for name in ("input_ids", "attention_mask", "position_ids")}
    start = tensors["prompts"].shape[1]
    logits = model(**inputs).logits[:, start - 1 : -1]
    return logits.log_softmax(-1).gather(-1, tensors["responses"].unsqueeze(-1)).squeeze(-1)


if __name__ == "__main__":
    typer.run(train)
