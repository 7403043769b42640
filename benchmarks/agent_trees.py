"""What a training step costs on the sessions of real agents: rows per call, merged rows, and trees of rows.

    python -m benchmarks.agent_trees [--quick] [--out DIR]

A group is four rollouts of one task by one agent, shaped as the recorded sessions are (`agent_sessions.json`): they share the first
prompt and part at the first sampled token. A step is taken in these ways:

    padded         a row for each call, all padded to the longest: trainers that take steps as samples, and pad (TRL's GRPO, verl)
    per call       the same rows without padding
    merged         a row for each branch, as this service, Polar and SkyRL merge calls whose prompts extend one another
    prompts once   merged rows, whose first prompts are computed once where they are equal: verl's PrefixGrouper
    TRL's trees    merged rows in the tries of TRL's AsyncGRPOTrainer, which fork one token early; counted by its own code
    trees          `batch.tree`: each distinct prefix once

Floating-point operations are counted from the shapes, for SmolLM2-135M, with the logits of trained tokens alone: matrix products of
each token, and of each pair of tokens that attention compares. CPU seconds are measured: a whole step, forward and backward, of a small
Llama (4 layers, hidden size 128) in float32 on one thread, at lengths divided so that no row exceeds 512 tokens. Flat rows go through it
one at a time, trees with a dense mask, which compares all pairs; FlexAttention would compare those that count.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from runpy import run_path
from typing import Any

import numpy as np
import torch

from benchmarks.results import Grid, main, number, progress, times
from benchmarks.trees import SIBLINGS, Shape, make_group, make_model, make_steps, read_shapes, shrink, split_calls
from trainer_client.batch import Batch

MEASURED_LENGTH = 512
"""Of the longest row, where CPU seconds are measured."""
TREE_TOKENS = 4096
COUNTED = ("padded", "per call", "merged", "prompts once", "TRL's trees", "trees")
MEASURED = ("per call", "merged", "trees")


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of a model; SmolLM2-135M's."""

    layers: int = 30
    hidden: int = 576
    kv: int = 192
    inner: int = 1536
    vocabulary: int = 49_152

    def count_operations(self, tokens: int, pairs: int, trained: int) -> float:
        """Of a step: a product is two operations, and the backward pass takes twice what the forward pass does."""
        per_token = 2 * self.layers * (2 * self.hidden**2 + 2 * self.hidden * self.kv + 3 * self.hidden * self.inner)
        per_pair = 4 * self.layers * self.hidden
        return 3.0 * (per_token * tokens + per_pair * pairs + 2 * self.hidden * self.vocabulary * trained)


