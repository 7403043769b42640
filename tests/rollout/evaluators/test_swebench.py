"""Kind `swebench`: a tiny instance, graded by the official package."""

from __future__ import annotations

import asyncio
import io
import json
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from contract.tasks import HarnessSpec, RuntimeSpec
from rollout.evaluators import swebench
from rollout.evaluators.base import BadEvaluator, EvaluationFailed, EvaluationTimedOut, Score
from rollout.evaluators.catalogue import load
from rollout.runtimes.base import Executed
from rollout.task_sources import REPOSITORY, RESULT, BadInstance, swebench_task
from tests import ROOT
from tests.support.runtimes.evaluations import TASK, case_of, check, plain_runtime
from tests.support.runtimes.plain_runtime import PlainRuntime
from tests.support.runtimes.swebench_instance import BUGGY, FIXED, FIXED_AND_BROKEN, HALF_FIXED, Instance, make_instance


@dataclass(frozen=True, slots=True)
class Place:
    """A runtime as the node leaves it to the evaluator: the image's repository in /testbed, the agent's beside it."""

    instance: Instance
    runtime: PlainRuntime
    folder: Path

    def options(self, **row: Any) -> dict[str, Any]:
        task = swebench_task({**self.instance.row, **row}, HarnessSpec("pi"))
        check("swebench", task.evaluator.options, task)
        return dict(task.evaluator.options)

    async def evaluated(self, options: dict[str, Any], seconds: float = 240.0) -> Score:
        return await load("swebench").evaluate(case_of(self.runtime, options, self.folder, seconds=seconds))

    @property
    def result(self) -> Path:
        return Path(self.runtime.workdir)

    def testbed(self, path: str) -> Path:
        return self.instance.repository / path


GRADER = """
import io, json, socket, sys
from rollout.evaluators import swebench
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
while True:
    connection, _ = listener.accept()
    with connection:
        asked = b""
        while True:
            asked += connection.recv(1 << 16)
            try:
                json.loads(asked)
                break
            except ValueError:
                pass
        sys.stdin, sys.stdout = io.StringIO(asked.decode()), io.StringIO()
        swebench.main()
        connection.sendall(sys.stdout.getvalue().encode())
"""


