"""The cases that must hold, in tests/cases.txt. Each is a numbered sentence there, and the tests that show it bear its number:
`@pytest.mark.case(30)`.

python -m tests.support.documents.cases 30      the tests of a case; without a number, of all
"""

from __future__ import annotations

import argparse
import ast
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tests import ROOT

LIST = ROOT / "tests" / "cases.txt"

_CASE = re.compile(r"^(\d+)\. (.*)$", re.MULTILINE)


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


def check(text: str, tests: Mapping[int, Sequence[str]]) -> Mapping[int, str]:
    """The sentences by number. Raises ValueError for a case without tests, a mark without a case, a number that two have."""
    rows = [(int(number), sentence) for number, sentence in _CASE.findall(text)]
    numbers = [number for number, _ in rows]
    if len(set(numbers)) < len(numbers) or set(numbers) != tests.keys():
        wrong = sorted({*tests} ^ {*numbers}) or sorted(each for each in set(numbers) if numbers.count(each) > 1)
        raise ValueError(f"of these cases either the sentence or the tests are missing, or there are two: {wrong}")
    return dict(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("numbers", nargs="*", type=int, help="of the cases to show")
    wanted, tests = parser.parse_args().numbers, find_tests()
    for number, sentence in check(LIST.read_text(), tests).items():
        if not wanted or number in wanted:
            print(f"{number}  {sentence}", *tests[number], sep="\n    ")  # noqa: T201


if __name__ == "__main__":
    main()
