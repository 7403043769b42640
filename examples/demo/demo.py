"""The closed loop on real parts, from one command: `python -m examples.demo.demo`.

vLLM samples, `verbatim serve` records, an agent that knows only a URL works, a trainer learns and pushes its weights back
into the running vLLM. Four processes that meet over HTTP, and this one, which starts them, hands out sessions and judges.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console

from examples.demo.driver import Agent, Driver, Round, Service
from examples.demo.environment import KEYS, corridors
from examples.demo.processes import Child, ChildDied
from examples.demo.report import draw_rewards, verdict_table, write_verdict
from examples.demo.screen import Screen
from examples.demo.verdict import Expectation, SessionFacts, judge
from proxy.engine.vllm_launch import free_port, vllm_command

T = TypeVar("T")
# Rounds that may be sampled ahead of the trainer: with one, sampling and training overlap.
AHEAD = 1


@dataclass(frozen=True, slots=True)
class Plan:
    """One run. `model` None: a tiny model is made and warmed up; otherwise a path or a Hugging Face name."""

    model: str | None
    out: Path
    steps: int
    seed: int
    push: bool
    groups: int
    rollouts: int
    learning_rate: float
    gpu: bool = field(default_factory=lambda: shutil.which("nvidia-smi") is not None)

    @property
    def model_dir(self) -> str:
        return self.model or str(self.out / "model")

    @property
    def weights_dir(self) -> Path:
        return self.out / "weights"

    @property
    def trainer_log(self) -> Path:
        return self.out / "trainer-steps.jsonl"

    def log(self, name: str) -> Path:
        return self.out / "logs" / f"{name}.log"

    @property
    def job(self) -> dict[str, Any]:
        """What every job of the agent says. A named model is told not to think: the task needs none."""
        extra = {"chat_template_kwargs": {"enable_thinking": False}} if self.model else {}
        return {"model": "policy", "max_tokens": 200 if self.model else 40, "extra_body": extra}

    @property
    def expected(self) -> Expectation:
        # bfloat16 keeps 8 bits: two correct programs differ visibly in the logprobs of unlikely tokens.
        return Expectation(push=self.push, rise=0.25 if self.push else 0.12, difference=0.5 if self.gpu else 1e-4)


@dataclass(frozen=True, slots=True)
class Loop:
    """What the loop leaves behind."""

    rounds: list[Round]
    sessions: list[SessionFacts]
    trained_tokens: int


def run(plan: Plan, console: Console) -> int:
    """The exit code: 0 when the verdict holds, 1 when it does not."""
    started = time.monotonic()
    _empty(plan.out)
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
    from transformers.utils import logging as transformers_logging

    from examples.demo.tiny_model import make_tiny_model
    from examples.demo.warmup import warm_up

    # Its progress bars would break the picture.
    transformers_logging.disable_progress_bar()
    with screen.phase("a tiny model learns to speak the tool's format") as phase:
        make_tiny_model(Path(plan.model_dir), seed=plan.seed, layers=2)

        def progress(step: int, loss: float) -> None:
            phase.detail = f"step {step + 1}, loss {loss:.2f}"

        warm_up(Path(plan.model_dir), seed=plan.seed, progress=progress)


async def _closed_loop(plan: Plan, screen: Screen) -> Loop:
    async with contextlib.AsyncExitStack() as stack:
        data_dir = stack.enter_context(tempfile.TemporaryDirectory(prefix="verbatim-demo-"))
        url, tokens = f"http://127.0.0.1:{free_port()}", {"admin": secrets.token_hex(16), "trainer": secrets.token_hex(16)}
        children = await _start(plan, stack, url, tokens, Path(data_dir))
        service = Service(url, tokens["admin"])
        stack.push_async_callback(service.close)
        return await _unless_one_dies(list(children.values()), _rounds(plan, screen, service, children))


async def _start(
    plan: Plan, stack: contextlib.AsyncExitStack, url: str, tokens: dict[str, str], data_dir: Path
) -> dict[str, Child]:
    """All four at once: whoever is up first waits for the others."""
    engine_port = free_port()
    engine, engine_env = vllm_command(
        plan.model_dir,
        engine_port,
        max_model_len=2048,
        device="gpu" if plan.gpu else "cpu",
        # Half of a GPU is left to the trainer.
        extra=["--gpu-memory-utilization", "0.45", "--dtype", "bfloat16"] if plan.gpu else [],
    )
    serve = [sys.executable, "-m", "cli.main", "serve", "--engine", f"http://127.0.0.1:{engine_port}"]
    serve += ["--data-dir", str(data_dir), "--port", url.rpartition(":")[2]]
    trainer = [sys.executable, "-m", "examples.demo.trainer", "--url", url, "--model-dir", plan.model_dir]
    trainer += ["--weights-dir", str(plan.weights_dir), "--log", str(plan.trainer_log), "--steps", str(plan.steps)]
    trainer += ["--groups", str(plan.groups), "--learning-rate", str(plan.learning_rate), "--seed", str(plan.seed)]
    trainer += ["--push" if plan.push else "--no-push"]
    service_env = {"VERBATIM_ADMIN_TOKEN": tokens["admin"], "VERBATIM_TRAINER_TOKEN": tokens["trainer"]}
    trainer_env = {"VERBATIM_TRAINER_TOKEN": tokens["trainer"]}
    children = [
        Child("vLLM", engine, plan.log("vllm"), env=engine_env),
        Child("service", serve, plan.log("service"), env=service_env),
        Child("agent", [sys.executable, "-m", "examples.demo.agent"], plan.log("agent"), piped=True),
        Child("trainer", trainer, plan.log("trainer"), env=trainer_env, may_finish=True),
    ]
    return {child.name: await stack.enter_async_context(child) for child in children}


async def _rounds(plan: Plan, screen: Screen, service: Service, children: dict[str, Child]) -> Loop:
    with screen.phase("vLLM, the service, the agent and the trainer start"):
        await service.wait_until_ready()
    agent = Agent(children["agent"])
    reader = asyncio.create_task(agent.read_outcomes())
    driver = Driver(service, agent, corridors(random.Random(plan.seed)), plan.job, plan.groups, plan.rollouts)
    rounds: list[Round] = []
    trained = TrainerLog(plan.trainer_log, screen)
    with screen.phase("sample, learn, push the weights, again"):
        async with trained.watched():
            for step in range(1, plan.steps + 1):
                await trained.reached(step - 1 - AHEAD)
                rounds.append(await _timed(driver, step, screen))
            await children["trainer"].finished()
    reader.cancel()
    with screen.phase("collect what was recorded"):
        sessions = [id_ for round_ in rounds for id_ in round_.session_ids]
        facts = await _facts(service, sessions)
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


class TrainerLog:
    """What the trainer wrote about its steps, read while it grows."""

    def __init__(self, path: Path, screen: Screen) -> None:
        self._path = path
        self._screen = screen
        self._seen = 0
        self._news = asyncio.Condition()

    def read(self) -> list[dict[str, Any]]:
        """The whole lines there are."""
        text = self._path.read_text() if self._path.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    async def reached(self, step: int) -> None:
        """Returns when the trainer is done with `step`."""
        async with self._news:
            await self._news.wait_for(lambda: self._seen >= step)

    @contextlib.asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """While the block runs, new lines are shown on the screen; at its end all of them have been."""
        task = asyncio.create_task(self._follow())
        try:
            yield
        finally:
            task.cancel()
        await self._show_new()

    async def _follow(self) -> None:
        while True:
            await self._show_new()
            await asyncio.sleep(0.1)

    async def _show_new(self) -> None:
        lines = self.read()
        for line in lines[self._seen :]:
            self._screen.trained(line)
        async with self._news:
            self._seen = len(lines)
            self._news.notify_all()


async def _unless_one_dies(children: list[Child], work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`; ChildDied as soon as a child ends that should not have."""

    async def watch(child: Child) -> None:
        await child.finished()
        await asyncio.Event().wait()

    main = asyncio.ensure_future(work)
    watchers = [asyncio.create_task(watch(child)) for child in children]
    try:
        done, _ = await asyncio.wait({main, *watchers}, return_when=asyncio.FIRST_COMPLETED)
        # A dead child is the cause, whatever error it led to elsewhere.
        for watcher in (task for task in watchers if task in done):
            watcher.result()
        return await main
    finally:
        for task in (main, *watchers):
            task.cancel()
        await asyncio.gather(main, *watchers, return_exceptions=True)


