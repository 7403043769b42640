"""The pages of tasks: what was asked, and what became of each rollout."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from fastapi.routing import APIRoute

from contract.attempts import ENDED
from proxy.errors import NotFound
from proxy.store.states import SessionState
from proxy.ui.pictures import Rewards
from proxy.ui.rendering import page
from proxy.ui.shown import Shown, Tasks, Ui

TASKS_ON_A_PAGE = 50
ROLLOUTS_ON_A_PAGE = 100
MOST_LIVE = 500
"""Rollouts of a task up to which its page is kept up to date by itself: all of them are read each time."""
FEEDBACK_LINES = 4
FEEDBACK_CHARACTERS = 400

STATUSES = ("queued", "running", "completed", "cancelled")
STAGES = ("queued", "preparing", "ready", "running", "evaluating", "concluding")
ORDERS = ("lowest", "highest")

Text = Annotated[str, Query(max_length=500)]


def routes(kind: type[APIRoute]) -> APIRouter:
    router = APIRouter(prefix="/ui", route_class=kind)
    router.add_api_route("/tasks", tasks, methods=["GET"])
    router.add_api_route("/tasks/{task_id}", task, methods=["GET"])
    return router


async def tasks(
    request: Request, ui: Shown, status: Text = "", cursor: Annotated[str, Query(pattern=r"^[0-9]{0,15}\z")] = ""
) -> Response:
    wanted = status if status in STATUSES else ""
    found, following = await _tasks_of(ui).list_tasks(status=wanted or None, limit=TASKS_ON_A_PAGE, cursor=cursor or None)
    query = {"status": wanted}
    return await page(request, "tasks.html", tasks=found, cursor=following, query=query, statuses=STATUSES, live=not cursor)


async def task(
    request: Request, ui: Shown, task_id: str, start: Annotated[int, Query(ge=0, le=10**9)] = 0, order: Text = ""
) -> Response:
    """The rollouts in the `order` of their numbers, or of their rewards: lowest or highest first, those without one last."""
    found, rollouts, now = await asyncio.gather(
        _tasks_of(ui).load_task(task_id), _tasks_of(ui).load_rollouts(task_id), ui.services.clock.now()
    )
    part = put_in_order(rollouts, order)[start : start + ROLLOUTS_ON_A_PAGE]
    sessions = await asyncio.gather(*(_load_session(ui, rollout["session_id"]) for rollout in part))
    return await page(
        request,
        "task.html",
        task=found,
        body=found["task"],
        lines=[describe_rollout(rollout, session, now) for rollout, session in zip(part, sessions, strict=True)],
        rewards=Rewards.of((rollout["session_id"] or "", _reward_of(rollout)) for rollout in rollouts),
        start=start,
        query={"order": order if order in ORDERS else ""},
        step=ROLLOUTS_ON_A_PAGE,
        count=len(rollouts),
        live=found["ended_at"] is None and len(rollouts) <= MOST_LIVE,
    )


def _tasks_of(ui: Ui) -> Tasks:
    if ui.tasks is None:
        raise NotFound("this service has no tasks")
    return ui.tasks


async def _load_session(ui: Ui, session_id: str | None) -> SessionState | None:
    return None if session_id is None else await ui.services.sessions.load(session_id)


def put_in_order(rollouts: Sequence[Mapping[str, Any]], order: str) -> list[Mapping[str, Any]]:
    if order not in ORDERS:
        return list(rollouts)
    sign = -1 if order == "highest" else 1
    return sorted(rollouts, key=lambda rollout: ((reward := _reward_of(rollout)) is None, sign * (reward or 0.0)))


# A rollout in a line.


@dataclass(frozen=True, slots=True)
class Durations:
    """Seconds of the current attempt; None: it did not get that far. `waiting` is for a node and for a slot to run in."""

    waiting: float | None
    preparing: float | None
    running: float | None
    evaluating: float | None


@dataclass(frozen=True, slots=True)
class RolloutLine:
    """`session_id` is "" where there is none, or none any more. `tokens`: sampled ones, known once the session is closed. `ended` says why
    it ended; `feedback` is the beginning of the evaluator's, `more` whether that goes on."""

    index: int
    status: str
    session_id: str
    attempt: int
    reward: float | None
    calls: int | None
    tokens: int | None
    durations: Durations
    ended: str
    feedback: str
    more: str
    node: str
    logs: str
    look: str
    failures: Sequence[Mapping[str, str]]


def describe_rollout(rollout: Mapping[str, Any], session: SessionState | None, now: float) -> RolloutLine:
    """`rollout` as `GET /tasks/{id}/rollouts` shows it."""
    verdict = rollout["verdict"] or {}
    feedback = str(verdict.get("feedback") or "").strip()
    begun = shorten(feedback)
    return RolloutLine(
        index=rollout["index"],
        status=rollout["status"],
        session_id=rollout["session_id"] if session else "",
        attempt=rollout["attempt"],
        reward=_reward_of(rollout),
        calls=rollout["calls"] if session is None else session.calls,
        tokens=session.accounting.sampled_tokens if session and session.accounting else None,
        durations=measure_durations(rollout["times"], now),
        ended=_tell_end(rollout),
        feedback=begun,
        more="" if begun == feedback else feedback,
        node=rollout["node"] or "",
        logs=rollout["logs"] or "",
        look=(verdict.get("failure") or {}).get("look", ""),
        failures=rollout["failures"],
    )


def shorten(text: str) -> str:
    """Its first lines."""
    return "\n".join(text.splitlines()[:FEEDBACK_LINES])[:FEEDBACK_CHARACTERS]


def measure_durations(times: Mapping[str, float], now: float) -> Durations:
    """From when each status was reached; a status that lasts is measured up to now."""
    reached = [status for status in (*STAGES, *ENDED) if status in times]
    ends = [times[status] for status in reached[1:]] + [now]
    lasted = {status: max(0.0, end - times[status]) for status, end in zip(reached, ends, strict=False)}
    waited = [lasted[status] for status in ("queued", "ready") if status in lasted]
    return Durations(sum(waited) if waited else None, lasted.get("preparing"), lasted.get("running"), lasted.get("evaluating"))


def _reward_of(rollout: Mapping[str, Any]) -> float | None:
    reward: float | None = (rollout["verdict"] or {}).get("reward")
    return reward


def _tell_end(rollout: Mapping[str, Any]) -> str:
    """Why it ended, "" while it has not."""
    verdict = rollout["verdict"]
    if verdict is None:
        return "cancelled" if rollout["status"] == "cancelled" else ""
    if verdict["failure"]:
        return f"{verdict['failure']['failure']}: {verdict['failure']['message']}"
    return f"the harness exited with code {rollout['exit_code']}" if rollout["exit_code"] is not None else ""
