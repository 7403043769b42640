"""Compare ways to assign credit: `python -m examples.pivots.compare`, which needs bubblewrap.

For each seed the corridor is learned through tasks once in each way, from the same weights: by GRPO with `--rollouts` of each task; with
half as many, each of which is taken back to its most uncertain call and forked there; or as by GRPO, but with an advantage per turn
(`examples.pivots.trainer.CREDITS`). What an arm has cost the engine by each step is counted in sampled tokens, which replayed calls of a
fork are not. Left are the arms' steps and a picture of reward against tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console
from rich.table import Table

from examples.demo.demo import make_demo_model
from examples.demo.driver import Service
from examples.demo.fleet import serving, trainer, unless_one_ends
from examples.demo.plan import Plan
from examples.demo.screen import Screen
from examples.pivots.trainer import CREDITS, FORKS
from examples.tasks_loop.loop import Parts, node

COLORS = dict(zip(CREDITS, ("tab:blue", "tab:orange", "tab:green", "tab:red"), strict=True))
MODULE = "examples.pivots.trainer"
LAST = 3
"""Steps that are averaged."""


async def run_arm(plan: Plan, credit: str, screen: Screen) -> list[dict[str, Any]]:
    """The steps of one arm. Raises ChildDied when a process does not last."""
    async with contextlib.AsyncExitStack() as stack:
        served = await stack.enter_async_context(serving(plan))
        service = await stack.enter_async_context(contextlib.aclosing(Service(served.url, served.admin_token)))
        with screen.phase("vLLM and the service start"):
            await unless_one_ends(service.wait_until_ready(1), *(child.finished() for child in served.children))
        rollouts = await stack.enter_async_context(node(Parts([]), plan, served))
        words = ["--rollouts", str(plan.rollouts), "--credit", credit]
        env = {"VERBATIM_ADMIN_TOKEN": served.admin_token}
        learning = await stack.enter_async_context(trainer(plan, served, MODULE, *words, env=env))
        others = (child.finished() for child in [*served.children, rollouts])
        with screen.phase(f"{plan.steps} steps, {credit}"):
            await unless_one_ends(learning.finished(), *others)
    return [json.loads(line) for line in plan.trainer_log.read_text().splitlines()]


def spent_at(steps: Sequence[dict[str, Any]]) -> list[int]:
    """The tokens that had been sampled before each step: its rewards are those of what was learned by then."""
    return [0, *accumulate(step["sampled_tokens"] for step in steps)][:-1]


def reward_at(steps: Sequence[dict[str, Any]], tokens: int) -> float:
    """The mean reward of the last steps that began before so many tokens were sampled."""
    begun = [step["reward"] for step, spent in zip(steps, spent_at(steps), strict=True) if spent < tokens]
    return sum(begun[-LAST:]) / len(begun[-LAST:])


def draw(path: Path, arms: dict[str, list[dict[str, Any]]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5), dpi=150, layout="constrained")
    seeds = list(dict.fromkeys(name.partition(", ")[2] for name in arms))
    for name, steps in arms.items():
        arm, _, seed = name.partition(", ")
        look = {"color": COLORS[arm], "linestyle": ("-", "--", ":")[seeds.index(seed) % 3]}
        axes.plot(spent_at(steps), [step["reward"] for step in steps], label=name, **look)
    axes.set(xlabel="tokens sampled", ylabel="reward of the rollouts", ylim=(0, 1.03))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path)
    pyplot.close(figure)


def show(console: Console, arms: dict[str, list[dict[str, Any]]]) -> None:
    """Reward at quarters of the tokens that every arm has spent."""
    least = min(sum(step["sampled_tokens"] for step in steps) for steps in arms.values())
    table = Table("arm", *(f"{least * part // 4:,} tokens" for part in range(1, 5)), title="Reward by tokens sampled")
    for name, steps in arms.items():
        table.add_row(name, *(f"{reward_at(steps, least * part // 4):.3f}" for part in range(1, 5)))
    console.print(table)


async def compare(base: Plan, credits: Sequence[str], seeds: Sequence[int], console: Console) -> None:
    """Run the arms one after the other: each is `base` with its own seed and credit, in a folder of its own below that of `base`."""
    arms: dict[str, list[dict[str, Any]]] = {}
    with Screen(console, base.steps) as screen:
        for seed in seeds:
            made = base.model or str(base.out / f"seed-{seed}" / credits[0] / "model")
            for name in credits:
                plan = replace(
                    base,
                    model=base.model if name == credits[0] else made,
                    out=base.out / f"seed-{seed}" / name,
                    seed=seed,
                    rollouts=max(1, base.rollouts // 2) if name == FORKS else base.rollouts,
                )
                plan.empty_out()
                if plan.model is None:
                    with screen.phase("a tiny model is made") as phase:
                        await asyncio.to_thread(make_demo_model, plan, phase)
                arms[f"{name}, seed {seed}"] = await run_arm(plan, name, screen)
    draw(base.out / "reward.png", arms)
    show(console, arms)


def main(
    credits: Annotated[str, typer.Option(help=f"Which ways, with commas: {', '.join(CREDITS)}.")] = f"grpo,{FORKS}",
    steps: Annotated[int, typer.Option(min=2, help="Training steps of each arm.")] = 16,
    groups: Annotated[int, typer.Option(min=1, help="Tasks per step.")] = 8,
    rollouts: Annotated[int, typer.Option(min=2, help="Rollouts per task of GRPO.")] = 4,
    learning_rate: Annotated[float, typer.Option()] = 5e-4,
    seeds: Annotated[int, typer.Option(min=1, help="How many.")] = 2,
    seed: Annotated[int, typer.Option(help="The first of them.")] = 0,
    model: Annotated[
        Path | None, typer.Option(help="The folder `model` of a run to begin with. Default: one is made for each seed.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Where everything is left.")] = Path("demo-out-pivots"),
) -> None:
    """Compare them. Exit code 0: all arms came to their end; 1: a part failed; 130: interrupted."""
    names = list(dict.fromkeys(credits.split(",")))
    if unknown := set(names) - CREDITS.keys():
        raise typer.BadParameter(f"{', '.join(sorted(unknown))}: there are {', '.join(CREDITS)}", param_hint="--credits")
    base = Plan(
        model=None if model is None else str(model.resolve()),
        out=out.resolve(),
        steps=steps,
        seed=seed,
        groups=groups,
        rollouts=rollouts,
        learning_rate=learning_rate,
    )
    console = Console()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        asyncio.run(compare(base, names, range(seed, seed + seeds), console))
    except KeyboardInterrupt:
        console.print("Interrupted; everything that was started has been ended.")
        sys.exit(130)
    except (RuntimeError, OSError, httpx.HTTPError) as error:
        console.print(f"[red]It stopped:[/red] {error}", markup=True, soft_wrap=True)
        sys.exit(1)


if __name__ == "__main__":
    typer.run(main)
