"""GRPO in a torch loop of one's own: leased microbatches from DataLoader workers, a step, an acknowledgement, new weights.

    VERBATIM_URL=http://127.0.0.1:8700 VERBATIM_TRAINER_TOKEN=... \
        python -m examples.trainers.torch_loop --model Qwen/Qwen3-0.6B --weights /shared/weights

Start it with the weights that the engines serve. It waits for groups and ends after `--steps` optimizer steps.
"""

from __future__ import annotations

import os
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers import AutoModelForCausalLM

from trainer_client import TrainerClient
from trainer_client.adapters.microbatches import Padded
from trainer_client.adapters.torch_dataset import LeasedRows


def train(
    model: Annotated[str, typer.Option(help="The weights that the engines serve now.")],
    weights: Annotated[Path, typer.Option(help="Where new versions are written, readable by the engines.")],
    steps: int = 100,
    microbatches: Annotated[int, typer.Option(help="Microbatches per optimizer step.")] = 4,
    workers: int = 2,
    learning_rate: float = 1e-6,
) -> None:
    """Train on what the service leases. The service and the token are read from the environment."""
    url, token = os.environ["VERBATIM_URL"], os.environ["VERBATIM_TRAINER_TOKEN"]
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    policy.to("cuda" if torch.cuda.is_available() else "cpu")
    optimizer = torch.optim.AdamW(policy.parameters(), lr=learning_rate)
    with TrainerClient(url, token) as client, LeasedRows(url, token, Padded(micro_rows=4), max_staleness=4) as rows:
        version = client.weights()["current"]["version"]
        loop = rows.loader(workers, multiprocessing_context="spawn" if workers else None)
        for step in range(1, steps + 1):
            parts = [part.to(policy.device) for part in islice(loop, microbatches)]
            sampled = sum(int(part.loss_mask.sum()) for part in parts)
            loss = sum(backward(policy, part, sampled) for part in parts)
            optimizer.step()
            optimizer.zero_grad()
            version += 1
            client.publish(policy.state_dict(), version, directory=weights, config=policy.config, keep_last=3)
            rows.ack()  # only now: a trainer that dies before is given these rows again
            print(f"step {step}: {sampled} tokens, loss {loss:.4f}, version {version}", flush=True)


def backward(policy: Any, part: Any, sampled: int) -> float:
    """Adds the gradient of the clipped objective, each token weighing 1/`sampled`; the loss."""
    logits = policy(part.token_ids, attention_mask=part.attention_mask).logits
    # The mask stands at the token itself; the logits that speak of it stand one before.
    mask = part.loss_mask[:, 1:]
    logprobs = logits[:, :-1][mask].float().log_softmax(-1).gather(-1, part.token_ids[:, 1:][mask][:, None])[:, 0]
    ratio = (logprobs - part.inference_logprobs[:, 1:][mask]).exp()
    advantages = part.advantages[:, None].expand(mask.shape)[mask]
    loss = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.28) * advantages).sum() / sampled
    loss.backward()
    return float(loss.detach())


if __name__ == "__main__":
    typer.run(train)
