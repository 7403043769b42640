"""The page of runs: is the reward rising, what goes wrong and what is lost, over weight versions and over time.

It shows one run, or several laid over each other.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import RedirectResponse
from fastapi.routing import APIRoute

from proxy.api.run import answer_run
from proxy.api.runs import RunMarks, mark_run, refuse_unknown
from proxy.errors import NotFound
from proxy.store.run import CAUSES, WIDTHS, Axis, Curve, Point, RunRecord
from proxy.ui.rendering import HEADERS, address, home_of, page
from proxy.ui.run_charts import add_up, draw_charts, draw_spark, overlay_charts, tell, tell_start, thin, thin_all
from proxy.ui.shown import Shown, read_form
from reconstruct.reasons import REASONS, Reason

MOST_POINTS = 80
"""Points of a chart; neighbours are added up where there are more."""
MOST_SPARKS = 40
NUMBERS_SHOWN = 25
MOST_OVERLAID = 6
"""Runs in one chart."""
MOST_LISTED = 40
"""Runs to choose from, those that began last."""
SHOWN_AXES: dict[Axis, str] = {
    "version": "each weight version",
    "versions": "every 20 weight versions",
    "minute": "minutes",
    "quarter": "quarters of an hour",
    "hours": "six hours",
}
ALL_TIME: Axis = "all"
MARKS = ("ended", "hidden")
FILES = {"run.csv": "csv", "run.json": "json"}
ALL = "*"
"""Stands for all labels in the address; "" is what has none."""
STATES: Mapping[str, str] = {
    "filling": "It waits for members to close with a reward.",
    "ready": "It waits for a trainer's lease.",
    "leased": "A trainer has it.",
    "acked": "A trainer acknowledged it.",
}

Text = Annotated[str, Query(max_length=500)]


def routes(kind: type[APIRoute]) -> APIRouter:
    router = APIRouter(prefix="/ui", route_class=kind)
    router.add_api_route("/run", run, methods=["GET"])
    router.add_api_route("/run", mark, methods=["POST"])
    router.add_api_route("/run/{name}", run_file, methods=["GET"])
    return router


async def run(
    request: Request,
    ui: Shown,
    axis: Axis = "version",
    policy: Text = "",
    label: Text = ALL,
    run: Annotated[list[str] | None, Query(max_length=MOST_OVERLAID)] = None,
    hidden: bool = False,
) -> Response:
    """One run, by default the newest, or several laid over each other. `hidden`: also hidden ones are there to choose."""
    delivery, now = ui.services.delivery, await ui.services.clock.now()
    records = await delivery.load_runs()
    chosen = [record for record in records if record.run in (run or ())] if run else _choose_newest(records)
    if unknown := set(run or ()).difference(record.run for record in chosen):
        raise refuse_unknown(min(unknown))
    names = [record.run for record in chosen]
    every, totals = await asyncio.gather(*(delivery.load_curves(each, runs=names) for each in (axis, ALL_TIME)))
    policies = sorted({curve.policy for curve in totals})
    policy = policy if policy in policies or not policies else policies[0]
    every, totals = ([curve for curve in curves if curve.policy == policy] for curves in (every, totals))
    shown = await asyncio.to_thread(describe_runs, axis, chosen, every, totals, label, now)
    return await page(
        request,
        "run.html",
        axis=axis,
        axes=SHOWN_AXES,
        policies=policies,
        policy=policy,
        label=label,
        runs=[record for record in records if hidden or not record.hidden or record in chosen][:MOST_LISTED],
        hidden=0 if hidden else sum(record.hidden for record in records if record not in chosen),
        chosen=names,
        tell=tell,
        live=True,
        **shown,
    )


async def mark(request: Request, ui: Shown) -> Response:
    """Ends or hides the run of the form, or takes that back; back to its page."""
    given = await read_form(request)
    run = given.pop("run", "")
    await mark_run(ui.services, run, RunMarks(**{name: value == "yes" for name, value in given.items() if name in MARKS}))
    return RedirectResponse(address(f"{home_of(request)}/run", run=run), 303, headers=HEADERS)


def _choose_newest(records: Sequence[RunRecord]) -> list[RunRecord]:
    """The run that began last, of those that are not hidden."""
    return [record for record in records if not record.hidden][:1]


@dataclass(frozen=True, slots=True)
class RunLine:
    """One of the chosen runs: its sums, how its reward went, and its groups by state and cause, each with its sentence."""

    record: RunRecord
    whole: Point
    trend: Trend | None

    @property
    def groups(self) -> list[tuple[str, str, str, int]]:
        """State, cause, sentence and number."""
        found = sorted(self.record.groups.items())
        return [(state, cause, CAUSES.get(cause) or STATES.get(state, ""), number) for (state, cause), number in found]

    @property
    def losses(self) -> list[tuple[str, int, int, Reason]]:
        """Reason, calls, tokens and what it means, the most tokens first."""
        return [(reason, *each, REASONS[reason]) for reason, each in self.whole.quarantined.items()]


def describe_runs(
    axis: Axis, records: Sequence[RunRecord], curves: Sequence[Curve], totals: Sequence[Curve], label: str, now: float
) -> dict[str, Any]:
    """What the page shows of one policy's curves; `label` ALL: of all of them together."""
    points = {each.run: _list_points(curves, each.run, label) for each in records}
    drawn, width = thin_all(points, WIDTHS[axis], MOST_POINTS)
    lines = [RunLine(each, add_up(_list_points(totals, each.run, label)), measure_trend(drawn[each.run])) for each in records]
    if len(records) > 1:
        charts, first = overlay_charts(axis, drawn), list[Point]()
    else:
        first = next(iter(drawn.values()), [])
        charts = draw_charts(axis, first, width, now)
    return {
        "lines": lines,
        "labels": describe_labels(axis, curves, totals) if len(records) < 2 else _list_labels(totals),
        "charts": charts,
        "newest": [(tell_start(axis, point.start), point) for point in first[: -NUMBERS_SHOWN - 1 : -1]],
    }


def _list_points(curves: Sequence[Curve], run: str, label: str) -> list[Point]:
    return [point for curve in curves if curve.run == run and label in (ALL, curve.label) for point in curve.points]


def _list_labels(totals: Sequence[Curve]) -> list[LabelLine]:
    """Only to choose from."""
    return [LabelLine(name, Point(0), "") for name in sorted({curve.label for curve in totals})]


async def run_file(
    ui: Shown,
    name: str,
    axis: Axis = "version",
    by_label: bool = True,
    run: Annotated[list[str] | None, Query(max_length=MOST_OVERLAID)] = None,
) -> Response:
    if name not in FILES:
        raise NotFound(f"there is no download {name}; there are: {', '.join(FILES)}")
    answer = await answer_run(ui.services, axis, FILES[name], run, by_label=by_label)
    answer.headers.update({**HEADERS, "content-disposition": f'attachment; filename="{name}"'})
    return answer


# What the page says of one run.


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
            total.label, add_up(total.points), draw_spark(thin(of_label.get(total.label, ()), WIDTHS[axis], MOST_SPARKS)[0])
        )
        for total in totals
    ]
    return sorted(lines, key=lambda line: (-line.whole.rollouts, line.label))
