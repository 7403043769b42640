"""The pages: each handler loads what its template shows."""

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
from proxy.services import Services
from proxy.store.keys import listing_member
from proxy.store.sessions import SessionState
from proxy.ui.conversation import ShownMessage, Thread, Turn, list_messages, show_message
from proxy.ui.pictures import Rewards, draw_tree
from proxy.ui.rendering import page
from proxy.ui.session_view import ONLY, CallFilter, SessionView, describe_call, show_turn, summarize
from proxy.ui.shown import Shown, Ui
from reconstruct.forest import shared_length
from reconstruct.messages import canonical_json
from reconstruct.records import Call

TURNS_ON_A_PAGE = 30
ROWS_ON_A_PAGE = 100

Text = Annotated[str, Query(max_length=500)]
Offset = Annotated[int, Query(ge=0, le=10**9)]


def routes(kind: type[APIRoute]) -> APIRouter:
    router = APIRouter(prefix="/ui", route_class=kind)
    for path, handler in (
        ("", sessions),
        ("/", sessions),
        ("/groups", groups),
        ("/group", group),
        ("/compare", comparison),
        ("/sessions/{session_id}", session),
        ("/sessions/{session_id}/turns", turns),
        ("/sessions/{session_id}/calls/{call_id}/details", call_details),
    ):
        router.add_api_route(path, handler, methods=["GET"])
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
    found = await load_group(ui.services, id)
    if found is None:
        raise NotFound(f"there is no group {id}")
    live = found.closed < max(found.size, len(found.sessions))
    return page(request, "group.html", group=found, rewards=found.rewards, live=live)


async def _now(ui: Ui) -> dict[str, Any]:
    """The engines and groups as they are."""
    counts = await ui.services.delivery.count_groups()
    shown = ("opened", "filling", "ready", "leased", "acked", "dropped", "dead")
    return {
        "engines": [*ui.services.pool.replicas],
        "groups": {name: counts[name] for name in shown if counts.get(name)},
        "in_flight": len(ui.services.inflight),
        "at": time.time(),
    }


def _number(text: str) -> float | None:
    """None, which finds everything, for a text that is no number."""
    try:
        return float(text)
    except ValueError:
        return None


# A session: one conversation, of which the page has the first turns; the browser loads further ones and forks as fragments.


@dataclass(frozen=True, slots=True)
class Part:
    """Some turns of a conversation, of one of its forks (`thread`), or of the `count` calls that a search found. `following` and
    `preceding` are where the parts after and before it begin; None: there is none."""

    turns: Sequence[Turn]
    start: int
    count: int
    following: int | None
    preceding: int | None
    thread: Thread | None

    @property
    def last_start(self) -> int:
        return (self.count - 1) // TURNS_ON_A_PAGE * TURNS_ON_A_PAGE


async def session(
    request: Request,
    ui: Shown,
    session_id: str,
    q: Text = "",
    role: Text = "",
    only: Text = "",
    start: Offset = 0,
    at: Text = "",
    token: Offset | None = None,
    thread: Text = "",
    row_start: Offset = 0,
) -> Response:
    """With `at`, the part that has this call; with `token` too, that call's tokens from there on."""
    view = await ui.views.load(session_id)
    wanted = CallFilter(q.strip(), role, only if only in ONLY else "")
    part = await asyncio.to_thread(cut_part, view, wanted, start, at, thread)
    info, rows = view.state.info, view.built.rows
    return page(
        request,
        "session.html",
        view=view,
        state=view.state,
        part=part,
        at=at,
        token=token,
        query={"q": wanted.text, "role": role, "only": wanted.only},
        only=ONLY,
        roles=sorted({call.role for call in view.summaries}),
        rows=list(enumerate(rows, 1))[row_start : row_start + ROWS_ON_A_PAGE],
        row_count=len(rows),
        row_start=row_start,
        row_step=ROWS_ON_A_PAGE,
        tree=draw_tree(view.summaries),
        total=summarize(view),
        group=await load_group(ui.services, info.group_id) if info.group_id else None,
        log=await ui.services.sessions.load_log(session_id),
        live=view.state.status in ("open", "closing"),
    )


