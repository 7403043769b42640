"""The pages: each reads what it shows, puts it into words of the templates, and renders."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from fastapi.routing import APIRoute

from proxy.errors import NotFound
from proxy.rows import sampling_as_wire
from proxy.ui.call_lines import ONLY, CallFilter, CallLine, branch_reasons
from proxy.ui.comparing import compare
from proxy.ui.looks import Look
from proxy.ui.rendering import page
from proxy.ui.session_lists import STATUSES, SessionFilter, newest_groups, one_group, session_page
from proxy.ui.shown import Shown, Ui
from proxy.ui.shown_messages import ShownMessage, reply_of, request_messages, shown_message, tools_of
from proxy.ui.totals import totals
from proxy.ui.tree_picture import tree_picture
from reconstruct.records import Call

CALLS_ON_A_PAGE = 100
ROWS_ON_A_PAGE = 100
MESSAGES_ON_A_PAGE = 40
MOST_BRANCHES = 50

Text = Annotated[str, Query(max_length=500)]
Offset = Annotated[int, Query(ge=0, le=10**9)]


def routes(kind: type[APIRoute]) -> APIRouter:
    router = APIRouter(prefix="/ui", route_class=kind)
    for path, shows in (
        ("", sessions),
        ("/", sessions),
        ("/groups", groups),
        ("/group", group),
        ("/compare", comparison),
        ("/sessions/{session_id}", session),
        ("/sessions/{session_id}/calls/{call_id}", call),
        ("/sessions/{session_id}/rows/{trajectory_id}", row),
    ):
        router.add_api_route(path, shows, methods=["GET"])
    return router


async def sessions(
    request: Request,
    ui: Shown,
    q: Text = "",
    status: Text = "",
    at_least: Text = "",
    at_most: Text = "",
    cursor: Text = "",
) -> Response:
    wanted = SessionFilter(q.strip(), status if status in STATUSES else "", _number(at_least), _number(at_most))
    found, now = await asyncio.gather(session_page(ui.services, wanted, cursor or None), _now(ui))
    query = {"q": q, "status": wanted.status, "at_least": at_least, "at_most": at_most}
    return page(request, "sessions.html", found=found, query=query, statuses=STATUSES, now=now, live=not cursor)


async def groups(request: Request, ui: Shown, q: Text = "") -> Response:
    return page(request, "groups.html", groups=await newest_groups(ui.services, q.strip()), query={"q": q}, live=True)


async def group(request: Request, ui: Shown, id: Text) -> Response:
    found = await one_group(ui.services, id)
    if found is None:
        raise NotFound(f"there is no group {id}")
    live = found.closed < max(found.size, len(found.sessions))
    return page(request, "group.html", group=found, rewards=found.rewards, live=live)


async def comparison(request: Request, ui: Shown, left: Text, right: Text) -> Response:
    one, other = await ui.looks.at(left), await ui.looks.at(right)
    compared = await asyncio.to_thread(compare, one, other)
    sides = [_side(one, compared.left), _side(other, compared.right)]
    return page(request, "compare.html", sides=sides, compared=compared, live=False)


async def session(
    request: Request,
    ui: Shown,
    session_id: str,
    q: Text = "",
    role: Text = "",
    only: Text = "",
    start: Offset = 0,
    row_start: Offset = 0,
) -> Response:
    look = await ui.looks.at(session_id)
    wanted = CallFilter(q.strip(), role, only if only in ONLY else "")
    lines = await asyncio.to_thread(_filtered, look, wanted)
    members = await one_group(ui.services, look.state.info.group_id) if look.state.info.group_id else None
    rows = look.built.rows
    return page(
        request,
        "session.html",
        look=look,
        state=look.state,
        lines=lines[start : start + CALLS_ON_A_PAGE],
        found=len(lines),
        start=start,
        step=CALLS_ON_A_PAGE,
        rows=rows[row_start : row_start + ROWS_ON_A_PAGE],
        row_count=len(rows),
        row_start=row_start,
        row_step=ROWS_ON_A_PAGE,
        query={"q": q, "role": role, "only": wanted.only},
        only=ONLY,
        roles=sorted({line.role for line in look.lines}),
        reasons=branch_reasons(look.lines),
        tree=tree_picture(look.lines),
        total=totals(look),
        group=members,
        live=look.state.status in ("open", "closing"),
    )


async def call(request: Request, ui: Shown, session_id: str, call_id: str, message: Offset | None = None) -> Response:
    look = await ui.looks.at(session_id)
    found = look.call(call_id)
    line = _line(look, call_id)
    messages = await asyncio.to_thread(request_messages, look, found)
    first = max(0, len(messages) - MESSAGES_ON_A_PAGE) if message is None else min(message, max(0, len(messages) - 1))
    part = messages[first : first + MESSAGES_ON_A_PAGE]
    shown: list[ShownMessage] = [shown_message(first + at, each) for at, each in enumerate(part)]
    return page(
        request,
        "call.html",
        look=look,
        state=look.state,
        call=found,
        line=line,
        messages=shown,
        message_count=len(messages),
        first=first,
        step=MESSAGES_ON_A_PAGE,
        reply=shown_message(len(messages), reply_of(found), is_reply=True),
        tools=tools_of(look, found),
        sampling={name: value for name, value in sampling_as_wire(found.sampling).items() if value not in (None, [])},
        before=_neighbour(look, line, -1),
        behind=_neighbour(look, line, 1),
        children=_branches(look, call_id),
        row=look.row_of.get(call_id),
        delivered=call_id in look.delivered,
        live=False,
    )


async def row(request: Request, ui: Shown, session_id: str, trajectory_id: str) -> Response:
    look = await ui.looks.at(session_id)
    found = look.row(trajectory_id)
    lines = {line.call_id: line for line in look.lines}
    numbers = [each.trajectory_id for each in look.built.rows]
    at = numbers.index(trajectory_id)
    return page(
        request,
        "row.html",
        look=look,
        state=look.state,
        row=found,
        number=at + 1,
        trained=int(found.loss_mask.sum()),
        calls=[lines[call_id] for call_id in found.call_ids],
        prompt_length=look.forest.prompt_length,
        before=numbers[at - 1] if at else None,
        behind=numbers[at + 1] if at + 1 < len(numbers) else None,
        live=False,
    )


def _side(look: Look, last: Call | None) -> dict[str, Any]:
    return {"look": look, "state": look.state, "total": totals(look), "call_id": last.call_id if last else None}


def _filtered(look: Look, wanted: CallFilter) -> list[CallLine]:
    return [line for line in look.lines if wanted.takes(line, look.calls[line.call_id])]


def _line(look: Look, call_id: str) -> CallLine:
    return next(line for line in look.lines if line.call_id == call_id)


def _neighbour(look: Look, line: CallLine, step: int) -> CallLine | None:
    at = line.number - 1 + step
    return look.lines[at] if 0 <= at < len(look.lines) else None


def _branches(look: Look, call_id: str) -> Sequence[CallLine]:
    """The calls that go on from this one, the first of them."""
    return [line for line in look.lines if line.parent_id == call_id][:MOST_BRANCHES]


async def _now(ui: Ui) -> dict[str, Any]:
    """Engines and groups, as they stand."""
    counts = await ui.services.delivery.counts()
    shown = ("opened", "filling", "ready", "leased", "acked", "dropped", "dead")
    return {
        "engines": [*ui.services.pool.replicas],
        "groups": {name: counts[name] for name in shown if counts.get(name)},
        "in_flight": len(ui.services.inflight),
        "at": time.time(),
    }


def _number(text: str) -> float | None:
    """None for what is no number: a half-typed one finds everything."""
    try:
        return float(text)
    except ValueError:
        return None
