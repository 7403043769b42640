"""The charts of runs: one run with several measures in a chart, or several runs laid over each other with one.

A chart is an SVG that the template draws: lines, a band, ticks, and spots where a pointer finds the numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from proxy.api.run import measure_elapsed
from proxy.store.run import OVER_TIME, Axis, Curve, Point, merge
from proxy.ui.rendering import format_count, format_number


def thin(points: Sequence[Point], width: int, most: int) -> tuple[list[Point], int]:
    """At most so many points, each of which adds up those of an interval, and how wide that is."""
    thinned, wider = thin_all({"": points}, width, most)
    return thinned[""], wider


def thin_all(runs: Mapping[str, Sequence[Point]], width: int, most: int) -> tuple[dict[str, list[Point]], int]:
    """As `thin`, each run with the same intervals. Points may be in any order, and several of one start."""
    starts = [point.start for points in runs.values() for point in points]
    if not starts:
        return {run: [] for run in runs}, width
    first = min(starts)
    wider = width * math.ceil((max(starts) + width - first) / (width * most)) if width else 1
    thinned: dict[str, list[Point]] = {}
    for run, points in runs.items():
        parts: dict[int, list[Point]] = {}
        for point in points:
            parts.setdefault(first + (point.start - first) // wider * wider, []).append(point)
        thinned[run] = [Point(start, add_up(parts[start]).sums) for start in sorted(parts)]
    return thinned, wider


def add_up(points: Sequence[Point]) -> Point:
    """Their sums as one point."""
    summed = merge([Curve("", "", [Point(0, point.sums)]) for point in points])
    return summed[0] if summed else Point(0)


WIDTH, HEIGHT = 520, 170
LEFT, RIGHT, TOP, BOTTOM = 46, 8, 8, 20
SPARK_WIDTH, SPARK_HEIGHT = 140, 24

Value = Callable[[Point], float | None]


@dataclass(frozen=True, slots=True)
class Line:
    """`mark` is its class in the style sheet, `last` its newest value."""

    name: str
    mark: str
    path: str
    last: str


@dataclass(frozen=True, slots=True)
class Spot:
    """Where a pointer finds the numbers of one point."""

    x: float
    width: float
    text: str


@dataclass(frozen=True, slots=True)
class Chart:
    """Lines in a box of WIDTH x HEIGHT. `ticks` are (y, text) and `starts` (x, text, anchor)."""

    title: str
    lines: Sequence[Line]
    band: str
    ticks: Sequence[tuple[float, str]]
    starts: Sequence[tuple[float, str, str]]
    spots: Sequence[Spot]
    wide: bool = False

    @property
    def summary(self) -> str:
        """For those who do not see it."""
        newest = ", ".join(f"{line.name} {line.last}" for line in self.lines)
        return f"{self.title}, {len(self.spots)} points. Newest: {newest}"


def draw_charts(axis: Axis, points: Sequence[Point], width: int, now: float) -> list[Chart]:
    """Of points that are `width` weight versions or seconds wide. Nothing where nothing is counted."""
    if not points:
        return []

    def hourly(name: str, seconds: int) -> Value:
        def measure(point: Point) -> float | None:
            elapsed = measure_elapsed(axis, point.start, now, width)
            return point.count(name) * seconds / elapsed if elapsed else None

        return measure

    reward: list[tuple[str, str, Value]] = [
        ("mean", "main", lambda point: point.reward),
        ("median", "second", lambda point: point.quantile(0.5)),
    ]
    charts = [_draw(axis, "Reward", points, reward, (0.1, 0.9))]
    plain: list[tuple[str, list[tuple[str, str, Value]]]] = [
        ("Share solved", [("solved", "main", lambda point: point.solved)]),
        (
            "Share of rollouts",
            [
                ("truncated", "main", lambda point: point.truncated),
                ("timed out", "second", lambda point: point.timed_out),
                ("failed", "third", lambda point: point.failed),
            ],
        ),
        ("Share of groups with equal rewards", [("equal", "main", lambda point: point.equal_groups)]),
        ("Share of rewards that are 0", [("zero", "main", lambda point: point.zero_rewards)]),
        (
            "Share of tokens lost, and of incomplete rollouts",
            [("tokens lost", "main", lambda point: point.lost), ("incomplete", "third", lambda point: point.incomplete)],
        ),
        ("Share of calls with an invalid tool call", [("invalid", "main", lambda point: point.invalid_tool_calls)]),
        ("Tokens sampled per rollout", [("tokens", "main", lambda point: point.tokens)]),
        ("Calls per rollout", [("calls", "main", lambda point: point.calls)]),
        ("Seconds per rollout", [("seconds", "main", lambda point: point.seconds)]),
        ("Staleness in weight versions", [("versions behind", "main", lambda point: point.staleness)]),
    ]
    if axis in OVER_TIME:
        plain.append(("Rollouts per hour", [("rollouts", "main", hourly("rollouts", 3600))]))
        plain.append(("Tokens sampled per second", [("tokens", "main", hourly("sampled_tokens", 1))]))
    else:
        plain.append(
            (
                f"Rollouts per {width} weight versions" if width > 1 else "Rollouts per weight version",
                [("rollouts", "main", lambda point: float(point.rollouts))],
            )
        )
    return charts + [_draw(axis, title, points, lines) for title, lines in plain]


OVERLAID: Sequence[tuple[str, Value]] = (
    ("Reward, mean", lambda point: point.reward),
    ("Share solved", lambda point: point.solved),
    ("Share of rewards that are 0", lambda point: point.zero_rewards),
    ("Share of groups with equal rewards", lambda point: point.equal_groups),
    ("Share of tokens lost", lambda point: point.lost),
    ("Share of rollouts truncated", lambda point: point.truncated),
    ("Share of rollouts failed", lambda point: point.failed),
    ("Tokens sampled per rollout", lambda point: point.tokens),
    ("Calls per rollout", lambda point: point.calls),
    ("Seconds per rollout", lambda point: point.seconds),
    ("Staleness in weight versions", lambda point: point.staleness),
    ("Rollouts", lambda point: float(point.rollouts)),
)
"""What is compared between runs: one measure a chart."""


def overlay_charts(axis: Axis, runs: Mapping[str, Sequence[Point]]) -> list[Chart]:
    """A line per run. Lines connect a run's own points: where another run has one, there is no gap."""
    runs = {run: points for run, points in runs.items() if points}
    starts = sorted({point.start for points in runs.values() for point in points})
    return [_overlay(axis, title, runs, starts, measure) for title, measure in OVERLAID] if starts else []


