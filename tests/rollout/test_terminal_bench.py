"""Terminal-Bench folders as tasks: what is read of them, what is refused, and the verdict of their tests.

The folder has the form that terminal-bench 0.2.18 makes of its template: `terminal_bench/cli/template-task`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from contract.tasks import HarnessSpec, RuntimeSpec, Task
from rollout.evaluators.base import Score
from rollout.evaluators.catalogue import load
from rollout.task_sources import BadTaskFolder, terminal_bench_task
from tests.support.runtimes.evaluations import case_of, check, plain_runtime
from tests.support.runtimes.plain_runtime import PlainRuntime

TASK = """# canary
instruction: |-
  Write "Hello, world!" to hello.txt.
author_name: A
difficulty: easy
category: file-operations
tags: [files]
parser_name: pytest
max_agent_timeout_sec: 900.0
max_test_timeout_sec: 180.0
run_tests_in_same_shell: false
"""
COMPOSE = """services:
  client:
    build:
      dockerfile: Dockerfile
    image: ${T_BENCH_TASK_DOCKER_CLIENT_IMAGE_NAME}
    container_name: ${T_BENCH_TASK_DOCKER_CLIENT_CONTAINER_NAME}
    command: [ "sh", "-c", "sleep infinity" ]
    environment:
      - TEST_DIR=${T_BENCH_TEST_DIR}
      - LEVEL=3
    volumes:
      - ${T_BENCH_TASK_LOGS_PATH}:${T_BENCH_CONTAINER_LOGS_PATH}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "hello-world"
    (folder / "tests").mkdir(parents=True)
    (folder / "task.yaml").write_text(TASK)
    (folder / "docker-compose.yaml").write_text(COMPOSE)
    (folder / "Dockerfile").write_text("FROM registry.example/python:3.13\nWORKDIR /app\n")
    (folder / "run-tests.sh").write_text('cat "$TEST_DIR/summary.txt"\n')
    (folder / "tests" / "summary.txt").write_text("= short test summary info =\nPASSED tests/test_a.py::test_a\n")
    return folder


def loaded(folder: Path, **more: Any) -> Task:
    return terminal_bench_task(folder, HarnessSpec("pi"), **{"image": "built:1", **more})


def test_a_folder_becomes_a_task(folder: Path) -> None:
    task = loaded(folder, num_samples=4)
    assert (task.task_id, task.num_samples, task.instruction) == ("hello-world", 4, 'Write "Hello, world!" to hello.txt.')
    assert task.runtime == RuntimeSpec("docker", "built:1", memory_mb=2048, network="full", workdir="/app")
    assert (task.budgets.agent, task.budgets.evaluation, task.environment) == (900.0, 240.0, {"LEVEL": "3"})
    assert task.metadata["terminal_bench"]["category"] == "file-operations"
    assert task.evaluator.options["env"] == {"LEVEL": "3"}
    assert sorted(task.evaluator.options["tests"]) == ["run-tests.sh", "summary.txt", "test.sh"]
    check("harbor", dict(task.evaluator.options), task)


def test_an_image_and_limits_that_the_service_names_are_used(folder: Path) -> None:
    service = "services: {a: {image: 'ready:2', working_dir: /work, deploy: {resources: {limits: {cpus: '2', memory: 4G}}}}}"
    (folder / "docker-compose.yaml").write_text(service)
    runtime = loaded(folder, image=None).runtime
    assert runtime == RuntimeSpec("docker", "ready:2", cpus=2.0, memory_mb=4096, network="full", workdir="/work")


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("task.yaml", "instruction: x\nparser_name: swebench", "has parser_name swebench: that cannot be run here"),
        ("task.yaml", "instruction: x\nrun_tests_in_same_shell: true", "has run_tests_in_same_shell"),
        ("task.yaml", "descriptions: []", "has no instruction"),
        ("task.yaml", "[", "task.yaml cannot be read: "),
        ("task.yaml", "- a", "task.yaml is not a mapping"),
        ("docker-compose.yaml", "services: {a: {}, b: {}}", "has 2 services"),
        ("docker-compose.yaml", "services: {a: {privileged: true}}", "has a service with privileged"),
        ("docker-compose.yaml", "services: {a: {volumes: ['./data:/data']}}", "has volumes of its own"),
    ],
)
def test_what_cannot_be_had_here_is_refused(folder: Path, name: str, text: str, says: str) -> None:
    (folder / name).write_text(text)
    with pytest.raises(BadTaskFolder) as refused:
        loaded(folder)
    assert says in str(refused.value) and str(folder) in str(refused.value)


@pytest.mark.parametrize("path", ["task.yaml", "docker-compose.yaml", "Dockerfile", "run-tests.sh", "tests/summary.txt"])
def test_a_link_out_of_the_folder_is_not_followed(path: str, folder: Path, tmp_path: Path) -> None:
    (folder / path).rename(tmp_path / "outside")
    (folder / path).symlink_to(tmp_path / "outside")
    with pytest.raises(BadTaskFolder, match="leads out of the task's folder"):
        loaded(folder)


def test_a_folder_without_an_image_or_tests_is_refused(folder: Path) -> None:
    with pytest.raises(BadTaskFolder, match="names no image: build its Dockerfile"):
        loaded(folder, image=None)
    (folder / "run-tests.sh").unlink()
    with pytest.raises(BadTaskFolder, match=r"has no run-tests.sh"):
        loaded(folder)


@pytest.fixture
async def runtime(tmp_path: Path) -> AsyncIterator[PlainRuntime]:
    async with plain_runtime(tmp_path / "runtime", ("/app", "/tests", "/logs"), "/app") as made:
        yield made


@pytest.mark.parametrize(
    ("said", "reward"),
    [
        ("== Short Test Summary Info ==\nPASSED tests/a.py::a\nSKIPPED [1] b.py: why\nXFAIL c.py::c - known\n2 passed", 1.0),
        ("===== short test summary info =====\nPASSED a.py::a\nFAILED a.py::b - assert 1 == 2\n1 failed, 1 passed", 0.0),
        ("===== short test summary info =====\nERROR a.py - ImportError", 0.0),
        ("===== short test summary info =====\nXPASS a.py::b", 0.0),
        # Words before the summary are the tests' own output.
        ("FAILED to connect at first\n===== short test summary info =====\nPASSED a.py::a", 1.0),
        ("no tests ran in 0.01s", 0.0),
    ],
)
async def test_the_verdict_is_that_of_pytests_summary(runtime: PlainRuntime, folder: Path, said: str, reward: float) -> None:
    (folder / "tests" / "summary.txt").write_text(said + "\n")
    task = loaded(folder)
    score: Score = await load("harbor").evaluate(case_of(runtime, dict(task.evaluator.options), folder))
    assert score.reward == reward and said.splitlines()[-1] in score.feedback