def count(shapes: Sequence[Shape]) -> dict[str, dict[str, float]]:
    """Tokens that go through the model, and operations, by way."""
    merged = make_group(shapes)
    calls = split_calls(merged)
    trees = merged.tree(10**7)
    trained = sum(len(tree.trained_index) for tree in trees)
    lengths = {"per call": [len(row.token_ids) for row in calls.rows], "merged": [len(row.token_ids) for row in merged.rows]}
    lengths["padded"] = [max(lengths["per call"])] * len(calls.rows)
    found = {way: (sum(each), sum(length * (length + 1) // 2 for length in each)) for way, each in lengths.items()}
    found["prompts once"] = count_prompts_once(merged)
    found["TRL's trees"] = count_in_tries(merged)
    found["trees"] = (sum(len(tree.token_ids) for tree in trees), sum(int((tree.position_ids + 1).sum()) for tree in trees))
    return {
        way: {"tokens": tokens, "operations": Sizes().count_operations(tokens, pairs, trained)}
        for way, (tokens, pairs) in found.items()
    }


def count_prompts_once(batch: Batch) -> tuple[int, int]:
    """Tokens and pairs where each distinct prompt, up to a row's first sampled token, is computed once."""
    prompts: set[bytes] = set()
    tokens = pairs = 0
    for row in batch.rows:
        prompt, length = int(np.argmax(row.loss_mask)), len(row.token_ids)
        begun = prompt if row.token_ids[:prompt].tobytes() in prompts else 0
        prompts.add(row.token_ids[:prompt].tobytes())
        tokens += length - begun
        pairs += (length * (length + 1) - begun * (begun + 1)) // 2
    return tokens, pairs


def count_in_tries(batch: Batch) -> tuple[int, int]:
    """Tokens and pairs by TRL's own code, from its file alone: importing the package imports vLLM. `tests/peers.txt` installs it."""
    package = find_spec("trl")
    if package is None or not package.submodule_search_locations:
        raise SystemExit("trl is missing: pip install --no-deps -r tests/peers.txt")
    file = Path(next(iter(package.submodule_search_locations)), "experimental", "async_grpo", "packing.py")
    trie = run_path(str(file))["TreeRow"]()
    for row in batch.rows:
        trie.add({"input_ids": row.token_ids, "completion_mask": row.loss_mask, "group_id": row.group_id})
    return len(trie.tokens), trie.load


def measure_seconds(step: Callable[[], object], model: Any, rounds: int) -> float:
    """The least CPU seconds of a step, after one that is not counted."""
    taken = []
    for _ in range(rounds + 1):
        model.zero_grad()
        began = time.process_time()
        step()
        taken.append(time.process_time() - began)
    return min(taken[1:])


def measure(shapes: Sequence[Shape], model: Any, rounds: int) -> dict[str, float]:
    """CPU seconds of a step by way; the loss is held equal."""
    made = make_steps(model, make_group(shrink(shapes, MEASURED_LENGTH)), TREE_TOKENS)
    steps = {way: step for way, (_, step) in made.items()}
    losses = [step() for step in steps.values()]
    np.testing.assert_allclose(losses, losses[0], rtol=1e-4)
    return {way: measure_seconds(step, model, rounds) for way, step in steps.items()}


def run(quick: bool) -> dict[str, Any]:
    torch.set_num_threads(1)
    model, agents = make_model("cpu", torch.float32), read_shapes()
    model.set_attn_implementation("sdpa")
    chosen = list(agents.items())[: 2 if quick else None]
    found = {}
    with progress() as bar:
        for agent, shapes in bar.track(chosen, description="agents"):
            found[agent] = {
                "first_prompt": shapes[0]["runs"][0],
                "calls": SIBLINGS * sum(len(shape["runs"]) // 2 for shape in shapes),
                "rows": SIBLINGS * len(shapes),
                "ways": count(shapes),
                "seconds": measure(shapes, model, 1 if quick else 2),
            }
    return {"siblings": SIBLINGS, "agents": found}


def tables(result: dict[str, Any]) -> Sequence[Grid]:
    tokens, operations, seconds = list[Any](), list[Any](), list[Any]()
    shown: dict[str, Callable[[Any], str]] = {
        "tokens": lambda value: f"{value:,}",
        "operations": lambda value: number(value / 1e12),
    }
    for agent, found in result["agents"].items():
        ways, clock = found["ways"], found["seconds"]
        head = (agent, f"{found['first_prompt']:,}", str(found["calls"]), str(found["rows"]))
        for rows, name, start in (
            (tokens, "tokens", head),
            (operations, "operations", (agent,)),
        ):
            least = ways["trees"][name]
            saved = [times(ways[way][name] / least) for way in ("per call", "merged")]
            rows.append((*start, *(shown[name](ways[way][name]) for way in COUNTED), *saved))
        seconds.append(
            (agent, *(number(clock[way]) for way in MEASURED), *(times(clock[way] / clock["trees"]) for way in MEASURED[:2]))
        )
    less = ("per call / trees", "merged / trees")
    title = f"A step on {result['siblings']} rollouts of one task"
    return [
        Grid(f"{title}: tokens through the model", ("agent", "first prompt", "calls", "rows", *COUNTED, *less), tuple(tokens)),
        Grid(f"{title}: 10^12 operations of SmolLM2-135M", ("agent", *COUNTED, *less), tuple(operations)),
        Grid(f"{title}: CPU seconds of a small model at divided lengths", ("agent", *MEASURED, *less), tuple(seconds)),
    ]


if __name__ == "__main__":
    main("agent_trees", __doc__, run, tables, alone=False)
