"""The pages: each reads what it shows, puts it into words of the templates, and renders."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Annotated, Any, get_args

import msgspec
from fastapi import APIRouter, Query, Request, Response
from fastapi.routing import APIRoute

from proxy.api.closing import RUN_ENDED
from proxy.api.sessions import Status
from proxy.errors import NotFound
from proxy.rows import sampling_as_wire
from proxy.services import Services
from proxy.store.keys import listing_member
from proxy.store.sessions import SessionState
from proxy.ui.look import ONLY, CallFilter, CallLine, Look, branch_reasons
from proxy.ui.messages import ShownMessage, conversation, reply_of, request_messages, shown_message, tools_of
from proxy.ui.pictures import Rewards, tree_picture
from proxy.ui.rendering import page
from proxy.ui.shown import Shown, Ui
from reconstruct.forest import shared_length
from reconstruct.messages import canonical_json
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
    counts = await ui.services.delivery.count_groups()
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


# Two sessions side by side, from where their main branches diverge.


COMPARED = 400
"""Messages of each side at most."""
SHOWN_CHARACTERS = 4000


@dataclass(frozen=True, slots=True)
class Pair:
    """What stands at one place in both conversations; None where one has ended."""

    left: ShownMessage | None
    right: ShownMessage | None
    same: bool


@dataclass(frozen=True, slots=True)
class Comparison:
    """`last` is the call whose conversation is shown of each side. `same_messages` and `same_tokens` are how many both begin with."""

    left: Call | None
    right: Call | None
    pairs: Sequence[Pair]
    same_messages: int
    same_tokens: int
    left_out: int


def compare(left: Look, right: Look) -> Comparison:
    one, other = last_call(left), last_call(right)
    first, second = (conversation(look, call) if call else [] for look, call in ((left, one), (right, other)))
    pairs = [
        _pair(index, mine, theirs, len(first), len(second)) for index, (mine, theirs) in enumerate(zip_longest(first, second))
    ]
    same = next((index for index, pair in enumerate(pairs) if not pair.same), len(pairs))
    tokens = shared_length(left.forest.full_ids(one.call_id), right.forest.full_ids(other.call_id)) if one and other else 0
    return Comparison(one, other, pairs[:COMPARED], same, tokens, max(0, len(pairs) - COMPARED))


def last_call(look: Look) -> Call | None:
    """The end of the session's longest branch of the role main; of any role where there is none."""
    lines = [line for line in look.lines if line.in_tree]
    of_main = [line for line in lines if line.role == "main"] or lines
    if not of_main:
        return None
    longest = max(of_main, key=lambda line: (line.prompt_tokens + line.sampled_tokens, line.number))
    return look.forest.calls[longest.call_id]


def _pair(index: int, left: Any, right: Any, left_count: int, right_count: int) -> Pair:
    return Pair(
        _shown(index, left, is_reply=index == left_count - 1),
        _shown(index, right, is_reply=index == right_count - 1),
        left is not None and right is not None and _said(left) == _said(right),
    )


def _shown(index: int, message: Any, *, is_reply: bool) -> ShownMessage | None:
    return None if message is None else shown_message(index, message, is_reply=is_reply, most=SHOWN_CHARACTERS)


def _said(message: Any) -> bytes:
    """What a message says, without the ids that name its calls: those differ where nothing else does."""
    if not isinstance(message, dict):
        return canonical_json(message)
    calls = [call.get("function") for call in message.get("tool_calls") or () if isinstance(call, dict)]
    return canonical_json({**message, "tool_call_id": None, "tool_calls": calls or None})


# Totals of a session.


def totals(look: Look) -> dict[str, Any]:
    """Tokens by what became of them, weight versions, and seconds."""
    lines, accounting = look.lines, look.built.accounting
    versions = sorted({version for line in lines for version in line.versions})
    started = min((line.started_at for line in lines), default=None)
    return {
        "sampled": accounting.sampled_tokens,
        "exported": accounting.exported_tokens,
        "quarantined": accounting.sampled_tokens - accounting.exported_tokens,
        "items": list(accounting.quarantined),
        "versions": versions,
        "engine_seconds": sum(line.engine_seconds for line in lines),
        "seconds": None if started is None else (look.state.closed_at or look.state.updated_at) - started,
    }


# Lists of sessions and groups, with search and filters.


