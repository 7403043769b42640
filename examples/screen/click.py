"""A policy learns to look: `python -m examples.screen.click`.

The demo's loop, training and verdict around a tiny vision model that is shown screens and asked to click. Its images go from the agent's
data URLs through the service into the engine, and with the rows into the trainer, which computes gradients through the pixels; the
verdict recomputes every sampled token with them. With `--no-push` the engine never gets the new weights: the curve stays flat.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from examples.demo.demo import exit_code, show_steps
from examples.demo.loop import closed_loop
from examples.demo.plan import Plan
from examples.demo.screen import Phase
from examples.screen.screens import PER_SESSION, SQUARES, draw_tasks


def make_model(plan: Plan, phase: Phase) -> None:
    """A tiny model that looks at screens, and has the habit of clicking beside the target."""
    from examples.screen.tiny_vision_model import TILE, make_tiny_vision_model
    from examples.screen.warmup import STEPS, TEXTS, warm_up

    make_tiny_vision_model(Path(plan.model_dir), seed=plan.seed, longest_edge=TILE, initializer_range=0.1, texts=[*TEXTS] * 100)
    warm_up(Path(plan.model_dir), seed=plan.seed, progress=show_steps(phase, STEPS))


def main(
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = 12,
    groups: Annotated[int, typer.Option(min=1, help="Groups per step.")] = 8,
    rollouts: Annotated[int, typer.Option(min=2, help="Rollouts per group.")] = 8,
    learning_rate: Annotated[float, typer.Option()] = 5e-4,
    seed: Annotated[int, typer.Option()] = 0,
    push: Annotated[bool, typer.Option(help="--no-push: the engine never gets the new weights; the curve stays flat.")] = True,
    out: Annotated[Path | None, typer.Option(help="Default: demo-out-screen, or demo-out-screen-no-push.")] = None,
) -> None:
    """Run the closed loop on screens and judge it. Exit code 0: every check holds; 1: one does not; 130: interrupted."""
    plan = Plan(
        out=(out or Path("demo-out-screen" if push else "demo-out-screen-no-push")).resolve(),
        steps=steps,
        seed=seed,
        push=push,
        groups=groups,
        rollouts=rollouts,
        learning_rate=learning_rate,
        max_staleness=2,
        # Only the first step's rollouts are all by the model as it was warmed up.
        ends=(1, 3),
        agent="examples.screen.agent",
        engine_flags=("--limit-mm-per-prompt", json.dumps({"image": PER_SESSION}), "--max-num-seqs", "64"),
    )
    sys.exit(exit_code(plan, partial(closed_loop, draw_tasks=draw_tasks), make_model, chance=1 / SQUARES))


if __name__ == "__main__":
    typer.run(main)
