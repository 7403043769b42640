"""TRL and OpenEnv, real: agents at the service, whose traces TRL's own loop takes."""

from __future__ import annotations

import json
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
    with service_of(model, redis_server.url) as running:
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
    """What TRL's loop made of each rollout, and the sessions: one more, which was closed before it was judged."""

    told: list[dict[str, Any]]
    sessions: list[tuple[dict[str, Any], dict[str, Any]]]


@pytest.fixture(scope="module")
def looped(trl: Framework, service: RunningService) -> Looped:
    return Looped(json.loads(trl.run("python", PROGRAM).stdout.splitlines()[-1]), list_ended(service))


def test_trls_loop_trains_exactly_what_leases_would(service: RunningService, looped: Looped) -> None:
    """With a sub-agent, an edited history and a stream."""
    told, found = looped.told[:2], looped.sessions[:2]
    assert [(each["turns"], each["reward"]) for each in told] == [(5, session["reward"]) for session, _ in found]
    assert [each["trained"] for each in told] == [sums["exported_tokens"] for _, sums in found]
    for _, sums in found:
        assert sums["sampled_tokens"] == sums["exported_tokens"] + count_quarantined(sums) > 0
    (group,) = service.request("POST", "/batches/lease", TRAINER, json={}).json()["groups"]
    assert sum(sum(row["loss_mask"]) for row in group["trajectories"]) == sum(each["trained"] for each in told)


def test_a_rollout_ends_as_its_agent_and_its_judge_do(looped: Looped) -> None:
    """What nothing scored has no reward, which is not 0. Nothing stops TRL's worker, and TRL alone trains these."""
    told, states = looped.told[2:], [session for session, _ in looped.sessions[2:]]
    ends = {"hello": "completed", "silent": "failed", "late": "timeout", "broken": "failed", "unscored": "failed"}
    assert [session["status"] for session in states] == [*ends.values(), "failed", "cancelled"]
    assert [each["reward"] for each in told] == [session["reward"] for session in states[:-1]]
    assert [each["reward"] is not None for each in told] == [True, False, True, False, False, False]
    for at, problem in ((1, "no_calls"), (3, "broke down"), (4, "no reward"), (5, "no verdict")):
        assert problem in states[at]["error"]
    assert not any(session["trained"] for session in states)
