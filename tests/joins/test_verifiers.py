"""verifiers, real: rollouts in sessions of their own, and a run of its command with a project's key."""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests import ROOT
from tests.joins.conftest import Framework, find_shown
from tests.support.engine.scripted_engine import Generation, Say, ScriptedEngine
from tests.support.service.redis_server import RedisServer
from tests.support.service.running_service import TRAINER, RunningService
from trainer_client import Sessions
from trainer_client.integrations.verifiers import close_rollouts

WORK = "echo done"
UV = """#!/bin/sh
case "$*" in *--help*) echo --script ;; "python find"*) command -v python ;; esac
"""
"""In place of uv: what the script of verifiers' agent asks for is in verifiers' own environment."""


@pytest.fixture(scope="module")
def service(redis_server: RedisServer) -> Iterator[RunningService]:
    redis_server.flushall()
    with ScriptedEngine("qwen3") as engine, RunningService(engine.url, redis_server.url) as running:

        def reply(generation: Generation, index: int) -> Say:
            if "bash tool" in generation.prompt and WORK not in generation.prompt:
                return Say(engine.family.speak("", calls=[("bash", {"command": WORK})]))
            return Say(engine.family.speak("hello" if "hello" in generation.prompt else "goodbye"))

        engine.script = reply
        yield running


@dataclass
class Rollouts:
    service: RunningService
    traces: list[dict[str, Any]]

    def of(self, task: str) -> list[dict[str, Any]]:
        listed = self.service.request("GET", f"/sessions?task_id={task}").json()["sessions"]
        return [each for each in listed if each["task_id"] == task]

    def outcomes(self, task: str) -> list[tuple[str, float | None, int]]:
        return sorted((each["status"], each["reward"], each["calls"]) for each in self.of(task))


@pytest.fixture(scope="module")
def rollouts(service: RunningService, client_wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Rollouts:
    verifiers = Framework("verifiers", tmp_path_factory.mktemp("verifiers"), client_wheel, service.url)
    (programs := verifiers.folder / "bin").mkdir()
    (programs / "uv").write_text(UV)
    (programs / "uv").chmod(0o755)
    done = verifiers.run("python", "-m", "verifiers_tasks", PATH=f"{programs}:{os.environ['PATH']}")
    return Rollouts(service, json.loads(done.stdout.splitlines()[-1]))


def test_each_rollout_is_a_session_with_its_traces_reward_and_a_trainer_gets_the_group(rollouts: Rollouts) -> None:
    assert rollouts.outcomes("Word") == rollouts.outcomes("Bash") == [("completed", 1.0, 2)] * 2
    leased = rollouts.service.request("POST", "/batches/lease", TRAINER, json={"max_groups": 9}).json()
    groups = {group["group_id"]: group["trajectories"] for group in leased["groups"]}
    assert {name: len(rows) for name, rows in groups.items()} == dict.fromkeys(
        ("Word", "Bash", "BreaksDownOnce", "RunsOutOfTime"), 2
    )
    for session in (*rollouts.of("Word"), *rollouts.of("Bash")):
        accounting = rollouts.service.request("GET", f"/sessions/{session['session_id']}/trajectories").json()["accounting"]
        trained = sum(
            sum(row["loss_mask"]) for row in groups[session["group_id"]] if row["session_id"] == session["session_id"]
        )
        assert accounting["sampled_tokens"] == trained > 0


def test_a_trace_that_nothing_scored_leaves_its_session_without_a_reward(rollouts: Rollouts) -> None:
    assert [trace["reward"] for trace in rollouts.traces if trace["task"] == "Unscored"] == ["0"] * 2
    assert rollouts.outcomes("Unscored") == [("completed", None, 2)] * 2


def test_a_reward_that_is_no_number_fails_its_session(rollouts: Rollouts) -> None:
    assert rollouts.outcomes("NotANumber") == [("failed", None, 2)] * 2


def test_each_attempt_is_a_session_of_its_own_and_the_next_replaces_it(rollouts: Rollouts) -> None:
    outcomes = rollouts.outcomes("BreaksDownOnce")
    assert outcomes == [("completed", 1.0, 2), ("completed", 1.0, 2), ("failed", None, 2)]
    (failed,) = [each for each in rollouts.of("BreaksDownOnce") if each["status"] == "failed"]
    assert "the task broke down" in failed["error"]


def test_what_an_agent_did_before_its_time_was_up_is_graded_and_trained(rollouts: Rollouts) -> None:
    assert rollouts.outcomes("RunsOutOfTime") == [("timeout", 1.0, 2)] * 2


def test_a_run_of_its_own_command_is_recorded_with_a_projects_key_and_closed_with_its_traces(
    service: RunningService, client_wheel: Path, tmp_path: Path
) -> None:
    made = service.request("POST", "/projects", json={"name": "swe"}).json()
    verifiers = Framework("verifiers", tmp_path, client_wheel, service.url)
    shutil.copy(ROOT / "tests/joins/verifiers_tasks.py", tmp_path / "my_taskset.py")
    secrets = {"PROJECT_KEY": made["key"], "PROJECT_TOKEN": made["token"]}
    verifiers.follow("vf-eval my_taskset", PYTHONPATH=f"{client_wheel}:{tmp_path}", **secrets)
    told = verifiers.run("python", "-c", find_shown("import close_rollouts"), **secrets).stdout
    (traces,) = tmp_path.rglob("traces.jsonl")
    with Sessions(service.url, made["token"]) as sessions:
        closed = close_rollouts(traces, sessions, "swe")
    assert told == f"{closed}\n"
    assert Counter(closed.values()) == {"completed": 4}
    states = [service.request("GET", f"/sessions/{session_id}").json() for session_id in closed]
    assert sorted(each["reward"] for each in states) == [0.0, 0.0, 1.0, 1.0]
    assert {each["calls"] for each in states} == {2}
    groups = Counter((each["group_id"], each["group_size"], each["task_id"]) for each in states)
    assert [(size, count) for (_, size, _), count in groups.items()] == [(2, 2)] * 2
    trains_no_one(traces, made["key"], made["token"], service)


def trains_no_one(traces: Path, key: str, token: str, service: RunningService) -> None:
    """Of an agent that is not trained, and of one that never called the model."""
    episode = json.loads(traces.read_text().splitlines()[0])
    (trace,) = episode["traces"]
    judge = {**trace, "id": "judge", "agent": {**trace["agent"], "name": "judge", "trainable": False}}
    traces.write_text(json.dumps({**episode, "traces": [judge, {**trace, "id": "silent"}]}) + "\n")
    body = {"model": "policy", "messages": [{"role": "user", "content": "Is this good?"}]}
    service.request("POST", "/r/judge/v1/chat/completions", key, json=body).raise_for_status()
    with Sessions(service.url, token) as sessions:
        assert close_rollouts(traces, sessions, "swe") == {"swe.judge": "cancelled", "swe.silent": "absent"}
        traces.write_text("{}\n")
        with pytest.raises(ValueError, match=r"traces\.jsonl, line 1: no episode of verifiers'"):
            close_rollouts(traces, sessions, "swe")