def _overlay(axis: Axis, title: str, runs: Mapping[str, Sequence[Point]], starts: Sequence[int], measure: Value) -> Chart:
    values = {run: {point.start: _measure(measure, point) for point in points} for run, points in runs.items()}
    known = [value for each in values.values() for value in each.values() if value is not None]
    ticks = choose_ticks(min([0.0, *known]), max([*known, 0.0 if any(known) else 1.0]))
    places = {start: _scale(start, starts[0], starts[-1], LEFT, WIDTH - RIGHT) for start in starts}
    frame = Frame([places[start] for start in starts], ticks[0], ticks[-1])
    lines = [
        Line(
            run,
            f"run{at}",
            _path([places[start] for start in each], [frame.place(value) for value in each.values()]),
            tell([*each.values()][-1]),
        )
        for at, (run, each) in enumerate(values.items())
    ]
    spots = []
    for at, start in enumerate(starts):
        left, right = frame.reach(at)
        told = ", ".join(f"{run} {tell(each[start])}" for run, each in values.items() if start in each)
        spots.append(Spot(round(left, 1), round(max(1.0, right - left), 1), f"{tell_start(axis, start)}: {told}"))
    marks = [(round(frame.place(tick) or 0.0, 1), tell(tick)) for tick in ticks]
    return Chart(title, lines, "", marks, _tell_ends(axis, [Point(start) for start in starts]), spots)


@dataclass(frozen=True, slots=True)
class Frame:
    """Where points and values stand in a chart."""

    xs: Sequence[float]
    low: float
    high: float

    def place(self, value: float | None) -> float | None:
        return None if value is None else _scale(value, self.low, self.high, HEIGHT - BOTTOM, TOP)

    def reach(self, at: int) -> tuple[float, float]:
        """From where to where a pointer is nearest to a point."""
        left = (self.xs[at - 1] + self.xs[at]) / 2 if at else LEFT
        right = (self.xs[at] + self.xs[at + 1]) / 2 if at + 1 < len(self.xs) else WIDTH - RIGHT
        return left, right


