"""Inspect, real: evaluations that know nothing of sessions, recorded by hooks that Inspect finds by their entry point."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import ROOT
from tests.joins.conftest import Framework
from tests.support.engine.scripted_engine import Generation, Say, ScriptedEngine
from tests.support.service.redis_server import RedisServer
from tests.support.service.running_service import TRAINER, RunningService

TASKS = ROOT / "tests/joins/inspect_tasks.py"


@pytest.fixture(scope="module")
def service(redis_server: RedisServer) -> Iterator[RunningService]:
    redis_server.flushall()
    with ScriptedEngine("qwen3") as engine, RunningService(engine.url, redis_server.url) as running:

        def reply(generation: Generation, index: int) -> Say:
            said = "GRADE: I" if "[Criterion]" in generation.prompt else "hello" if "hello" in generation.prompt else "goodbye"
            return Say(engine.family.speak(said))

        engine.script = reply
        yield running


def evaluate(inspect: Framework, **variables: str) -> str:
    """Every task, as the documentation shows it."""
    shutil.copy(TASKS, inspect.folder / "task.py")
    return inspect.follow("inspect eval task.py", INSPECT_DISPLAY="plain", INSPECT_EVAL_RETRY_ON_ERROR="1", **variables)


@pytest.fixture(scope="module")
def sessions(service: RunningService, client_wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """All there are after one run."""
    said = evaluate(Framework("inspect", tmp_path_factory.mktemp("inspect"), client_wheel, service.url))
    assert "hooks enabled: 1" in said
    found: list[dict[str, Any]] = service.request("GET", "/sessions?limit=1000").json()["sessions"]
    return found


def outcomes(sessions: list[dict[str, Any]], task: str) -> list[tuple[str, float | None, int]]:
    return sorted(
        (each["status"], each["reward"], each["calls"]) for each in sessions if each["task_id"] == task and each["trained"]
    )


def test_epochs_of_a_sample_are_a_group_and_its_score_is_their_reward(sessions: list[dict[str, Any]]) -> None:
    assert outcomes(sessions, "hello") == [("completed", 1.0, 1)] * 2
    assert outcomes(sessions, "goodbye") == [("completed", 0.0, 1)] * 2
    groups = {each["task_id"]: each["group_id"] for each in sessions if each["task_id"] in ("hello", "goodbye")}
    assert len(set(groups.values())) == 2


def test_a_scorer_that_asks_the_policy_does_so_in_a_session_that_is_not_trained(
    service: RunningService, sessions: list[dict[str, Any]]
) -> None:
    """Of two scores the first is the reward."""
    assert outcomes(sessions, "graded") == [("completed", 0.0, 1)] * 2
    graded = {each["session_id"] for each in sessions if each["task_id"] == "graded" and each["trained"]}
    gradings = [each for each in sessions if not each["trained"]]
    assert [(each["status"], each["calls"]) for each in gradings] == [("completed", 1)] * 2
    assert {each["metadata"]["grades"] for each in gradings} == graded


def test_a_trainer_gets_every_sampled_token_of_the_samples_and_none_of_the_scorers(
    service: RunningService, sessions: list[dict[str, Any]]
) -> None:
    leased = service.request("POST", "/batches/lease", TRAINER, json={"max_groups": 9}).json()
    rows = [row for group in leased["groups"] for row in group["trajectories"]]
    assert sorted(row["task_id"] for row in rows) == sorted(["broken", "goodbye", "graded", "hello", "limited"] * 2)
    trained = sum(sum(row["loss_mask"]) for row in rows)
    told = (service.request("GET", f"/sessions/{row['session_id']}/trajectories").json()["accounting"] for row in rows)
    assert trained == sum(accounting["sampled_tokens"] for accounting in told) > 0


def test_a_score_that_is_no_number_fails_its_session(sessions: list[dict[str, Any]]) -> None:
    assert outcomes(sessions, "unreadable") == [("failed", None, 1)] * 2
    errors = {each["error"] for each in sessions if each["task_id"] == "unreadable"}
    assert errors == {"score illegible is nan, which is no reward"}


def test_a_sample_without_a_score_leaves_its_session_without_a_reward(sessions: list[dict[str, Any]]) -> None:
    assert outcomes(sessions, "unscored") == [("completed", None, 1)] * 2


def test_an_attempt_that_broke_down_is_replaced_by_the_next(sessions: list[dict[str, Any]]) -> None:
    assert outcomes(sessions, "broken") == [("completed", 1.0, 1), ("completed", 1.0, 1), ("failed", None, 1)]
    assert len({each["group_id"] for each in sessions if each["task_id"] == "broken"}) == 1


def test_what_a_sample_did_until_a_limit_ended_it_is_scored_and_trained(sessions: list[dict[str, Any]]) -> None:
    assert outcomes(sessions, "limited") == [("completed", 1.0, 1)] * 2


def test_no_session_is_left_open(sessions: list[dict[str, Any]]) -> None:
    assert [each for each in sessions if each["status"] not in ("completed", "failed")] == []


def test_without_a_session_every_call_is_refused(service: RunningService, client_wheel: Path, tmp_path: Path) -> None:
    """Inspect only warns of it, and goes on."""
    before = service.request("GET", "/sessions?limit=1000").json()["sessions"]
    inspect = Framework("inspect", tmp_path, client_wheel, service.url)
    said = evaluate(inspect, VERBATIM_ADMIN_TOKEN="of-another-service")
    assert "401" in said
    assert service.request("GET", "/sessions?limit=1000").json()["sessions"] == before
