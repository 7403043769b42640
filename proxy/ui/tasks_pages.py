"""The pages of tasks: what was asked, and what became of each rollout."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.routing import APIRoute

from contract.attempts import ENDED
from proxy.api.filters import Columns, ListQuery, measure_lost, parse_query
from proxy.errors import NotFound
from proxy.store.states import SessionState
from proxy.ui.catalogue import LISTED
from proxy.ui.causes import group_causes
from proxy.ui.listing import (
    PAGE,
    Listing,
    load_choices,
    measure_rate,
    put_in_order,
    suggest,
)
from proxy.ui.pictures import Rewards
from proxy.ui.rendering import page
from proxy.ui.shown import Shown, Tasks, Ui

TASKS_LISTED = 500
"""Tasks that a filtered or ordered list looks at, the newest."""
TASK_CURSOR = re.compile(r"[0-9]{1,15}\Z")
ROLLOUTS_ON_A_PAGE = 100
MOST_LIVE = 500
"""Rollouts of a task up to which its page is kept up to date by itself: all of them are read each time."""
FEEDBACK_LINES = 4
FEEDBACK_CHARACTERS = 400

STATUSES = ("queued", "running", "completed", "cancelled")
STAGES = ("queued", "preparing", "ready", "running", "evaluating", "concluding")
ROLLOUT_STATUSES = (*STAGES, *ENDED)


def routes(kind: type[APIRoute]) -> APIRouter:
    router = APIRouter(prefix="/ui", route_class=kind)
    router.add_api_route("/tasks", tasks, methods=["GET"])
    router.add_api_route("/tasks/{task_id}", task, methods=["GET"])
    return router


async def tasks(request: Request, ui: Shown) -> Response:
    query = parse_query(request.query_params, TASK_COLUMNS, STATUSES)
    found, choices = await asyncio.gather(list_tasks(ui, query), load_choices(ui))
    shown: dict[str, Any] = {"columns": TASK_COLUMNS, "statuses": STATUSES}
    return await page(request, "tasks.html", found=found, query=query, live=not query.cursor, **shown, **choices)


@dataclass(frozen=True, slots=True)
class TaskLine:
    """A task in a list, with its `sessions` among the newest."""

    task: Mapping[str, Any]
    sessions: Sequence[SessionState]
    rewards: Rewards | None

    @property
    def tokens(self) -> int:
        return sum(state.accounting.sampled_tokens for state in self.sessions if state.accounting)

    @property
    def lost(self) -> int:
        return sum(measure_lost(state.accounting) for state in self.sessions if state.accounting)


TASK_COLUMNS: Columns[TaskLine] = {
    "task": lambda line: line.task["task_id"],
    "status": lambda line: line.task["status"],
    "run": lambda line: line.task["run"],
    "usable": lambda line: line.task["usable"],
    "reward": lambda line: line.rewards and line.rewards.mean,
    "tokens": lambda line: line.tokens,
    "lost": lambda line: line.lost,
    "harness": lambda line: line.task["harness"],
    "submitted": lambda line: line.task["created_at"],
}


async def list_tasks(ui: Ui, query: ListQuery) -> Listing[TaskLine]:
    """The newest tasks. What is asked of sessions is asked of theirs, as far as those are among the newest."""
    narrows = query.narrows or bool(query.run) or query.after is not None or query.before is not None
    cursor = query.cursor if query.cursor and TASK_CURSOR.match(query.cursor) else None
    (found, following), window = await asyncio.gather(
        _tasks_of(ui).list_tasks(status=query.status or None, limit=TASKS_LISTED if narrows else PAGE, cursor=cursor),
        ui.catalogue.load(run=query.run or None),
    )
    sessions: dict[str | None, list[SessionState]] = {}
    for state in window.sessions:
        sessions.setdefault(state.info.task_id, []).append(state)
    lines = [_describe_task(task, sessions.get(task["task_id"], ())) for task in found]
    suggested = suggest(window.sessions)
    if not narrows:
        return Listing(lines, cursor=following, suggested=suggested)
    matched = put_in_order([line for line in lines if _accepts(query, line)], query, TASK_COLUMNS)
    return Listing(matched[query.start : query.start + PAGE], query.start, len(matched), len(found), following, suggested)


def _describe_task(task: Mapping[str, Any], sessions: Sequence[SessionState]) -> TaskLine:
    return TaskLine(task, sessions, Rewards.of((state.info.session_id, state.reward) for state in sessions))


def _accepts(query: ListQuery, line: TaskLine) -> bool:
    task, wanted = line.task, query.text.casefold()
    if query.run and task["run"] != query.run:
        return False
    if not (query.after or 0.0) <= task["created_at"] < (query.before or math.inf):
        return False
    if not any(wanted in str(task[name]).casefold() for name in ("task_id", "instruction", "harness")):
        return False
    return not query.members_narrow or any(map(query.accepts_member, line.sessions))


async def task(request: Request, ui: Shown, task_id: str) -> Response:
    """The rollouts that are asked for, by number unless another order is."""
    query = parse_query(request.query_params, ROLLOUT_COLUMNS, ROLLOUT_STATUSES)
    found, rollouts, now = await asyncio.gather(
        _tasks_of(ui).load_task(task_id), _tasks_of(ui).load_rollouts(task_id), ui.services.clock.now()
    )
    part = await describe_rollouts(ui, query, rollouts, now)
    return await page(
        request,
        "task.html",
        task=found,
        body=found["task"],
        found=part,
        query=query,
        columns=ROLLOUT_COLUMNS,
        statuses=ROLLOUT_STATUSES,
        rewards=Rewards.of((rollout["session_id"] or "", _reward_of(rollout)) for rollout in rollouts),
        live=found["ended_at"] is None and len(rollouts) <= MOST_LIVE,
        **await load_choices(ui),
    )


async def describe_rollouts(
    ui: Ui, query: ListQuery, rollouts: Sequence[Mapping[str, Any]], now: float
) -> Listing[RolloutLine]:
    """A page of them; of those before the last `LISTED` no session is looked at."""
    names = [rollout["session_id"] for rollout in rollouts if rollout["session_id"]][-LISTED:]
    sessions = {state.info.session_id: state for state in await ui.catalogue.load_sessions(names)}
    states = [sessions.get(rollout["session_id"] or "") for rollout in rollouts]
    lines = [describe_rollout(rollout, state, now) for rollout, state in zip(rollouts, states, strict=True)]
    matched = [line for line, state in zip(lines, states, strict=True) if _accepts_rollout(query, line, state)]
    ordered = put_in_order(matched, query, ROLLOUT_COLUMNS)
    end = query.start + ROLLOUTS_ON_A_PAGE
    suggested = suggest(sessions.values())
    causes = group_causes((line.ended, str(line.index)) for line in matched if line.status == "failed")
    part = ordered[query.start : end]
    return Listing(part, query.start, len(ordered), len(lines), None, suggested, causes, ROLLOUTS_ON_A_PAGE)


def _accepts_rollout(query: ListQuery, line: RolloutLine, state: SessionState | None) -> bool:
    wanted = query.text.casefold()
    if query.status and line.status != query.status:
        return False
    if wanted and not any(wanted in text.casefold() for text in (line.session_id, line.ended, line.feedback, line.more)):
        return False
    if not query.members_narrow:
        return True
    return state is not None and query.accepts_member(state)


def _tasks_of(ui: Ui) -> Tasks:
    if ui.tasks is None:
        raise NotFound("this service has no tasks")
    return ui.tasks


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
    """`session_id` is "" where there is none, or none any more. `tokens`, the sampled ones, `rate`, of them per second, `lost` and
    `truncated` are known once the session is closed. `ended` says why it ended; `feedback` is the beginning of the evaluator's, `more` all
    of it if that goes on."""

    index: int
    status: str
    session_id: str
    attempt: int
    reward: float | None
    calls: int | None
    tokens: int | None
    rate: float | None
    lost: int
    truncated: bool
    durations: Durations
    ended: str
    feedback: str
    more: str
    node: str
    logs: str
    look: str
    failures: Sequence[Mapping[str, str]]


ROLLOUT_COLUMNS: Columns[RolloutLine] = {
    "number": lambda line: line.index,
    "status": lambda line: line.status,
    "reward": lambda line: line.reward,
    "calls": lambda line: line.calls,
    "tokens": lambda line: line.tokens,
    "tokens/s": lambda line: line.rate,
    "waited": lambda line: line.durations.waiting,
    "prepared": lambda line: line.durations.preparing,
    "ran": lambda line: line.durations.running,
    "evaluated": lambda line: line.durations.evaluating,
}


def describe_rollout(rollout: Mapping[str, Any], session: SessionState | None, now: float) -> RolloutLine:
    """`rollout` as `GET /tasks/{id}/rollouts` shows it."""
    verdict = rollout["verdict"] or {}
    feedback = str(verdict.get("feedback") or "").strip()
    begun, sums = shorten(feedback), session.accounting if session else None
    return RolloutLine(
        index=rollout["index"],
        status=rollout["status"],
        session_id=rollout["session_id"] if session else "",
        attempt=rollout["attempt"],
        reward=_reward_of(rollout),
        calls=rollout["calls"] if session is None else session.calls,
        tokens=sums.sampled_tokens if sums else None,
        rate=measure_rate(session) if session else None,
        lost=measure_lost(sums) if sums else 0,
        truncated=bool(sums and sums.truncated),
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
