"""TRL and OpenEnv, real: agents at the service, whose traces TRL's own loop takes."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from examples.demo.tiny_model import make_tiny_model
from tests import ROOT
from tests.joins.conftest import Framework
from tests.support.service.redis_server import RedisServer
from tests.support.service.running_service import TRAINER, RunningService
from tests.support.sessions.finished_groups import service_of

PROGRAM = ROOT / "tests/joins/trl_rollouts.py"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), layers=1, hidden_size=64)


@pytest.fixture(scope="module")
def service(model: Path, redis_server: RedisServer) -> Iterator[RunningService]:
    with service_of(model, redis_server.url, admission={"undelivered_groups": 1, "hold_seconds": 0.0}) as running:
        yield running


@pytest.fixture(scope="module")
def trl(service: RunningService, client_wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Framework:
    return Framework("trainers", tmp_path_factory.mktemp("trl"), client_wheel, service.url)


def list_ended(service: RunningService) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Each session that is no longer open, in the order in which they were opened, with what became of its tokens."""
    listed = service.request("GET", "/sessions?limit=1000").json()["sessions"][::-1]
    ended = [each for each in listed if each["status"] not in ("open", "closing")]
    return [
        (each, service.request("GET", f"/sessions/{each['session_id']}/trajectories").json()["accounting"]) for each in ended
    ]


def count_quarantined(sums: dict[str, Any]) -> int:
    return sum(item["tokens"] for item in sums["quarantined"])


@dataclass(frozen=True)
class Looped:
    """What TRL's loop made of each rollout, and the sessions: two more, of which one was closed before it was judged and one has images.
    `leased`: the tokens of the group that was leased while the next one waited; `ran`: the tasks whose agents ran."""

    told: list[dict[str, Any]]
    sessions: list[tuple[dict[str, Any], dict[str, Any]]]
    leased: int
    refused: str
    ran: list[str]


@pytest.fixture(scope="module")
def looped(trl: Framework, service: RunningService) -> Looped:
    said = json.loads(trl.run("python", PROGRAM).stdout.splitlines()[-1])
    return Looped(sessions=list_ended(service), **said)


def test_trls_loop_trains_exactly_what_leases_would(service: RunningService, looped: Looped) -> None:
    """With a sub-agent, an edited history and a stream."""
    told, found = looped.told[:2], looped.sessions[:2]
    assert [(each["turns"], each["reward"]) for each in told] == [(5, session["reward"]) for session, _ in found]
    assert [each["trained"] for each in told] == [sums["exported_tokens"] for _, sums in found]
    for _, sums in found:
        assert sums["sampled_tokens"] == sums["exported_tokens"] + count_quarantined(sums) > 0
    assert looped.leased == sum(each["trained"] for each in told)


def test_a_rollout_waits_while_the_service_holds_its_group_back(service: RunningService, looped: Looped) -> None:
    told = looped.told[2:4]
    assert [each["turns"] for each in told] == [1, 1]
    (group,) = service.request("POST", "/batches/lease", TRAINER, json={}).json()["groups"]
    assert sum(sum(row["loss_mask"]) for row in group["trajectories"]) == sum(each["trained"] for each in told)


def test_a_rollout_ends_as_its_agent_and_its_judge_do(looped: Looped) -> None:
    """What nothing scored has no reward, which is not 0. Nothing stops TRL's worker, and TRL alone trains these."""
    told, states = looped.told[4:-1], [session for session, _ in looped.sessions[4:]]
    ends = {"silent": "failed", "late": "timeout", "broken": "failed", "unscored": "failed", "illjudged": "failed"}
    assert [each["task"] for each in told] == [*ends]
    assert [session["status"] for session in states] == [*ends.values(), "cancelled", "completed"]
    assert [each["reward"] for each in told] == [session["reward"] for session in states[:5]]
    assert [each["reward"] is not None for each in told] == [False, True, False, False, False]
    for at, problem in ((0, "no_calls"), (2, "broke down"), (3, "no reward"), (4, "no verdict")):
        assert problem in states[at]["error"]
    assert not any(session["trained"] for session in states)


def test_a_rollout_with_images_stops_the_worker(looped: Looped) -> None:
    """Its ids alone would be trained without what the model saw."""
    assert "has images" in looped.refused


def test_without_a_session_no_agent_runs(looped: Looped) -> None:
    assert looped.told[-1] == {"task": "uncalled", "reward": None, "trained": 0, "turns": None}
    assert "uncalled" not in looped.ran and "seeing" in looped.ran


def test_trls_own_trainer_trains_every_sampled_token_and_publishes_after_each_step(
    redis_server: RedisServer, client_wheel: Path, model: Path, tmp_path: Path
) -> None:
    """On a CPU: its worker, its process for rollouts, its loader, its loss and its weight sync. Each step trains one group."""
    redis_server.flushall()
    with service_of(model, redis_server.url) as service:
        trl = Framework("trainers", tmp_path, client_wheel, service.url)
        done = trl.run("python", ROOT / "tests/joins/trl_training.py", model, tmp_path, PYTHONPATH=f"{client_wheel}:{ROOT}")
        exported: dict[str, int] = defaultdict(int)
        for session, sums in list_ended(service):
            assert sums["sampled_tokens"] == sums["exported_tokens"] + count_quarantined(sums)
            exported[session["group_id"]] += sums["exported_tokens"]
        steps, left = json.loads(done.stdout.splitlines()[-1]), list(exported.values())
        assert [each["batch/samples_per_step"] for each in steps] == [8, 8]
        for each in steps:
            left.remove(each["batch/trained_tokens_per_step"])
        assert service.request("GET", "/weights").json()["current"]["version"] == len(steps)
        listed = service.request("GET", "/sessions?limit=1000").json()["sessions"]
        assert [each for each in listed if each["status"] in ("open", "closing")] == []
