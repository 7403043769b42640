"""Kind `harbor`: a tiny task folder, from its files to its reward."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from contract.tasks import Budgets, Exec, HarnessSpec, McpServer, RuntimeSpec, Task, Upload
from rollout.evaluators.base import BadReward, EvaluationFailed, EvaluationTimedOut, Score
from rollout.evaluators.catalogue import load
from rollout.runtimes.base import Executed
from rollout.runtimes.local.runtime import LocalKind
from rollout.task_sources import BadTaskFolder, harbor_task
from tests import ROOT
from tests.support.runtimes.evaluations import case_of, check, plain_runtime
from tests.support.runtimes.plain_runtime import PlainRuntime
from tests.support.runtimes.runtime_places import out, sandboxed

FOLDER = ROOT / "tests/support/runtimes/formats/harbor_slugify"
ADDED = {"OWNER": "us"}


@pytest.fixture
async def runtime(tmp_path: Path) -> AsyncIterator[PlainRuntime]:
    """As the image would have it: what a container has at /app, /tests and /logs lies below the test's own folder."""
    async with plain_runtime(tmp_path, ("/app", "/tests", "/logs"), "/app") as made:
        yield made


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the task's folder, to be changed."""
    return Path(shutil.copytree(FOLDER, tmp_path / "task"))


def loaded(folder: Path = FOLDER, **more: Any) -> Task:
    return harbor_task(folder, HarnessSpec("pi"), variables=ADDED, **more)


async def verified(runtime: PlainRuntime, folder: Path, options: dict[str, Any]) -> Score:
    check("harbor", options)
    return await load("harbor").evaluate(case_of(runtime, options, folder))


async def scripted(runtime: PlainRuntime, folder: Path, script: str, **options: Any) -> Score:
    return await verified(runtime, folder, {"tests": {"test.sh": script}, **options})


def task_options(folder: Path = FOLDER) -> dict[str, Any]:
    task = loaded(folder)
    check("harbor", task.evaluator.options, task)
    return dict(task.evaluator.options)


async def solved(runtime: PlainRuntime) -> None:
    await runtime.upload("solve.sh", (FOLDER / "solution" / "solve.sh").read_bytes(), mode=0o755)
    assert (await runtime.exec(["./solve.sh"], timeout_seconds=60)).exit_code == 0


async def test_its_own_solution_gets_the_full_reward(runtime: PlainRuntime, tmp_path: Path) -> None:
    await solved(runtime)
    score = await verified(runtime, tmp_path, task_options())
    assert (score.reward, score.feedback) == (1.0, "4 of 4 are right (strict)")
    assert score.metadata == {"rewards": {"reward": 1.0}, "exit_code": 0}


async def test_a_folder_runs_without_an_image_in_a_local_runtime(tmp_path: Path) -> None:
    task = loaded(runtime_kind="local")
    LocalKind().check(task.runtime)
    assert (task.runtime.image, task.runtime.workdir) == (None, "/app")
    (titles,) = task.prepare
    assert isinstance(titles, Upload) and titles.content is not None
    async with sandboxed(tmp_path / "runtimes").started(workdir="/app", options=task.runtime.options) as runtime:
        await runtime.upload(titles.path, titles.content, mode=titles.mode)
        assert await out(runtime, "cat /app/titles.txt") == (FOLDER / "environment/titles.txt").read_text()
        await runtime.upload("/solution/solve.sh", (FOLDER / "solution/solve.sh").read_bytes(), mode=0o755)
        await out(runtime, "/solution/solve.sh")
        score = await load("harbor").evaluate(case_of(runtime, dict(task.evaluator.options), tmp_path))
    assert (score.reward, score.feedback) == (1.0, "4 of 4 are right (strict)")


def test_a_local_runtime_has_no_image() -> None:
    with pytest.raises(BadTaskFolder, match="a local runtime has no image"):
        loaded(runtime_kind="local", image="debian")


async def test_a_part_of_the_work_gets_a_part_of_the_reward(runtime: PlainRuntime, tmp_path: Path) -> None:
    await runtime.upload("slugify", b"#!/bin/sh\ncat\n", mode=0o755)
    assert (await verified(runtime, tmp_path, task_options())).reward == 0.25


async def test_nothing_done_gets_nothing(runtime: PlainRuntime, tmp_path: Path) -> None:
    assert (await verified(runtime, tmp_path, task_options())).reward == 0.0


async def test_a_reward_that_the_agent_wrote_is_removed_first(runtime: PlainRuntime, tmp_path: Path) -> None:
    await runtime.upload("/logs/verifier/reward.json", b'{"reward": 1}')
    await runtime.upload("/logs/verifier/reward.txt", b"1")
    with pytest.raises(BadReward, match=r"test.sh left no reward.json or reward.txt in /logs/verifier: exit code 2"):
        await scripted(runtime, tmp_path, "exit 2")


