"""Kind `pytest`: a command runs tests and writes JUnit XML; the part of them that passed is the reward.

Options, beside those of `commands.read_command` (command's default runs pytest):

    report     the file that the command writes, or a folder of such files, or a list of them; default report.xml. What is there
               before is removed, so that nobody brings a report of his own
    mode       fraction (default): passed / counted. all: 1.0 when all that count passed, otherwise 0.0
    must_pass  the tests that count; default: all of the report that were not skipped
    must_keep  tests that worked before: when one of them does not pass, the reward is 0.0

Tests are named as pytest names them or as `<classname>::<name>`. A named test that is not in the report, or was skipped, has not
passed. A report that is missing, is no JUnit XML, or holds no test that counts, is a failure.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal
from xml.etree.ElementTree import Element, ParseError, TreeBuilder, XMLParser

from rollout.evaluators.base import Case, EvaluationFailed, EvaluationTimedOut, Options, Score, of_case, shorten
from rollout.evaluators.command import (
    Command,
    check_time,
    describe,
    describe_end,
    read_command,
    require_runtime,
    run_command,
    score_timeout,
)
from rollout.evaluators.diff import Collected, collect
from rollout.runtimes.base import Executed
from rollout.task import EvaluatorSpec, Task

DEFAULT_COMMAND = ("python3", "-m", "pytest", "-q", "--junitxml=report.xml")
MODES = ("fraction", "all")
REPORT_BYTES = 64 << 20
"""Of all reports together."""
MESSAGE_CHARS = 600
"""Of one failed test's message in the feedback."""


@dataclass(frozen=True, slots=True)
class Wanted:
    command: Command
    report: tuple[str, ...]
    mode: str
    must_pass: tuple[str, ...]
    must_keep: tuple[str, ...]


class PytestEvaluator:
    name = "pytest"
    needs_runtime = True

    def check(self, spec: EvaluatorSpec, task: Task) -> None:
        check_time(_read(Options(self.name, spec.options)).command, task)

    async def evaluate(self, case: Case) -> Score:
        wanted = of_case(self.name, case, _read)
        await _remove(case, wanted.report)
        try:
            done = await run_command(case, wanted.command)
        except EvaluationTimedOut as error:
            return score_timeout(wanted.command, error)
        collected = await collect(require_runtime(case), wanted.report, REPORT_BYTES)
        results = await asyncio.to_thread(_results, collected, wanted, done)
        return score(results, wanted.must_pass, wanted.must_keep, wanted.mode)


def score(results: Mapping[str, TestResult], must_pass: Sequence[str], must_keep: Sequence[str], mode: str) -> Score:
    """Of tests by name. Raises `EvaluationFailed` when none counts."""
    counted = list(dict.fromkeys(map(canonicalize, must_pass)))
    counted = counted or [test for test, result in results.items() if result.outcome != "skipped"]
    kept = list(dict.fromkeys(map(canonicalize, must_keep)))
    if not counted:
        raise EvaluationFailed(f"the report has no test that counts: all of its {len(results)} tests were skipped")
    failed, broken = _not_passed(results, counted), _not_passed(results, kept)
    passed = len(counted) - len(failed)
    reward = passed / len(counted) if mode == "fraction" else float(not failed)
    return Score(
        reward=0.0 if broken else reward,
        feedback=shorten(_feedback(len(counted), failed, broken)),
        metadata={"passed": passed, "counted": len(counted), "broken": len(broken)},
    )


def _read(options: Options) -> Wanted:
    wanted = Wanted(
        command=read_command(options, DEFAULT_COMMAND),
        report=options.texts("report") or ("report.xml",),
        mode=options.choice("mode", MODES),
        must_pass=options.texts("must_pass"),
        must_keep=options.texts("must_keep"),
    )
    options.done()
    if any(path.rstrip("/") in ("", ".", "..") for path in wanted.report):
        raise options.refused("report", "must name files or folders that hold nothing else: they are removed before the run")
    return wanted


async def _remove(case: Case, paths: Sequence[str]) -> None:
    runtime = require_runtime(case)
    done = await runtime.exec(["rm", "-rf", "--", *paths], timeout_seconds=case.seconds, logs=case.logs)
    if done.exit_code != 0:
        raise EvaluationFailed(f"an old report at {', '.join(paths)} cannot be removed: {describe_end(done)}")


