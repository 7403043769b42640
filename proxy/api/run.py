"""The numbers of the run over HTTP: rewards and what goes wrong, over weight versions or over time, as JSON or CSV."""

from __future__ import annotations

import asyncio
import csv
import io
import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query, Response

from contract.sessions import RunName
from proxy.api.requests import Body, Served, json_response, require_trainer
from proxy.services import Services
from proxy.store.run import OVER_TIME, WIDTHS, Axis, Curve, Point, merge

router = APIRouter(tags=["run"], dependencies=[Depends(require_trainer)], default_response_class=Response)

POINT: dict[str, Any] = {
    "run": "default",
    "policy": "",
    "label": None,
    "start": 12,
    "rollouts": 64,
    "rewarded": 62,
    "reward": 0.41,
    "reward_p10": 0.0,
    "reward_p50": 0.33,
    "reward_p90": 1.0,
    "zero_rewards": 0.4,
    "solved": 0.25,
    "truncated": 0.03,
    "timed_out": 0.0,
    "failed": 0.03,
    "invalid_tool_calls": 0.004,
    "groups": 8,
    "equal_groups": 0.125,
    "sampled_tokens": 4210.5,
    "exported_tokens": 4100.0,
    "lost": 0.02,
    "quarantined": {"not_delivered": {"calls": 3, "tokens": 7072}},
    "incomplete": 0.01,
    "calls": 17.2,
    "seconds": 311.0,
    "staleness": 0.6,
    "rollouts_per_hour": None,
    "tokens_per_second": None,
}


class Loss(Body):
    calls: int
    tokens: int


class PointShape(Body):
    run: str
    policy: str
    label: str | None
    """None: all labels together."""
    start: int
    """A weight version, or epoch seconds: where the point's interval begins."""
    rollouts: int
    """Closed sessions that a trainer could get."""
    rewarded: int
    reward: float | None
    """The mean."""
    reward_p10: float | None
    """Quantiles are of rewards rounded to two digits."""
    reward_p50: float | None
    reward_p90: float | None
    zero_rewards: float | None
    """Share of the rewards that are 0."""
    solved: float | None
    """Share of the rewarded whose reward is at least `solved_reward`."""
    truncated: float | None
    """Share of rollouts with a trained row whose last reply was cut short."""
    timed_out: float | None
    failed: float | None
    """Share of failed and cancelled rollouts."""
    invalid_tool_calls: float | None
    """Share of calls whose reply has a tool call that cannot be parsed."""
    groups: int
    """Decided groups of two or more."""
    equal_groups: float | None
    """Share of them whose rewards are all equal."""
    sampled_tokens: float | None
    """Per rollout, as exported tokens, calls and seconds are."""
    exported_tokens: float | None
    lost: float | None
    """Share of the sampled tokens that are in quarantine, without those that are left out by choice."""
    quarantined: dict[str, Loss]
    """Sums by reason; in CSV as JSON. Calls of records that cannot be read, and dangling ones, have no tokens."""
    incomplete: float | None
    """Share of rollouts with a dangling or damaged call, or whose outcome depends on a quarantined one."""
    calls: float | None
    seconds: float | None
    staleness: float | None
    """Weight versions between a rollout's oldest token and its end, on average."""
    rollouts_per_hour: float | None
    """Over time only."""
    tokens_per_second: float | None


class RunShape(Body, json_schema_extra={"example": {"axis": "version", "width": 1, "now": 1767225600.0, "points": [POINT]}}):
    axis: Axis
    width: int
    """Of a point's interval, in weight versions or seconds; 0: everything."""
    now: float
    points: list[PointShape]


AxisQuery = Annotated[
    Axis,
    Query(
        description="What a point is: `version` (one weight version), `versions` (20), `minute`, `quarter` (of an hour), `hours` (six), "
        "or `all` (everything so far). Of each the newest are kept."
    ),
]
ByLabel = Annotated[bool, Query(description="A point per label instead of one for all labels together.")]


