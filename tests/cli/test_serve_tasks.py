"""`verbatim serve` takes tasks: the kinds it knows are those there are."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

from tests.support.engine.scripted_engine import ScriptedEngine
from tests.support.runtimes.rollout_nodes import ASK
from tests.support.service.scripted_service import ScriptedService, json_answer, serving
from tests.support.service.verbatim_process import ADMIN, COMMAND, NODE, Serving, environment, verbatim, wait_until

SECONDS = 240.0


def asking(running: Serving) -> Callable[..., subprocess.CompletedProcess[str]]:
    where = {"VERBATIM_URL": running.url, "VERBATIM_ADMIN_TOKEN": ADMIN, "COLUMNS": "200"}
    return lambda *args: verbatim("tasks", *args, timeout_seconds=SECONDS, **where)


def test_a_served_app_takes_tasks_tells_of_them_and_refuses_what_there_is_not(tmp_path: Path) -> None:
    file = tmp_path / "tasks.jsonl"
    good = {"task_id": "a", "instruction": "Fix it.", "harness": "pi", "runtime": "local", "num_samples": 2}
    with serving(ScriptedService()) as receiver:
        receiver.script("POST /done", json_answer({}))
        good["callback_url"] = f"{receiver.url}/done"
        judged = {**good, "task_id": "b", "evaluator": {"kind": "command", "options": {"command": "make check"}}}
        wrong = [{**good, "runtime": "cloud"}, {**good, "evaluator": "oracle"}]
        file.write_text("\n".join(json.dumps(body) for body in (good, judged, *wrong)))
        with Serving("--engine", "http://127.0.0.1:9", data_dir=tmp_path / "data") as running:
            tasks = asking(running)
            done = tasks("submit", str(file))
            assert done.stdout == "a\nb\n", done.stderr
            assert (
                "there is no runtime 'cloud': choose one of" in done.stderr and "there is no evaluator 'oracle'" in done.stderr
            )
            assert "2 rollouts cancelled" in tasks("cancel", "a").stdout
            assert "task.ended" in tasks("watch", "a").stdout
            receiver.wait_for(lambda: receiver.paths() == ["/done"], SECONDS)


def test_a_node_runs_rollouts_of_a_service_whose_sides_have_two_ports_with_a_nodes_token(tmp_path: Path) -> None:
    """The agent is given the harness side's port; nobody tells it the other."""
    runtime = {"kind": "local", "network": "full", "memory_mb": 256, "cpus": 0.1, "options": {"sandbox": "none"}}
    with (
        ScriptedEngine("qwen3") as engine,
        Serving("--engine", engine.url, "--control-port", "0", data_dir=tmp_path / "data") as running,
        (tmp_path / "log").open("w") as log,
    ):
        task = {"task_id": "a", "instruction": f"{ASK}printenv >seen", "harness": "shell", "runtime": runtime}
        scored = {"command": "grep -q OPENAI_BASE_URL=%s/s/ seen && ! grep -q %s seen"}
        scored["command"] %= (running.url, running.control_url.removeprefix("http://"))
        task["evaluator"] = {"kind": "command", "options": scored, "fresh_runtime": False}
        made = running.request("POST", "/tasks", json=task)
        assert made.status_code == 201, made.text
        place = ["--url", running.control_url, "--harness-url", running.url]
        variables = environment(
            VERBATIM_NODE_TOKEN=NODE, VERBATIM_LOCAL_SANDBOX="none", VERBATIM_LOCAL_DIR=str(tmp_path / "runtimes")
        )
        command = [*COMMAND, "node", *place, "--runtime", "local", "--data-dir", str(tmp_path / "node")]
        with subprocess.Popen(command, env=variables, stderr=log) as node:
            try:
                wait_until(
                    lambda: running.request("GET", "/tasks/a").json()["status"] == "completed" or node.poll() is not None,
                    SECONDS,
                    "the rollout has ended",
                )
                (rollout,) = running.request("GET", "/tasks/a/rollouts").json()["rollouts"]
            finally:
                node.kill()
        assert (rollout["failures"], rollout["calls"]) == ([], 1), (rollout, (tmp_path / "log").read_text())
        assert rollout["verdict"]["reward"] == 1.0, rollout
