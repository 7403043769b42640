"""The example tasks: their hidden tests fail on what the agent is given, and pass on the reference solution."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from examples.tasks.load import FOLDER, body, names
from rollout.evaluators.base import Score
from rollout.evaluators.catalogue import load
from tests.support.runtimes.evaluations import case_of, check, plain_runtime

ROOT = FOLDER.parent.parent
EXPECTED = [
    "add-json-flag",
    "csv-summary",
    "fix-pagination",
    "fix-roman",
    "migrate-config",
    "parse-durations",
    "redact-text",
    "rotate-logs",
    "single-flight",
    "split-invoice",
    "sql-report",
    "update-docs",
]


async def graded(name: str, folder: Path, solved: bool, left: Mapping[str, bytes] | None = None) -> Score:
    """As a node would do it: the repository unpacked, the solution put over it, then the evaluator."""
    task = body(name, "pi")
    evaluator: dict[str, Any] = task["evaluator"]
    check(evaluator["kind"], evaluator["options"])
    async with plain_runtime(folder) as runtime:
        await runtime.unpack(".", base64.b64decode(task["prepare"][0]["upload"]["base64"]))
        if solved:
            shutil.copytree(FOLDER / name / "solution", runtime.workdir, dirs_exist_ok=True)
        for path, content in (left or {}).items():
            await runtime.upload(path, content)
        return await load(evaluator["kind"]).evaluate(case_of(runtime, evaluator["options"], folder))


def test_there_are_a_dozen() -> None:
    assert names() == EXPECTED


@pytest.mark.parametrize("name", EXPECTED)
async def test_the_hidden_tests_fail_on_what_the_agent_is_given(name: str, tmp_path: Path) -> None:
    """And not because something broke that has to be kept."""
    score = await graded(name, tmp_path, solved=False)
    assert score.reward == 0.0, score.feedback
    assert score.metadata.get("broken", 0) == 0, score.feedback


@pytest.mark.parametrize("name", EXPECTED)
async def test_the_hidden_tests_pass_on_the_reference_solution(name: str, tmp_path: Path) -> None:
    score = await graded(name, tmp_path, solved=True)
    assert score.reward == 1.0, score.feedback


OF_ITS_OWN = b"""
import re, sys
from pathlib import Path
text = (Path(__file__).parent / "check_roman.py").read_text()
found = re.findall(r"def (test_[a-z_]+)", text)
cases = [f'<testcase classname="check_roman.Roman" name="{name}"/>' for name in found]
Path(sys.argv[1]).write_text(f"<testsuite>{''.join(cases)}</testsuite>")
sys.exit()
"""


async def test_an_agent_that_leaves_a_library_beside_the_hidden_tests_earns_nothing_by_it(tmp_path: Path) -> None:
    left = {".hidden/unittest.py": OF_ITS_OWN}
    assert (await graded("fix-roman", tmp_path, solved=False, left=left)).reward == 0.0


async def test_tests_that_hang_by_the_agents_doing_earn_nothing(tmp_path: Path) -> None:
    task = body("fix-pagination", "pi")
    options = {**task["evaluator"]["options"], "timeout_seconds": 0.5}
    async with plain_runtime(tmp_path) as runtime:
        await runtime.upload("pages.py", b"while True: pass")
        score = await load("pytest").evaluate(case_of(runtime, options, tmp_path))
    assert (score.reward, score.metadata) == (0.0, {"timed_out": True})


@pytest.mark.parametrize("name", EXPECTED)
def test_nothing_hidden_and_no_solution_goes_to_the_agent(name: str, tmp_path: Path) -> None:
    task = body(name, "pi")
    (tmp_path / "a.tgz").write_bytes(base64.b64decode(task["prepare"][0]["upload"]["base64"]))
    shutil.unpack_archive(tmp_path / "a.tgz", tmp_path / "a", "gztar", filter="data")
    given = {path.relative_to(tmp_path / "a") for path in (tmp_path / "a").rglob("*") if path.is_file()}
    assert given == {
        path.relative_to(FOLDER / name / "repository")
        for path in (FOLDER / name / "repository").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_a_task_is_the_same_whenever_it_is_loaded() -> None:
    assert json.dumps(body("fix-roman", "pi")) == json.dumps(body("fix-roman", "pi"))


def run_loader(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "examples.tasks.load", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)


def test_the_loader_prints_a_line_for_each_task() -> None:
    done = run_loader(
        "--harness", "codex", "--num-samples", "4", "--runtime", "docker", "--image", "python:3", "--prefix", "a-"
    )
    tasks = [json.loads(line) for line in done.stdout.splitlines()]
    assert [task["task_id"] for task in tasks] == [f"a-{name}" for name in EXPECTED], done.stderr
    assert {(task["harness"], task["num_samples"]) for task in tasks} == {("codex", 4)}
    assert {json.dumps(task["runtime"]) for task in tasks} == {'{"kind": "docker", "image": "python:3"}'}


def test_the_loader_names_a_task_that_is_not_there() -> None:
    done = run_loader("--harness", "codex", "fix-romans")
    assert done.returncode == 2
    assert "no such task: fix-romans; there are add-json-flag" in done.stderr