def _judged(plan: Plan, loop: Loop, screen: Screen) -> Any:
    import torch
    from transformers.utils import logging as transformers_logging

    from examples.demo.recompute import largest_difference

    transformers_logging.disable_progress_bar()
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


def _percent(phase: Any) -> Callable[[int, int], None]:
    def progress(done: int, of: int) -> None:
        phase.detail = f"{done:,} of {of:,} rows"

    return progress


def _empty(out: Path) -> None:
    """`out` with nothing left in it of an earlier run; what the demo did not write stays."""
    for name in ("model", "weights", "logs"):
        shutil.rmtree(out / name, ignore_errors=True)
    for name in ("trainer-steps.jsonl", "verdict.json", "reward.png"):
        (out / name).unlink(missing_ok=True)
    (out / "logs").mkdir(parents=True)


def main(
    steps: Annotated[int, typer.Option(help="Training steps.")] = 20,
    seed: Annotated[int, typer.Option()] = 0,
    out: Annotated[Path | None, typer.Option(help="Default: demo-out, or demo-out-no-push.")] = None,
    model: Annotated[
        str | None, typer.Option(help="A path or a Hugging Face name. Default: a tiny model, made and warmed up here.")
    ] = None,
    push: Annotated[bool, typer.Option(help="--no-push: the engine never gets the new weights; the curve stays flat.")] = True,
    groups: Annotated[int, typer.Option(help="Groups per step.")] = 8,
    rollouts: Annotated[int, typer.Option(help="Rollouts per group.")] = 8,
    learning_rate: Annotated[float | None, typer.Option(help="Default: 5e-4; with --model 5e-6.")] = None,
) -> None:
    """Run the closed loop and judge it. Exit code 0: every check holds; 1: one does not; 130: interrupted."""
    plan = Plan(
        model=model or None,
        out=(out or Path("demo-out" if push else "demo-out-no-push")).resolve(),
        steps=steps,
        seed=seed,
        push=push,
        groups=groups,
        rollouts=rollouts,
        learning_rate=learning_rate or (5e-6 if model else 5e-4),
    )
    console = Console()
    # Told to stop in either way, the demo ends its children first.
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        code = run(plan, console)
    except KeyboardInterrupt:
        console.print("Interrupted; everything that was started has been ended.")
        code = 130
    except (ChildDied, RuntimeError) as error:
        console.print(f"[red]The demo stopped:[/red] {error}", soft_wrap=True)
        code = 1
    sys.exit(code)


if __name__ == "__main__":
    typer.run(main)