async def test_tests_that_the_agent_wrote_are_replaced(runtime: PlainRuntime, tmp_path: Path) -> None:
    await runtime.upload("/tests/write_reward.sh", b"echo 1 > /logs/verifier/reward.txt")
    assert (await verified(runtime, tmp_path, task_options())).reward == 0.0


async def test_nothing_that_the_agent_put_beside_the_tests_is_there(runtime: PlainRuntime, tmp_path: Path) -> None:
    await runtime.upload("/tests/conftest.py", b"")
    script = "ls /tests | wc -l > /logs/verifier/reward.txt"
    assert (await scripted(runtime, tmp_path, script)).reward == 1.0


@pytest.mark.parametrize("network", ["full", "proxy", None])
async def test_the_verifier_has_the_network_that_the_task_gives_it(
    network: str | None, runtime: PlainRuntime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[object] = []
    exec_ = runtime.exec

    async def seen(argv: Sequence[str], **more: Any) -> Executed:
        if any("test.sh" in word for word in argv) and not any("rm -rf" in word for word in argv):
            given.append(more.get("network"))
        return await exec_(argv, **more)

    monkeypatch.setattr(runtime, "exec", seen)
    options = {"network": network} if network else {}
    await scripted(runtime, tmp_path, "echo 1 > /logs/verifier/reward.txt", **options)
    assert given == [network]


@pytest.mark.parametrize(
    ("written", "options", "reward"),
    [
        ('{"reward": 0.5}', {}, 0.5),
        ('{"accuracy": 0.75}', {}, 0.75),
        ('{"reward": 1, "seconds": 3.5}', {}, 1.0),
        ('{"accuracy": 0.5, "seconds": 3.5}', {"reward_key": "accuracy"}, 0.5),
        ('{"reward": true}', {}, 1.0),
        ("0.25", {}, 0.25),
    ],
)
async def test_a_json_reward_may_have_several_numbers(
    written: str, options: dict[str, Any], reward: float, runtime: PlainRuntime, tmp_path: Path
) -> None:
    """It goes before a reward.txt, and the exit code does not matter."""
    script = f"#!/bin/sh\necho 9 > /logs/verifier/reward.txt\necho '{written}' > /logs/verifier/reward.json\nexit 1\n"
    assert (await scripted(runtime, tmp_path, script, **options)).reward == reward


@pytest.mark.parametrize(
    ("name", "written", "said"),
    [
        ("reward.txt", "", "reward.txt is ''"),
        ("reward.txt", "good", "which is no number"),
        ("reward.txt", "nan", "which is not finite"),
        ("reward.json", "", "reward.json is no JSON"),
        ("reward.json", "{}", "reward.json has no 'reward', but nothing"),
        ("reward.json", '{"a": 1, "b": 2}', "reward.json has no 'reward', but a, b"),
        ("reward.json", '{"reward": "1"}', "'reward' of reward.json is '1', which is no number"),
        ("reward.json", '{"reward": 1, "other": 1e999}', "'other' of reward.json is inf"),
        ("reward.json", "null", "is None, which is no number"),
    ],
)
async def test_what_is_no_finite_number_is_no_reward(
    name: str, written: str, said: str, runtime: PlainRuntime, tmp_path: Path
) -> None:
    with pytest.raises(BadReward, match=said):
        await scripted(runtime, tmp_path, f"printf %s '{written}' > /logs/verifier/{name}")


async def test_a_verifier_without_end_gives_no_reward(runtime: PlainRuntime, tmp_path: Path) -> None:
    with pytest.raises(EvaluationTimedOut):
        await scripted(runtime, tmp_path, "sleep 600", timeout_seconds=0.2)
    assert (await scripted(runtime, tmp_path, "sleep 600", timeout_seconds=0.2, timeout_reward=0)).reward == 0.0


async def test_a_folder_that_cannot_be_made_is_named(runtime: PlainRuntime, tmp_path: Path) -> None:
    with pytest.raises(EvaluationFailed, match="/proc/verifier cannot be made ready"):
        await scripted(runtime, tmp_path, "true", verifier_folder="/proc/verifier")


@pytest.mark.parametrize("left", ["/logs", "/logs/verifier", "/logs/verifier/reward.txt/a", "/logs/verifier/reward.json/a"])
async def test_no_agent_keeps_the_verifier_from_its_reward(runtime: PlainRuntime, tmp_path: Path, left: str) -> None:
    await runtime.exec(["sh", "-c", "rm -rf /logs"], timeout_seconds=60)
    await runtime.upload(left, b"a file")
    assert (await scripted(runtime, tmp_path, "echo -1 > /logs/verifier/reward.txt")).reward == -1.0


def test_a_folder_becomes_a_task() -> None:
    task = loaded(num_samples=8)
    assert task.task_id == "verbatim-slugify"
    assert task.num_samples == 8
    assert task.instruction.startswith("Write an executable `/app/slugify`")
    assert task.runtime == RuntimeSpec(
        "docker", "registry.example/slugify:1", cpus=2.0, memory_mb=512, disk_mb=1024, network="proxy", workdir="/app"
    )
    assert task.environment == {"LANG": "C.UTF-8", "OWNER": "us"}
    assert task.harness.mcp_servers == (McpServer("notes", command=("notes-server", "--stdio")),)
    assert task.budgets == Budgets(agent=300.0, evaluation=180.0, total=2280.0)
    assert task.metadata == {"harbor": {"task": "verbatim/slugify", "difficulty": "easy", "category": "programming"}}
    assert not task.evaluator.fresh_runtime
    assert task.evaluator.options["network"] == "proxy"
    assert task.evaluator.options["env"] == {"LEVEL": "strict"}
    assert {*task.evaluator.options["tests"]} == {"test.sh", "write_reward.sh"}


def test_an_older_folder_is_read_too(folder: Path) -> None:
    """`version` instead of `schema_version`, sizes as texts, `allow_internet`; and no [task]."""
    text = 'version = "1.0"\nartifacts = ["/app/out"]\n[environment]\nmemory = "2G"\nstorage = "512M"\nallow_internet = true\n'
    (folder / "task.toml").write_text(text + '[environment.healthcheck]\ncommand = "true"\n')
    (folder / "tests" / "data.bin").write_bytes(b"\xff")
    task = loaded(folder, image="built:1", task_id="mine", runtime_kind="kubernetes")
    assert task.task_id == "mine"
    assert task.runtime == RuntimeSpec("kubernetes", "built:1", memory_mb=2048, disk_mb=512, network="full", workdir="/app")
    assert task.evaluator.options["tests"]["data.bin"] == {"base64": "/w==", "executable": False}
    assert isinstance(task.prepare[0], Exec)
    assert loaded(folder, image="built:1").task_id == "task"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[[steps]]\nname = 'a'", "has several steps: that cannot be run here"),
        ("[environment]\nos = 'windows'", "has environment.os other than linux"),
        ("[environment]\ngpus = 1", "has accelerators"),
        ("[environment]\nnetwork_mode = 'allowlist'", "the network mode 'allowlist' cannot be had here"),
        ("[environment]\ndocker_image = 'a'\nmemory = 'big'", "'big' is no size"),
        ("[environment]\ndocker_image = 'a'\n[verifier]\nnetwork_mode = 'no-network'", "keeps its verifier from a network"),
        ("[verifier]\nenvironment_mode = 'separate'", "has a verifier in a separate environment"),
        ("[verifier]\nuser = 'checker'", "has verifier.user or agent.user"),
        ("[verifier]\nenv = { KEY = '${KEY}' }", "needs the variable KEY, which was not given"),
        ("", "names no docker_image: build its environment/Dockerfile"),
        ("[", "task.toml: "),
    ],
)
def test_what_cannot_be_had_here_is_refused(text: str, said: str, folder: Path) -> None:
    (folder / "task.toml").write_text(text)
    with pytest.raises(BadTaskFolder, match=said.replace("[", r"\[")):
        loaded(folder)


