"""A service that is killed while nodes run rollouts, and is away for longer than their leases."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from tests.harnesses.node_victims import NodeVictim
from tests.support.engine.scripted_engine import Say, ScriptedEngine
from tests.support.runtimes.rollout_nodes import ASK
from tests.support.service.redis_server import RedisServer, free_port
from tests.support.service.verbatim_process import Serving, wait_until

SECONDS = 120.0
LEASE_SECONDS = 3.0
SAMPLES = 4


def test_a_service_away_for_two_leases_robs_no_node_and_loses_nothing(redis_server: RedisServer, tmp_path: Path) -> None:
    """All nodes were silent for it; the first that took robbed the others."""
    redis_server.flushall()
    started, gate = tmp_path / "started", tmp_path / "gate"
    body = {
        "task_id": "t",
        "instruction": f"echo $OPENAI_BASE_URL >> {started}\nuntil test -e {gate}; do sleep 0.1; done\n{ASK}",
        "harness": "shell",
        "num_samples": SAMPLES,
        "max_attempts": 1,
        "runtime": {"network": "full", "options": {"sandbox": "none"}, "memory_mb": 256, "cpus": 0.1},
    }
    flags = ("--engine-api", "token", "--redis", redis_server.url, "--log-level", "warning")
    slots = ("--run", str(SAMPLES), "--ready", "0", "--lease-seconds", str(LEASE_SECONDS))
    with ScriptedEngine("qwen3") as engine:
        engine.script = lambda generation, index: Say("hello world")
        place = {"data_dir": tmp_path / "service", "port": free_port()}
        with Serving("--engine", engine.url, *flags, **place) as service:
            assert service.request("POST", "/tasks", json=body).status_code == 201
            names = [f"{name}-{os.getpid()}" for name in ("a", "b")]
            nodes = [NodeVictim(name, tmp_path, service.url, *slots, VERBATIM_LOCAL_SANDBOX="none") for name in names]
            for node in nodes:
                node.start()
            try:
                wait_until(lambda: started.exists() and len(started.read_text().split()) == SAMPLES, SECONDS, "all run")
                os.kill(service.pid, signal.SIGKILL)
                time.sleep(2 * LEASE_SECONDS)
                with Serving("--engine", engine.url, *flags, **place) as again:
                    gate.touch()
                    wait_until(
                        lambda: again.request("GET", "/tasks/t").json()["status"] == "completed", SECONDS, "the task ends"
                    )
                    rollouts = again.request("GET", "/tasks/t/rollouts").json()["rollouts"]
                    sessions = again.request("GET", "/sessions").json()["sessions"]
            finally:
                for node in nodes:
                    node.stop()
    assert [(each["status"], each["attempt"], each["failures"]) for each in rollouts] == [("completed", 1, [])] * SAMPLES
    assert sorted(each["session_id"] for each in sessions) == [each["session_id"] for each in rollouts]
    assert len(started.read_text().split()) == SAMPLES