PAGE = 50
READ_AT_ONCE = 200
LOOKED_AT = 2000
"""Sessions that one page looks at; a search that finds few among them is short and goes on with the next page."""
GROUPS_AMONG = 1000
MOST_MEMBERS = 1000

STATUSES: tuple[str, ...] = get_args(Status)


@dataclass(frozen=True, slots=True)
class SessionFilter:
    """`text` is looked for in ids and metadata; rewards are inclusive. None and "": no limit."""

    text: str = ""
    status: str = ""
    at_least: float | None = None
    at_most: float | None = None

    @property
    def narrows(self) -> bool:
        return self != SessionFilter(status=self.status)

    def takes(self, state: SessionState) -> bool:
        if self.at_least is not None and (state.reward is None or state.reward < self.at_least):
            return False
        if self.at_most is not None and (state.reward is None or state.reward > self.at_most):
            return False
        return not self.text or _tells(state, self.text.casefold())


@dataclass(frozen=True, slots=True)
class SessionPage:
    """`looked_at` sessions were read for it; `cursor` is where the next page begins, None at the end."""

    sessions: Sequence[SessionState]
    cursor: str | None
    looked_at: int


@dataclass(frozen=True, slots=True)
class Group:
    """What is known of a group from its sessions. `size` is what they were opened with."""

    group_id: str
    size: int
    sessions: Sequence[SessionState]

    @property
    def rewards(self) -> Rewards | None:
        return Rewards.of((state.info.session_id, state.reward) for state in self.sessions)

    @property
    def closed(self) -> int:
        return sum(state.closed_at is not None for state in self.sessions)

    @property
    def failed(self) -> int:
        """Members that closed with nothing to train on. A completed one without a reward is waited for."""
        return sum(
            state.closed_at is not None
            and (state.status not in RUN_ENDED or (state.status == "timeout" and state.reward is None))
            for state in self.sessions
        )

    @property
    def newest(self) -> float:
        return max(state.info.created_at for state in self.sessions)


async def session_page(services: Services, wanted: SessionFilter, cursor: str | None) -> SessionPage:
    """The newest sessions that the filter takes, from behind the cursor."""
    found: list[SessionState] = []
    looked_at = 0
    limit = READ_AT_ONCE if wanted.narrows else PAGE
    while looked_at < LOOKED_AT:
        states, cursor = await services.sessions.list_sessions(
            status=wanted.status or None, group_id=None, limit=limit, cursor=cursor
        )
        for at, state in enumerate(states):
            looked_at += 1
            if wanted.takes(state):
                found.append(state)
                if len(found) == PAGE and (at + 1 < len(states) or cursor is not None):
                    return SessionPage(found, _behind(state), looked_at)
        if cursor is None:
            break
    return SessionPage(found, cursor, looked_at)


async def newest_groups(services: Services, text: str) -> list[Group]:
    """The groups of the newest sessions, newest first, whose ids have the text in them."""
    members: dict[str, list[SessionState]] = {}
    cursor, looked_at = None, 0
    while looked_at < GROUPS_AMONG:
        states, cursor = await services.sessions.list_sessions(status=None, group_id=None, limit=READ_AT_ONCE, cursor=cursor)
        looked_at += len(states)
        for state in states:
            named = state.info.group_id
            if named is not None and text.casefold() in named.casefold():
                members.setdefault(named, []).append(state)
        if cursor is None:
            break
    return [Group(name, max(each.info.group_size for each in states), states) for name, states in members.items()]


async def one_group(services: Services, group_id: str) -> Group | None:
    """The group with all its sessions, oldest first; None where it has none."""
    states: list[SessionState] = []
    cursor = None
    while len(states) < MOST_MEMBERS:
        part, cursor = await services.sessions.list_sessions(status=None, group_id=group_id, limit=READ_AT_ONCE, cursor=cursor)
        states += part
        if cursor is None:
            break
    if not states:
        return None
    return Group(group_id, max(state.info.group_size for state in states), states[::-1])


def _tells(state: SessionState, wanted: str) -> bool:
    info = state.info
    named = (info.session_id, info.task_id or "", info.group_id or "", state.error or "")
    if any(wanted in name.casefold() for name in named):
        return True
    return wanted in msgspec.json.encode([info.metadata, state.reward_metadata]).decode().casefold()


def _behind(state: SessionState) -> str:
    """The cursor of the page that begins behind a session."""
    return listing_member(state.info.created_at, state.info.session_id)