@pytest.mark.parametrize("path", ["task.toml", "instruction.md", "tests/test.sh"])
def test_a_file_that_is_missing_is_named(path: str, folder: Path) -> None:
    (folder / path).unlink()
    with pytest.raises(BadTaskFolder, match=path):
        loaded(folder)


FILES = ["task.toml", "instruction.md", "environment/Dockerfile", "tests/test.sh", "tests/secret"]


@pytest.mark.parametrize("path", FILES)
@pytest.mark.parametrize("how", ["a file", "a folder", "a link to a link"])
def test_a_link_out_of_the_folder_is_not_followed(path: str, how: str, folder: Path, tmp_path: Path) -> None:
    """`instruction.md -> /any/file` was what the agent saw."""
    outside, link = tmp_path / "outside", folder / path
    shutil.copytree(folder, outside)
    (outside / "tests" / "secret").write_text("of the machine")
    for each in (link.parent, outside / link.parent.relative_to(folder)):
        each.mkdir(exist_ok=True)
    (outside / path).touch()
    link.unlink(missing_ok=True)
    if how == "a file":
        link.symlink_to(outside / path)
    elif how == "a folder":
        (folder / "there").symlink_to(f"../{outside.name}")
        link.symlink_to(folder / "there" / path)
    else:
        (folder / "first").symlink_to(outside / path)
        link.symlink_to(folder / "first")
    with pytest.raises(BadTaskFolder, match="leads out of the task's folder"):
        loaded(folder)


def test_a_link_within_the_folder_is_followed_and_what_is_no_file_is_refused(folder: Path) -> None:
    text = (folder / "instruction.md").read_text()
    (folder / "instruction.md").rename(folder / "README.md")
    (folder / "instruction.md").symlink_to("README.md")
    assert loaded(folder).instruction == text
    (folder / "instruction.md").unlink()
    os.mkfifo(folder / "instruction.md")
    with pytest.raises(BadTaskFolder, match=r"instruction.md is not a file"):
        loaded(folder)