def _results(collected: Collected, wanted: Wanted, done: Executed) -> dict[str, TestResult]:
    files: dict[str, bytes] = {}
    for path in wanted.report:
        found = collected.below(path)
        single = collected.at(path) is not None
        files |= {name: content for name, content in found.items() if single or name.endswith(".xml")}
    if not files:
        raise EvaluationFailed(
            f"{describe(wanted.command)} wrote no report at {', '.join(wanted.report)}: {describe_end(done)}"
        )
    results: list[TestResult] = []
    for name, content in files.items():
        try:
            results += read_report(content)
        except BadReport as error:
            raise EvaluationFailed(f"the report {name} is no JUnit XML: {error}; {describe_end(done)}") from error
    if not results:
        raise EvaluationFailed(f"the report at {', '.join(wanted.report)} holds no test: {describe_end(done)}")
    return merge_by_test(results)


def _not_passed(results: Mapping[str, TestResult], tests: Sequence[str]) -> list[TestResult]:
    found = [results.get(test) or TestResult(test, "skipped", "it is not in the report") for test in tests]
    return [result for result in found if result.outcome != "passed"]


def _feedback(counted: int, failed: Sequence[TestResult], broken: Sequence[TestResult]) -> str:
    lines = [f"{counted - len(failed)} of {counted} tests passed."]
    lines += [f"{result.test}: {_why(result)}" for result in failed]
    if broken:
        lines += ["", "These passed before and must still pass:"]
        lines += [f"{result.test}: {_why(result)}" for result in broken]
    return "\n".join(lines)


def _why(result: TestResult) -> str:
    return shorten(result.message, MESSAGE_CHARS) or result.outcome


# JUnit XML, as pytest and many other test runners write it, read into what became of each test.
#
# Reports come out of runtimes in which an agent worked: a document type, with which a small file can be made to fill the memory, is
# refused.


Outcome = Literal["passed", "failed", "skipped"]

FED_BYTES = 1 << 20
"""At a time: other threads get their turn in between."""

_WORSE: tuple[Outcome, ...] = ("skipped", "passed", "failed")


class BadReport(Exception):
    """The file is no JUnit XML. Says what is wrong with it."""


@dataclass(frozen=True, slots=True)
class TestResult:
    """`test` is `<classname>::<name>`, or the name alone where there is no class name."""

    __test__ = False

    test: str
    outcome: Outcome
    message: str = ""


def read_report(content: bytes) -> list[TestResult]:
    """In the order of the file. Raises `BadReport`."""
    parser = XMLParser(target=_WithoutDoctype())
    try:
        for start in range(0, len(content), FED_BYTES):
            parser.feed(content[start : start + FED_BYTES])
        root = parser.close()
    except (ParseError, ValueError, LookupError) as error:
        raise BadReport(f"it is not well formed: {error}") from error
    if root.tag not in ("testsuites", "testsuite"):
        raise BadReport(f"its root is <{root.tag}>, not <testsuites> or <testsuite>")
    return [_result(case) for case in root.iter("testcase")]


def merge_by_test(results: Iterable[TestResult]) -> dict[str, TestResult]:
    """One result for each test. Of several of one test the worst counts: pytest reports a failed teardown as a second one."""
    found: dict[str, TestResult] = {}
    for result in results:
        known = found.get(result.test)
        if known is None or _WORSE.index(result.outcome) > _WORSE.index(known.outcome):
            found[result.test] = result
    return found


def canonicalize(written: str) -> str:
    """The `test` of what a user writes: `tests/test_a.py::TestB::test_c[1]` is `tests.test_a.TestB::test_c[1]`, the way pytest
    itself writes class names (`_pytest.junitxml.mangle_test_address`); `<classname>::<name>` stays as it is."""
    address, bracket, parameters = written.partition("[")
    parts = address.split("::")
    if len(parts) > 1 and parts[0].endswith(".py"):
        parts[0] = re.sub(r"\.py$", "", parts[0]).replace("/", ".")
        return f"{'.'.join(parts[:-1])}::{parts[-1]}{bracket}{parameters}"
    return written


class _WithoutDoctype(TreeBuilder):
    def doctype(self, name: str, pubid: str | None, system: str | None) -> None:
        raise ValueError("it has a document type")


def _result(case: Element) -> TestResult:
    classname, name = case.get("classname"), case.get("name", "")
    test = f"{classname}::{name}" if classname else name
    for tag in ("failure", "error"):
        if (child := case.find(tag)) is not None:
            return TestResult(test, "failed", child.get("message") or (child.text or "").strip())
    skipped = case.find("skipped") is not None or case.get("status") in ("notrun", "disabled")
    return TestResult(test, "skipped" if skipped else "passed")
