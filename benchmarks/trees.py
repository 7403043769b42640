"""A training step on trees of rows beside the same step on flat rows: seconds, memory, and how far loss and gradients are apart.

    python -m benchmarks.trees                                    # on the CPU, a small model, lengths divided
    python -m benchmarks.trees --device cuda --dtype bfloat16     # SmolLM2-135M's shape, at the lengths that were recorded

A group is four rollouts of one task, shaped as the recorded sessions of an agent (`agent_sessions.json`). Rows per call and merged rows go
through the model one at a time with causal attention, as a trainer without padding computes them; trees go through it with FlexAttention
on CUDA and a dense mask elsewhere. Needs torch and transformers and nothing of the service.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from reconstruct.records import RAW, pack_ids, pack_logprobs
from reconstruct.spans import ModeSpan, Span
from reconstruct.trajectory import Trajectory
from trainer_client.batch import Batch
from trainer_client.tree import TreeBatch
from trainer_client.wire import Group

VOCABULARY = 8192
SIBLINGS = 4
SHAPES = Path(__file__).with_name("agent_sessions.json")
Shape = dict[str, Any]
"""Of a row: `agent_sessions.py` says what `shared` and `runs` are."""


def read_shapes() -> dict[str, list[Shape]]:
    """By agent and version."""
    shapes: dict[str, list[Shape]] = json.loads(SHAPES.read_text())
    return shapes


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
        logprob_modes=tuple(ModeSpan(RAW, span.start, span.end) for span in spans),
        weight_versions=spans,
        reward=1.0,
        call_ids=(name,),
        finish_reason="stop",
        truncated=False,
    )


def make_rollout(
    name: str, shapes: Sequence[Shape], prompt: Sequence[int], draw: Callable[[int], list[int]]
) -> list[Trajectory]:
    """Rows of these shapes: the first begins with `prompt`, each other one with what it shares with the one before it."""
    rows: list[Trajectory] = []
    for at, shape in enumerate(shapes):
        begun = list(prompt) if not rows else rows[-1].token_ids[: shape["shared"]].tolist()
        ids = begun + draw(sum(shape["runs"]) - len(begun))
        mask = [sampled for place, run in enumerate(shape["runs"]) for sampled in [place % 2] * run]
        rows.append(make_row(f"{name}.{at}", ids, mask))
    return rows


def make_group(shapes: Sequence[Shape], seed: int = 0) -> Batch:
    numbers = np.random.default_rng(seed)

    def draw(count: int) -> list[int]:
        return numbers.integers(0, VOCABULARY, count).tolist()  # type: ignore[no-any-return]

    prompt = draw(shapes[0]["runs"][0])
    rows = [row for sibling in range(SIBLINGS) for row in make_rollout(f"r{sibling}", shapes, prompt, draw)]
    return Batch([Group("g", tuple(rows))], weight_version=1)


def split_calls(batch: Batch) -> Batch:
    """The same as rows per call: each stretch of sampled tokens after all that stands before it."""
    rows = []
    for row in batch.rows:
        ends = np.flatnonzero(np.diff(row.loss_mask, append=0) == -1) + 1
        begun = 0
        for end in ends.tolist():
            mask = [int(at >= begun and sampled) for at, sampled in enumerate(row.loss_mask[:end])]
            rows.append(make_row(f"{row.trajectory_id}.{end}", row.token_ids[:end].tolist(), mask))
            begun = end
    return Batch([Group("g", tuple(rows))], weight_version=1)


def shrink(shapes: Sequence[Shape], longest: int) -> list[Shape]:
    """The shapes with every run divided, so that no row is longer than `longest`."""
    by = max(1.0, max(sum(shape["runs"]) for shape in shapes) / longest)
    small: list[Shape] = []
    for shape in shapes:
        runs = [max(1, int(run / by)) for run in shape["runs"]]
        small.append({"shared": min(int(shape["shared"] / by), sum(small[-1]["runs"]) if small else 0), "runs": runs})
    return small


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
        assert data.inference_logprobs is not None and data.advantages is not None
        loss = objective(logprobs, data.inference_logprobs, data.advantages[data.segment_index])
        loss.backward()
        total += float(loss.detach())
    return total


def make_model(device: str, dtype: torch.dtype) -> Any:
    """On CUDA of SmolLM2-135M's shape, but for the vocabulary; elsewhere a small one."""
    torch.manual_seed(0)
    layers, hidden, heads, kv_heads, inner = (30, 576, 9, 3, 1536) if device.startswith("cuda") else (4, 128, 2, 1, 384)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=2**17,
    )
    return LlamaForCausalLM(config).to(device=device, dtype=dtype)


