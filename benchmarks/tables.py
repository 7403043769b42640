"""The tables in the Markdown files, made from the results: what stands between a pair of marks is written anew.

<!-- table: calls 0 -->        table 0 of calls; without a number, all of them
<!-- end of table -->

python -m benchmarks.tables --write     without --write: only says whether they are
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
from pathlib import Path
from typing import Any

from benchmarks.processes import ROOT
from benchmarks.results import RESULTS, disturbed

FILES = (ROOT / "benchmarks" / "README.md", ROOT / "docs" / "comparison.md", ROOT / "docs" / "weights.md")
MINUTES = {
    "calls": 13,
    "dialects": 3,
    "turns": 1,
    "streams": 5,
    "memory": 4,
    "scaling": 1,
    "storage": 2,
    "reconstruction": 1,
    "delivery": 1,
    "weights": 4,
}
"""The sections, each a module, in the order in which they are run, and about how long each takes on two quiet cores."""

_TABLE = re.compile(r"(<!-- table: (\w+)(?: (\d+))? -->\n).*?(<!-- end of table -->)", re.DOTALL)


def module(name: str) -> Any:
    return importlib.import_module(f"benchmarks.{name}")


def written(text: str, results: Path = RESULTS) -> str:
    """`text` with every marked table as its results have it."""
    return _TABLE.sub(lambda found: f"{found[1]}{_table(results, found[2], found[3])}{found[4]}", text)


def _table(results: Path, name: str, place: str | None) -> str:
    path = results / f"{name}.json"
    if not path.exists():
        return "\nNot measured yet.\n\n"
    result = json.loads(path.read_text())
    grids = module(name).tables(result)
    chosen = grids if place is None else [grids[int(place)]]
    plot = f"![{name}](results/{name}.png)\n\n" if place is None and path.with_suffix(".png").exists() else ""
    made = "\n".join(grid.markdown() for grid in chosen)
    return f"\n{made}\n{_measured_on(name, result['machine'])}\n\n{plot}"


def _measured_on(name: str, machine: dict[str, Any]) -> str:
    where = f"{machine['cpu']}, {machine['cores']} cores, {machine.get('pinned', 'nothing pinned')}"
    said = f"{where}; {machine['at'][:10]}"
    warned = " **The machine was busy: trust the CPU seconds and the counts, not the clock.**" if disturbed(machine) else ""
    short = " A short run, only to see that it works." if machine.get("quick") else ""
    return f"<sub>`benchmarks/results/{name}.json`: {said}.{warned}{short}</sub>"


def write() -> None:
    for path in FILES:
        path.write_text(written(path.read_text()))
        print(f"written: {path.relative_to(ROOT)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write what is not as the results have it")
    if parser.parse_args().write:
        write()
        return
    old = [path.name for path in FILES if written(path.read_text()) != path.read_text()]
    if old:
        raise SystemExit(f"not what the results say: {', '.join(old)}: python -m benchmarks.tables --write")


if __name__ == "__main__":
    main()
