"""`verbatim runs` as its users run it, against the real service."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator

import pytest

from tests.support.engine.scripted_engine import ScriptedEngine
from tests.support.service.counted_run import count, play_rollouts
from tests.support.service.redis_server import RedisServer
from tests.support.service.running_service import ADMIN, RunningService
from tests.support.service.verbatim_process import verbatim


@pytest.fixture(scope="module", name="service")
def service_with_a_run(redis_server: RedisServer) -> Iterator[RunningService]:
    redis_server.flushall()
    count(redis_server.url, play_rollouts(40))
    with ScriptedEngine() as engine, RunningService(engine.url, redis_server.url, engine_api="token") as service:
        yield service


def runs(service: RunningService, *args: str) -> subprocess.CompletedProcess[str]:
    return verbatim("runs", *args, VERBATIM_URL=service.url, VERBATIM_ADMIN_TOKEN=ADMIN, COLUMNS="200")


def test_a_mark_is_made_and_taken_back_alone(service: RunningService) -> None:
    for mark, shown in (
        ("ended", "default: over, shown"),
        ("hidden", "default: over, hidden"),
        ("going", "default: going on, hidden"),
        ("shown", "default: going on, shown"),
    ):
        done = runs(service, "mark", "default", mark)
        assert (done.returncode, done.stdout.strip()) == (0, shown), done.stderr
    assert runs(service, "mark", "default", "ended", "hidden").stdout.strip() == "default: over, hidden"
    done = runs(service, "mark", "default", "going", "visible")
    assert done.returncode == 2 and "'visible' is invalid: choose from ended, going" in done.stderr


def test_a_run_is_shown_alone_or_beside_others(service: RunningService) -> None:
    alone = runs(service, "show", "default")
    assert alone.returncode == 0 and "groups ready" in alone.stdout, alone.stderr
    both = runs(service, "show", "default", "default")
    assert both.returncode == 0 and "groups ready" not in both.stdout
    assert "default" in both.stdout.partition("default")[2], "a column each"
    assert len(json.loads(runs(service, "show", "default", "default", "--json").stdout)) == 2