async def turns(
    request: Request,
    ui: Shown,
    session_id: str,
    q: Text = "",
    role: Text = "",
    only: Text = "",
    start: Offset = 0,
    thread: Text = "",
) -> Response:
    """A fragment: the turns from `start` on of the conversation, or of the fork that has the call `thread`."""
    view = await ui.views.load(session_id)
    wanted = CallFilter(q.strip(), role, only if only in ONLY else "")
    part = await asyncio.to_thread(cut_part, view, wanted, start, "", thread)
    query = {"q": wanted.text, "role": role, "only": wanted.only}
    return page(request, "turns.html", view=view, state=view.state, part=part, at="", token=None, query=query)


async def call_details(request: Request, ui: Shown, session_id: str, call_id: str) -> Response:
    """A fragment: what is known of a call besides its messages."""
    view = await ui.views.load(session_id)
    return page(request, "call.html", state=view.state, **describe_call(view, call_id))


def cut_part(view: SessionView, wanted: CallFilter, start: int, at: str, thread_id: str) -> Part:
    """Raises NotFound for an unknown call or thread."""
    conversation, thread = view.conversation, None
    if at or thread_id:
        thread = conversation.thread_of[view.find_summary(at or thread_id).call_id]
        thread = thread if thread.fork_of else None
    calls = wanted.select(view) if wanted.narrows else thread.calls if thread else conversation.main_line
    if at:
        place = next((place for place, call in enumerate(calls) if call.call_id == at), 0)
        start = place // TURNS_ON_A_PAGE * TURNS_ON_A_PAGE
    end = start + TURNS_ON_A_PAGE
    return Part(
        [show_turn(view, call, with_forks=not wanted.narrows) for call in calls[start:end]],
        start,
        len(calls),
        end if end < len(calls) else None,
        max(0, start - TURNS_ON_A_PAGE) if start else None,
        thread,
    )


# Two sessions side by side, from where their main branches diverge.


COMPARED = 400
"""Messages compared of each side."""
COMPARED_CHARACTERS = 4000


@dataclass(frozen=True, slots=True)
class Pair:
    """The messages at one position of both conversations; None where one has ended."""

    left: ShownMessage | None
    right: ShownMessage | None
    same: bool


@dataclass(frozen=True, slots=True)
class Comparison:
    """`left` and `right` are the last calls of the compared branches, which share their first `same_messages` and `same_tokens`."""

    left: Call | None
    right: Call | None
    pairs: Sequence[Pair]
    same_messages: int
    same_tokens: int
    left_out: int


async def comparison(request: Request, ui: Shown, left: Text, right: Text) -> Response:
    one, other = await ui.views.load(left), await ui.views.load(right)
    compared = await asyncio.to_thread(compare, one, other)
    sides = [_side(one, compared.left), _side(other, compared.right)]
    return page(request, "compare.html", sides=sides, compared=compared, live=False)


def _side(view: SessionView, last: Call | None) -> dict[str, Any]:
    return {"view": view, "state": view.state, "total": summarize(view), "call_id": last.call_id if last else None}


def compare(left: SessionView, right: SessionView) -> Comparison:
    one, other = find_last_call(left), find_last_call(right)
    first, second = (list_messages(call, view.forest) if call else [] for view, call in ((left, one), (right, other)))
    pairs = [
        _pair(index, mine, theirs, len(first), len(second)) for index, (mine, theirs) in enumerate(zip_longest(first, second))
    ]
    same = next((index for index, pair in enumerate(pairs) if not pair.same), len(pairs))
    tokens = shared_length(left.forest.full_ids(one.call_id), right.forest.full_ids(other.call_id)) if one and other else 0
    return Comparison(one, other, pairs[:COMPARED], same, tokens, max(0, len(pairs) - COMPARED))


def find_last_call(view: SessionView) -> Call | None:
    """The end of the session's longest branch of the role main, or of any role if there is none."""
    calls = [call for call in view.summaries if call.in_tree]
    calls = [call for call in calls if call.role == "main"] or calls
    if not calls:
        return None
    longest = max(calls, key=lambda call: (call.prompt_tokens + call.sampled_tokens, call.number))
    return view.forest.calls[longest.call_id]


def _pair(index: int, left: Any, right: Any, left_count: int, right_count: int) -> Pair:
    def show(message: Any, count: int) -> ShownMessage | None:
        if message is None:
            return None
        return show_message(index, message, is_reply=index == count - 1, limit=COMPARED_CHARACTERS)

    same = left is not None and right is not None and _without_ids(left) == _without_ids(right)
    return Pair(show(left, left_count), show(right, right_count), same)


