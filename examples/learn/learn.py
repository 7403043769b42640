"""An unmodified command-line agent learns: `python -m examples.learn.learn --agent pi`, which needs bubblewrap.

The demo's model, training and verdict in the loop through tasks, whose agent is pi or mini-swe-agent as it comes from its registry. The
model starts from demonstrations that are wrong in a habitual way three times out of four; the rewards of hidden checks show it which way is
right. With `--no-push` the engine never gets the new weights, with `--shuffle-rewards` the rollouts of a group exchange their rewards:
then nothing may be learned.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from examples.demo.demo import WithDeltas, exit_code, show_steps
from examples.demo.plan import Plan
from examples.demo.screen import Phase
from examples.learn.agents import AGENTS, CliAgent, with_agents
from examples.learn.exercises import KINDS, draw_exercises
from examples.tasks_loop.loop import AHEAD, Parts, closed_loop

SKILL = 0.25
"""The share of demonstrations that solve their exercise."""
# An agent may use a whole CPU, but mostly starts up or waits: more run at once than there are CPUs.
SLOTS = ("--prepare", "2", "--ready", "2", "--run", "4", "--evaluate", "2", "--cpus", "16", "--memory-mb", "16384")


def make_model(agent: CliAgent, plan: Plan, phase: Phase) -> None:
    """A tiny model that speaks to `agent` and follows the habits of its demonstrations."""
    from examples.demo.tiny_model import make_tiny_model
    from examples.demo.warmup import Labelled, label, warm_up

    model_dir, demonstrations = Path(plan.model_dir), demonstrate(agent, random.Random(plan.seed))
    texts = [text for dialogue in islice(demonstrations, 500) for text in _list_texts(agent, dialogue)]
    make_tiny_model(model_dir, seed=plan.seed, layers=2, initializer_range=0.1, texts=texts)

    def draw_opening(tokenizer: Any, _: random.Random) -> Labelled:
        return label(tokenizer, next(demonstrations)[1:3], None)

    def draw_whole(tokenizer: Any, _: random.Random) -> Labelled:
        return label(tokenizer, next(demonstrations), agent.tools)

    # What a command has to do with its instruction is learned from the two alone, which are a quarter of a conversation.
    for draw, steps, batch, rate in ((draw_opening, 200, 32, 5e-3), (draw_whole, 60, 16, 2e-3)):
        progress = show_steps(phase, steps)
        warm_up(model_dir, seed=plan.seed, make_dialogue=draw, steps=steps, batch=batch, learning_rate=rate, progress=progress)


def demonstrate(agent: CliAgent, rng: random.Random) -> Iterator[Sequence[Mapping[str, Any]]]:
    """Conversations on training exercises, of which a share of SKILL solve theirs."""
    for exercise in draw_exercises(rng, "train"):
        yield agent.play(exercise, exercise.solution if rng.random() < SKILL else exercise.habit)


def _list_texts(agent: CliAgent, dialogue: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield json.dumps(agent.tools[0])
    for message in dialogue:
        yield message["content"]
        yield from (call["function"]["arguments"] for call in message.get("tool_calls", ()))


def show_held_out(console: Console, log: Path) -> None:
    """The success on held-out exercises by kind, before and after."""
    before, after = json.loads(log.read_text()).values()
    table = Table(title="Held-out exercises solved", title_justify="left")
    for name in ("kind", "before", "after"):
        table.add_column(name)
    for kind in before:
        table.add_row(kind, _count_solved(before[kind]), _count_solved(after[kind]))
    table.add_row("all", *(_count_solved([*chain(*rewards.values())]) for rewards in (before, after)))
    console.print(table)


def _count_solved(rewards: Sequence[float]) -> str:
    return f"{sum(rewards):.0f} of {len(rewards)}"


def main(
    agent: Annotated[str, typer.Option(help=" or ".join(AGENTS))] = "pi",
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = 6,
    groups: Annotated[
        int, typer.Option(min=1, help="Tasks per step, each of which becomes a group; there are eight kinds.")
    ] = 8,
    rollouts: Annotated[int, typer.Option(min=2, help="Rollouts per task.")] = 4,
    held_out: Annotated[int, typer.Option(min=0, help="Held-out exercises of each kind, tried before and after.")] = 3,
    learning_rate: Annotated[float, typer.Option()] = 3e-4,
    model: Annotated[
        Path | None, typer.Option(help="The folder `model` of another run with this agent. Default: one is made and warmed up.")
    ] = None,
    seed: Annotated[int, typer.Option()] = 0,
    push: Annotated[bool, typer.Option(help="--no-push: the engine never gets the new weights; the curve stays flat.")] = True,
    shuffle_rewards: Annotated[
        bool, typer.Option("--shuffle-rewards", help="The rollouts of a group exchange their rewards; the curve stays flat.")
    ] = False,
    delta: WithDeltas = False,
    out: Annotated[Path | None, typer.Option(help="Default: demo-out-AGENT, with the control behind it.")] = None,
) -> None:
    """Let the agent learn, and judge it. Exit code 0: every check holds; 1: one does not; 130: interrupted."""
    if agent not in AGENTS:
        raise typer.BadParameter(f"{agent!r} is none of {', '.join(AGENTS)}", param_hint="--agent")
    cli = AGENTS[agent]
    control = ("" if push else "-no-push") + ("-shuffled" if shuffle_rewards else "")
    out = (out or Path(f"demo-out-{agent}{control}")).resolve()
    log = out / "held-out.json"
    plan = Plan(
        model=str(model.resolve()) if model else None,
        out=out,
        steps=steps,
        seed=seed,
        push=push,
        shuffled=shuffle_rewards,
        delta=delta,
        groups=groups,
        rollouts=rollouts,
        learning_rate=learning_rate,
        max_staleness=AHEAD,
        # Only the first step's rollouts are all by the model as it was warmed up.
        ends=(1, 3),
        held_out_log=log,
        flat=0.25,
    )
    log.unlink(missing_ok=True)
    words = ["--agent", agent, "--held-out", str(held_out), "--held-out-log", str(log), "--push" if push else "--no-push"]
    if shuffle_rewards:
        words.append("--shuffle")
    parts = Parts(["examples.learn.trainer", *words], SLOTS, with_agents(), untrained=2 * held_out * len(KINDS))
    code = exit_code(plan, partial(closed_loop, parts), partial(make_model, cli))
    if log.exists():
        show_held_out(Console(), log)
    sys.exit(code)


if __name__ == "__main__":
    typer.run(main)
