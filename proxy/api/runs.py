"""Runs over HTTP: which there are, what each adds up to and lost, and whether it is over or hidden."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Response

from contract.sessions import RunName
from proxy.api.requests import Body, JsonBody, Served, json_response, require_trainer
from proxy.api.run import POINT, PointShape, point_as_wire
from proxy.errors import NotFound
from proxy.services import Services
from proxy.store.run import Curve, Point, RunRecord, merge

router = APIRouter(prefix="/runs", tags=["run"], dependencies=[Depends(require_trainer)], default_response_class=Response)

OfRun = Annotated[RunName, Path(description="The run's name.")]
GROUPS = [{"state": "acked", "cause": "", "groups": 30}, {"state": "dead", "cause": "incomplete", "groups": 4}]
EXAMPLE: dict[str, Any] = {
    **{"run": "grpo-3", "since": 1767225600.0, "counted_at": 1767229200.0, "ended_at": None, "hidden": False},
    **{"groups": GROUPS, "sums": {**POINT, "run": "grpo-3", "start": 0}},
}


class GroupsInState(Body):
    state: str
    """filling (waiting for members), ready, leased, acked (acknowledged), dropped or dead."""
    cause: str
    """Why they were dropped or died; empty for the others."""
    groups: int


class RunView(Body, json_schema_extra={"example": EXAMPLE}):
    run: str
    since: float
    """When a session of it was first counted."""
    counted_at: float
    """When one was last counted."""
    ended_at: float | None
    """When it was declared over."""
    hidden: bool
    """Left out of `GET /run`, the page and the metrics, unless it is asked for by name."""
    groups: list[GroupsInState]
    """How many are in each state now."""
    sums: PointShape
    """Of all its policies and labels."""


class Runs(Body, json_schema_extra={"example": {"runs": [EXAMPLE]}}):
    runs: list[RunView]


class RunMarks(Body, json_schema_extra={"example": {"ended": True}}):
    """What is left out or null stays as it is."""

    ended: bool | None = None
    """Over: the metrics leave it out. Its sessions still count."""
    hidden: bool | None = None


@router.get("", responses={200: {"model": Runs, "description": "the runs"}})
async def list_runs(services: Served) -> Response:
    """All runs, the one that began last first, also those that are over or hidden."""
    return json_response({"runs": await describe_runs(services, await services.delivery.load_runs())})


@router.get("/{run}", responses={200: {"model": RunView, "description": "the run"}})
async def read_run(services: Served, run: OfRun) -> Response:
    """One run."""
    (shown,) = await describe_runs(services, [await find_run(services, run)])
    return json_response(shown)


@router.patch("/{run}", responses={200: {"model": RunView, "description": "the run"}})
async def change_run(services: Served, run: OfRun, body: Annotated[RunMarks, Depends(JsonBody(RunMarks).read)]) -> Response:
    """Declares it over or hidden, or takes that back. Nothing is deleted."""
    await mark_run(services, run, body)
    return await read_run(services, run)


async def mark_run(services: Services, run: str, marks: RunMarks) -> None:
    """Raises `NotFound`."""
    if not await services.delivery.mark_run(run, await services.clock.now(), ended=marks.ended, hidden=marks.hidden):
        raise refuse_unknown(run)


def refuse_unknown(run: str) -> NotFound:
    return NotFound(f"there is no run {run!r}: a run begins when a trained session of it is closed with a reward")


async def find_run(services: Services, run: str) -> RunRecord:
    """Raises `NotFound`."""
    found = await services.delivery.load_runs(run)
    if not found:
        raise refuse_unknown(run)
    return found[0]


async def describe_runs(services: Services, records: Sequence[RunRecord]) -> list[dict[str, Any]]:
    """Each as a `RunView`."""
    curves, now = await services.delivery.load_curves("all", runs=[each.run for each in records]), await services.clock.now()
    described = []
    for record in records:
        whole = (merge(curve for curve in curves if curve.run == record.run) or [Point(0)])[0]
        sums = point_as_wire("all", Curve("", "", [whole], record.run), whole, now) | {"label": None}
        groups = [
            {"state": state, "cause": cause, "groups": number} for (state, cause), number in sorted(record.groups.items())
        ]
        described.append(
            {
                "run": record.run,
                "since": record.since,
                "counted_at": record.at,
                "ended_at": record.ended_at,
                "hidden": record.hidden,
                "groups": groups,
                "sums": sums,
            }
        )
    return described
