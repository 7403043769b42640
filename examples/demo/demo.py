"""The closed loop on real parts, from one command: `python -m examples.demo.demo`.

vLLM samples, `verbatim serve` records, an agent that knows only a URL works, a trainer learns and pushes its weights back
into the running vLLM. Four processes that meet over HTTP, more with several replicas of vLLM, and this one, which starts them,
hands out sessions and judges. With `--asynchronous` the agents go on while the trainer trains.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console
from rich.markup import escape

from examples.demo.environment import KEYS
from examples.demo.loop import Loop, closed_loop
from examples.demo.plan import Plan
from examples.demo.report import draw_run, verdict_table, write_verdict
from examples.demo.screen import Phase, Screen
from examples.demo.verdict import Verdict, judge

WithDeltas = Annotated[
    bool,
    typer.Option(
        "--delta", help="Push what changed in the bfloat16 weights; in the end the engines must hold the trainer's bits."
    ),
]
ClosedLoop = Callable[[Plan, Screen], Coroutine[Any, Any, Loop]]
MakeModel = Callable[[Plan, Phase], None]
"""Makes the model in the plan's `model_dir`."""


def exit_code(plan: Plan, loop: ClosedLoop, make_model: MakeModel, chance: float | None = None) -> int:
    """Run it. 0 when the verdict holds; 1 when it does not or a part failed, with one sentence; 130 when interrupted. `chance`: the
    reward of trying at random, for the picture."""
    console = Console()
    # Told to stop in either way, the demo ends its children first; a shell that runs it in the background has SIGINT ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        return _run(plan, console, loop, make_model, chance)
    except KeyboardInterrupt:
        kept = f"Logs and the steps trained by then are in {plan.out}, until the next run there, which begins anew."
        console.print(
            f"Interrupted; everything that was started has been ended. {escape(kept)}", soft_wrap=True, highlight=False
        )
        return 130
    except (RuntimeError, OSError, httpx.HTTPError) as error:
        console.print(f"[red]The demo stopped:[/red] {escape(str(error) or repr(error))}", soft_wrap=True)
        return 1


def _run(plan: Plan, console: Console, closed_loop: ClosedLoop, make_model: MakeModel, chance: float | None) -> int:
    started = time.monotonic()
    plan.empty_out()
    with Screen(console, plan.steps) as screen:
        if plan.model is None:
            _calm_torch(plan)
            with screen.phase("a tiny model learns to speak the tool's format") as phase:
                make_model(plan, phase)
        loop = asyncio.run(closed_loop(plan, screen))
        verdict = _judged(plan, loop, screen)
    write_verdict(plan.out / "verdict.json", verdict, plan.expected, time.monotonic() - started)
    draw_run(plan.out / "reward.png", loop.rewards, verdict, plan.expected, chance=chance)
    console.print(verdict_table(verdict, plan.expected))
    console.print(verdict.course, soft_wrap=True, highlight=False)
    console.print(f"{time.monotonic() - started:.0f} s in all; picture, numbers and logs in {plan.out}", soft_wrap=True)
    console.print(
        f"every run and token in a browser, at the URL that this prints:\n  {plan.viewer}", soft_wrap=True, highlight=False
    )
    failures = verdict.failures(plan.expected)
    for failure in failures:
        console.print(f"[red]✗[/red] {failure}", soft_wrap=True)
    if not failures:
        console.print("[green]✓ every check holds[/green]")
    return 1 if failures else 0


def make_demo_model(plan: Plan, phase: Phase) -> None:
    """The tiny model that the demo starts with."""
    from examples.demo.tiny_model import make_tiny_model
    from examples.demo.warmup import STEPS, warm_up

    # Larger first weights than usual: so small a model learns from them in half the steps.
    make_tiny_model(Path(plan.model_dir), seed=plan.seed, layers=2, initializer_range=0.1)
    warm_up(Path(plan.model_dir), seed=plan.seed, progress=show_steps(phase, STEPS))


def show_steps(phase: Phase, steps: int) -> Callable[[int, float], None]:
    """The `progress` of a warm-up, on the screen."""

    def progress(step: int, loss: float) -> None:
        phase.detail = f"step {step + 1}, loss {loss:.2f}"
        phase.share = (step + 1) / steps

    return progress