def _without_ids(message: Any) -> bytes:
    """The message without the ids of its tool calls, which differ between any two sessions."""
    if not isinstance(message, dict):
        return canonical_json(message)
    calls = [call.get("function") for call in message.get("tool_calls") or () if isinstance(call, dict)]
    return canonical_json({**message, "tool_call_id": None, "tool_calls": calls or None})


# Lists of sessions and groups, with search and filters.


PAGE = 50
READ_TOGETHER = 200
SEARCHED = 2000
"""Sessions searched for one page; the next page continues."""
GROUPS_AMONG = 1000
MOST_MEMBERS = 1000

STATUSES: tuple[str, ...] = get_args(Status)


@dataclass(frozen=True, slots=True)
class SessionFilter:
    """`text` is searched in ids, metadata, feedback and errors; rewards are inclusive. None and "": no limit."""

    text: str = ""
    status: str = ""
    at_least: float | None = None
    at_most: float | None = None

    @property
    def narrows(self) -> bool:
        return self != SessionFilter(status=self.status)

    def accepts(self, state: SessionState) -> bool:
        if self.at_least is not None and (state.reward is None or state.reward < self.at_least):
            return False
        if self.at_most is not None and (state.reward is None or state.reward > self.at_most):
            return False
        return not self.text or _finds_text(state, self.text.casefold())


@dataclass(frozen=True, slots=True)
class SessionPage:
    """`searched` counts the sessions read for it; `cursor` is where the next page begins, None at the end."""

    sessions: Sequence[SessionState]
    cursor: str | None
    searched: int


@dataclass(frozen=True, slots=True)
class Group:
    """The sessions of a group. `size` is the one they were opened with."""

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
        """Members that closed with nothing to train on. A completed one may still get a reward."""
        return sum(
            state.closed_at is not None
            and (state.status not in RUN_ENDED or (state.status == "timeout" and state.reward is None))
            for state in self.sessions
        )

    @property
    def newest(self) -> float:
        return max(state.info.created_at for state in self.sessions)


async def session_page(services: Services, wanted: SessionFilter, cursor: str | None) -> SessionPage:
    """The newest sessions that the filter accepts, from the cursor on."""
    found: list[SessionState] = []
    searched = 0
    limit = READ_TOGETHER if wanted.narrows else PAGE
    while searched < SEARCHED:
        states, cursor = await services.sessions.list_sessions(
            status=wanted.status or None, group_id=None, limit=limit, cursor=cursor
        )
        for at, state in enumerate(states):
            searched += 1
            if wanted.accepts(state):
                found.append(state)
                if len(found) == PAGE and (at + 1 < len(states) or cursor is not None):
                    return SessionPage(found, _cursor_after(state), searched)
        if cursor is None:
            break
    return SessionPage(found, cursor, searched)


async def newest_groups(services: Services, text: str) -> list[Group]:
    """The groups of the newest sessions whose ids contain the text, newest first."""
    members: dict[str, list[SessionState]] = {}
    cursor, searched = None, 0
    while searched < GROUPS_AMONG:
        states, cursor = await services.sessions.list_sessions(status=None, group_id=None, limit=READ_TOGETHER, cursor=cursor)
        searched += len(states)
        for state in states:
            named = state.info.group_id
            if named is not None and text.casefold() in named.casefold():
                members.setdefault(named, []).append(state)
        if cursor is None:
            break
    return [Group(name, max(each.info.group_size for each in states), states) for name, states in members.items()]


async def load_group(services: Services, group_id: str) -> Group | None:
    """The group with all its sessions, oldest first; None if it has none."""
    states: list[SessionState] = []
    cursor = None
    while len(states) < MOST_MEMBERS:
        part, cursor = await services.sessions.list_sessions(status=None, group_id=group_id, limit=READ_TOGETHER, cursor=cursor)
        states += part
        if cursor is None:
            break
    if not states:
        return None
    return Group(group_id, max(state.info.group_size for state in states), states[::-1])


def _finds_text(state: SessionState, wanted: str) -> bool:
    info = state.info
    named = (info.session_id, info.task_id or "", info.group_id or "", state.error or "")
    if any(wanted in name.casefold() for name in named):
        return True
    return wanted in msgspec.json.encode([info.metadata, state.reward_metadata]).decode().casefold()


def _cursor_after(state: SessionState) -> str:
    """The cursor of the page that begins after a session."""
    return listing_member(state.info.created_at, state.info.session_id)
