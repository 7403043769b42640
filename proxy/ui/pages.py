"""The pages: each handler loads what its template shows."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import RedirectResponse
from fastapi.routing import APIRoute

from proxy.api.filters import STATUSES, measure_lost, parse_query
from proxy.api.sessions import Review
from proxy.errors import RequestError
from proxy.ui.concepts import STATE_WORDS
from proxy.ui.conversation import ShownCall, Thread
from proxy.ui.listing import SESSION_COLUMNS, list_sessions, load_choices, measure_rate
from proxy.ui.pictures import draw_tree
from proxy.ui.rendering import HEADERS, address, home_of, page
from proxy.ui.session_view import ONLY, CallFilter, ShownSession, describe_call, show_turn, summarize
from proxy.ui.shown import Shown, Ui, read_form

TURNS_ON_A_PAGE = 30
ROWS_ON_A_PAGE = 100

Text = Annotated[str, Query(max_length=500)]
Offset = Annotated[int, Query(ge=0, le=10**9)]


def routes(kind: type[APIRoute]) -> APIRouter:
    router = APIRouter(prefix="/ui", route_class=kind)
    for path, handler in (
        ("", sessions),
        ("/", sessions),
        ("/sessions/{session_id}", session),
        ("/sessions/{session_id}/turns", turns),
        ("/sessions/{session_id}/calls/{call_id}/details", call_details),
    ):
        router.add_api_route(path, handler, methods=["GET"])
    router.add_api_route("/sessions/{session_id}/review", review, methods=["POST"])
    return router


async def sessions(request: Request, ui: Shown) -> Response:
    query = parse_query(request.query_params, SESSION_COLUMNS, STATUSES)
    found, now, choices = await asyncio.gather(list_sessions(ui, query), _now(ui), load_choices(ui))
    shown: dict[str, Any] = {"columns": SESSION_COLUMNS, "statuses": STATUSES, "lost": measure_lost, "rate": measure_rate}
    return await page(
        request,
        "sessions.html",
        found=found,
        query=query,
        now=now,
        live=not (query.cursor or query.in_texts),
        **shown,
        **choices,
    )


async def _now(ui: Ui) -> dict[str, Any]:
    """The engines and groups as they are."""
    counts = await ui.services.delivery.count_groups()
    words = Counter[str]()
    for name in ("opened", "filling", "ready", "leased", "acked", "dropped", "dead"):
        words[STATE_WORDS.get(name, "waiting")] += counts.get(name, 0)
    return {
        "engines": [*ui.services.pool.replicas],
        "groups": {word: many for word, many in words.items() if many},
        "in_flight": len(ui.services.inflight),
        "at": time.time(),
    }


# A session: one conversation, of which the page has the first turns; the browser loads further ones and forks as fragments.


@dataclass(frozen=True, slots=True)
class ConversationPage:
    """Some turns of a conversation, of one of its forks (`thread`), or of the `count` calls that a search found. `following` and
    `preceding` are where the parts after and before it begin; None: there is none."""

    turns: Sequence[ShownCall]
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

    def measured() -> dict[str, Any]:
        return {
            "part": cut_part(view, wanted, start, at, thread),
            "roles": sorted({call.role for call in view.summaries}),
            "tree": draw_tree(view.summaries),
            "total": summarize(view),
        }

    rows = view.built.rows
    return await page(
        request,
        "session.html",
        view=view,
        state=view.state,
        at=at,
        token=token,
        query={"q": wanted.text, "role": role, "only": wanted.only},
        only=ONLY,
        rows=list(enumerate(rows, 1))[row_start : row_start + ROWS_ON_A_PAGE],
        row_count=len(rows),
        row_start=row_start,
        row_step=ROWS_ON_A_PAGE,
        log=await ui.services.sessions.load_log(session_id),
        live=view.state.status in ("open", "closing"),
        **await asyncio.to_thread(measured),
    )


async def review(request: Request, ui: Shown, session_id: str) -> Response:
    """Puts the form's flag and note on the session; back to its page."""
    given = await read_form(request)
    try:
        wanted = Review(flag=given.get("flag", ""), note=given.get("note", ""))
    except ValueError as error:
        raise RequestError("a flag has at most 64 letters, digits, '.', '_' and '-', a note at most 4000 characters") from error
    await ui.services.sessions.set_review(session_id, wanted.flag, wanted.note)
    return RedirectResponse(address(f"{home_of(request)}/sessions/{session_id}"), 303, headers=HEADERS)


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
    return await page(request, "turns.html", view=view, state=view.state, part=part, at="", token=None, query=query)


async def call_details(request: Request, ui: Shown, session_id: str, call_id: str) -> Response:
    """A fragment: what is known of a call besides its messages."""
    view = await ui.views.load(session_id)
    return await page(request, "call.html", state=view.state, **await asyncio.to_thread(describe_call, view, call_id))


def cut_part(view: ShownSession, wanted: CallFilter, start: int, at: str, thread_id: str) -> ConversationPage:
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
    return ConversationPage(
        [show_turn(view, call, with_forks=not wanted.narrows) for call in calls[start:end]],
        start,
        len(calls),
        end if end < len(calls) else None,
        max(0, start - TURNS_ON_A_PAGE) if start else None,
        thread,
    )
