"""The versions of engines that were run, and their table in docs/engines.md: a run writes its row, the page shows what the rows say.

    record(Run("vLLM", "0.31.0", "token", plugin=False, sessions=18, exact=18, logprob_difference=2e-6, pushes=("keep",), at="2026-11-28"))

python -m tests.support.documents.engine_versions --write     without --write: only says whether the page has the rows
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tests import ROOT

RUNS = ROOT / "docs" / "results" / "engine_versions.json"
PAGE = ROOT / "docs" / "engines.md"
COMMAND = "python -m tests.support.documents.engine_versions --write"

_TABLE = re.compile(r"(<!-- table: engine versions -->\n).*?(<!-- end of table -->)", re.DOTALL)
_COLUMNS = ("engine", "path", "plugin", "sessions exact", "largest logprob difference", "pushes", "run on")


@dataclass(frozen=True, slots=True)
class Run:
    """One version of an engine on one path. `sessions` were played, and `exact` of them recorded exactly the ids that were sampled, with
    logprobs that differ at most by `logprob_difference` from those recomputed in float32 (None: not compared). `pushes` are the modes in
    which weights were pushed and then sampled from. `at` is the day, as 2026-11-28."""

    engine: str
    version: str
    path: str
    plugin: bool
    sessions: int
    exact: int
    logprob_difference: float | None
    pushes: tuple[str, ...]
    at: str

    @property
    def key(self) -> tuple[str, str, str, bool]:
        """What a later run replaces."""
        return self.engine, self.version, self.path, self.plugin


def read_runs(path: Path = RUNS) -> list[Run]:
    if not path.exists():
        return []
    return [Run(**{**row, "pushes": tuple(row["pushes"])}) for row in json.loads(path.read_text())]


def record(run: Run, path: Path = RUNS) -> None:
    """Write the run in place of an earlier one of the same version, path and plugin."""
    runs = sorted([each for each in read_runs(path) if each.key != run.key] + [run], key=_order)
    path.write_text("[\n" + ",\n".join(f"  {json.dumps(asdict(each))}" for each in runs) + "\n]\n")


def write_table(text: str, runs: Sequence[Run]) -> str:
    """The page with the table of these runs."""
    rows = [_COLUMNS, tuple("---" for _ in _COLUMNS), *map(_cells, runs)] if runs else []
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows) or "No version was run yet."
    made, marks = _TABLE.subn(lambda found: f"{found[1]}\n{table}\n\n{found[2]}", text)
    if marks != 1:
        raise ValueError(f"the page has {marks} pairs of marks for the table of engine versions, not one")
    return made


def _cells(run: Run) -> tuple[str, ...]:
    difference = "not compared" if run.logprob_difference is None else f"{run.logprob_difference:.1e}"
    sessions, pushes = f"{run.exact} of {run.sessions}", ", ".join(run.pushes) or "none"
    return f"{run.engine} {run.version}", f"`{run.path}`", "yes" if run.plugin else "no", sessions, difference, pushes, run.at


def _order(run: Run) -> tuple[str, list[int], str, bool]:
    """Engines by name, newest versions first."""
    return run.engine, [-int(number) for number in re.findall(r"\d+", run.version)], run.path, not run.plugin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the page")
    text = PAGE.read_text()
    made = write_table(text, read_runs())
    if parser.parse_args().write:
        PAGE.write_text(made)
    elif made != text:
        raise SystemExit(f"{PAGE.relative_to(ROOT)} is not what the runs say: {COMMAND}")


if __name__ == "__main__":
    main()
