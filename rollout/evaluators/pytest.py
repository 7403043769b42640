"""Kind `pytest`: a command runs tests and writes JUnit XML; the share that passed is the reward.

Tests are named as pytest names them or as `<classname>::<name>`. A named test that is not in the report, or was skipped, has not
passed. A report that is missing, is not JUnit XML, or has no test that counts is a failure. Where no test is named, one in which all passed
is worth nothing if the command broke off.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal
from xml.etree.ElementTree import Element, ParseError, TreeBuilder, XMLParser

from pydantic import AfterValidator

from contract.tasks import EvaluatorSpec, Task
from rollout.evaluators.base import Argv, Case, EvaluationFailed, EvaluationTimedOut, Score, Texts, shorten
from rollout.evaluators.collected import Collected, collect
from rollout.evaluators.command import (
    GradingCommand,
    RunOptions,
    check_time,
    clear,
    describe,
    describe_end,
    require_runtime,
    run_command,
    score_timeout,
)
from rollout.runtimes.base import Executed

REPORT_BYTES = 64 << 20
"""Of all reports together."""
MESSAGE_CHARS = 600
"""Of one failed test's message in the feedback."""


def _check_report(paths: tuple[str, ...]) -> tuple[str, ...]:
    if any(path.rstrip("/") in ("", ".", "..") for path in paths):
        raise ValueError("must name files or folders that hold nothing else: they are removed before the run")
    return paths or DEFAULT_REPORT


DEFAULT_REPORT = ("report.xml",)


class PytestOptions(RunOptions):
    kind = "pytest"

    command: Argv = ("python3", "-m", "pytest", "-q", "--junitxml=report.xml")
    report: Annotated[Texts, AfterValidator(_check_report)] = DEFAULT_REPORT
    """The file that the command writes, a folder of such files, or a list. It is removed first, so that the agent cannot bring its own."""
    mode: Literal["fraction", "all"] = "fraction"
    """fraction: passed / counted. all: 1.0 when all that count passed, otherwise 0.0."""
    must_pass: Texts = ()
    """The tests that count; empty: all in the report that were not skipped."""
    must_keep: Texts = ()
    """Tests that passed before: if one of them does not pass, the reward is 0.0."""


class PytestEvaluator:
    name = "pytest"
    needs_runtime = True

    def check(self, spec: EvaluatorSpec, task: Task) -> None:
        check_time(PytestOptions.read(spec.options).build(), task)

    async def evaluate(self, case: Case) -> Score:
        options = PytestOptions.read_case(case)
        command = options.build()
        await clear(case, (), options.report)
        try:
            done = await run_command(case, command)
        except EvaluationTimedOut as error:
            return score_timeout(command, error)
        collected = await collect(require_runtime(case), options.report, REPORT_BYTES)
        results = await asyncio.to_thread(_read_results, collected, options.report, command, done)
        scored = score(results, options.must_pass, options.must_keep, options.mode)
        if not options.must_pass and _broke_off(results, scored, done):
            feedback = f"{scored.feedback}\nThe run broke off before the others: {describe_end(done)}"
            return Score(0.0, feedback=shorten(feedback), metadata=scored.metadata)
        return scored


def score(results: Mapping[str, TestResult], must_pass: Sequence[str], must_keep: Sequence[str], mode: str) -> Score:
    """The score of test results by name. Raises `EvaluationFailed` if no test counts."""
    counted = list(dict.fromkeys(map(canonicalize, must_pass)))
    counted = counted or [test for test, result in results.items() if result.outcome != "skipped"]
    kept = list(dict.fromkeys(map(canonicalize, must_keep)))
    if not counted:
        raise EvaluationFailed(f"the report has no test that counts: all of its {len(results)} tests were skipped")
    failed, broken = _list_unpassed(results, counted), _list_unpassed(results, kept)
    passed = len(counted) - len(failed)
    reward = passed / len(counted) if mode == "fraction" else float(not failed)
    return Score(
        reward=0.0 if broken else reward,
        feedback=shorten(_write_feedback(len(counted), failed, broken)),
        metadata={"passed": passed, "counted": len(counted), "broken": len(broken)},
    )


def _broke_off(results: Mapping[str, TestResult], scored: Score, done: Executed) -> bool:
    """Whether the report does not have all tests: code that raises KeyboardInterrupt ends pytest. Then a result has no name, or all passed
    and yet the command ended otherwise than well (0) or with a failed test (1)."""
    return done.exit_code not in (0, 1) and ("" in results or scored.reward == 1.0)


