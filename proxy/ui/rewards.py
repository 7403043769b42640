"""Rewards of a group as numbers and as pictures: a strip of dots and a histogram."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

BARS = 12
WIDTH, HEIGHT = 240, 26
TALL = 90
RADIUS = 5


@dataclass(frozen=True, slots=True)
class Dot:
    x: float
    y: float
    name: str
    reward: float


@dataclass(frozen=True, slots=True)
class Bar:
    """`x` to `x + width` stands for rewards from `low` to `high`."""

    x: float
    width: float
    height: float
    count: int
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Rewards:
    """Of `values`, those of sessions that have one, by session id. `spread` is the population's standard deviation."""

    values: Sequence[tuple[str, float]]
    low: float
    high: float
    mean: float
    spread: float

    @classmethod
    def of(cls, given: Iterable[tuple[str, float | None]]) -> Rewards | None:
        """None where there is not one finite reward."""
        values = [(name, reward) for name, reward in given if reward is not None and math.isfinite(reward)]
        if not values:
            return None
        numbers = [reward for _, reward in values]
        mean = math.fsum(number / len(numbers) for number in numbers)
        spread = math.hypot(*(number - mean for number in numbers)) / math.sqrt(len(numbers))
        return cls(values, min(numbers), max(numbers), mean, spread)

    @property
    def flat(self) -> bool:
        """Whether all are equal: then a group teaches nothing by comparison."""
        return self.low == self.high

    @property
    def ends(self) -> tuple[str, str]:
        """The ids of a session with the lowest and of one with the highest reward."""
        ordered = sorted(self.values, key=lambda each: each[1])
        return ordered[0][0], ordered[-1][0]

    def dots(self) -> list[Dot]:
        """One per session from left (lowest) to right, equal ones on top of each other as far as there is room."""
        piled: dict[int, int] = {}
        dots = []
        for name, reward in sorted(self.values, key=lambda each: each[1]):
            x = RADIUS + self._place(reward) * (WIDTH - 2 * RADIUS)
            column = round(x / (2 * RADIUS))
            height = piled[column] = piled.get(column, 0) + 1
            dots.append(Dot(round(x, 1), round(HEIGHT - RADIUS - min(height - 1, 4) * RADIUS, 1), name, reward))
        return dots

    def bars(self) -> list[Bar]:
        """The histogram, left to right."""
        count = 1 if self.flat else BARS
        heights = [0] * count
        for _, reward in self.values:
            heights[min(count - 1, int(self._place(reward) * count))] += 1
        step, tallest = (self.high - self.low) / count, max(heights)
        width = WIDTH / count
        return [
            Bar(
                round(at * width, 1),
                round(width - 2, 1),
                round(height / tallest * TALL, 1),
                height,
                self.low + at * step,
                self.low + (at + 1) * step,
            )
            for at, height in enumerate(heights)
        ]

    def _place(self, reward: float) -> float:
        """From 0 at the lowest to 1 at the highest; the middle where there is but one."""
        if self.flat:
            return 0.5
        # Halved, the difference of the largest numbers is a number, too.
        return (reward / 2 - self.low / 2) / (self.high / 2 - self.low / 2)
