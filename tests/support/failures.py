"""The end of a failed run: one line per failure with its cause, and the command that repeats it."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator

import pytest

from tests import ROOT

MOST = 160
"""Characters shown of a cause."""


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = list(_failed(terminalreporter))
    if not reports:
        return
    terminalreporter.section(f"{len(reports)} failed")
    for report in reports:
        terminalreporter.write_line(f"{_where(report)}: {cause(report)}", red=True)
        terminalreporter.write_line(f"    {command(report.nodeid)}")


def _failed(reporter: pytest.TerminalReporter) -> Iterator[pytest.TestReport | pytest.CollectReport]:
    for outcome in ("error", "failed"):
        yield from reporter.stats.get(outcome, [])


def _where(report: pytest.TestReport | pytest.CollectReport) -> str:
    when = getattr(report, "when", "call")
    return report.nodeid if when == "call" else f"{report.nodeid} ({when})"


def cause(report: pytest.TestReport | pytest.CollectReport) -> str:
    """The first line of the error message, shortened to MOST characters."""
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash is not None else report.longreprtext.strip().rpartition("\n")[2]
    first = next((line.strip() for line in text.splitlines() if line.strip()), "no message")
    return first if len(first) <= MOST else first[: MOST - 3] + "..."


def command(nodeid: str) -> str:
    return f"{shlex.quote(os.path.relpath(sys.executable, ROOT))} -m pytest {shlex.quote(nodeid)}"
