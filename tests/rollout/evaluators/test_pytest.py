"""Kind `pytest`: JUnit XML, by pytest itself and by hand, as rewards."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.evaluators.base import EvaluationFailed, EvaluationTimedOut
from rollout.evaluators.pytest import BadReport, canonicalize, merge_by_test, read_report
from tests.support.runtimes.evaluations import evaluated

TESTS = """
import unittest, pytest

@pytest.mark.parametrize("n", [1, 2])
def test_add(n): assert n + n == 2 * n

class TestDivide:
    def test_whole(self): assert 4 / 2 == 2
    @pytest.mark.parametrize("x", ["a::b", "é["])
    def test_text(self, x): assert x

def test_wrong(): assert "é" == "e"
def test_left_out(): pytest.skip("not today")
@pytest.mark.xfail(strict=True)
def test_known_to_fail(): assert False

@pytest.fixture
def breaks():
    yield
    raise OSError("the teardown broke")
def test_teardown(breaks): pass
"""
PYTEST = f"PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 {sys.executable} -m pytest -q -p no:cacheprovider --junitxml=report.xml"
OPTIONS = {"command": PYTEST}


async def test_the_fraction_of_passed_tests_is_the_reward(tmp_path: Path) -> None:
    """Five pass (two of them are parametrised), test_wrong and the teardown fail, two are skipped."""
    score = await evaluated("pytest", OPTIONS, tmp_path, {"tests/test_it.py": TESTS})
    assert score.reward == 5 / 7
    assert score.metadata == {"passed": 5, "counted": 7, "broken": 0}
    assert score.feedback.startswith("5 of 7 tests passed.\n")
    assert "tests.test_it::test_wrong: AssertionError" in score.feedback
    assert "the teardown broke" in score.feedback


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A command that leaves the report of `TESTS`, which ran once for all."""
    folder = tmp_path_factory.mktemp("reported")
    (folder / "tests").mkdir()
    (folder / "tests" / "test_it.py").write_text(TESTS)
    subprocess.run(PYTEST, shell=True, cwd=folder, check=False, capture_output=True)
    return f"cp {folder}/report.xml report.xml"


@pytest.mark.parametrize(
    ("must_pass", "reward"),
    [
        (["tests/test_it.py::test_add[1]", "tests/test_it.py::TestDivide::test_whole"], 1.0),
        (["tests.test_it::test_add[2]", "tests.test_it.TestDivide::test_whole"], 1.0),
        (["tests/test_it.py::TestDivide::test_text[a::b]"], 1.0),
        (["tests/test_it.py::test_add[1]", "tests/test_it.py::test_wrong"], 0.5),
        (["tests/test_it.py::test_left_out", "tests/test_it.py::test_add[1]"], 0.5),
        (["tests/test_it.py::test_known_to_fail"], 0.0),
        (["tests/test_it.py::test_teardown"], 0.0),
        (["tests/test_it.py::test_gone", "tests/test_it.py::test_add[1]", "tests/test_it.py::test_add[1]"], 0.5),
    ],
)
async def test_only_the_tests_that_must_pass_count(must_pass: list[str], reward: float, reported: str, tmp_path: Path) -> None:
    score = await evaluated("pytest", {"command": reported, "must_pass": must_pass}, tmp_path)
    assert score.reward == reward


async def test_a_broken_test_that_worked_before_voids_the_reward(reported: str, tmp_path: Path) -> None:
    named = {"must_pass": ["tests/test_it.py::test_add[1]"], "must_keep": ["tests/test_it.py::test_wrong"]}
    score = await evaluated("pytest", {"command": reported, **named}, tmp_path)
    assert (score.reward, score.metadata["broken"]) == (0.0, 1)
    assert "These passed before and must still pass:\ntests.test_it::test_wrong" in score.feedback


async def test_in_mode_all_one_failure_is_enough(reported: str, tmp_path: Path) -> None:
    options = {"command": reported, "mode": "all"}
    assert (await evaluated("pytest", options, tmp_path)).reward == 0.0
    must_pass = ["tests/test_it.py::test_add[1]"]
    assert (await evaluated("pytest", {**options, "must_pass": must_pass}, tmp_path)).reward == 1.0


async def test_a_file_that_cannot_be_imported_counts_as_failed(tmp_path: Path) -> None:
    files = {"test_it.py": "import what_is_not_there\n", "test_good.py": "def test_a(): pass\n"}
    score = await evaluated("pytest", {"command": f"{PYTEST} --continue-on-collection-errors"}, tmp_path, files)
    assert score.reward == 0.5


