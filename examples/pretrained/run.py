"""A pretrained model learns through an unmodified command-line agent: `python -m examples.pretrained.run --model smollm2 --agent pi`.

First the model imitates demonstrations, which an expert made through the same agent; then it learns by GRPO, or from a teacher's scores,
on the training exercises and is judged on held-out ones. Everything is left in one folder, from which `--resume` goes on after whatever
was killed:

    run.json          the settings                      demonstrations/   what `verbatim generate` wrote, with the expert
    model/            smollm2, converted                warm/             the policy that begins: version 0
    results.jsonl     what is done (examples.pretrained.journal)               curves.png
    weights/          the last versions                 checkpoints/      their optimizers
    data/             the service's records             logs/
    teacher/          what a run that teaches had learned
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console
from rich.markup import escape

from examples.demo.driver import Service
from examples.demo.fleet import Served, serving, unless_one_ends
from examples.demo.plan import Plan
from examples.demo.processes import Child
from examples.learn.agents import AGENTS, with_agents
from examples.pretrained.acceptance import show_acceptance
from examples.pretrained.curves import RESULTS, draw_curves
from examples.pretrained.demonstrations import is_complete
from examples.pretrained.generations import copy_last_policy, demonstrate
from examples.pretrained.journal import Journal, Line
from examples.pretrained.smollm2 import with_packages
from examples.tasks_loop.loop import Parts, node

SMOLLM2 = "smollm2"
RUN_FILE = "run.json"
LONGEST_FOLDER = 70
"""Bytes of its path: a Unix socket below it may have about a hundred."""
# The node reserves what a task may use at most; most agents wait for the model.
SLOTS = ("--prepare", "2", "--ready", "4", "--run", "16", "--evaluate", "2", "--cpus", "64", "--memory-mb", "65536")


@dataclass(frozen=True, slots=True)
class Settings:
    """What makes a run; only `steps` may change when it goes on. `warm_start`: a folder with a policy to begin with, of another run;
    `teacher`: one with a policy to learn from, or with a run whose last policy teaches."""

    agent: str
    model: str
    warm_start: str | None
    demonstrations: int
    epochs: int
    warm_rate: float
    steps: int
    groups: int
    rollouts: int
    held_out: int
    held_out_every: int
    learning_rate: float
    seed: int
    push: bool
    shuffle_rewards: bool
    teacher: str | None
    shuffle_scores: bool


class Run:
    """One run in its folder."""

    def __init__(self, out: Path, settings: Settings, console: Console) -> None:
        self.out = out
        self._settings = settings
        self._agent = AGENTS[settings.agent]
        self._console = console
        self._logs = out / "logs"
        self.journal = Journal(out / RESULTS)
        self._teacher: Path | None = None

    async def go(self) -> None:
        """All phases that are not done yet. Raises RuntimeError, ChildDied among them."""
        self._logs.mkdir(parents=True, exist_ok=True)
        if self._settings.teacher:
            self._teacher = find_teacher(Path(self._settings.teacher), self.out / "teacher")
        if not (self.out / "warm").exists():
            await self._begin()
        if self._is_open():
            way = "distillation" if self._settings.teacher else "GRPO"
            self._console.print(f"{way} from step {self.journal.done + 1} to {self._settings.steps}")
            await self._reinforce()
        draw_curves(self.out / "curves.png", [self.out])

    def _is_open(self) -> bool:
        tried = {line["step"] for line in self.journal.read("held-out")}
        return self.journal.done < self._settings.steps or self._settings.steps not in tried

    async def _find_model(self) -> Path:
        if self._settings.model != SMOLLM2:
            return Path(self._settings.model)
        made = self.out / "model"
        if not made.exists():
            with self._phase("the model is read from its package"):
                await self._finish("the conversion", "examples.pretrained.smollm2", [str(made)], with_packages())
        return made

    async def _begin(self) -> None:
        if self._settings.warm_start:
            (self.out / "warm").symlink_to(self._settings.warm_start, target_is_directory=True)
        else:
            await self._warm_up(await self._find_model())

    async def _warm_up(self, model_dir: Path) -> None:
        folder = self.out / "demonstrations"
        if not is_complete(folder / "generated"):
            with self._phase("the expert demonstrates through the agent"):
                await demonstrate(
                    self._agent, self._settings.demonstrations, self._settings.seed, model_dir, folder, self._logs
                )
        show_acceptance(self._console, [folder / "generated"])
        with self._phase("the policy imitates the demonstrations"):
            words = self._list_words(
                ["--model-dir", model_dir, "--demonstrations", folder / "generated", "--out", self.out / "warm"],
                ["--log", self.out / "warm-start.jsonl", "--epochs", self._settings.epochs, "--seed", self._settings.seed],
                ["--learning-rate", self._settings.warm_rate],
            )
            await self._finish("the warm start", "examples.pretrained.warm_start", words, {})

    async def _reinforce(self) -> None:
        plan = self._plan
        async with contextlib.AsyncExitStack() as stack:
            served = await stack.enter_async_context(serving(plan, self.out / "data"))
            service = await stack.enter_async_context(contextlib.aclosing(Service(served.url, served.admin_token)))
            with self._phase("vLLM and the service start"):
                await unless_one_ends(service.wait_until_ready(1), *(child.finished() for child in served.children))
            rollouts = await stack.enter_async_context(node(Parts([], SLOTS, with_agents()), plan, served))
            await stack.enter_async_context(self._shown())
            others = (child.finished() for child in [*served.children, rollouts])
            await unless_one_ends(self._train(plan, served), *others)

    async def _train(self, plan: Plan, served: Served) -> None:
        own = self._settings
        words = self._list_words(
            ["--url", served.url, "--model-dir", plan.model_dir, "--weights-dir", plan.weights_dir, "--agent", own.agent],
            ["--checkpoints", self.out / "checkpoints", "--results", self.journal.path, "--steps", own.steps],
            ["--groups", own.groups, "--rollouts", own.rollouts, "--held-out", own.held_out],
            ["--held-out-every", own.held_out_every, "--learning-rate", own.learning_rate, "--seed", own.seed],
            ["--push" if own.push else "--no-push"],
            ["--shuffle"] if own.shuffle_rewards or own.shuffle_scores else [],
            ["--taught"] if own.teacher else [],
        )
        tokens = {"VERBATIM_ADMIN_TOKEN": served.admin_token, "VERBATIM_TRAINER_TOKEN": served.trainer_token}
        await self._finish("the trainer", "examples.pretrained.steps", words, tokens)

    async def _finish(self, name: str, module: str, words: list[str], env: Mapping[str, str]) -> None:
        log = self._logs / f"{module.rpartition('.')[2]}.log"
        async with Child(name, [sys.executable, "-m", module, *words], log, env=env, may_finish=True) as child:
            await child.finished()

    @property
    def _plan(self) -> Plan:
        own = self._settings
        return Plan(
            model=str(self.out / "warm"),
            out=self.out,
            steps=own.steps,
            seed=own.seed,
            push=own.push,
            groups=own.groups,
            rollouts=own.rollouts,
            learning_rate=own.learning_rate,
            teacher=self._teacher and str(self._teacher),
        )

    @staticmethod
    def _list_words(*parts: list[Any]) -> list[str]:
        return [str(word) for part in parts for word in part]

    @contextlib.contextmanager
    def _phase(self, title: str) -> Iterator[None]:
        started = time.monotonic()
        self._console.print(f"{title} …")
        yield
        self._console.print(f"{title}: done in {time.monotonic() - started:.0f} s")

    @contextlib.asynccontextmanager
    async def _shown(self) -> AsyncIterator[None]:
        """While the block runs, new lines of the journal are shown."""
        shown = len(self.journal.read())

        def show_new() -> None:
            nonlocal shown
            for line in (lines := self.journal.read())[shown:]:
                self._console.print(describe(line), highlight=False, soft_wrap=True)
            shown = len(lines)

        async def follow() -> None:
            while True:
                show_new()
                await asyncio.sleep(1)

        following = asyncio.create_task(follow())
        try:
            yield
        finally:
            following.cancel()
            show_new()


def find_teacher(folder: Path, made: Path) -> Path:
    """The folder of a policy itself; of a run, `made`, where its last policy is copied once, however far it goes meanwhile. Raises
    RuntimeError for a folder that holds neither."""
    if made.exists():
        return made
    if (folder / "warm").exists() and (folder / RUN_FILE).exists():
        return copy_last_policy(folder, made)
    if not (folder / "config.json").exists():
        raise RuntimeError(f"--teacher: {folder} holds no policy, nor a run that has one")
    return folder


def describe(line: Line) -> str:
    """A line of the journal in words."""
    if line["event"] == "push":
        return f"version {line['step']} pushed in {line['seconds']:.1f} s"
    what = f"step {line['step']}" if line["event"] == "step" else f"held-out exercises after step {line['step']}"
    more = f", {sum(line['failures'].values())} failed" if line["failures"] else ""
    if "largest_difference" in line:
        more += f"; a recomputed logprob differs by {line['largest_difference']:.1e} at most"
    seconds = ", ".join(f"{name} {value:.0f} s" for name, value in line["seconds"].items())
    return f"{what}: {line['reward']:.3f} of {line['rollouts']} rollouts solved{more}; {seconds}"


def open_run(out: Path, settings: Settings, *, resume: bool) -> None:
    """Put the settings into the folder, or hold them against those that are there. Raises BadParameter."""
    path = out / RUN_FILE
    if len(os.fsencode(out)) > LONGEST_FOLDER:
        raise typer.BadParameter(f"{out} is too long a path for the store's socket in it", param_hint="--out")
    if not path.exists():
        if resume:
            raise typer.BadParameter(f"{out} holds no run", param_hint="--resume")
        out.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(settings), indent=1) + "\n")
        return
    if not resume:
        raise typer.BadParameter(f"{out} holds a run: continue it with --resume, or name another folder", param_hint="--out")
    for name, value in json.loads(path.read_text()).items():
        if name != "steps" and value != (given := getattr(settings, name)):
            raise typer.BadParameter(f"the run in {out} has {name} {value}, not {given}", param_hint="--resume")


def exit_code(run: Callable[[Console], Any]) -> int:
    """0; 1 when a part failed, with one sentence; 130 when interrupted."""
    console = Console()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        run(console)
        return 0
    except KeyboardInterrupt:
        console.print("Interrupted; everything that was started has been ended. Go on with --resume.")
        return 130
    except (RuntimeError, OSError, httpx.HTTPError) as error:
        console.print(f"[red]The run stopped:[/red] {escape(str(error) or repr(error))}", soft_wrap=True)
        return 1


def main(
    agent: Annotated[str, typer.Option(help=" or ".join(AGENTS))] = "pi",
    model: Annotated[str, typer.Option(help="smollm2, or the folder of a model whose chat template takes tools.")] = SMOLLM2,
    warm_start: Annotated[
        Path | None, typer.Option(help="The folder `warm` of another run, to begin with its policy instead of a warm start.")
    ] = None,
    demonstrations: Annotated[
        int, typer.Option(min=1, help="Exercises that the expert tries, each twice; it solves it once.")
    ] = 64,
    epochs: Annotated[int, typer.Option(min=1, help="Of the warm start.")] = 6,
    warm_rate: Annotated[float, typer.Option(help="The learning rate of the warm start.")] = 1e-4,
    steps: Annotated[int, typer.Option(min=1, help="Training steps; more than before let a run go on.")] = 40,
    groups: Annotated[int, typer.Option(min=1, help="Tasks per step, each of which becomes a group.")] = 8,
    rollouts: Annotated[int, typer.Option(min=2, help="Rollouts per task.")] = 4,
    held_out: Annotated[int, typer.Option(min=1, help="Held-out exercises per trial; there are eight kinds.")] = 48,
    held_out_every: Annotated[int, typer.Option(min=1, help="Steps between their trials.")] = 8,
    learning_rate: Annotated[float, typer.Option()] = 2e-5,
    seed: Annotated[int, typer.Option()] = 0,
    push: Annotated[bool, typer.Option(help="--no-push: the engine never gets the new weights; the curve stays flat.")] = True,
    shuffle_rewards: Annotated[
        bool, typer.Option("--shuffle-rewards", help="The rollouts of a group exchange their rewards; the curve stays flat.")
    ] = False,
    teacher: Annotated[
        Path | None,
        typer.Option(help="The folder of a policy, or of a run for its last one, whose scores teach in place of rewards."),
    ] = None,
    shuffle_scores: Annotated[
        bool, typer.Option("--shuffle-scores", help="Each token gets the teacher's score of another; nothing is learned.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Default: demo-out-MODEL-AGENT, with the control behind it.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in the folder.")] = False,
) -> None:
    """Let a pretrained model learn through an agent. Exit code 0: it came to its end; 1: a part failed; 130: interrupted."""
    if agent not in AGENTS:
        raise typer.BadParameter(f"{agent!r} is none of {', '.join(AGENTS)}", param_hint="--agent")
    if shuffle_rewards if teacher else shuffle_scores:
        raise typer.BadParameter("rewards teach without --teacher, scores with it: shuffle those that teach")
    control = ("" if push else "-no-push") + ("-shuffled" if shuffle_rewards or shuffle_scores else "")
    folder = (out or Path(f"demo-out-{Path(model).name}-{agent}{'-taught' if teacher else ''}{control}")).resolve()
    settings = Settings(
        agent=agent,
        model=model if model == SMOLLM2 else str(Path(model).resolve()),
        warm_start=str(warm_start.resolve()) if warm_start else None,
        demonstrations=demonstrations,
        epochs=epochs,
        warm_rate=warm_rate,
        steps=steps,
        groups=groups,
        rollouts=rollouts,
        held_out=held_out,
        held_out_every=held_out_every,
        learning_rate=learning_rate,
        seed=seed,
        push=push,
        shuffle_rewards=shuffle_rewards,
        teacher=str(teacher.resolve()) if teacher else None,
        shuffle_scores=shuffle_scores,
    )
    open_run(folder, settings, resume=resume)
    sys.exit(exit_code(lambda console: asyncio.run(Run(folder, settings, console).go())))


if __name__ == "__main__":
    typer.run(main)
