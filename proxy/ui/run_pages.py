"""The page of the run: is the reward rising, and what goes wrong, over weight versions and over time."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from fastapi.routing import APIRoute

from proxy.api.run import answer_run, measure_elapsed
from proxy.errors import NotFound
from proxy.store.run import OVER_TIME, WIDTHS, Axis, Curve, Point, merge
from proxy.ui.rendering import HEADERS, format_count, format_number, page
from proxy.ui.shown import Shown

MOST_POINTS = 80
"""Points of a chart; neighbours are added up where there are more."""
MOST_SPARKS = 40
NUMBERS_SHOWN = 25
SHOWN_AXES: dict[Axis, str] = {
    "version": "each weight version",
    "versions": "every 20 weight versions",
    "minute": "minutes",
    "quarter": "quarters of an hour",
    "hours": "six hours",
}
FILES = {"run.csv": "csv", "run.json": "json"}
ALL = "*"
"""Stands for all labels in the address; "" is what has none."""

Text = Annotated[str, Query(max_length=500)]


def routes(kind: type[APIRoute]) -> APIRouter:
    router = APIRouter(prefix="/ui", route_class=kind)
    router.add_api_route("/run", run, methods=["GET"])
    router.add_api_route("/run/{name}", run_file, methods=["GET"])
    return router


async def run(request: Request, ui: Shown, axis: Axis = "version", policy: Text = "", label: Text = ALL) -> Response:
    delivery, now = ui.services.delivery, await ui.services.clock.now()
    every, totals = await delivery.load_curves(axis), await delivery.load_curves("all")
    policies = sorted({curve.policy for curve in totals})
    policy = policy if policy in policies or not policies else policies[0]
    every, totals = ([curve for curve in curves if curve.policy == policy] for curves in (every, totals))
    shown = await asyncio.to_thread(describe_run, axis, every, totals, label, now)
    return await page(
        request,
        "run.html",
        axis=axis,
        axes=SHOWN_AXES,
        policies=policies,
        policy=policy,
        label=label,
        tell=tell,
        live=True,
        **shown,
    )


def describe_run(axis: Axis, curves: Sequence[Curve], totals: Sequence[Curve], label: str, now: float) -> dict[str, Any]:
    """What the page shows of one policy's curves; `label` ALL: of all of them together."""
    points = merge(curve for curve in curves if label in (ALL, curve.label))
    drawn, width = thin(points, WIDTHS[axis], MOST_POINTS)
    return {
        "labels": describe_labels(axis, curves, totals),
        "whole": add_up([point for curve in totals if label in (ALL, curve.label) for point in curve.points]),
        "trend": measure_trend(points),
        "charts": draw_charts(axis, drawn, width, now),
        "newest": [(tell_start(axis, point.start), point) for point in drawn[: -NUMBERS_SHOWN - 1 : -1]],
    }


async def run_file(ui: Shown, name: str, axis: Axis = "version", by_label: bool = True) -> Response:
    if name not in FILES:
        raise NotFound(f"there is no download {name}; there are: {', '.join(FILES)}")
    answer = await answer_run(ui.services, axis, FILES[name], by_label=by_label)
    answer.headers.update({**HEADERS, "content-disposition": f'attachment; filename="{name}"'})
    return answer


# What the charts are made from.


def thin(points: Sequence[Point], width: int, most: int) -> tuple[list[Point], int]:
    """At most so many points, each of which adds up those of an interval, and how wide that is."""
    if not points:
        return [], width
    first = points[0].start
    wider = width * math.ceil((points[-1].start + width - first) / (width * most)) if width else 1
    parts: dict[int, list[Point]] = {}
    for point in points:
        parts.setdefault(first + (point.start - first) // wider * wider, []).append(point)
    return [Point(start, add_up(part).sums) for start, part in parts.items()], wider


def add_up(points: Sequence[Point]) -> Point:
    """Their sums as one point."""
    summed = merge([Curve("", "", [Point(0, point.sums)]) for point in points])
    return summed[0] if summed else Point(0)


@dataclass(frozen=True, slots=True)
class Trend:
    """The mean reward of the first and of the last tenth of the rewarded rollouts, in whole points. `error` is the standard error of the
    difference."""

    first: float
    last: float
    error: float

    @property
    def word(self) -> str:
        """What the difference amounts to: two standard errors count as more than chance."""
        if abs(self.last - self.first) <= 2 * self.error:
            return "no clear change"
        return "risen" if self.last > self.first else "fallen"


def measure_trend(points: Sequence[Point]) -> Trend | None:
    """None with fewer than two points that have rewards."""
    rewarded = [point for point in points if point.count("rewarded") > 0]
    if len(rewarded) < 2:
        return None
    tenth = max(1.0, sum(point.count("rewarded") for point in rewarded) / 10)
    first, last = _begin(rewarded, tenth), _begin(rewarded[::-1], tenth)
    error = math.sqrt(sum(each.spread**2 / each.count("rewarded") for each in (first, last)))
    return Trend(first.reward or 0.0, last.reward or 0.0, error)


def _begin(points: Sequence[Point], rewarded: float) -> Point:
    """The first points that together have so many rewards; never all of them."""
    taken: list[Point] = []
    for point in points[:-1]:
        taken.append(point)
        if sum(each.count("rewarded") for each in taken) >= rewarded:
            break
    return add_up(taken)


@dataclass(frozen=True, slots=True)
class LabelLine:
    """One label of the policy: its sums, and the curve of its mean reward as an SVG path."""

    label: str
    whole: Point
    spark: str


def describe_labels(axis: Axis, curves: Sequence[Curve], totals: Sequence[Curve]) -> list[LabelLine]:
    """The most rollouts first."""
    of_label = {curve.label: curve.points for curve in curves}
    lines = [
        LabelLine(
            total.label, add_up(total.points), _draw_spark(thin(of_label.get(total.label, ()), WIDTHS[axis], MOST_SPARKS)[0])
        )
        for total in totals
    ]
    return sorted(lines, key=lambda line: (-line.whole.rollouts, line.label))


# Charts.


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


def _draw_spark(points: Sequence[Point]) -> str:
    known = [(point.start, point.reward) for point in points if point.reward is not None]
    if not known:
        return ""
    low, high = min(0.0, *(reward for _, reward in known)), max(reward for _, reward in known)
    xs = [_scale(start, known[0][0], known[-1][0], 2, SPARK_WIDTH - 2) for start, _ in known]
    return _path(xs, [_scale(reward, low, high, SPARK_HEIGHT - 2, 2) for _, reward in known])
