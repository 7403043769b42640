"""Every cell of the table of what each kind of runtime protects from is shown by tests that bear its mark."""

from __future__ import annotations

import re

from tests import ROOT
from tests.support.documents.cases import find_tests

PAGE = (ROOT / "docs/runtimes.md").read_text().partition("## What each kind protects from")[2].partition("\n## ")[0]


def test_every_cell_of_the_table_has_tests_that_bear_its_mark() -> None:
    """`@pytest.mark.cell("L1")`; those of test_contract.py run on every kind."""
    rows = [line.strip("|").split("|") for line in PAGE.splitlines() if line.startswith("| ")]
    kinds, cells = len(rows[0]) - 1, [cell for row in rows[1:] for cell in row[1:]]
    assert kinds == 5 and len(cells) == 7 * kinds
    marks = [re.search(r"\((\w\d)\) *$", cell) for cell in cells]
    assert all(marks), [cell for cell, mark in zip(cells, marks, strict=True) if not mark]
    assert {mark[1] for mark in marks if mark} == find_tests("cell").keys()
