"""The run of a pretrained model: its exercises, the expert who demonstrates, the journal it goes on from, and its tables."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import typer
from aiohttp.test_utils import TestClient, TestServer
from transformers import AutoTokenizer

from examples.demo.tiny_model import make_tiny_model
from examples.learn.agents import AGENTS
from examples.learn.exercises import KINDS
from examples.pretrained.acceptance import ALL, count_attempts
from examples.pretrained.curves import RESULTS
from examples.pretrained.demonstrations import is_complete, read_demonstrations, write_demonstrations
from examples.pretrained.expert import Expert, make_app
from examples.pretrained.journal import Journal
from examples.pretrained.run import RUN_FILE, Settings, describe, find_teacher, open_run
from examples.pretrained.steps import Rules
from examples.pretrained.varied import WORDINGS, draw_varied, make_varied
from proxy.archive.folder import ArchiveWriter
from proxy.archive.tables import ArchivedSession
from reconstruct.trajectory import encode_row
from rollout.task import read_json
from tests.support.sessions.training_rows import trajectory

SETTINGS = Settings(
    agent="pi",
    model="smollm2",
    warm_start=None,
    demonstrations=8,
    epochs=1,
    warm_rate=1e-4,
    steps=3,
    groups=2,
    rollouts=2,
    held_out=1,
    held_out_every=2,
    learning_rate=1e-5,
    seed=0,
    push=True,
    shuffle_rewards=False,
    teacher=None,
    shuffle_scores=False,
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return AutoTokenizer.from_pretrained(make_tiny_model(tmp_path_factory.mktemp("tokenizer")))


# Exercises


def test_varied_exercises_hardly_repeat_and_none_is_in_both_splits() -> None:
    drawn = {split: list(islice(draw_varied(random.Random(1), split), 1600)) for split in ("train", "held-out")}
    train, held_out = ({exercise.instruction for exercise in exercises} for exercises in drawn.values())
    assert len(train) > 1550 and len(held_out) > 1550 and not train & held_out
    assert WORDINGS.keys() == KINDS.keys()


# The expert


def test_the_expert_says_what_the_template_renders_of_a_demonstration(tokenizer: Any) -> None:
    """Turn by turn as a harness asks it: what it says continues the prompt that it says it saw, to the id."""
    for agent in AGENTS.values():
        exercise = make_varied("count", random.Random(0), "train")
        played = agent.play(exercise, exercise.solution)
        expert = Expert(tokenizer, agent, {exercise.instruction: [exercise.solution]})
        for end in (2, 4):
            messages = [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in played[:end]]
            reply = expert.reply({"messages": messages, "tools": agent.tools})
            whole = tokenizer.apply_chat_template(played[: end + 1], tools=agent.tools)["input_ids"]
            assert reply["prompt"] + reply["ids"] == whole[: len(reply["prompt"]) + len(reply["ids"])]
            assert tokenizer.decode(reply["ids"]).endswith("<|im_end|>")
            assert len(reply["entries"]) == len(reply["ids"])


async def test_the_expert_is_served_whole_and_streamed_alike(tokenizer: Any) -> None:
    agent, exercise = AGENTS["pi"], make_varied("cut", random.Random(0), "train")
    app = make_app(Expert(tokenizer, agent, {exercise.instruction: [exercise.solution]}))
    body = {"messages": agent.play(exercise, "")[:2], "tools": agent.tools}
    async with TestClient(TestServer(app)) as client:
        whole = await (await client.post("/v1/chat/completions", json=body)).json()
        streamed = await (await client.post("/v1/chat/completions", json={**body, "stream": True})).text()
        empty = await client.post("/v1/chat/completions", json={})
        first = {"model": "policy", "messages": [{"role": "user", "content": "Hello"}]}
        contact = await (await client.post("/v1/chat/completions", json=first)).json()
    lines = [line.removeprefix("data: ") for line in streamed.splitlines() if line]
    events = [json.loads(line) for line in lines[:-1]]
    assert lines[-1] == "[DONE]" and events[1]["usage"] == whole["usage"] and empty.status == 400
    assert contact["choices"][0]["token_ids"], "the service, which samples a token at first contact, gets none"
    (choice,), (delta,) = whole["choices"], events[0]["choices"]
    assert (delta["token_ids"], delta["finish_reason"]) == (choice["token_ids"], "tool_calls")
    arguments = [said["tool_calls"][0]["function"]["arguments"] for said in (choice["message"], delta["delta"])]
    assert arguments == [json.dumps({"command": exercise.solution})] * 2


def test_the_expert_solves_an_exercise_once_and_follows_the_habit_once(tokenizer: Any, tmp_path: Path) -> None:
    """Whichever of the two attempts goes on first; and its tasks are valid."""
    agent = AGENTS["pi"]
    write_demonstrations(tmp_path, agent, 20, seed=0)
    answers = json.loads((tmp_path / "answers.json").read_text())
    exercises = list(islice(draw_varied(random.Random("demonstrations 0"), "train"), 20))
    tasks = [read_json(line.encode()) for line in (tmp_path / "tasks.jsonl").read_text().splitlines()]
    assert [task.instruction for task in tasks] == list(answers) == [each.instruction for each in exercises]
    expert = Expert(tokenizer, agent, answers)
    for exercise in exercises:
        played = agent.play(exercise, exercise.solution)

        def say(end: int, played: Any = played) -> Any:
            return expert.reply({"messages": played[:end], "tools": agent.tools})["message"]

        begun = [say(2), say(2)]
        commands = [json.loads(said["tool_calls"][0]["function"]["arguments"])["command"] for said in begun]
        assert commands == [exercise.solution, exercise.habit]
        assert say(4)["content"] == agent.end


def test_demonstrations_are_read_as_they_were_recorded_those_that_failed_twice(tmp_path: Path) -> None:
    """Whatever columns an archive has beside theirs; before it is complete, a generation counts as unfinished."""
    solved, other = trajectory("a", session="s"), trajectory("c", session="s", task_id="task-2")
    failed = trajectory("b", session="s", versions=(5, 5, 5), reward=0.0)
    empty: dict[str, Any] = {"reward_metadata": {}, "per_call": {}, "per_branch": {}}
    state = defaultdict(lambda: None, session_id="s", created_at=1.0, status="completed", **empty)
    assert not is_complete(tmp_path)
    with ArchiveWriter(tmp_path / "accepted") as writer:
        rows = [encode_row(row, arrays="bytes") for row in (solved, other, failed)]
        writer.add(ArchivedSession(state, [], trajectories=rows))
        writer.flush()
        assert not is_complete(tmp_path)
        writer.finish({})
    batch = read_demonstrations(tmp_path)
    assert is_complete(tmp_path) and [group.group_id for group in batch.groups] == ["task-1", "task-2"]
    assert [encode_row(row) for row in batch.rows] == [encode_row(row) for row in (solved, failed, failed, other)]


# Going on


def test_a_line_that_a_killed_writer_left_unfinished_is_cut_off(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "results.jsonl")
    assert journal.done == 0
    journal.add("held-out", 0, reward=0.25)
    journal.add("step", 1, reward=0.5)
    with journal.path.open("a") as file:
        file.write('{"event": "step", "st')
    assert journal.done == 1
    journal.mend()
    journal.add("step", 2, reward=0.5)
    assert [(line["event"], line["step"]) for line in journal.read()] == [("held-out", 0), ("step", 1), ("step", 2)]


def test_a_steps_tasks_are_the_same_whenever_they_are_made() -> None:
    """So a task that was submitted before a kill is not another one afterwards."""
    rules = Rules(AGENTS["pi"], 3, 2, 2, 5, 2, seed=7, push=True, shuffled=False, taught=False)
    assert rules.make_tasks(2) == rules.make_tasks(2) != rules.make_tasks(3)
    assert rules.make_tasks(2) != replace(rules, seed=8).make_tasks(2)
    held_out = [[body["instruction"] for body in rules.make_held_out_tasks(step)] for step in (0, 2)]
    assert held_out[0] == held_out[1] and len(held_out[0]) == 5
    assert [step for step in range(4) if rules.tries_held_out_after(step)] == [0, 2, 3]


def test_a_folder_with_a_run_is_not_overwritten_or_used_with_other_settings(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("run")
    with pytest.raises(typer.BadParameter, match="holds no run"):
        open_run(folder, SETTINGS, resume=True)
    open_run(folder, SETTINGS, resume=False)
    with pytest.raises(typer.BadParameter, match="continue it with --resume"):
        open_run(folder, SETTINGS, resume=False)
    open_run(folder, replace(SETTINGS, steps=9), resume=True)
    with pytest.raises(typer.BadParameter, match=r"has learning_rate 1e-05, not 0\.1"):
        open_run(folder, replace(SETTINGS, learning_rate=0.1), resume=True)
    with pytest.raises(typer.BadParameter, match="too long a path"):
        open_run(folder / ("x" * 80), SETTINGS, resume=False)


def test_a_run_teaches_with_what_it_had_learned_when_it_was_first_asked(tmp_path: Path) -> None:
    run, made = tmp_path / "run", tmp_path / "taught" / "teacher"
    for folder, files in (("warm", ("config.json", "model.safetensors")), ("weights/version-1", ("model.safetensors",))):
        (run / folder).mkdir(parents=True)
        for file in files:
            (run / folder / file).write_text(folder)
    with pytest.raises(RuntimeError, match="holds no policy, nor a run that has one"):
        find_teacher(run, made)
    assert find_teacher(run / "warm", made) == run / "warm"
    made.parent.mkdir()
    (run / RUN_FILE).write_text("{}")
    journal = Journal(run / RESULTS)
    journal.add("step", 1)
    for _ in range(2):
        assert find_teacher(run, made) == made
        assert [(made / file).read_text() for file in ("config.json", "model.safetensors")] == ["warm", "weights/version-1"]
        journal.add("step", 2)


# What is shown


def test_attempts_are_counted_by_kind_and_agent() -> None:
    def attempt(kind: str, agent: str, reward: float | None, failure: str | None = None) -> dict[str, Any]:
        return {"metadata": {"label": kind, "agent": agent}, "reward": reward, "failure": failure}

    counts = count_attempts(
        [
            attempt("cut", "pi", 1.0),
            attempt("cut", "pi", None, "timeout"),
            attempt("find", "pi", 0.0),
            attempt("cut", "mini-swe-agent", 1.0),
        ]
    )
    assert counts["cut", "pi"] == {"attempts": 2, "solved": 1, "failed": 1}
    assert counts[ALL, "pi"] == {"attempts": 3, "solved": 1, "failed": 1}
    assert counts[ALL, "mini-swe-agent"] == {"attempts": 1, "solved": 1, "failed": 0}


def test_lines_of_the_journal_are_told_in_words() -> None:
    told = {"reward": 0.25, "rollouts": 8, "failures": {"timeout": 1}, "seconds": {"sample": 61.4, "learn": 20.0}}
    assert describe({"event": "step", "step": 3, "largest_difference": 4e-6, **told}) == (
        "step 3: 0.250 of 8 rollouts solved, 1 failed; a recomputed logprob differs by 4.0e-06 at most; sample 61 s, learn 20 s"
    )
    assert describe({"event": "push", "step": 3, "seconds": 2.5}) == "version 3 pushed in 2.5 s"
