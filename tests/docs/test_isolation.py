"""The table of what each kind of runtime protects from names, for each cell, tests that there are."""

from __future__ import annotations

import re

from tests import ROOT

PAGE = (ROOT / "docs/runtimes.md").read_text().partition("## What each kind protects from")[2].partition("\n## ")[0]
FOLDER = ROOT / "tests/rollout/runtimes"


def test_every_cell_of_the_table_names_tests_that_there_are() -> None:
    rows = [line.strip("|").split("|") for line in PAGE.splitlines() if line.startswith("| ")]
    kinds, cells = len(rows[0]) - 1, [cell for row in rows[1:] for cell in row[1:]]
    assert kinds == 5 and len(cells) == 7 * kinds
    marks = [re.search(r"\((\w\d)\) *$", cell) for cell in cells]
    assert all(marks), [cell for cell, mark in zip(cells, marks, strict=True) if not mark]
    tests = {
        mark: re.findall(r"`(\w+\.py)::(\w+)`", named) for mark, named in re.findall(r"^- (\w\d): (.+)$", PAGE, re.MULTILINE)
    }
    assert {mark[1] for mark in marks if mark} == tests.keys() and all(tests.values())
    for file, name in {each for named in tests.values() for each in named}:
        assert re.search(rf"^(async )?def {name}\(", (FOLDER / file).read_text(), re.MULTILINE), f"{file}::{name}"
