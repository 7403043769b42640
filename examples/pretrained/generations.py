"""Generations through `verbatim generate`: the expert's demonstrations, and what a policy that has learned solves.

python -m examples.pretrained.generations --run demo-out-smollm2-pi --agent pi     # the policy of that run on held-out exercises
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from itertools import islice
from pathlib import Path
from random import Random
from typing import Annotated

import typer
from rich.console import Console

from examples.demo.fleet import unless_one_ends
from examples.demo.processes import Child
from examples.learn.agents import AGENTS, CliAgent, with_agents
from examples.learn.exercises import KINDS
from examples.pretrained.acceptance import show_acceptance
from examples.pretrained.curves import RESULTS
from examples.pretrained.demonstrations import ATTEMPTS, write_demonstrations, write_exercises
from examples.pretrained.journal import Journal
from examples.pretrained.varied import draw_varied
from examples.vllm_server import free_port, make_one_process_env, vllm_command

AT_ONCE = 4


async def generate(engine: Child, port: int, tasks: Path, out: Path, log: Path, more: Sequence[str] = ()) -> None:
    """Run the tasks of a file against the engine until `verbatim generate` ends. Repeated, it goes on. Raises ChildDied."""
    argv = [sys.executable, "-m", "cli.main", "generate", str(tasks), "--out", str(out)]
    argv += ["--engine", f"http://127.0.0.1:{port}", "--at-once", str(AT_ONCE), *more]
    generation = Child("verbatim generate", argv, log, env=with_agents(), may_finish=True)
    async with AsyncExitStack() as stack:
        for child in (engine, generation):
            await stack.enter_async_context(child)
        await unless_one_ends(generation.finished(), engine.finished())


async def demonstrate(agent: CliAgent, count: int, seed: int, model_dir: Path, folder: Path, logs: Path) -> None:
    """`folder`/generated: the expert's attempts at `count` exercises, two each, recorded in the ids of the model's tokenizer."""
    write_demonstrations(folder, agent, count, seed)
    port = free_port()
    words = [
        "--port",
        str(port),
        "--model-dir",
        str(model_dir),
        "--answers",
        str(folder / "answers.json"),
        "--agent",
        agent.name,
    ]
    expert = Child("the expert", [sys.executable, "-m", "examples.pretrained.expert", *words], logs / "expert.log")
    # The habits are imitated too: whatever could be judged is kept.
    more = ["--accept", "reward >= 0", "--samples", str(ATTEMPTS)]
    await generate(expert, port, folder / "tasks.jsonl", folder / "generated", logs / "generate.log", more)


def copy_last_policy(run: Path, out: Path) -> Path:
    """A folder of its own, complete once it is there: what the run's last step left, or its beginning if none is done."""
    made, done = out.with_name(f".{out.name}.writing"), Journal(run / RESULTS).done
    shutil.copytree(run / "warm", made, dirs_exist_ok=True)
    if done:
        shutil.copytree(run / "weights" / f"version-{done}", made, dirs_exist_ok=True)
    return made.rename(out)


async def generate_held_out(run: Path, agent: CliAgent, per_kind: int, samples: int, out: Path) -> None:
    """What the last policy of a run solves of held-out exercises that the run itself did not try."""
    exercises = list(islice(draw_varied(Random("generations"), "held-out"), per_kind * len(KINDS)))
    write_exercises(out / "tasks.jsonl", exercises, agent)
    port = free_port()
    with tempfile.TemporaryDirectory() as made:
        policy = copy_last_policy(run, Path(made) / "policy")
        argv, env = vllm_command(policy, port, max_model_len=2048)
        threads = max(1, (os.cpu_count() or 1) - 1)
        engine = Child("vLLM", argv, out / "vllm.log", env={**env, **make_one_process_env(threads)})
        more = ["--samples", str(samples)]
        await generate(engine, port, out / "tasks.jsonl", out / "generated", out / "generate.log", more)


def main(
    run: Annotated[Path, typer.Option(help="The folder of a run of `examples.pretrained.run`.")],
    agent: Annotated[str, typer.Option(help=" or ".join(AGENTS))],
    per_kind: Annotated[int, typer.Option(min=1, help="Exercises of each kind.")] = 4,
    samples: Annotated[int, typer.Option(min=1, help="Attempts at each.")] = 4,
    out: Annotated[Path | None, typer.Option(help="Default: `generations` in the run's folder.")] = None,
) -> None:
    """Have the run's last policy try held-out exercises, and print which attempts are accepted."""
    folder = (out or run / "generations").resolve()
    asyncio.run(generate_held_out(run.resolve(), AGENTS[agent], per_kind, samples, folder))
    show_acceptance(Console(), [folder / "generated"])


if __name__ == "__main__":
    typer.run(main)