def _read_results(
    collected: Collected, report: Sequence[str], command: GradingCommand, done: Executed
) -> dict[str, TestResult]:
    files: dict[str, bytes] = {}
    for path in report:
        found = collected.below(path)
        single = collected.at(path) is not None
        files |= {name: content for name, content in found.items() if single or name.endswith(".xml")}
    if not files:
        raise EvaluationFailed(f"{describe(command)} wrote no report at {', '.join(report)}: {describe_end(done)}")
    results: list[TestResult] = []
    for name, content in files.items():
        try:
            results += read_report(content)
        except BadReport as error:
            raise EvaluationFailed(f"the report {name} is no JUnit XML: {error}; {describe_end(done)}") from error
    if not results:
        raise EvaluationFailed(f"the report at {', '.join(report)} holds no test: {describe_end(done)}")
    return merge_by_test(results)


def _list_unpassed(results: Mapping[str, TestResult], tests: Sequence[str]) -> list[TestResult]:
    found = [results.get(test) or TestResult(test, "skipped", "it is not in the report") for test in tests]
    return [result for result in found if result.outcome != "passed"]


def _write_feedback(counted: int, failed: Sequence[TestResult], broken: Sequence[TestResult]) -> str:
    lines = [f"{counted - len(failed)} of {counted} tests passed."]
    lines += [f"{result.test or '(no name)'}: {_explain(result)}" for result in failed]
    if broken:
        lines += ["", "These passed before and must still pass:"]
        lines += [f"{result.test}: {_explain(result)}" for result in broken]
    return "\n".join(lines)


def _explain(result: TestResult) -> str:
    return shorten(result.message, MESSAGE_CHARS) or result.outcome


# JUnit XML, as pytest and many other test runners write it. An agent may have had a hand in a report, so document types are refused:
# their entities let a small file fill the memory.


Outcome = Literal["passed", "failed", "skipped"]

FED_BYTES = 1 << 20
"""Parsed at a time, so that other threads get their turn."""

_WORSE: tuple[Outcome, ...] = ("skipped", "passed", "failed")


class BadReport(Exception):
    """The file is not JUnit XML. The message says why."""


@dataclass(frozen=True, slots=True)
class TestResult:
    """`test` is `<classname>::<name>`, or the name alone if there is no class name."""

    __test__ = False

    test: str
    outcome: Outcome
    message: str = ""


def read_report(content: bytes) -> list[TestResult]:
    """In the order of the file. Raises `BadReport`."""
    parser = XMLParser(target=_RefuseDoctype())
    try:
        for start in range(0, len(content), FED_BYTES):
            parser.feed(content[start : start + FED_BYTES])
        root = parser.close()
    except (ParseError, ValueError, LookupError) as error:
        raise BadReport(f"it is not well formed: {error}") from error
    if root.tag not in ("testsuites", "testsuite"):
        raise BadReport(f"its root is <{root.tag}>, not <testsuites> or <testsuite>")
    return [_read_result(case) for case in root.iter("testcase")]


def merge_by_test(results: Iterable[TestResult]) -> dict[str, TestResult]:
    """One result per test, the worst of it: pytest reports a failed teardown as a second result."""
    found: dict[str, TestResult] = {}
    for result in results:
        known = found.get(result.test)
        if known is None or _WORSE.index(result.outcome) > _WORSE.index(known.outcome):
            found[result.test] = result
    return found


def canonicalize(written: str) -> str:
    """A test's name as it is in reports: `tests/test_a.py::TestB::test_c[1]` becomes `tests.test_a.TestB::test_c[1]`, as pytest writes
    class names (`_pytest.junitxml.mangle_test_address`); `<classname>::<name>` stays as it is."""
    address, bracket, parameters = written.partition("[")
    parts = address.split("::")
    if len(parts) > 1 and parts[0].endswith(".py"):
        parts[0] = re.sub(r"\.py$", "", parts[0]).replace("/", ".")
        return f"{'.'.join(parts[:-1])}::{parts[-1]}{bracket}{parameters}"
    return written


class _RefuseDoctype(TreeBuilder):
    def doctype(self, name: str, pubid: str | None, system: str | None) -> None:
        raise ValueError("it has a document type")


def _read_result(case: Element) -> TestResult:
    classname, name = case.get("classname"), case.get("name", "")
    test = f"{classname}::{name}" if classname else name
    for tag in ("failure", "error"):
        if (child := case.find(tag)) is not None:
            return TestResult(test, "failed", child.get("message") or (child.text or "").strip())
    if not test:
        return TestResult(test, "failed", "a test that broke off")
    skipped = case.find("skipped") is not None or case.get("status") in ("notrun", "disabled")
    return TestResult(test, "skipped" if skipped else "passed")