@pytest.fixture(scope="module")
def grader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A program that is started as the package's process is, and asks the one process that has the package imported for all tests."""
    program = tmp_path_factory.mktemp("grader") / "python"
    with subprocess.Popen([sys.executable, "-X", "utf8", "-c", GRADER], stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        port = int(process.stdout.readline())
        program.write_text(f"#!/bin/bash\nexec 3<>/dev/tcp/127.0.0.1/{port}\ncat >&3\ncat <&3\n")
        program.chmod(0o755)
        yield str(program)
        process.kill()


@pytest.fixture(scope="module")
def instance(tmp_path_factory: pytest.TempPathFactory) -> Instance:
    return make_instance(tmp_path_factory.mktemp("instance") / "testbed")


@pytest.fixture
async def place(instance: Instance, grader: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Place]:
    monkeypatch.setattr(swebench, "sys", SimpleNamespace(executable=grader))
    async with plain_runtime(tmp_path, (REPOSITORY, RESULT), RESULT) as runtime:
        testbed = tmp_path / "stand_ins" / "testbed"
        for copy in (testbed, Path(runtime.workdir)):
            await asyncio.to_thread(shutil.copytree, instance.repository, copy, dirs_exist_ok=True)
        yield Place(replace(instance, repository=testbed), runtime, tmp_path)


async def test_a_solved_instance_is_resolved(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package is asked as a node asks it, in a process of its own for each question."""
    monkeypatch.setattr(swebench, "sys", sys)
    (place.result / "slugs.py").write_text(FIXED)
    score = await place.evaluated(place.options())
    assert (score.reward, score.feedback) == (1.0, "resolved: yes")
    assert score.metadata == {"resolved": True, "fixed": 2, "unfixed": 0, "kept": 1, "broken": 0}


@pytest.mark.parametrize(
    ("left", "mode", "reward", "told"),
    [
        (HALF_FIXED, "resolved", 0.0, "does not pass: checks/check_slugs.py::test_case"),
        (HALF_FIXED, "fraction", 0.5, "does not pass: checks/check_slugs.py::test_case"),
        (FIXED_AND_BROKEN, "fraction", 0.0, "passed before, does not pass: checks/check_slugs.py::test_shout"),
        ("what is (this\n", "resolved", 0.0, "does not pass: checks/check_slugs.py::test_spaces"),
    ],
)
async def test_what_does_not_pass_is_told(left: str, mode: str, reward: float, told: str, place: Place) -> None:
    (place.result / "slugs.py").write_text(left)
    score = await place.evaluated({**place.options(), "mode": mode})
    assert score.reward == reward
    assert told in score.feedback


async def test_an_agent_that_changed_nothing_resolved_nothing(place: Place) -> None:
    (place.result / "left.cache").write_text("ignored by git")
    score = await place.evaluated(place.options())
    assert (score.reward, score.feedback) == (0.0, "nothing was changed")


async def test_a_patch_that_cannot_be_read_is_not_an_empty_one(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    (place.result / "slugs.py").write_text(FIXED)
    exec_ = place.runtime.exec

    async def killed(argv: Sequence[str], **more: Any) -> Executed:
        return Executed(137, b"", b"") if argv[0] == "cat" else await exec_(argv, **more)

    monkeypatch.setattr(place.runtime, "exec", killed)
    with pytest.raises(EvaluationFailed, match="the agent's patch cannot be read: exit code 137"):
        await place.evaluated(place.options())


async def test_the_agents_files_are_carried_over_as_they_are(place: Place) -> None:
    """New, removed, moved and binary ones; not those that git ignores; and whatever the agent did to its own git."""
    (place.result / "slugs.py").write_text("from more.slugs import *\n")
    (place.result / "more").mkdir()
    (place.result / "more" / "slugs.py").write_text(FIXED)
    (place.result / "data.bin").write_bytes(bytes(range(256)))
    (place.result / "old.py").unlink()
    (place.result / "left.cache").write_text("ignored by git")
    shutil.rmtree(place.result / ".git")
    assert (await place.evaluated(place.options())).reward == 1.0
    assert place.testbed("data.bin").read_bytes() == bytes(range(256))
    assert not place.testbed("old.py").exists()
    assert not place.testbed("left.cache").exists()


async def test_a_repository_that_the_agent_began_inside_is_carried_as_a_folder(place: Place) -> None:
    """git adds none without a commit. One with a commit is a link without content, which a patch shows as that."""
    (place.result / "slugs.py").write_text(FIXED)
    for name in ("tried", "tried/inside"):
        await asyncio.to_thread(subprocess.run, ["git", "init", "-q", str(place.result / name)], check=True)
        (place.result / name / "notes").write_text("tried")
    assert (await place.evaluated(place.options())).reward == 1.0
    assert place.testbed("tried/inside/notes").read_text() == "tried"


async def test_a_log_is_graded_whole_however_long_it_is(place: Place) -> None:
    """A runtime hands back the last megabyte. The tests' output lies before that, between two times as much."""
    (place.result / "slugs.py").write_text(FIXED)
    noise = "head -c 2000000 /dev/zero | tr '\\0' x; echo"
    script = place.instance.row["eval_script"].replace("\n: '", f"\n{noise}\n: '")
    assert (await place.evaluated(place.options(eval_script=script))).reward == 1.0


async def test_tests_that_the_agent_wrote_do_not_grade_it(place: Place) -> None:
    (place.result / "checks" / "check_slugs.py").write_text(
        "def test_spaces(): pass\ndef test_case(): pass\ndef test_shout(): pass\n"
    )
    assert (await place.evaluated(place.options())).reward == 0.0


async def test_the_repository_may_be_the_one_in_which_the_agent_worked(place: Place) -> None:
    place.testbed("slugs.py").write_text(FIXED)
    assert (await place.evaluated({**place.options(), "result": REPOSITORY})).reward == 1.0


async def test_a_script_that_comes_to_no_tests_gives_no_reward(place: Place) -> None:
    (place.result / "slugs.py").write_text(FIXED)
    with pytest.raises(EvaluationFailed, match="example__slugs-1: the eval script did not come to its tests: exit code 3"):
        await place.evaluated(place.options(eval_script="#!/bin/bash\nexit 3\n"))


@pytest.mark.parametrize(("said", "failed"), [("Cannot allocate memory", True), ("nothing of interest", False)])
async def test_broken_surroundings_are_no_fault_of_the_agent(said: str, failed: bool, place: Place) -> None:
    """Both logs have no tests. The package tells by its words that the first one's surroundings broke."""
    (place.result / "slugs.py").write_text(FIXED)
    script = f": '>>>>> Start Test Output'\necho {said}\n: '>>>>> End Test Output'\n"
    if failed:
        with pytest.raises(EvaluationFailed, match="the surroundings broke: out_of_memory"):
            await place.evaluated(place.options(eval_script=script))
    else:
        score = await place.evaluated(place.options(eval_script=script))
        assert (score.reward, score.metadata) == (0.0, {"resolved": False, "tests_ran": False})


async def test_tests_without_end_give_no_reward(place: Place) -> None:
    (place.result / "slugs.py").write_text(FIXED)
    options = {**place.options(eval_script="sleep 600\n"), "result": REPOSITORY}
    with pytest.raises(EvaluationTimedOut, match=r"the tests were still at work after 0\.1 seconds"):
        await place.evaluated(options, seconds=0.1)


async def test_a_log_parser_that_the_package_does_not_have_is_named(place: Place) -> None:
    (place.result / "slugs.py").write_text(FIXED)
    with pytest.raises(EvaluationFailed, match=r"did not grade: KeyError: 'parse_log_cobol'"):
        await place.evaluated(place.options(log_parser="parse_log_cobol"))


async def test_a_result_that_is_no_place_for_git_is_named(place: Place) -> None:
    shutil.rmtree(place.testbed(".git"))
    with pytest.raises(EvaluationFailed, match="could not be carried into /testbed"):
        await place.evaluated(place.options())


def test_a_node_without_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(swebench, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "stdin", io.StringIO('{"do": "script", "instance": {}}'))
    swebench.main()
    told = json.loads(capsys.readouterr().out)
    assert told == {"error": "No module named 'swebench'; install the extra 'swebench' on this node"}


def test_a_row_becomes_a_task_without_its_solution(instance: Instance) -> None:
    row = instance.row
    task = swebench_task(row, HarnessSpec("codex"), num_samples=4, runtime=RuntimeSpec("kubernetes", cpus=4.0))
    assert (task.task_id, task.num_samples, task.harness.name) == ("example__slugs-1", 4, "codex")
    assert "slug() keeps upper case" in task.instruction
    assert task.runtime == RuntimeSpec("kubernetes", row["image"], cpus=4.0, workdir="/testbed")
    assert task.evaluator.runtime == RuntimeSpec("kubernetes", row["image"], cpus=4.0, workdir="/agent-result", network="full")
    assert row["patch"] not in json.dumps(task.evaluator.options)
    check("swebench", task.evaluator.options, task)


def test_a_row_that_lacks_something_is_refused(instance: Instance) -> None:
    row = instance.row
    with pytest.raises(BadInstance, match="'example__slugs-1' lacks image, eval_script: rows of swebench 5 have them"):
        swebench_task({**row, "image": None, "eval_script": ""}, HarnessSpec("pi"))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"instance": None}, "option 'instance' lacks instance_id, image"),
        ({"instance": {"eval_script": 3}}, "option 'instance' has no text as its eval_script"),
        ({"instance": {"FAIL_TO_PASS": "test_a"}}, "option 'instance' must have a list of tests as FAIL_TO_PASS"),
        ({"instance": {"PASS_TO_PASS": [1]}}, "option 'instance' must have a list of tests as PASS_TO_PASS"),
        ({"instance": {"image_assets": '{"test_patch": [{"path": "a.png"}]}'}}, "option 'instance' has image_assets"),
        ({"mode": "partial"}, "option 'mode' cannot be 'partial'"),
        ({"split": "test"}, "there is no option 'split'"),
    ],
)
def test_bad_options_are_refused_by_name(change: dict[str, Any], said: str, instance: Instance) -> None:
    row = instance.row
    if change.get("instance"):
        change = {"instance": {**row, **change["instance"]}}
    options = {name: value for name, value in {"instance": row, **change}.items() if value is not None}
    with pytest.raises(BadEvaluator, match=said):
        check("swebench", options, TASK)


def test_the_bug_of_the_instance_is_there() -> None:
    assert BUGGY != FIXED != HALF_FIXED != FIXED_AND_BROKEN
