"""The study: three seeds with pushes, one without and one with shuffled rewards: `python -m examples.pretrained.study`.

They run one after the other, all from the policy of the first one's warm start. Repeated, the command goes on where it was. It ends with a
picture and a table.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from examples.demo.processes import ROOT
from examples.learn.agents import AGENTS
from examples.pretrained.curves import RESULTS, draw_curves
from examples.pretrained.journal import Journal

RUNS: Mapping[str, Sequence[str]] = {
    "seed-0": ("--seed", "0"),
    "seed-1": ("--seed", "1"),
    "seed-2": ("--seed", "2"),
    "no-push": ("--seed", "0", "--no-push"),
    "shuffled": ("--seed", "0", "--shuffle-rewards"),
}


def show_runs(console: Console, folders: Sequence[Path]) -> None:
    """Success on held-out exercises before and after, and what became of the tokens."""
    table = Table(title="Held-out exercises solved", title_justify="left")
    for name in ("run", "steps", "before", "after", "sampled", "exported", "quarantined", "largest difference", "hours"):
        table.add_column(name)
    for folder in folders:
        journal = Journal(folder / RESULTS)
        if not (tried := journal.read("held-out")):
            continue
        steps, lines = journal.read("step"), journal.read()
        seconds = sum(sum(line["seconds"].values()) for line in lines if line["event"] != "push")
        tokens = (f"{sum(line[f'{name}_tokens'] for line in steps):,}" for name in ("sampled", "exported", "quarantined"))
        largest = f"{max((line['largest_difference'] for line in steps), default=0.0):.1e}"
        ends = (f"{tried[0]['reward']:.3f}", f"{tried[-1]['reward']:.3f}")
        table.add_row(folder.name, str(journal.done), *ends, *tokens, largest, f"{seconds / 3600:.2f}")
    console.print(table)


def main(
    agent: Annotated[str, typer.Option(help=" or ".join(AGENTS))] = "mini-swe-agent",
    runs: Annotated[str, typer.Option(help="Which, with commas.")] = ",".join(RUNS),
    out: Annotated[Path | None, typer.Option(help="Default: demo-out-study-AGENT.")] = None,
    flags: Annotated[
        list[str] | None, typer.Argument(help="After --: flags of `examples.pretrained.run` for every run.")
    ] = None,
) -> None:
    """Run what is not done yet, and show all of it. Exit code 0: every run came to its end."""
    folder = (out or Path(f"demo-out-study-{agent}")).resolve()
    if unknown := set(names := runs.split(",")) - RUNS.keys():
        raise typer.BadParameter(f"{', '.join(sorted(unknown))}: there are {', '.join(RUNS)}", param_hint="--runs")
    for name in names:
        words = ["--agent", agent, "--out", str(folder / name), *RUNS[name], *(flags or [])]
        if name != names[0]:
            words += ["--warm-start", str(folder / names[0] / "warm")]
        if (folder / name / "run.json").exists():
            words.append("--resume")
        code = subprocess.run([sys.executable, "-m", "examples.pretrained.run", *words], cwd=ROOT).returncode
        if code:
            sys.exit(code)
    done = [folder / name for name in RUNS if (folder / name / RESULTS).exists()]
    draw_curves(folder / "curves.png", done)
    show_runs(Console(), done)


if __name__ == "__main__":
    typer.run(main)
