"""The warm start: the policy imitates the demonstrations, by the very ids that the agent's calls were recorded with.

python -m examples.pretrained.warm_start --model-dir model --demonstrations generated --out warm --log warm-start.jsonl
"""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from examples.demo.trainer import Recipe, write
from examples.pretrained.demonstrations import read_demonstrations
from examples.pretrained.policy import Policy
from trainer_client import Batch


def warm_start(
    model_dir: Annotated[Path, typer.Option()],
    demonstrations: Annotated[Path, typer.Option(help="What `verbatim generate` wrote.")],
    out: Annotated[Path, typer.Option(help="Where the policy is written; it is there when all of it is.")],
    log: Annotated[Path, typer.Option(help="One JSON line per optimizer step.")],
    exercises: Annotated[int, typer.Option(help="Whose demonstrations make an optimizer step.")] = 8,
    epochs: Annotated[int, typer.Option()] = 6,
    learning_rate: Annotated[float, typer.Option()] = 1e-4,
    seed: Annotated[int, typer.Option()] = 0,
) -> None:
    """Imitate for `epochs` epochs and write the policy."""
    batch, policy = read_demonstrations(demonstrations), Policy(model_dir, Recipe(learning_rate))
    log.unlink(missing_ok=True)
    for number, part in enumerate(_shuffle(batch, exercises, epochs, random.Random(seed)), start=1):
        started = time.monotonic()
        loss, flat = policy.imitate(part), sum(len(row.token_ids) for row in part.rows)
        write(log, {"step": number, "rows": len(part), "tokens": flat, "loss": loss, "seconds": time.monotonic() - started})
    unfinished = out.with_name(f".{out.name}.writing")
    shutil.copytree(model_dir, unfinished, dirs_exist_ok=True)
    policy.save_model(unfinished)
    unfinished.rename(out)


def _shuffle(batch: Batch, exercises: int, epochs: int, rng: random.Random) -> Iterator[Batch]:
    for _ in range(epochs):
        groups = rng.sample(batch.groups, len(batch.groups))
        for start in range(0, len(groups), exercises):
            yield Batch(groups[start : start + exercises], weight_version=batch.weight_version)


if __name__ == "__main__":
    typer.run(warm_start)