def _draw(
    axis: Axis, title: str, points: Sequence[Point], wanted: Sequence[tuple[str, str, Value]], shares: Sequence[float] = ()
) -> Chart:
    """`shares` are the quantiles of the reward between which there is a band; the chart that has one is the wide one."""
    values = [[_measure(measure, point) for point in points] for _, _, measure in wanted]
    edges = [[point.quantile(share) for point in points] for share in shares]
    known = [value for each in (*values, *edges) for value in each if value is not None]
    # A curve of zeros is a line at the foot of its chart.
    ticks = choose_ticks(min([0.0, *known]), max([*known, 0.0 if any(known) else 1.0]))
    starts = [point.start for point in points]
    frame = Frame([_scale(start, starts[0], starts[-1], LEFT, WIDTH - RIGHT) for start in starts], ticks[0], ticks[-1])
    lines = [
        Line(name, mark, _path(frame.xs, [frame.place(value) for value in each]), tell(each[-1]))
        for (name, mark, _), each in zip(wanted, values, strict=True)
    ]
    named = [*zip((line.name for line in lines), values, strict=True)]
    named += [(f"p{100 * share:.0f}", each) for share, each in zip(shares, edges, strict=True)]
    return Chart(
        title,
        lines,
        _area(frame, *edges) if edges else "",
        [(round(frame.place(tick) or 0.0, 1), tell(tick)) for tick in ticks],
        _tell_ends(axis, points),
        [_spot(axis, frame, at, point, named) for at, point in enumerate(points)],
        bool(edges),
    )


def _measure(measure: Value, point: Point) -> float | None:
    value = measure(point)
    return value if value is not None and math.isfinite(value) else None


def _spot(axis: Axis, frame: Frame, at: int, point: Point, named: Sequence[tuple[str, Sequence[float | None]]]) -> Spot:
    left, right = frame.reach(at)
    told = ", ".join(f"{name} {tell(values[at])}" for name, values in named)
    text = f"{tell_start(axis, point.start)}: {told}, of {point.rollouts} rollouts"
    return Spot(round(left, 1), round(max(1.0, right - left), 1), text)


def tell(value: float | None) -> str:
    """To three digits, and large numbers whole."""
    return format_count(round(value)) if value is not None and abs(value) >= 100 else format_number(value, 3)


def choose_ticks(low: float, high: float) -> list[float]:
    """Three to six round numbers from `low` or below to `high` or above."""
    span = (high - low) or 1.0
    step = 10.0 ** math.floor(math.log10(span / 3))
    step = next(step * factor for factor in (1, 2, 5, 10) if span / (step * factor) <= 4)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(at * step, 12) for at in range(first, last + 1)]


def tell_start(axis: Axis, start: int) -> str:
    if axis in OVER_TIME:
        return datetime.fromtimestamp(start, UTC).strftime("%Y-%m-%d %H:%M UTC")
    return f"version {start}"


def _tell_ends(axis: Axis, points: Sequence[Point]) -> list[tuple[float, str, str]]:
    ends = [(LEFT, tell_start(axis, points[0].start), "start")]
    if len(points) > 1:
        ends.append((WIDTH - RIGHT, tell_start(axis, points[-1].start), "end"))
    return [(float(x), text, anchor) for x, text, anchor in ends]


def _scale(value: float, low: float, high: float, first: float, last: float) -> float:
    """Where `value` is between `first` and `last`; the middle where there is but one value."""
    return (first + last) / 2 if high == low else first + (value - low) / (high - low) * (last - first)


def _path(xs: Sequence[float], ys: Sequence[float | None]) -> str:
    """A line that stops at gaps; a point without neighbours is a short dash, so that it can be seen."""
    path, pen = [], False
    for at, (x, y) in enumerate(zip(xs, ys, strict=True)):
        if y is None:
            pen = False
            continue
        path.append(f"{'L' if pen else 'M'}{x:.1f} {y:.1f}")
        if not pen and (at + 1 == len(ys) or ys[at + 1] is None):
            path.append("h2")
        pen = True
    return "".join(path)


def _area(frame: Frame, bottoms: Sequence[float | None], tops: Sequence[float | None]) -> str:
    """The band between two lines."""
    edges = [
        (x, frame.place(bottom), frame.place(top))
        for x, bottom, top in zip(frame.xs, bottoms, tops, strict=True)
        if bottom is not None and top is not None
    ]
    there = [f"{x:.1f} {bottom:.1f}" for x, bottom, _ in edges]
    back = [f"{x:.1f} {top:.1f}" for x, _, top in reversed(edges)]
    return "M" + "L".join(there + back) + "Z" if len(edges) > 1 else ""


def draw_spark(points: Sequence[Point]) -> str:
    known = [(point.start, point.reward) for point in points if point.reward is not None]
    if not known:
        return ""
    low, high = min(0.0, *(reward for _, reward in known)), max(reward for _, reward in known)
    xs = [_scale(start, known[0][0], known[-1][0], 2, SPARK_WIDTH - 2) for start, _ in known]
    return _path(xs, [_scale(reward, low, high, SPARK_HEIGHT - 2, 2) for _, reward in known])
