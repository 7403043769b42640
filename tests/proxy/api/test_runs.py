"""Runs over HTTP: a name that sessions and tasks carry, by which they are listed and leased."""

from __future__ import annotations

from typing import Any

import pytest

from contract.sessions import DEFAULT_RUN
from tests.support.engine.scripted_engine import ScriptedEngine
from tests.support.engine.scripted_fixtures import fresh_engine, fresh_service
from tests.support.service.running_service import TRAINER, RunningService

__all__ = ["fresh_engine", "fresh_service"]


def play(service: RunningService, run: str, reward: float = 1.0, **fields: Any) -> str:
    session = service.session(run=run, **fields)
    session.ask("hello")
    session.close(reward=reward)
    return session.session_id


def list_run(service: RunningService, run: str, **query: str) -> list[str]:
    answer = service.request("GET", "/sessions", params={"run": run, **query})
    assert answer.status_code == 200, answer.text
    return [each["session_id"] for each in answer.json()["sessions"]]


def lease(service: RunningService, **terms: object) -> list[str]:
    """The group ids that a trainer gets."""
    answer = service.request("POST", "/batches/lease", TRAINER, json={"max_groups": 9, **terms})
    return [group["group_id"] for group in answer.json()["groups"]] if answer.status_code == 200 else []


def test_sessions_are_listed_by_their_run_and_one_that_names_none_is_of_the_default(service: RunningService) -> None:
    ids = {run: play(service, run) for run in ("grpo-3", "sft")}
    unnamed = service.session().session_id
    assert {run: list_run(service, run) for run in (*ids, DEFAULT_RUN)} == {
        "grpo-3": [ids["grpo-3"]],
        "sft": [ids["sft"]],
        DEFAULT_RUN: [unnamed],
    }
    assert list_run(service, "grpo-3", status="open") == [] and list_run(service, "unheard-of") == []
    service.request("DELETE", f"/sessions/{ids['sft']}")
    assert list_run(service, "sft") == []


def test_a_trainer_that_asks_for_a_run_gets_no_other_runs_groups(service: RunningService) -> None:
    mine, other = play(service, "mine"), play(service, "other")
    assert lease(service, run="mine", consumer="a") == [mine]
    assert lease(service, run="mine", consumer="a") == []
    assert lease(service, run="nobody-plays-this", consumer="b") == []
    assert lease(service, consumer="c") == [other]


@pytest.mark.parametrize("name", ["", "<b>x</b>", "a b", "a/b", "..", "a=b", "ü", "x" * 129, "line\n"])
def test_a_run_whose_name_is_not_plain_is_refused_with_the_rule_and_leaves_nothing(service: RunningService, name: str) -> None:
    for path in ("/sessions", "/batches/lease"):
        answer = service.request("POST", path, json={"run": name})
        assert answer.status_code == 400
        assert "run" in answer.json()["error"]["message"] and "128 letters, digits" in answer.json()["error"]["message"]
    assert service.request("GET", "/sessions", params={"run": name}).status_code == 400
    assert service.request("GET", "/sessions").json()["sessions"] == []


def read_run(service: RunningService, run: str) -> dict[str, Any]:
    answer = service.request("GET", f"/runs/{run}", TRAINER)
    assert answer.status_code == 200, answer.text
    shown: dict[str, Any] = answer.json()
    return shown


def test_a_run_shows_what_it_lost_and_why_and_where_its_groups_are(service: RunningService, engine: ScriptedEngine) -> None:
    play(service, "good")
    engine.sampler.version = "step-120"  # no version that can be told from another: its tokens are not trained
    play(service, "bad", reward=0.0)
    sums = read_run(service, "bad")["sums"]
    (lost,) = sums["quarantined"].values()
    assert sums["quarantined"].keys() == {"weight_version_unknown"} and lost["calls"] == 1 and lost["tokens"] > 0
    assert (sums["lost"], sums["zero_rewards"], sums["incomplete"], sums["exported_tokens"]) == (1.0, 1.0, 1.0, 0.0)
    assert read_run(service, "good")["sums"]["lost"] == 0.0
    assert read_run(service, "good")["groups"] == [{"state": "ready", "cause": "", "groups": 1}]
    assert [each["run"] for each in service.request("GET", "/runs").json()["runs"]] == ["bad", "good"]
    (listed,) = service.request("GET", "/sessions", params={"run": "bad"}).json()["sessions"]
    assert listed["accounting"]["quarantined"] == {"weight_version_unknown": lost["tokens"]}
    assert listed["session_id"] in service.request("GET", "/ui", params={"loss": "tokens lost"}).text
    for query in ({"loss": "tokens lost", "run": "good"}, {"loss": "truncated"}):
        assert "No session matches" in service.request("GET", "/ui", params=query).text


def test_the_numbers_of_the_run_are_per_run_and_a_hidden_one_is_shown_only_by_name(service: RunningService) -> None:
    for run in ("a", "b"):
        play(service, run)
    points = service.request("GET", "/run", TRAINER, params={"axis": "all"}).json()["points"]
    assert [(point["run"], point["rollouts"]) for point in points] == [("a", 1), ("b", 1)]
    marked = service.request("PATCH", "/runs/b", TRAINER, json={"ended": True, "hidden": True})
    assert marked.status_code == 200 and marked.json()["ended_at"] is not None
    for query, shown in (({}, ["a"]), ({"run": "b"}, ["b"]), ({"run": ["a", "b"]}, ["a", "b"])):
        points = service.request("GET", "/run", TRAINER, params={"axis": "all", **query}).json()["points"]
        assert [point["run"] for point in points] == shown
    metrics = service.request("GET", "/metrics").text
    assert 'verbatim_run_group_states{cause="",run="a",state="ready"} 1.0' in metrics and 'run="b"' not in metrics
    again = service.request("PATCH", "/runs/b", TRAINER, json={"hidden": False}).json()
    assert again["ended_at"] == marked.json()["ended_at"] and not again["hidden"]
    assert service.request("PATCH", "/runs/nobodys", TRAINER, json={"ended": True}).status_code == 404
