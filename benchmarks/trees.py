"""A training step on trees of rows beside the same step on flat rows: tokens, time, and how far loss and gradients are apart.

    python -m benchmarks.trees                                   # on the CPU, a small model in float32
    python -m benchmarks.trees --device cuda --dtype bfloat16 --layers 28 --hidden 1024 --scale 16

The rows are made: a group of rollouts that share their task's prompt and part at different turns. Flat rows go through the model one at
a time with causal attention, as a trainer without padding computes them; trees go through it with FlexAttention on CUDA and a dense
mask elsewhere. Needs torch and transformers and nothing of the service.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from reconstruct.records import Span, pack_ids, pack_logprobs
from reconstruct.trajectory import Trajectory
from trainer_client.batch import Batch
from trainer_client.tree import TreeBatch
from trainer_client.wire import Group

VOCABULARY = 8192


def make_row(name: str, ids: list[int], mask: list[int]) -> Trajectory:
    sampled = np.array(mask, dtype=np.int8)
    spans = tuple(Span(1, int(at), int(at) + 1) for at in np.flatnonzero(sampled))
    return Trajectory(
        trajectory_id=name,
        session_id=name,
        group_id="g",
        task_id="t",
        role="main",
        agent="",
        token_ids=pack_ids(ids),
        loss_mask=sampled,
        logprobs=pack_logprobs([-1.0 if one else 0.0 for one in mask]),
        weight_versions=spans,
        reward=1.0,
        call_ids=(name,),
        finish_reason="stop",
        truncated=False,
    )


def make_group(scale: int, siblings: int, seed: int = 0) -> Batch:
    """Rollouts of one task: a prompt of 256 tokens, then 6 turns of 16 sampled tokens and 48 of a tool's answer, all times `scale`.
    Half of the rollouts part at once, the others after a turn or two that they share."""
    numbers = np.random.default_rng(seed)

    def draw(count: int) -> list[int]:
        return numbers.integers(0, VOCABULARY, count * scale).tolist()  # type: ignore[no-any-return]

    def make_turn() -> tuple[list[int], list[int]]:
        return draw(16) + draw(48), [1] * (16 * scale) + [0] * (48 * scale)

    prompt, shared = draw(256), [make_turn(), make_turn()]
    rows = []
    for at in range(siblings):
        begun = shared[: max(0, at - siblings // 2) % 3]
        turns = begun + [make_turn() for _ in range(6 - len(begun))]
        ids, mask = list(prompt), [0] * len(prompt)
        for more, marks in turns:
            ids += more
            mask += marks
        rows.append(make_row(f"r{at}", ids, mask))
    return Batch([Group("g", tuple(rows))], weight_version=1)


def objective(logprobs: Any, inference_logprobs: Any, advantages: Any) -> Any:
    return -(torch.exp(logprobs - inference_logprobs) * advantages).sum() / 1000


def step_flat(model: Any, batch: Batch, advantages: np.ndarray[Any, Any]) -> Any:
    total = 0.0
    for row, advantage in zip(batch.rows, advantages, strict=True):
        ids = torch.as_tensor(np.array(row.token_ids), dtype=torch.long, device=model.device)
        trained = torch.as_tensor(np.flatnonzero(row.loss_mask), device=model.device)
        logits = model(ids[None], logits_to_keep=trained - 1).logits[0].float()
        logprobs = torch.log_softmax(logits, -1).gather(1, ids[trained][:, None])[:, 0]
        loss = objective(logprobs, torch.as_tensor(row.logprobs[row.loss_mask == 1], device=model.device), float(advantage))
        loss.backward()
        total += float(loss.detach())
    return total


def step_trees(model: Any, parts: Iterable[TreeBatch], flex: bool, dtype: Any) -> Any:
    total = 0.0
    for data in parts:
        data = data.to(model.device)
        mask = data.block_mask() if flex else data.attention_mask(dtype)
        sources, place = torch.unique(data.logit_index, return_inverse=True)
        logits = model(
            data.token_ids[None], attention_mask=mask, position_ids=data.position_ids[None], logits_to_keep=sources
        ).logits[0]
        table = torch.log_softmax(logits.float(), -1)
        logprobs = table[place, data.token_ids[data.trained_index]]
        loss = objective(logprobs, data.inference_logprobs, data.advantages[data.segment_index])
        loss.backward()
        total += float(loss.detach())
    return total


def measure(model: Any, step: Callable[[], float], rounds: int) -> tuple[float, float, list[torch.Tensor]]:
    """The loss, the shortest time of a step in seconds after one that is not counted, and the gradients."""
    times, loss = [], 0.0
    for _ in range(rounds + 1):
        model.zero_grad()
        began = time.perf_counter()
        loss = step()
        if model.device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return loss, min(times[1:]), [parameter.grad.detach().float().cpu() for parameter in model.parameters()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--scale", type=int, default=1, help="1: rows of 640 tokens")
    parser.add_argument("--siblings", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--budget", type=int, default=10**6, help="distinct tokens of one sequence")
    args = parser.parse_args()
    torch.manual_seed(0)
    dtype, flex = getattr(torch, args.dtype), args.device.startswith("cuda")
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=args.hidden,
        intermediate_size=3 * args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=max(2, args.hidden // 64),
        num_key_value_heads=max(1, args.hidden // 128),
        max_position_embeddings=2**17,
    )
    model = LlamaForCausalLM(config).to(device=args.device, dtype=dtype)
    batch = make_group(args.scale, args.siblings)
    advantages = np.random.default_rng(1).normal(size=len(batch.rows)).astype(np.float32)
    parts = batch.tree(args.budget, framework="torch", advantages=advantages)
    tokens = sum(len(data.token_ids) for data in parts)
    model.set_attn_implementation("sdpa")
    flat_loss, flat_seconds, flat_gradients = measure(model, lambda: step_flat(model, batch, advantages), args.rounds)
    if flex:
        model.set_attn_implementation("flex_attention")
    loss, seconds, gradients = measure(model, lambda: step_trees(model, parts, flex, dtype), args.rounds)
    scale = max(float(each.abs().max()) for each in flat_gradients)
    apart = max(float((one - other).abs().max()) for one, other in zip(gradients, flat_gradients, strict=True))
    norm = sum(float(((one - other) ** 2).sum()) for one, other in zip(gradients, flat_gradients, strict=True)) ** 0.5
    whole = sum(float((each**2).sum()) for each in flat_gradients) ** 0.5
    flat_tokens = sum(data.flat_tokens for data in parts)
    print(
        f"rows {len(batch.rows)}, tokens flat {flat_tokens}, distinct {tokens} ({flat_tokens / tokens:.2f}x fewer), {len(parts)} sequences"
    )
    print(f"step flat {flat_seconds:.3f} s, trees {seconds:.3f} s ({flat_seconds / seconds:.2f}x faster)")
    print(f"loss {flat_loss:.6f} and {loss:.6f}; largest gradient {scale:.3g}, largest difference {apart:.3g}")
    print(f"|difference of gradients| / |gradient| {norm / whole:.3g}")


if __name__ == "__main__":
    main()