def _judged(plan: Plan, loop: Loop, screen: Screen) -> Verdict:
    import torch

    from examples.demo.recompute import differing_tensors, largest_difference

    _calm_torch(plan)
    with screen.phase("recompute every sampled token with transformers") as phase:
        largest, tokens = largest_difference(
            [row for session in loop.sessions for row in session.trajectories],
            plan.model_dir,
            plan.weights_dir,
            dtype=torch.bfloat16 if plan.gpu else torch.float32,
            images=loop.images,
            progress=_percent(phase),
        )
    return judge(
        loop.sessions,
        [sum(rewards) / len(rewards) for rewards in loop.rewards],
        Counter(age for step in loop.steps for age in step["ages"]),
        agent_tokens=sum(outcome["completion_tokens"] for outcome in loop.outcomes),
        trained_tokens=sum(step["tokens"] for step in loop.steps),
        recomputed_tokens=tokens,
        largest_difference=largest,
        ends=plan.ends,
        held_out=_read_held_out(plan.held_out_log),
        differing_tensors=differing_tensors(plan) if plan.delta and plan.push else (),
    )


def _read_held_out(log: Path | None) -> Sequence[Sequence[float]]:
    """The rewards before and after."""
    tried: dict[str, dict[str, list[float]]] = json.loads(log.read_text()) if log is not None else {}
    return [list(chain(*rewards.values())) for rewards in tried.values()]


def _calm_torch(plan: Plan) -> None:
    import torch
    from transformers.utils import logging as transformers_logging

    # Its progress bars would break the picture.
    transformers_logging.disable_progress_bar()
    if not plan.gpu:
        # The model is too small to share out: on a busy machine two threads spend their time waiting for each other.
        torch.set_num_threads(1)


def _percent(phase: Phase) -> Callable[[int, int], None]:
    def progress(done: int, of: int) -> None:
        phase.reached(done, of, "rows")

    return progress


def main(
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = 18,
    seed: Annotated[int, typer.Option()] = 0,
    out: Annotated[Path | None, typer.Option(help="Default: demo-out, or demo-out-no-push.")] = None,
    model: Annotated[
        str | None, typer.Option(help="A path or a Hugging Face name. Default: a tiny model, made and warmed up here.")
    ] = None,
    push: Annotated[bool, typer.Option(help="--no-push: the engine never gets the new weights; the curve stays flat.")] = True,
    delta: WithDeltas = False,
    groups: Annotated[int, typer.Option(min=1, help="Groups per step.")] = 8,
    rollouts: Annotated[int, typer.Option(min=2, help="Rollouts per group.")] = 8,
    learning_rate: Annotated[float | None, typer.Option(help="Default: 5e-4; with --model 5e-6.")] = None,
    thinking: Annotated[
        bool, typer.Option(help="With --model: let it think before it calls the tool; the task needs none.")
    ] = False,
    replicas: Annotated[int, typer.Option(min=1, help="vLLM servers that share the sampling.")] = 1,
    asynchronous: Annotated[
        bool, typer.Option("--asynchronous", help="The agents go on while the trainer trains, instead of working in rounds.")
    ] = False,
    max_staleness: Annotated[
        int,
        typer.Option(
            min=0, help="Versions that a group may lie behind the trainer; with --asynchronous also how far ahead it may begin."
        ),
    ] = 2,
) -> None:
    """Run the closed loop and judge it. Exit code 0: every check holds; 1: one does not; 130: interrupted."""
    plan = Plan(
        model=str(Path(model).resolve()) if model and Path(model).exists() else model or None,
        out=(out or Path("demo-out" if push else "demo-out-no-push")).resolve(),
        steps=steps,
        seed=seed,
        push=push,
        delta=delta,
        groups=groups,
        rollouts=rollouts,
        learning_rate=learning_rate or (5e-6 if model else 5e-4),
        thinking=thinking or not model,
        replicas=replicas,
        asynchronous=asynchronous,
        max_staleness=max_staleness,
    )
    sys.exit(exit_code(plan, closed_loop, make_demo_model, chance=1 / KEYS))


if __name__ == "__main__":
    typer.run(main)
