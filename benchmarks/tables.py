"""What was measured, as tables: all of it, which is a page of the site, and what stands between a pair of marks in Markdown files.

<!-- table: calls 0 -->        table 0 of calls; without a number, all of them
<!-- end of table -->

python -m benchmarks.tables             prints all tables
python -m benchmarks.tables --write     writes those in the files anew

Results of another commit are refused: their tables stay as they are, and the command says how to measure them again.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from benchmarks.measured_code import is_current, name_commit
from benchmarks.processes import ROOT
from benchmarks.results import RESULTS, disturbed

FILES = (ROOT / "docs" / "weights.md",)
MINUTES: dict[str, float] = {
    "calls": 5,
    "parts": 1,
    "streams": 2.5,
    "dialects": 1,
    "turns": 0.5,
    "memory": 2.5,
    "scaling": 1,
    "storage": 0.5,
    "reconstruction": 0.5,
    "delivery": 0.5,
    "weights": 3,
    "delta": 4,
    "sessions": 0.5,
    "rounds": 8,
    "store_load": 0.5,
    "forks": 0.5,
    "images": 4,
    "agent_trees": 3,
    "stalls": 8,
}
"""The sections, each a module, in the order in which they are run, and about how long each takes on two quiet cores."""
APART = ("weights", "delta", "sessions", "rounds", "store_load", "forks", "images", "agent_trees", "stalls")
"""Run only when they are named. `sessions` and `store_load` are what `benchmarks.capacity` calculates from."""

_TABLE = re.compile(r"(<!-- table: (\w+)(?: (\d+))? -->\n).*?(<!-- end of table -->)", re.DOTALL)


def module(name: str) -> Any:
    return importlib.import_module(f"benchmarks.{name}")


def written(text: str, results: Path = RESULTS, keep: Collection[str] = ()) -> str:
    """`text` with every marked table as its results have it, but for the sections to `keep`."""

    def replaced(found: re.Match[str]) -> str:
        return found[0] if found[2] in keep else f"{found[1]}{_table(results, found[2], found[3])}{found[4]}"

    return _TABLE.sub(replaced, text)


def render(results: Path = RESULTS, pictures: str = "results") -> str:
    """Markdown: what the results have, by section in the order of `MINUTES`; plots are looked for in the folder `pictures`."""
    names = [name for name in (*MINUTES, "first_byte") if (results / f"{name}.json").exists()]
    return "".join(f"\n## {name}\n{_table(results, name, None, pictures)}" for name in names)


def sections(texts: Iterable[str]) -> list[str]:
    """Those whose tables the texts have."""
    return list(dict.fromkeys(found[2] for text in texts for found in _TABLE.finditer(text)))


def outdated(names: Iterable[str], results: Path) -> dict[str, str]:
    """Why, by section, for those whose results come from other code than that in the checkout."""
    why = {}
    for name in names:
        path = results / f"{name}.json"
        machine = json.loads(path.read_text())["machine"] if path.exists() else None
        if machine is not None and not is_current(machine):
            why[name] = f"{name} was measured at {name_commit(machine)} on {machine['at'][:10]}"
    return why


def refusal(why: dict[str, str]) -> str:
    """What a person is told about outdated results, and what to run."""
    again = ",".join(name for name in why if name in MINUTES)
    others = [f"python -m benchmarks.{name} --json benchmarks/results/{name}.json" for name in why if name not in MINUTES]
    commands = [*([f"make bench ONLY={again}"] if again else []), *others]
    lines = [*why.values(), "The code has changed since, so these tables are not written. Measure this code:", *commands]
    return "\n  ".join(lines)


def _table(results: Path, name: str, place: str | None, pictures: str = "results") -> str:
    path = results / f"{name}.json"
    if not path.exists():
        return "\nNot measured yet.\n\n"
    result = json.loads(path.read_text())
    grids = module(name).tables(result)
    chosen = grids if place is None else [grids[int(place)]]
    plot = f"![{name}]({pictures}/{name}.png)\n\n" if place is None and path.with_suffix(".png").exists() else ""
    made = "\n".join(grid.markdown() for grid in chosen)
    return f"\n{made}\n{describe_measurement(f'{name}.json', result['machine'])}\n\n{plot}"


def describe_measurement(file: str, machine: dict[str, Any]) -> str:
    """The line under a table: the file of its results, the machine, the day and the commit."""
    where = f"{machine['cpu']}, {machine['cores']} cores, {machine.get('pinned', 'nothing pinned')}"
    commit = f", {name_commit(machine)}" if "commit" in machine else ""
    said = f"{where}; {machine['at'][:10]}{commit}"
    warned = " **The machine was busy: trust the CPU seconds and the counts, not the clock.**" if disturbed(machine) else ""
    short = " A short run, only to see that it works." if machine.get("quick") else ""
    return f"<sub>`benchmarks/results/{file}`: {said}.{warned}{short}</sub>"


def write() -> dict[str, str]:
    """Writes the tables whose results are of the code in the checkout; returns why the others were not written, by section."""
    texts = {path: path.read_text() for path in FILES}
    why = outdated(sections(texts.values()), RESULTS)
    for path, text in texts.items():
        path.write_text(written(text, RESULTS, why))
        print(f"written: {path.relative_to(ROOT)}")
    return why


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write what is not as the results have it")
    if not parser.parse_args().write:
        print(render())
    elif why := write():
        raise SystemExit(refusal(why))


if __name__ == "__main__":
    main()
