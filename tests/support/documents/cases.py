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
from typing import Any

from tests import ROOT

LIST = ROOT / "tests" / "cases.txt"

_CASE = re.compile(r"^(\d+)\. (.*)$", re.MULTILINE)


def find_tests(mark: str = "case", folder: Path = ROOT / "tests") -> Mapping[Any, Sequence[str]]:
    """By what the mark says, a number of a case, the tests that bear it, as `proxy/call/test_flow.py::test_a`."""
    found: dict[Any, list[str]] = defaultdict(list)
    for path in sorted(folder.rglob("*.py")):
        text = path.read_text()
        if f"mark.{mark}(" in text:
            for said, name in _read_marks(ast.parse(text), f"pytest.mark.{mark}"):
                found[said].append(f"{path.relative_to(folder)}::{name}")
    return found


def _read_marks(module: ast.Module, mark: str) -> Iterator[tuple[Any, str]]:
    for each in module.body:
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
            for call in each.decorator_list:
                if isinstance(call, ast.Call) and ast.unparse(call.func) == mark:
                    yield from ((ast.literal_eval(said), each.name) for said in call.args)


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