@router.get(
    "/run",
    responses={200: {"model": RunShape, "content": {"text/csv": {}}, "description": "the points, by policy, label and start"}},
)
async def get_run(
    services: Served,
    axis: AxisQuery = "version",
    by_label: ByLabel = False,
    run: Annotated[
        list[RunName] | None, Query(description="Only these runs; may be repeated. Default: all that are not hidden.")
    ] = None,
    form: Annotated[Literal["json", "csv"], Query(alias="format", description="Of the answer.")] = "json",
) -> Response:
    """Sums of all closed sessions, kept beyond the sessions themselves. Sessions that are not trained are not counted."""
    return await answer_run(services, axis, form, run, by_label=by_label)


async def answer_run(services: Services, axis: Axis, form: str, runs: Sequence[str] | None, *, by_label: bool) -> Response:
    """All curves of the axis, or those of each policy's labels together, run by run."""
    if runs is None:
        runs = [record.run for record in await services.delivery.load_runs() if not record.hidden]
    now, curves = await services.clock.now(), await services.delivery.load_curves(axis, runs=runs)
    content = await asyncio.to_thread(_write_points, axis, curves, now, by_label=by_label)
    if form == "csv":
        return Response(_write_csv(content), media_type="text/csv; charset=utf-8")
    return json_response({"axis": axis, "width": WIDTHS[axis], "now": now, "points": content})


def _write_points(axis: Axis, curves: Sequence[Curve], now: float, *, by_label: bool) -> list[dict[str, Any]]:
    shown = curves if by_label else merge_labels(curves)
    none: dict[str, Any] = {} if by_label else {"label": None}
    return [point_as_wire(axis, curve, point, now) | none for curve in shown for point in curve.points]


async def load_last_hour(services: Services, runs: Sequence[str]) -> list[Curve]:
    """The quarters of an hour that begin within the last one, of these runs."""
    earliest = await services.clock.now() - 3600
    curves = await services.delivery.load_curves("quarter", newest=4, runs=runs)
    return [replace(each, points=[point for point in each.points if point.start > earliest]) for each in curves]


def merge_labels(curves: Sequence[Curve]) -> list[Curve]:
    """One curve per run and policy, the default policy first."""
    found = sorted({(curve.run, curve.policy) for curve in curves})
    return [
        Curve(policy, "", merge(each for each in curves if (each.run, each.policy) == (run, policy)), run)
        for run, policy in found
    ]


def point_as_wire(axis: Axis, curve: Curve, point: Point, now: float) -> dict[str, Any]:
    elapsed = measure_elapsed(axis, point.start, now, WIDTHS[axis])
    return {
        "run": curve.run,
        "policy": curve.policy,
        "label": curve.label,
        "start": point.start,
        "rollouts": point.rollouts,
        "rewarded": int(point.count("rewarded")),
        "reward": point.reward,
        **{f"reward_p{percent}": point.quantile(percent / 100) for percent in (10, 50, 90)},
        "zero_rewards": point.zero_rewards,
        "solved": point.solved,
        "truncated": point.truncated,
        "timed_out": point.timed_out,
        "failed": point.failed,
        "invalid_tool_calls": point.invalid_tool_calls,
        "groups": int(point.count("groups")),
        "equal_groups": point.equal_groups,
        "sampled_tokens": point.tokens,
        "exported_tokens": point.exported_tokens,
        "lost": point.lost,
        "quarantined": losses_as_wire(point),
        "incomplete": point.incomplete,
        "calls": point.calls,
        "seconds": point.seconds,
        "staleness": point.staleness,
        "rollouts_per_hour": point.rollouts * 3600 / elapsed if elapsed > 0 else None,
        "tokens_per_second": point.count("sampled_tokens") / elapsed if elapsed > 0 else None,
    }


def losses_as_wire(point: Point) -> dict[str, dict[str, int]]:
    return {reason: {"calls": calls, "tokens": tokens} for reason, (calls, tokens) in point.quarantined.items()}


def measure_elapsed(axis: Axis, start: int, now: float, width: int) -> float:
    """Seconds of an interval so far: the newest one is not over yet. 0 where the axis is not time."""
    return max(0.0, min(width, now - start)) if axis in OVER_TIME else 0.0


def _write_csv(points: Iterable[dict[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(POINT), lineterminator="\n")
    writer.writeheader()
    for point in points:
        writer.writerow({**point, "quarantined": json.dumps(point["quarantined"])})
    return text.getvalue()
