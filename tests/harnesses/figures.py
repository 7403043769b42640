"""What the runs showed, as one table at the end of the tests: one row for each.

With VERBATIM_KEEP_RESULTS=1 the table is written to `benchmarks/results/harnesses.json` too.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

from rollout.harnesses.catalogue import load
from tests import ROOT
from tests.harnesses.stage import Played
from tests.harnesses.truths import false_forks

RESULTS = ROOT / "benchmarks" / "results"
KEEP = "VERBATIM_KEEP_RESULTS"
PROPERTY = "harness"


@dataclass(frozen=True)
class Figure:
    """One plain run of one agent."""

    harness: str
    version: str
    dialect: str
    works: bool
    turns: int
    rows_per_conversation: int
    false_forks: int
    streamed: bool
    side_calls: dict[str, int]
    """Role -> number of calls."""
    first_prompt_tokens: int
    seconds: float

    @classmethod
    def of(cls, played: Played) -> Figure:
        main = played.main_calls
        return cls(
            harness=played.cli.harness,
            version=load(played.cli.harness).version,
            dialect=played.cli.dialect,
            works=played.ended.exit_code == 0 and played.text_of("number.py") == "value = 42\n",
            turns=len(main),
            rows_per_conversation=len(played.main_rows),
            false_forks=len(false_forks(played)),
            streamed=bool(played.generations) and all(generation.stream for generation in played.generations),
            side_calls=dict(Counter(played.side_roles)),
            first_prompt_tokens=len(main[0]["prompt_ids"]) if main else 0,
            seconds=round(played.ended.seconds, 1),
        )

    @property
    def cells(self) -> list[str]:
        side = ", ".join(f"{number} {role}" for role, number in self.side_calls.items())
        return [
            f"{self.harness} {self.version}",
            self.dialect,
            "yes" if self.works else "NO",
            str(self.turns),
            str(self.rows_per_conversation),
            str(self.false_forks),
            "yes" if self.streamed else "no",
            side or "none",
            f"{self.first_prompt_tokens:,}",
            f"{self.seconds:.1f}",
        ]


HEAD = (
    *("harness", "dialect", "works", "turns", "rows per conversation", "false forks", "streamed", "side calls"),
    *("first prompt, tokens of the tests' tokenizer", "seconds"),
)


def note(request: pytest.FixtureRequest, played: Played) -> None:
    """Attach the run's figure to the test's report, which reaches the summary whichever process ran the test."""
    request.node.user_properties.append((PROPERTY, asdict(Figure.of(played))))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    told = (
        value for report in terminalreporter.getreports("passed") for name, value in report.user_properties if name == PROPERTY
    )
    figures = sorted((Figure(**value) for value in told), key=lambda figure: figure.harness)
    if not figures:
        return
    terminalreporter.section("harnesses")
    for line in _markdown([figure.cells for figure in figures]):
        terminalreporter.write_line(line)
    if os.environ.get(KEEP) == "1":
        keep(figures, RESULTS)


def keep(figures: list[Figure], folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    text = json.dumps([asdict(figure) for figure in figures], indent=2)
    (folder / "harnesses.json").write_text(text + "\n", encoding="utf-8")


def _markdown(rows: list[list[str]]) -> list[str]:
    """A Markdown table whose columns are in line."""
    widths = [max(map(len, column)) for column in zip(HEAD, *rows, strict=True)]
    lines = [[*HEAD], ["-" * width for width in widths], *rows]
    return ["| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines]
