"""What the model does in each rollout of many: it solves the task, says that it is done without having done anything, runs into an
error of the engine, or never answers.

A conversation is known by what is in it: the instruction names the exercise, and the model's first command names the play that was
drawn for it. So whatever is asked again, by the same agent or in the next attempt, is answered by the same rule:

    first turn         look around, with the play in the command     ": play t-003/2/solve; ls"
    solve              write the reference solution, then the end
    fail               the end
    crash              every further call is refused in a way that no agent tries again
    hang               no further call is answered: the agent's budget runs out

An agent without tools is given the solution, and the play with it, as the text of its first turn.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples.tasks.load import BUDGETS, FOLDER, body, names, packed
from tests.harnesses import test_claude_code, test_codex, test_mini_swe_agent, test_pi
from tests.harnesses.agent_run import MODEL, Cli, Tools
from tests.harnesses.player import Step, ToolCall
from tests.support.engine.scripted_engine import Fail, Generation, Hang, Reply, Say
from tests.support.engine.template_families import Family

CLIS = [test_pi.CLI, test_mini_swe_agent.CLI, test_codex.CLI, test_claude_code.CLI]
WEIGHTS = {"solve": 55, "fail": 30, "crash": 15}
AGENT_SECONDS = 1200
"""More than any agent needs that is answered."""
GONE = Fail(404, "the model is gone", "NotFoundError", "model")
"""No agent takes it for something that may pass."""

_EXERCISE = re.compile(r"This is exercise ([a-z0-9-]+)\.")
_PLAY = re.compile(r": play ([a-z0-9-]+)/(\d+)/(solve|fail|crash|hang);")
_WRITTEN = ": solution of "


@dataclass(frozen=True)
class Exercise:
    """One task: `samples` rollouts of an example by one agent. `hurried`: the model hangs in all of them. `solved`: it solves all."""

    task_id: str
    example: str
    cli: Cli
    samples: int
    hurried: bool
    agent_seconds: float
    solved: bool = False

    @property
    def tools(self) -> Tools:
        assert self.cli.tools is not None
        return self.cli.tools

    def submitted(self) -> dict[str, Any]:
        """The body of its `POST /tasks`. No attempt is given up because nodes died, and a trainer gets what there is."""
        task = body(self.example, self.cli.harness)
        return task | {
            "task_id": self.task_id,
            "instruction": f"{task['instruction']}\n\nThis is exercise {self.task_id}.",
            "model": MODEL,
            "num_samples": self.samples,
            "runtime": {"kind": "local", "memory_mb": 2048},
            "budgets": {**BUDGETS, "agent_seconds": self.agent_seconds},
            "max_attempts": 100,
            "on_agent_timeout": "reward",
            "group": {"policy": "allow_partial", "minimum": 1, "zero_variance": "keep"},
        }


def exercises(rollouts: int, samples: int, seed: int, *, hang_seconds: float) -> list[Exercise]:
    """`rollouts` rollouts in tasks of `samples`: the agents in turn, the examples in an order drawn by the seed."""
    examples = names()
    random.Random(seed).shuffle(examples)
    made: list[Exercise] = []
    while (left := rollouts - sum(exercise.samples for exercise in made)) > 0:
        number = len(made)
        hurried = number % 9 == 4
        example, cli = examples[number // len(CLIS) % len(examples)], CLIS[number % len(CLIS)]
        seconds = hang_seconds if hurried else AGENT_SECONDS
        made.append(Exercise(f"t-{number:03}", example, cli, min(samples, left), hurried, seconds))
    return made


class Plays:
    """The script of an engine. `drawn` counts the plays that conversations were given, those of attempts that were lost included."""

    def __init__(self, family: Family, given: Sequence[Exercise], seed: int) -> None:
        self._family = family
        self._exercises = {exercise.task_id: exercise for exercise in given}
        self._dice = {exercise.task_id: random.Random(f"{seed} {exercise.task_id}") for exercise in given}
        self._numbers: Counter[str] = Counter()
        self.drawn: Counter[str] = Counter()

    def __call__(self, generation: Generation, index: int) -> Reply:
        found = _EXERCISE.search(generation.prompt)
        if found is None:
            return Say(self._family.speak("Yes."))
        exercise = self._exercises[found[1]]
        played = _PLAY.search(generation.prompt)
        return self._first(exercise) if played is None else self._next(exercise, played, generation.prompt)

    def _first(self, exercise: Exercise) -> Reply:
        self._numbers[exercise.task_id] += 1
        drawn = self._dice[exercise.task_id].choices([*WEIGHTS], [*WEIGHTS.values()])[0]
        play = "hang" if exercise.hurried else "solve" if exercise.solved else drawn
        self.drawn[play] += 1
        command = f": play {exercise.task_id}/{self._numbers[exercise.task_id]}/{play}; ls"
        if exercise.cli.tools is None:
            return Say(self._family.speak(f"{command}\n\n{_listings(exercise) if play == 'solve' else 'I do not know.'}"))
        return self._said(exercise.tools.shell(command))

    def _next(self, exercise: Exercise, played: re.Match[str], prompt: str) -> Reply:
        play = played[3]
        if play == "hang":
            return Hang()
        if play == "crash":
            return GONE
        if play == "solve" and _WRITTEN not in prompt:
            solution = packed(FOLDER / exercise.example / "solution")
            command = f"{_WRITTEN}{exercise.task_id}; printf %s {solution} | base64 -d | tar -xz && ls"
            return self._said(exercise.tools.shell(command))
        return exercise.cli.steps(Path("/workspace"))[-1].say(self._family)

    def _said(self, call: ToolCall) -> Reply:
        return Step("", "I go on.", [call]).say(self._family)


def _listings(exercise: Exercise) -> str:
    """The solution in the format of whole files, as aider has it."""
    folder = FOLDER / exercise.example / "solution"
    files = sorted(path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return "\n\n".join(f"{path.relative_to(folder)}\n```\n{path.read_text(encoding='utf-8')}```" for path in files)


def plays_in(text: str) -> set[str]:
    """The plays that are named in a text."""
    return {found[3] for found in _PLAY.finditer(text)}
