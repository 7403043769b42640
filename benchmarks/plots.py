"""Plots of results as PNG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

Spread = Mapping[str, float] | None


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def bars(
    path: Path,
    title: str,
    groups: Sequence[str],
    series: Mapping[str, Sequence[Spread]],
    scale: Literal["log", "linear"] = "log",
) -> None:
    """A group of bars per entry of `groups`, a bar per series, from least to most a line."""
    pyplot = _pyplot()
    figure, axis = pyplot.subplots(figsize=(11, 4.8))
    width = 0.8 / len(series)
    for place, (name, values) in enumerate(series.items()):
        there = [(group + (place + 0.5) * width - 0.4, value) for group, value in enumerate(values) if value is not None]
        if not there:
            continue
        at, found = zip(*there, strict=True)
        medians = [value["median"] for value in found]
        off = [[value["median"] - value["least"] for value in found], [value["most"] - value["median"] for value in found]]
        axis.bar(at, medians, width, yerr=off, label=name, capsize=2)
        for where, median in zip(at, medians, strict=True):
            axis.annotate(
                f"{median:,.3g}" if median < 100 else f"{median:,.0f}", (where, median), ha="center", va="bottom", fontsize=7
            )
    axis.set(title=title, yscale=scale, xticks=range(len(groups)), xticklabels=groups)
    axis.legend(fontsize=8)
    _save(figure, path)


def lines(path: Path, panels: Sequence[tuple[str, str, str, Mapping[str, Sequence[tuple[float, float]]]]]) -> None:
    """Panels side by side, each (title, name of x, name of y, points by series); every axis begins at zero."""
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(1, len(panels), figsize=(5.5 * len(panels), 4.2), squeeze=False)
    for axis, (title, x, y, series) in zip(axes[0], panels, strict=True):
        for name, points in series.items():
            axis.plot([point[0] for point in points], [point[1] for point in points], "o-", label=name, markersize=4)
        axis.set(title=title, xlabel=x, ylabel=y, xlim=(0, None))
        axis.set_ylim(0, 1.05 * axis.get_ylim()[1])
        axis.legend(fontsize=8)
    _save(figure, path)


def _save(figure: Any, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, dpi=110, metadata={"Software": None})
    _pyplot().close(figure)
