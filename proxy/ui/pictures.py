"""Pictures: a session's tree as boxes and lines, and the rewards of a group.

In the tree time runs to the right and every branch has its own line. A *run* is a sequence of calls of which each continues the one
before. A small tree shows every call, a large one a box per run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from proxy.ui.conversation import CallSummary

EACH_CALL = 120
"""Up to so many calls are drawn one by one; of more, a run is one box."""
LONGEST = 48
"""The same for the longest path from a root to a leaf."""
MOST_RUNS = 300
STEP, LANE, RADIUS, MARGIN = 44, 38, 13, 22
WIDEST = 4
"""The most steps that the box of a run is wide."""


@dataclass(frozen=True, slots=True)
class Box:
    """A run of `count` calls, of which `quarantined` are."""

    first: CallSummary
    last: CallSummary
    count: int
    x: int
    y: int
    width: int
    quarantined: int

    @property
    def label(self) -> str:
        return str(self.first.number) if self.count == 1 else f"{self.count} calls"

    @property
    def title(self) -> str:
        line = self.first
        what = f"call {line.number}" if self.count == 1 else f"calls {line.number} to {self.last.number}"
        parts = [what, line.role, line.branch_reason and f"branch: {line.branch_reason}"]
        parts.append(f"{line.prompt_tokens} + {line.sampled_tokens} tokens" if self.count == 1 else "")
        parts.append(f"{self.quarantined} quarantined" if self.quarantined and self.count > 1 else line.quarantine_reason)
        parts.append(f"worth {line.value} ({line.value.samples} forks)" if self.count == 1 and line.value else "")
        return ", ".join(part for part in parts if part)


@dataclass(frozen=True, slots=True)
class TreePicture:
    """`left_out` counts the calls in no box."""

    boxes: Sequence[Box]
    lines: Sequence[str]
    width: int
    height: int
    left_out: int


def draw_tree(lines: Sequence[CallSummary]) -> TreePicture:
    children = _children(lines)
    depth = _depth(lines)
    split = len(lines) <= EACH_CALL and depth <= LONGEST
    boxes: list[Box] = []
    drawn: list[str] = []
    left = [(line, 0, None) for line in reversed(children[""])]
    pending: list[tuple[CallSummary, int, Box | None]] = list(left)
    lanes = 0
    while pending and len(boxes) < MOST_RUNS:
        line, column, parent = pending.pop()
        run = [line] if split else _find_run(line, children)
        # The first child of a box stays in its lane; every other one gets a new lane.
        straight = parent is not None and not any(box.y == parent.y and box.x > parent.x for box in boxes)
        lane = (parent.y - MARGIN) // LANE if parent is not None and straight else lanes
        lanes = max(lanes, lane + 1)
        box = _box(run, column, lane)
        boxes.append(box)
        if parent is not None:
            drawn.append(_connect(parent, box))
        after = column + (box.width + STEP - 1) // STEP
        pending += [(child, after, box) for child in reversed(children.get(run[-1].call_id, []))]
    width = max((box.x + box.width for box in boxes), default=0) + MARGIN
    return TreePicture(boxes, drawn, width, lanes * LANE + MARGIN // 2, len(lines) - sum(box.count for box in boxes))


def _children(lines: Sequence[CallSummary]) -> dict[str, list[CallSummary]]:
    """By parent, continuations before branches. Calls whose parent is unknown are roots, under ""."""
    known = {line.call_id for line in lines}
    found: dict[str, list[CallSummary]] = {"": []}
    for line in lines:
        found.setdefault(line.parent_id if line.parent_id in known and line.parent_id else "", []).append(line)
    for each in found.values():
        each.sort(key=lambda line: (bool(line.branch_reason), line.number))
    return found


def _depth(lines: Sequence[CallSummary]) -> int:
    depths: dict[str, int] = {}
    for line in lines:
        depths[line.call_id] = depths.get(line.parent_id or "", 0) + 1
    return max(depths.values(), default=0)


def _find_run(line: CallSummary, children: dict[str, list[CallSummary]]) -> list[CallSummary]:
    """The call and those that continue it, up to where the tree branches."""
    run = [line]
    while len(following := children.get(run[-1].call_id, [])) == 1 and not following[0].branch_reason:
        run.append(following[0])
    return run


def _box(run: Sequence[CallSummary], column: int, lane: int) -> Box:
    steps = 1 if len(run) == 1 else min(WIDEST, 2 + len(run) // 25)
    width = 2 * RADIUS + (steps - 1) * STEP
    x, y = MARGIN + column * STEP, MARGIN + lane * LANE
    return Box(run[0], run[-1], len(run), x, y, width, sum(bool(line.quarantine_reason) for line in run))


def _connect(parent: Box, child: Box) -> str:
    """The SVG path from the parent's right end to the child's left one."""
    x, end = parent.x + parent.width - RADIUS, child.x - RADIUS
    if parent.y == child.y:
        return f"M{x} {parent.y}H{end}"
    turn = min(x + RADIUS, end)
    return f"M{x} {parent.y}C{turn} {parent.y} {x} {child.y} {end} {child.y}"


# The rewards of a group: statistics, a strip of dots, a histogram.


BARS = 12
WIDTH, HEIGHT = 240, 26
TALL = 90
DOT_RADIUS = 5


@dataclass(frozen=True, slots=True)
class Dot:
    x: float
    y: float
    name: str
    reward: float


@dataclass(frozen=True, slots=True)
class Bar:
    """`x` to `x + width` represents rewards from `low` to `high`."""

    x: float
    width: float
    height: float
    count: int
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Rewards:
    """`values`: session ids and rewards, of sessions that have one. `spread` is the population's standard deviation."""

    values: Sequence[tuple[str, float]]
    low: float
    high: float
    mean: float
    spread: float

    @classmethod
    def of(cls, given: Iterable[tuple[str, float | None]]) -> Rewards | None:
        """None if no reward is finite."""
        values = [(name, reward) for name, reward in given if reward is not None and math.isfinite(reward)]
        if not values:
            return None
        numbers = [reward for _, reward in values]
        mean = math.fsum(number / len(numbers) for number in numbers)
        spread = math.hypot(*(number - mean for number in numbers)) / math.sqrt(len(numbers))
        return cls(values, min(numbers), max(numbers), mean, spread)

    @property
    def flat(self) -> bool:
        """Whether all are equal, so that comparing them teaches nothing."""
        return self.low == self.high

    @property
    def ends(self) -> tuple[str, str]:
        """The ids of a session with the lowest and of one with the highest reward."""
        ordered = sorted(self.values, key=lambda each: each[1])
        return ordered[0][0], ordered[-1][0]

    def advantages(self) -> dict[str, tuple[float, float]]:
        """By session: its reward minus the mean, and that over the sample's deviation, as GRPO has it. 0 for all that are equal."""
        deviation = self.spread * math.sqrt(len(self.values) / max(1, len(self.values) - 1))
        centred = ((name, reward - self.mean) for name, reward in self.values)
        return {name: (0.0, 0.0) if self.flat else (each, each / (deviation + 1e-6)) for name, each in centred}

    def dots(self) -> list[Dot]:
        """One per session, lowest first. Equal ones are stacked, the closer together the more there are, so that each is whole."""
        columns: dict[int, list[tuple[str, float]]] = {}
        for name, reward in sorted(self.values, key=lambda each: each[1]):
            columns.setdefault(round(self._place_dot(reward) / (2 * DOT_RADIUS)), []).append((name, reward))
        dots = []
        for stacked in columns.values():
            step = min(DOT_RADIUS, (HEIGHT - 2 * DOT_RADIUS - 2) / max(1, len(stacked) - 1))
            for at, (name, reward) in enumerate(stacked):
                dots.append(Dot(round(self._place_dot(reward), 1), round(HEIGHT - DOT_RADIUS - 1 - at * step, 1), name, reward))
        return dots

    def _place_dot(self, reward: float) -> float:
        return DOT_RADIUS + self._place(reward) * (WIDTH - 2 * DOT_RADIUS)

    def bars(self) -> list[Bar]:
        """The histogram, left to right; rewards that are all equal are one bar in the middle of as many places."""
        count = 1 if self.flat else BARS
        heights = [0] * count
        for _, reward in self.values:
            heights[min(count - 1, int(self._place(reward) * count))] += 1
        step, tallest = (self.high - self.low) / count, max(heights)
        width = WIDTH / BARS
        first = (WIDTH - width * count) / 2
        return [
            Bar(
                round(first + at * width, 1),
                round(width - 2, 1),
                round(height / tallest * TALL, 1),
                height,
                self.low + at * step,
                self.low + (at + 1) * step,
            )
            for at, height in enumerate(heights)
        ]

    def _place(self, reward: float) -> float:
        """From 0 at the lowest to 1 at the highest; 0.5 if all are equal."""
        if self.flat:
            return 0.5
        # Halved first: the difference of the largest floats overflows.
        return (reward / 2 - self.low / 2) / (self.high / 2 - self.low / 2)
