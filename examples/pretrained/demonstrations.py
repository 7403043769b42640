"""Demonstrations made through the agent itself: the tasks and the expert's answers, and their rows as a batch to imitate."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from examples.learn.agents import CliAgent, make_task
from examples.learn.exercises import Exercise
from examples.pretrained.varied import draw_varied
from proxy.archive.folder import ArchiveError, ArchiveReader
from proxy.archive.tables import TRAJECTORIES
from reconstruct.trajectory import Trajectory
from trainer_client import Batch, Group, decode_trajectory

ATTEMPTS = 2
"""At each exercise: the expert solves it once, and once it follows the habit, a command that nearly does. With one answer to each, the
rollouts of an exercise nearly always agreed after some epochs, and left nothing for rewards to decide."""
FAILED_COUNTS = 2
"""An attempt that failed counts as often. So a policy that knows all of them solves a third, and both answers are tried."""


def write_exercises(path: Path, exercises: Sequence[Exercise], agent: CliAgent) -> None:
    """A file for `verbatim generate`."""
    tasks = [make_task(f"exercise-{number}", exercise, agent, 1) for number, exercise in enumerate(exercises)]
    # `verbatim generate` runs no more at once than the CPUs allow.
    lines = [json.dumps({**task, "runtime": {**task["runtime"], "cpus": 0.5}}) + "\n" for task in tasks]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(lines))


def write_demonstrations(folder: Path, agent: CliAgent, count: int, seed: int) -> None:
    """`folder`/tasks.jsonl, `count` exercises of the training split, and `folder`/answers.json, what the expert does in them."""
    exercises = list(islice(draw_varied(random.Random(f"demonstrations {seed}"), "train"), count))
    write_exercises(folder / "tasks.jsonl", exercises, agent)
    answers = {each.instruction: [each.solution, each.habit] for each in exercises}
    (folder / "answers.json").write_text(json.dumps(answers, indent=1) + "\n")


def is_complete(generated: Path) -> bool:
    """Whether `verbatim generate` has come to its end in the folder."""
    try:
        return bool(ArchiveReader(generated / "accepted").manifest.get("complete"))
    except ArchiveError:
        return False


def read_demonstrations(generated: Path) -> Batch:
    """The accepted rows of a folder that `verbatim generate` wrote, a group for each exercise; those that failed come again."""
    exercises: dict[str, list[Trajectory]] = defaultdict(list)
    for row in ArchiveReader(generated / "accepted").rows("trajectories"):
        decoded = decode_trajectory({**row, **_load_json(row)})
        exercises[decoded.task_id] += [decoded] * (1 if decoded.reward else FAILED_COUNTS)
    return Batch([Group(name, tuple(attempts)) for name, attempts in exercises.items()], weight_version=0)


def _load_json(row: Mapping[str, Any]) -> dict[str, Any]:
    """The columns that an archive holds as JSON."""
    names = (name for name, kind in TRAJECTORIES.items() if kind == "json")
    return {name: json.loads(row[name]) for name in names if row.get(name) is not None}