def make_steps(model: Any, merged: Batch, token_budget: int) -> dict[str, tuple[int, Callable[[], float]]]:
    """By way the tokens that go through the model, and a step on the group."""
    calls, flex = split_calls(merged), model.device.type == "cuda"
    ones = [np.ones(len(batch.rows), dtype=np.float32) for batch in (calls, merged)]
    parts = merged.tree(token_budget, framework="torch", advantages=ones[1])
    flat = [sum(len(row.token_ids) for row in batch.rows) for batch in (calls, merged)]
    return {
        "per call": (flat[0], lambda: step_flat(model, calls, ones[0])),
        "merged": (flat[1], lambda: step_flat(model, merged, ones[1])),
        "trees": (sum(len(part.token_ids) for part in parts), lambda: step_trees(model, parts, flex, model.dtype)),
    }


def measure_step(
    model: Any, attention: str, step: Callable[[], float], rounds: int
) -> tuple[dict[str, float], list[torch.Tensor]]:
    """The loss, the least seconds of a step after one that is not counted, and the peak of the GPU's memory in GB; the gradients."""
    model.set_attn_implementation(attention)
    cuda = model.device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    times, loss = [], 0.0
    for _ in range(rounds + 1):
        model.zero_grad()
        began = time.perf_counter()
        loss = step()
        if cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    found = {"loss": loss, "seconds": min(times[1:]), "first_seconds": times[0]}
    if cuda:
        found["memory_gb"] = torch.cuda.max_memory_allocated() / 1e9
    return found, [parameter.grad.detach().double().cpu() for parameter in model.parameters()]


def compare_gradients(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """|found - expected| / |expected|."""
    apart = sum(float(((one - other) ** 2).sum()) for one, other in zip(found, expected, strict=True))
    return float((apart / sum(float((each**2).sum()) for each in expected)) ** 0.5)


def measure_agent(model: Any, shapes: Sequence[Shape], ways: Sequence[str], rounds: int) -> dict[str, Any]:
    """A step on the group in each way."""
    steps = make_steps(model, make_group(shapes), 10**6)
    found: dict[str, Any] = {"tokens": {way: tokens for way, (tokens, _) in steps.items()}}
    gradients = {}
    for way in ways:
        attention = "flex_attention" if way == "trees" and model.device.type == "cuda" else "sdpa"
        found[way], gradients[way] = measure_step(model, attention, steps[way][1], rounds)
    if "merged" in ways:
        for way in gradients.keys() - {"merged"}:
            found[way]["gradient_apart"] = compare_gradients(gradients[way], gradients["merged"])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--agents", default="", help="beginnings of their names, with commas; all without")
    parser.add_argument("--ways", default="per call,merged,trees", help="with commas")
    parser.add_argument("--longest", type=int, help="tokens of a row, to which longer ones are divided; on the CPU 512 without")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", type=Path, help="a file to which a line is added for each agent")
    args = parser.parse_args()
    model = make_model(args.device, getattr(torch, args.dtype))
    cuda = model.device.type == "cuda"
    longest, ways = args.longest or (10**9 if cuda else 512), args.ways.split(",")
    head = {"device": torch.cuda.get_device_name() if cuda else "cpu", "torch": torch.__version__, "dtype": args.dtype}
    for agent, shapes in read_shapes().items():
        if agent.startswith(tuple(args.agents.split(","))):
            found = measure_agent(model, shrink(shapes, longest), ways, args.rounds)
            line = json.dumps(head | {"agent": agent} | found)
            print(line, flush=True)
            if args.json:
                with args.json.open("a") as lines:
                    lines.write(line + "\n")


if __name__ == "__main__":
    main()
