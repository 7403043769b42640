"""The exercises of the learning run: their hidden checks, their splits, and the control that shuffles rewards."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from examples.learn.agents import AGENTS, make_task
from examples.learn.exercises import KINDS, draw_exercises, make_check, make_exercise
from examples.learn.trainer import shuffle_rewards
from examples.pretrained.varied import make_varied
from rollout.task import read_json


@pytest.mark.parametrize("make", [make_exercise, make_varied])
@pytest.mark.parametrize("kind", KINDS)
def test_a_check_accepts_the_solution_and_refuses_the_habit(kind: str, make: Any, tmp_path: Path) -> None:
    """As on a node: the files, a command in their folder, then what the evaluator runs beside them."""
    rng = random.Random(0)
    for number in range(4):
        exercise = make(kind, rng, "train")
        for command, reward in ((exercise.solution, 1.0), (exercise.habit, 0.0), ("true", 0.0)):
            folder = tmp_path / f"{number}-{reward}-{len(command)}"
            (folder / ".hidden").mkdir(parents=True)
            options = make_check(exercise, "3")["options"]
            assert isinstance(options, dict)
            for name, text in {**exercise.files, **options["files"]}.items():
                (folder / name).write_text(text)
            subprocess.run(["sh", "-c", command], cwd=folder, check=True)
            checked = subprocess.run([sys.executable, ".hidden/check.py"], cwd=folder, check=True, capture_output=True)
            score = json.loads(checked.stdout)
            assert (score["reward"], score["metadata"]) == (reward, {"completion_tokens": 3}), (exercise, command, score)


def test_no_exercise_is_in_both_splits_and_every_kind_comes_as_often() -> None:
    drawn = {split: list(islice(draw_exercises(random.Random(1), split), 400)) for split in ("train", "held-out")}
    train, held_out = ({exercise.instruction for exercise in exercises} for exercises in drawn.values())
    assert len(train) > 100 and len(held_out) > 50 and not train & held_out
    assert set(Counter(exercise.kind for exercise in drawn["train"]).values()) == {50}


@pytest.mark.parametrize("agent", AGENTS)
def test_a_task_is_valid_and_says_nothing_of_what_is_checked(agent: str) -> None:
    for exercise in islice(draw_exercises(random.Random(2), "train"), len(KINDS)):
        body = make_task("a-task", exercise, AGENTS[agent], 4)
        assert read_json(json.dumps(body).encode()).num_samples == 4
        told = {name: value for name, value in body.items() if name not in ("evaluator", "metadata")}
        assert exercise.solution not in json.dumps(told)


@pytest.mark.case(80)
def test_shuffled_rewards_stay_in_their_group_and_whole_rollouts_get_them() -> None:
    """Rollouts 0 to 3 are one group, of which rollout 1 has two rows; 4 and 5 are another."""
    rewards = np.array([0.0, 1.0, 1.0, 2.0, 3.0, 8.0, 9.0])
    groups = np.array([0, 0, 0, 0, 0, 1, 1])
    rollouts = np.array([0, 1, 1, 2, 3, 4, 5])
    seen = set()

    def estimate(given: Any, group_index: Any, rollout_index: Any) -> Any:
        seen.add(tuple(given))
        return given

    shuffled = shuffle_rewards(estimate, random.Random(0))
    for _ in range(200):
        shuffled(rewards, groups, rollouts)
    assert len(seen) == 24 * 2
    assert all(row[1] == row[2] and {row[0], row[1], row[3], row[4]} == {0, 1, 2, 3} for row in seen)
    assert all(set(row[5:]) == {8, 9} for row in seen)
    assert list(rewards) == [0, 1, 1, 2, 3, 8, 9]
