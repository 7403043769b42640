"""The curves of runs: reward on training exercises and success on held-out ones, as a picture.

python -m examples.pretrained.curves --out curves.png demo-out-study-pi/*
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from examples.pretrained.journal import Journal

RESULTS = "results.jsonl"


def draw_curves(path: Path, runs: Sequence[Path]) -> None:
    """Write a PNG of the runs, which are named as their folders."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, both = pyplot.subplots(1, 2, figsize=(11, 4.5), dpi=150, layout="constrained", sharey=True)
    for axes, event, title in zip(both, ("step", "held-out"), ("training exercises", "held-out exercises"), strict=True):
        for run in runs:
            _draw(axes, run, event)
        axes.set(title=title, xlabel="training step", ylim=(0, 1.03))
        axes.grid(alpha=0.3)
    both[0].set_ylabel("solved")
    both[1].legend(loc="best")
    figure.savefig(path)
    pyplot.close(figure)


def _draw(axes: Any, run: Path, event: str) -> None:
    lines = Journal(run / RESULTS).read(event)
    axes.plot([line["step"] for line in lines], [line["reward"] for line in lines], marker="o", markersize=4, label=run.name)


def main(runs: Annotated[list[Path], typer.Argument()], out: Annotated[Path, typer.Option()] = Path("curves.png")) -> None:
    """Draw the curves of the runs in these folders."""
    draw_curves(out, runs)


if __name__ == "__main__":
    typer.run(main)
