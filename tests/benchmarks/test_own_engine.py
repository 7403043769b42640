"""`python -m benchmarks.own_engine`: calls on both ways, bounded, with the service's own account of them; run as its users run it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks.own_engine_passes import Cost, Counters, LoadShape, Round, Tally, Target, compute_cost, quantile
from tests.support.engine.scripted_engine import Generation, Say, ScriptedEngine
from tests.support.service.redis_server import RedisServer
from tests.support.service.running_service import ADMIN, RunningService
from tests.support.service.scripted_service import ScriptedService
from tests.support.service.verbatim_process import environment, wait_until

SMALL = ("--prompt", "20", "--tokens", "8")
SECONDS = 120.0


@pytest.fixture(scope="module")
def shared(redis_server: RedisServer) -> Iterator[tuple[ScriptedEngine, RunningService]]:
    redis_server.flushall()
    with ScriptedEngine() as engine, RunningService(engine.url, redis_server.url) as service:
        yield engine, service


def measure(*args: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.own_engine", *args]
    return subprocess.run(command, env=environment(**variables), capture_output=True, text=True, timeout=SECONDS, check=False)


def refused(*args: str, code: int = 1, **variables: str) -> str:
    done = measure(*args, **variables)
    assert (done.returncode, done.stdout) == (code, ""), done
    return done.stderr.strip().splitlines()[-1]


def test_both_ways_are_asked_equally_and_the_service_tells_its_steps(shared: tuple[ScriptedEngine, RunningService]) -> None:
    engine, service = shared
    engine.reset()
    where = ("--engine", engine.url + "/v1", "--url", service.url)
    done = measure(*where, "--calls", "6", "--connections", "2", *SMALL, "--json", VERBATIM_ADMIN_TOKEN=ADMIN)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    for way in report["ways"].values():
        assert (way["calls"], way["failed"]) == (6, 0)
        assert 0 < way["first_byte_p50_ms"] <= way["p50_ms"] <= way["p95_ms"]
        assert way["calls_per_second"] == pytest.approx(6 / way["seconds"])
    assert report["service_cost"]["calls"] == 6
    steps = report["service_cost"]["steps"]
    assert {"admit", "parse", "queue", "plan", "intent", "sample", "interpret", "commit", "reply"} == set(steps)
    assert steps["sample"]["engine"] > 0 and steps["commit"]["store"] > 0 and steps["parse"]["own"] > 0
    assert report["notes"] == []
    # Nothing of it is left for a trainer.
    assert service.request("GET", "/sessions").json()["sessions"] == []
    asked = [generation.prompt for generation in engine.generations]
    assert len(set(asked)) == len(asked)


def test_without_a_url_a_service_is_started_and_the_tables_are_printed() -> None:
    with ScriptedEngine() as engine:
        done = measure("--engine", engine.url, "--calls", "4", "--connections", "1", "--whole", *SMALL)
    assert done.returncode == 0, done.stderr
    for shown in ("engine alone", "through verbatim", "20 words in, 8 tokens out, whole", "commit", "per 1,000 calls"):
        assert shown in done.stdout
    assert "not told" not in done.stdout


def test_a_wrong_url_is_refused_in_one_sentence(
    shared: tuple[ScriptedEngine, RunningService], scripted_server: ScriptedService
) -> None:
    engine, _ = shared
    assert "no engine at http://127.0.0.1:9" in refused("--engine", "http://127.0.0.1:9")
    assert "/v1/models answered 404" in refused("--engine", scripted_server.reset().url)
    assert "--engine" in refused("--engine", "ftp://127.0.0.1", code=2)
    gone = refused("--engine", engine.url, "--url", "http://127.0.0.1:9", VERBATIM_ADMIN_TOKEN=ADMIN)
    assert "no service at http://127.0.0.1:9" in gone
    assert "VERBATIM_ADMIN_TOKEN" in refused("--engine", engine.url, "--url", "http://127.0.0.1:9", code=2)


def test_a_model_that_the_engine_does_not_have_is_told(shared: tuple[ScriptedEngine, RunningService]) -> None:
    engine, service = shared
    where = ("--engine", engine.url, "--url", service.url)
    done = measure(*where, "--model", "another", "--calls", "2", "--connections", "1", VERBATIM_ADMIN_TOKEN=ADMIN)
    assert done.returncode == 1
    assert "404" in done.stderr and "another" in done.stderr


def test_ctrl_c_ends_it_with_what_was_measured(shared: tuple[ScriptedEngine, RunningService]) -> None:
    engine, service = shared
    engine.reset()
    never, held = threading.Event(), threading.Event()

    def script(generation: Generation, index: int) -> Say | None:
        if len(engine.generations) <= 10:
            return None
        held.set()
        return Say("never", gate=never)

    engine.script = script
    where = ("--engine", engine.url, "--url", service.url, "--calls", "1000", "--connections", "1")
    with subprocess.Popen(
        (sys.executable, "-m", "benchmarks.own_engine", *where, *SMALL, "--json"),
        env=environment(VERBATIM_ADMIN_TOKEN=ADMIN),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            wait_until(held.is_set, SECONDS, "a call that does not end")
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=SECONDS)
        finally:
            never.set()
            process.kill()
    assert (process.returncode, err) == (0, "")
    report: dict[str, Any] = json.loads(out)
    # Four calls warmed up, six were answered, all of them by the engine alone.
    assert [way["calls"] for way in report["ways"].values()] == [6, 0]
    assert any(note.startswith("stopped") for note in report["notes"])
    assert service.request("GET", "/sessions").json()["sessions"] == []


def test_only_what_one_process_tells_of_just_these_calls_is_believed() -> None:
    before = Counters(1.0, 5.0, 10, {("plan", "own"): 1.0})
    after = Counters(1.0, 6.0, 30, {("plan", "own"): 1.5, ("commit", "store"): 0.2})
    assert compute_cost(before, after, 20) == Cost(20, 50.0, {"plan": {"own": 25.0}, "commit": {"store": 10.0}})
    assert compute_cost(before, after, 19) is None
    assert compute_cost(before, Counters(2.0, 6.0, 30), 20) is None
    assert compute_cost(before, before, 0) is None


async def test_a_fault_of_the_measurement_itself_is_raised() -> None:
    """Here the numbers of its calls come to an end."""
    with pytest.raises(RuntimeError, match="StopIteration"):
        await Round(LoadShape("m", 1, 1, True), 1, SECONDS, lambda: False).run(
            [Target("http://127.0.0.1:9")], iter(()), Tally()
        )


def test_a_quantile_is_a_call_that_was_measured() -> None:
    assert quantile([0.004, 0.001, 0.002, 0.003], 0.5) == pytest.approx(2.0)
    assert quantile([0.004, 0.001, 0.002, 0.003], 0.95) == pytest.approx(4.0)
    assert quantile([0.007], 0.5) == pytest.approx(7.0)
    assert quantile([], 0.5) is None
