"""The closed loop on real parts, from one command: `python -m examples.demo.demo`.

vLLM samples, `verbatim serve` records, an agent that knows only a URL works, a trainer learns and pushes its weights back
into the running vLLM. Four processes that meet over HTTP, and this one, which starts them, hands out sessions and judges.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import httpx
import typer
from rich.console import Console
from rich.markup import escape

from examples.demo.driver import Agent, Driver, Round, Service
from examples.demo.environment import KEYS, corridors
from examples.demo.fleet import Fleet, running, unless_one_ends
from examples.demo.plan import Plan
from examples.demo.report import draw_rewards, verdict_table, write_verdict
from examples.demo.screen import Phase, Screen
from examples.demo.trainer_log import TrainerLog
from examples.demo.verdict import SessionFacts, Verdict, judge

# Rounds that may be sampled ahead of the trainer: with one, sampling and training overlap.
AHEAD = 1


@dataclass(frozen=True, slots=True)
class Loop:
    """What the loop leaves behind."""

    rounds: list[Round]
    sessions: list[SessionFacts]
    trained_tokens: int


def run(plan: Plan, console: Console) -> int:
    """The exit code: 0 when the verdict holds, 1 when it does not."""
    started = time.monotonic()
    plan.empty_out()
    with Screen(console, plan.steps) as screen:
        if plan.model is None:
            _make_model(plan, screen)
        loop = asyncio.run(_closed_loop(plan, screen))
        verdict = _judged(plan, loop, screen)
    write_verdict(plan.out / "verdict.json", verdict, plan.expected, time.monotonic() - started)
    draw_rewards(plan.out / "reward.png", [r.rewards for r in loop.rounds], push=plan.push, chance=1 / KEYS)
    console.print(verdict_table(verdict, plan.expected))
    console.print(f"{time.monotonic() - started:.0f} s in all; picture, numbers and logs in {plan.out}", soft_wrap=True)
    failures = verdict.failures(plan.expected)
    for failure in failures:
        console.print(f"[red]✗[/red] {failure}", soft_wrap=True)
    if not failures:
        console.print("[green]✓ every check holds[/green]")
    return 1 if failures else 0


def _make_model(plan: Plan, screen: Screen) -> None:
    from examples.demo.tiny_model import make_tiny_model
    from examples.demo.warmup import warm_up

    _calm_torch(plan)
    with screen.phase("a tiny model learns to speak the tool's format") as phase:
        # Larger first weights than usual: so small a model learns from them in half the steps.
        make_tiny_model(Path(plan.model_dir), seed=plan.seed, layers=2, initializer_range=0.1)

        def progress(step: int, loss: float) -> None:
            phase.detail = f"step {step + 1}, loss {loss:.2f}"

        warm_up(Path(plan.model_dir), seed=plan.seed, progress=progress)


async def _closed_loop(plan: Plan, screen: Screen) -> Loop:
    async with running(plan) as fleet:
        service, agent = Service(fleet.url, fleet.admin_token), Agent(fleet.agent)
        watchers = [child.finished() for child in fleet.children]
        async with contextlib.aclosing(service):
            return await unless_one_ends(_rounds(plan, screen, fleet, service, agent), agent.read_outcomes(), *watchers)


async def _rounds(plan: Plan, screen: Screen, fleet: Fleet, service: Service, agent: Agent) -> Loop:
    with screen.phase("vLLM, the service, the agent and the trainer start"):
        await service.wait_until_ready()
    driver = Driver(service, agent, corridors(random.Random(plan.seed)), plan.job, plan.groups, plan.rollouts)
    rounds: list[Round] = []
    trained = TrainerLog(plan.trainer_log, screen)
    with screen.phase("sample, learn, push the weights, again"):
        async with trained.watched():
            for step in range(1, plan.steps + 1):
                await trained.reached(step - 1 - AHEAD)
                rounds.append(await _timed(driver, step, screen))
            await fleet.trainer.finished()
    with screen.phase("collect what was recorded"):
        facts = await _facts(service, [session_id for round_ in rounds for session_id in round_.session_ids])
    return Loop(rounds, facts, sum(line["tokens"] for line in trained.read()))


async def _timed(driver: Driver, step: int, screen: Screen) -> Round:
    started = time.monotonic()
    result = await driver.round(step)
    seconds = time.monotonic() - started
    screen.sampled(step, reward=result.reward, tokens=result.completion_tokens, seconds=seconds)
    return result


async def _facts(service: Service, session_ids: list[str]) -> list[SessionFacts]:
    narrow = asyncio.Semaphore(16)

    async def facts(session_id: str) -> SessionFacts:
        async with narrow:
            session = await service.session(session_id)
            rows = await service.trajectories(session_id)
        return SessionFacts(session["calls"], rows["trajectories"], rows["accounting"])

    return await asyncio.gather(*(facts(session_id) for session_id in session_ids))


def _judged(plan: Plan, loop: Loop, screen: Screen) -> Verdict:
    import torch

    from examples.demo.recompute import largest_difference

    _calm_torch(plan)
    with screen.phase("recompute every sampled token with transformers") as phase:
        largest, tokens = largest_difference(
            [row for session in loop.sessions for row in session.trajectories],
            plan.model_dir,
            plan.weights_dir,
            dtype=torch.bfloat16 if plan.gpu else torch.float32,
            progress=_percent(phase),
        )
    return judge(
        loop.sessions,
        [round_.reward for round_ in loop.rounds],
        agent_tokens=sum(round_.completion_tokens for round_ in loop.rounds),
        trained_tokens=loop.trained_tokens,
        recomputed_tokens=tokens,
        largest_difference=largest,
    )


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
        phase.detail = f"{done:,} of {of:,} rows"

    return progress


def main(
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = 18,
    seed: Annotated[int, typer.Option()] = 0,
    out: Annotated[Path | None, typer.Option(help="Default: demo-out, or demo-out-no-push.")] = None,
    model: Annotated[
        str | None, typer.Option(help="A path or a Hugging Face name. Default: a tiny model, made and warmed up here.")
    ] = None,
    push: Annotated[bool, typer.Option(help="--no-push: the engine never gets the new weights; the curve stays flat.")] = True,
    groups: Annotated[int, typer.Option(min=1, help="Groups per step.")] = 8,
    rollouts: Annotated[int, typer.Option(min=2, help="Rollouts per group.")] = 8,
    learning_rate: Annotated[float | None, typer.Option(help="Default: 5e-4; with --model 5e-6.")] = None,
    thinking: Annotated[
        bool, typer.Option(help="With --model: let it think before it calls the tool; the task needs none.")
    ] = False,
) -> None:
    """Run the closed loop and judge it. Exit code 0: every check holds; 1: one does not; 130: interrupted."""
    plan = Plan(
        model=str(Path(model).resolve()) if model and Path(model).exists() else model or None,
        out=(out or Path("demo-out" if push else "demo-out-no-push")).resolve(),
        steps=steps,
        seed=seed,
        push=push,
        groups=groups,
        rollouts=rollouts,
        learning_rate=learning_rate or (5e-6 if model else 5e-4),
        thinking=thinking or not model,
    )
    console = Console()
    # Told to stop in either way, the demo ends its children first.
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        code = run(plan, console)
    except KeyboardInterrupt:
        console.print("Interrupted; everything that was started has been ended.")
        code = 130
    except (RuntimeError, OSError, httpx.HTTPError) as error:
        console.print(f"[red]The demo stopped:[/red] {escape(str(error) or repr(error))}", soft_wrap=True)
        code = 1
    sys.exit(code)


if __name__ == "__main__":
    typer.run(main)
