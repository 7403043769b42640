"""The table of cases that must hold, in tests/README.md. Each is a numbered sentence there, and the tests that show it bear its number:
`@pytest.mark.case(30)`. From the marks its column of tests is written.

python -m tests.support.documents.cases --write     without --write: only says whether the page has the tests
"""

from __future__ import annotations

import argparse
import ast
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tests import ROOT

PAGE = ROOT / "tests" / "README.md"
COMMAND = "python -m tests.support.documents.cases --write"

_ROW = re.compile(r"^\| (\d+) \| (.*?) \|.*$", re.MULTILINE)


def find_tests(folder: Path = ROOT / "tests") -> Mapping[int, Sequence[str]]:
    """By number of the case, the tests that bear it, as `proxy/call/test_flow.py::test_a`."""
    found: dict[int, list[str]] = defaultdict(list)
    for path in sorted(folder.rglob("*.py")):
        text = path.read_text()
        if "mark.case(" in text:
            for number, name in _read_marks(ast.parse(text)):
                found[number].append(f"{path.relative_to(folder)}::{name}")
    return found


def _read_marks(module: ast.Module) -> Iterator[tuple[int, str]]:
    for each in module.body:
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
            for mark in each.decorator_list:
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.case":
                    yield from ((ast.literal_eval(number), each.name) for number in mark.args)


def write(page: str, tests: Mapping[int, Sequence[str]]) -> str:
    """The page with its columns of tests. Raises ValueError for a case without tests, a mark without a case, and a number that two have."""
    numbers = [int(number) for number, _ in _ROW.findall(page)]
    if len(set(numbers)) < len(numbers) or set(numbers) != tests.keys():
        wrong = sorted({*tests} ^ {*numbers}) or sorted(each for each in set(numbers) if numbers.count(each) > 1)
        raise ValueError(f"of these cases either the sentence or the tests are missing, or there are two: {wrong}")
    return _ROW.sub(lambda row: f"| {row[1]} | {row[2]} | {', '.join(f'`{name}`' for name in tests[int(row[1])])} |", page)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write tests/README.md")
    page = PAGE.read_text()
    written = write(page, find_tests())
    if parser.parse_args().write:
        PAGE.write_text(written)
    elif written != page:
        raise SystemExit(f"tests/README.md names other tests than bear the marks: {COMMAND}")


if __name__ == "__main__":
    main()
