"""JUnit XML, as pytest and many other test runners write it, read into what became of each test.

Reports come out of runtimes in which an agent worked: a document type, with which a small file can be made to fill the memory, is
refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal
from xml.etree.ElementTree import Element, ParseError, TreeBuilder, XMLParser

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


def by_test(results: Iterable[TestResult]) -> dict[str, TestResult]:
    """One result for each test. Of several of one test the worst counts: pytest reports a failed teardown as a second one."""
    found: dict[str, TestResult] = {}
    for result in results:
        known = found.get(result.test)
        if known is None or _WORSE.index(result.outcome) > _WORSE.index(known.outcome):
            found[result.test] = result
    return found


def canonical(written: str) -> str:
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
