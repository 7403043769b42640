"""`verbatim run` starts an installed agent in the folder where it was called: the folder is changed, the session closed as it ended."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.harnesses import test_codex, test_examples, test_pi
from tests.harnesses.agent_run import Cli
from tests.harnesses.installed import INSTALLED
from tests.harnesses.outside import Outside
from tests.harnesses.player import Player
from tests.harnesses.scratch import TASK, make_repository
from tests.support.engine.scripted_engine import Fail, ScriptedEngine
from tests.support.service.redis_server import RedisServer
from tests.support.service.running_service import ADMIN, RunningService
from tests.support.service.verbatim_process import COMMAND, environment

SECONDS = 300.0


def run(cli: Cli, service: RunningService, workdir: Path) -> subprocess.CompletedProcess[str]:
    """The agents SDK is a library of the tests' own interpreter, the others are commands."""
    folders = [Path(sys.prefix) / "bin", INSTALLED / "npm" / "node_modules" / ".bin"]
    path = os.pathsep.join([*map(str, folders), os.environ["PATH"]])
    homes = workdir.parent / "homes"
    homes.mkdir()
    with Outside() as outside:
        access = {"VERBATIM_URL": service.url, "VERBATIM_ADMIN_TOKEN": ADMIN, "PATH": path, "TMPDIR": str(homes)}
        return subprocess.run(
            [*COMMAND, "run", "--harness", cli.harness, "--reward", "1", "--", TASK],
            cwd=workdir,
            env=environment(**outside.variables, **access),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )


@pytest.mark.parametrize("cli", [test_pi.CLI, test_codex.CLI, test_examples.AGENTS_SDK], ids=lambda cli: cli.harness)
def test_an_agent_does_its_task_and_its_session_says_so(redis_server: RedisServer, tmp_path: Path, cli: Cli) -> None:
    workdir = make_repository(tmp_path / "work")
    steps = cli.steps(workdir)
    with (
        ScriptedEngine("qwen3", max_model_len=131_072) as engine,
        RunningService(engine.url, redis_server.url, engine_api="token") as service,
    ):
        engine.script = player = Player(engine.family, steps, cli.side, task=TASK)
        done = run(cli, service, workdir)
        assert done.returncode == 0, done.stderr
        assert (workdir / "number.py").read_text() == "value = 42\n", done.stderr
        assert (player.left, player.surplus, player.missing) == (0, [], [])
        found = re.search(rf"{service.url}/sessions/(\w+)/trajectories", done.stderr)
        assert found, done.stderr
        session = service.request("GET", f"/sessions/{found[1]}").json()
        assert (session["status"], session["reward"], session["calls"]) == ("completed", 1.0, len(steps))
        assert session["metadata"]["harness"] == cli.harness
        calls = service.request("GET", f"/sessions/{found[1]}/calls").json()["calls"]
        assert Counter((call["dialect"], call["role"]) for call in calls) == {(cli.dialect, "main"): len(steps)}
        (row,) = service.request("GET", f"/sessions/{found[1]}/trajectories").json()["trajectories"]
        assert sum(row["loss_mask"]) == sum(len(call["completion_ids"]) for call in calls)
        assert list((tmp_path / "homes").iterdir()) == [], "its home is gone"


def test_an_agent_that_gives_up_fails_its_session_with_its_exit_code(redis_server: RedisServer, tmp_path: Path) -> None:
    workdir = make_repository(tmp_path / "work")
    with (
        ScriptedEngine("qwen3", max_model_len=131_072) as engine,
        RunningService(engine.url, redis_server.url, engine_api="token") as service,
    ):
        engine.script = lambda generation, index: Fail(404, "the model is gone", "NotFoundError", "model")
        done = run(test_codex.CLI, service, workdir)
        assert done.returncode not in (0, 124), done.stderr
        found = re.search(r"session (\w+)", done.stderr)
        assert found, done.stderr
        session = service.request("GET", f"/sessions/{found[1]}").json()
    assert (session["status"], session["reward"], session["calls"]) == ("failed", None, 0)
    assert session["error"] == f"codex ended with exit code {done.returncode}"