BREAKS_OFF = "def test_a(): pass\ndef test_b(): raise KeyboardInterrupt\ndef test_c(): assert False\n"


async def test_a_run_that_the_agents_code_breaks_off_is_worth_nothing(tmp_path: Path) -> None:
    """The report has the tests as far as there, all of which passed: the reward was 1.0."""
    score = await evaluated("pytest", OPTIONS, tmp_path, {"test_it.py": BREAKS_OFF})
    assert score.reward == 0.0
    said = ("1 of 2 tests passed.", "(no name): a test that broke off", "The run broke off before the others: exit code 2")
    assert score.feedback.startswith("\n".join(said))


async def test_a_run_that_breaks_off_between_tests_is_worth_nothing(tmp_path: Path) -> None:
    files = {"test_it.py": "def test_a(): pass\n", "conftest.py": "def pytest_runtest_logfinish(): raise KeyboardInterrupt\n"}
    assert (await evaluated("pytest", OPTIONS, tmp_path, files)).reward == 0.0


async def test_a_run_that_breaks_off_after_the_tests_that_must_pass_has_its_reward(tmp_path: Path) -> None:
    options = {**OPTIONS, "must_pass": ["test_it.py::test_a"]}
    assert (await evaluated("pytest", options, tmp_path, {"test_it.py": BREAKS_OFF})).reward == 1.0


async def test_a_report_that_the_agent_left_is_not_believed(tmp_path: Path) -> None:
    report = '<testsuite><testcase classname="t" name="a"/></testsuite>'
    with pytest.raises(EvaluationFailed, match=r"(?s)wrote no report at report.xml: exit code 1.*it broke"):
        await evaluated("pytest", {"command": "echo it broke; exit 1"}, tmp_path, {"report.xml": report})


async def test_a_folder_of_reports_is_read_whole(tmp_path: Path) -> None:
    good = '<testsuite><testcase classname="A" name="one"/></testsuite>'
    bad = '<testsuites><testsuite><testcase classname="B" name="two"><error message="bad"/></testcase></testsuite></testsuites>'
    command = f"mkdir -p out/more; echo '{good}' > out/a.xml; echo '{bad}' > out/more/b.xml; echo noise > out/log.txt"
    score = await evaluated("pytest", {"command": command, "report": "out"}, tmp_path)
    assert (score.reward, score.feedback) == (0.5, "1 of 2 tests passed.\nB::two: bad")


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("<testsuite>", "no JUnit XML: it is not well formed"),
        ("", "no JUnit XML"),
        ("<html/>", "its root is <html>"),
        ('<!DOCTYPE a [<!ENTITY b "c">]><testsuite/>', "it has a document type"),
        ("<testsuite/>", "holds no test"),
        ('<testsuite><testcase name="a"><skipped/></testcase></testsuite>', "has no test that counts"),
    ],
)
async def test_a_report_that_tells_nothing_is_a_failure(written: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(EvaluationFailed, match=said):
        await evaluated("pytest", {"command": f"echo '{written}' > report.xml"}, tmp_path)


async def test_tests_without_end_give_the_reward_that_is_declared_for_them(tmp_path: Path) -> None:
    options: dict[str, Any] = {"command": "sleep 600", "timeout_seconds": 0.2}
    with pytest.raises(EvaluationTimedOut):
        await evaluated("pytest", options, tmp_path)
    assert (await evaluated("pytest", {**options, "timeout_reward": 0}, tmp_path)).reward == 0.0


def test_of_several_results_of_one_test_the_worst_counts() -> None:
    ran = '<testcase classname="A" name="x"/><testcase classname="A" name="x"><failure>no</failure></testcase>'
    skipped = '<testcase classname="A" name="y"><skipped/></testcase><testcase classname="A" name="y"/>'
    report = f'<testsuite>{ran}<testcase classname="A" name="x"/>{skipped}</testsuite>'.encode()
    assert {test: result.outcome for test, result in merge_by_test(read_report(report)).items()} == {
        "A::x": "failed",
        "A::y": "passed",
    }


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("test_a.py::test_b", "test_a::test_b"),
        ("a/b/test_c.py::TestD::test_e[x/y.py::z]", "a.b.test_c.TestD::test_e[x/y.py::z]"),
        ("org.example.ATest::works", "org.example.ATest::works"),
        ("alone", "alone"),
    ],
)
def test_names_are_those_of_the_report(written: str, name: str) -> None:
    assert canonicalize(written) == name
    assert canonicalize(name) == name


@given(st.binary(max_size=200))
def test_any_bytes_are_a_report_or_a_bad_one(content: bytes) -> None:
    try:
        read_report(content)
    except BadReport as error:
        assert str(error)
