"""What a page of Prometheus text says, as far as it is read here: series and their values. Comments are left out."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_SERIES = re.compile(r'([a-zA-Z_:][\w:]*)(?:\{((?:[^"}]|"(?:[^"\\]|\\.)*")*)\})? +(\S+)')
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_ESCAPED = re.compile(r"\\(.)")
_MEANT = {"n": "\n"}


@dataclass(frozen=True, slots=True)
class Series:
    labels: Mapping[str, str]
    value: float


class Exposition:
    def __init__(self, page: str) -> None:
        self._found: dict[str, list[Series]] = {}
        for line in page.splitlines():
            if (match := _SERIES.match(line)) is not None:
                name, labels, value = match.groups()
                self._found.setdefault(name, []).append(Series(_labels(labels or ""), float(value)))

    def __contains__(self, name: str) -> bool:
        return name in self._found

    def series(self, name: str) -> Sequence[Series]:
        return self._found.get(name, ())

    def total(self, name: str, **labels: str) -> float:
        """The sum of the series that have these labels; 0 where there are none."""
        return sum(series.value for series in self.series(name) if labels.items() <= series.labels.items())

    def by(self, name: str, label: str) -> dict[str, float]:
        """The value of each series by what it has for the label."""
        return {series.labels.get(label, ""): series.value for series in self.series(name)}


def _labels(text: str) -> dict[str, str]:
    return {name: _ESCAPED.sub(lambda found: _MEANT.get(found[1], found[1]), value) for name, value in _LABEL.findall(text)}
