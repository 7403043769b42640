"""The lines of lists in their order, page by page, and the list of sessions.

A list that is filtered or ordered looks at a window of bounded size, and its page says so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from proxy.api.closing import RUN_LABEL
from proxy.api.filters import DEFAULT_POLICY, LOSSES, Columns, ListQuery, measure_lost
from proxy.store.run import choose_label
from proxy.store.states import SessionState
from proxy.ui.catalogue import LISTED, SessionCatalogue, Window
from proxy.ui.causes import Cause, group_causes
from proxy.ui.searching import Findings, search_messages
from proxy.ui.shown import Ui

PAGE = 50
MOST_SUGGESTED = 100
"""Labels, flags, runs or policies offered for choice."""

T = TypeVar("T")


def measure_seconds(state: SessionState) -> float:
    """From its opening to its close, or to what happened last in it."""
    return (state.closed_at or state.updated_at) - state.info.created_at


def measure_rate(state: SessionState) -> float | None:
    """Sampled tokens per second from open to close; None while they are not counted."""
    seconds = measure_seconds(state)
    return state.accounting.sampled_tokens / seconds if state.accounting and seconds > 0 else None


SESSION_COLUMNS: Columns[SessionState] = {
    "session": lambda state: state.info.session_id,
    "status": lambda state: state.status,
    "calls": lambda state: state.calls,
    "reward": lambda state: state.reward,
    "tokens": lambda state: state.accounting and state.accounting.sampled_tokens,
    "tokens/s": measure_rate,
    "lost": lambda state: state.accounting and measure_lost(state.accounting),
    "version": lambda state: state.accounting and max((new for _, new in state.accounting.versions.values()), default=None),
    "run": lambda state: state.info.run,
    "group": lambda state: state.info.group_id,
    "task": lambda state: state.info.task_id,
    "opened": lambda state: state.info.created_at,
    "lasted": measure_seconds,
}


# Lines of a window.


@dataclass(frozen=True, slots=True)
class Suggestions:
    """Labels and flags, in their order."""

    labels: Sequence[str] = ()
    flags: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Listing(Generic[T]):
    """A page of `lines` from `start` on, of the `matched` ones among the `searched`. `cursor`: where the next window begins, None if
    there is none. Without a filter or order `matched` and `searched` are None: the window is the page. `suggested`: of the window;
    `causes`: of the failures among the matched ones."""

    lines: Sequence[T]
    start: int = 0
    matched: int | None = None
    searched: int | None = None
    cursor: str | None = None
    suggested: Suggestions = Suggestions()
    causes: Sequence[Cause] = ()
    step: int = PAGE
    findings: Findings | None = None
    """What a search in messages has read."""

    @property
    def following(self) -> int | None:
        end = self.start + len(self.lines)
        return end if self.matched is not None and end < self.matched else None

    @property
    def preceding(self) -> int | None:
        return max(0, self.start - self.step) if self.start else None


def put_in_order(lines: Iterable[T], query: ListQuery, columns: Columns[T]) -> list[T]:
    """In the order asked for; lines with nothing in the column come last. Equal ones stay in their order."""
    if not query.sort:
        return list(lines)
    told = [(columns[query.sort](line), line) for line in lines]
    known = sorted((each for each in told if each[0] is not None), key=lambda each: each[0], reverse=query.descending)
    return [line for _, line in known] + [line for value, line in told if value is None]


def cut_page(lines: Sequence[T], query: ListQuery, window: Window) -> Listing[T]:
    part, suggested = lines[query.start : query.start + PAGE], suggest(window.sessions)
    return Listing(part, query.start, len(lines), len(window.sessions), window.cursor, suggested)


async def load_window(catalogue: SessionCatalogue, query: ListQuery, limit: int | None = None) -> Window:
    """The newest sessions of the run and time that are asked for; `limit`: LISTED unless given."""
    return await catalogue.load(run=query.run or None, after=query.after, cursor=query.window_cursor, limit=limit or LISTED)


async def list_sessions(ui: Ui, query: ListQuery) -> Listing[SessionState]:
    catalogue = ui.catalogue
    if query.in_texts and query.text:
        return await _list_findings(ui, query)
    if not query.narrows:
        window = await load_window(catalogue, query, PAGE)
        return Listing(window.sessions, cursor=window.cursor, suggested=suggest(window.sessions))
    window = await load_window(catalogue, query)
    found = put_in_order(filter(query.accepts, window.sessions), query, SESSION_COLUMNS)
    causes = group_causes((state.error or "", state.info.session_id) for state in found)
    return replace(cut_page(found, query, window), causes=causes)


async def _list_findings(ui: Ui, query: ListQuery) -> Listing[SessionState]:
    """What a search in messages finds, newest first; an order holds among what a page of it has."""
    window = await load_window(ui.catalogue, query)
    findings = await search_messages(ui.services, filter(query.accepts, window.sessions), query.text, PAGE)
    lines = put_in_order(findings.sessions, query, SESSION_COLUMNS)
    cursor = findings.cursor or window.cursor
    return Listing(lines, cursor=cursor, suggested=suggest(window.sessions), findings=findings)


def suggest(sessions: Iterable[SessionState]) -> Suggestions:
    """What the sessions have, as much as one can choose from."""
    labels, flags = set[str](), set[str]()
    for state in sessions:
        labels.add(choose_label(state.info.metadata, RUN_LABEL))
        flags.add(state.flag or "")
    return Suggestions(*(sorted(found - {""})[:MOST_SUGGESTED] for found in (labels, flags)))


async def load_choices(ui: Ui) -> dict[str, Any]:
    """What the forms of all lists offer."""
    runs, policies = await asyncio.gather(ui.services.delivery.load_runs(), ui.services.delivery.list_policies())
    names = [record.run for record in runs if not record.hidden]
    return {"runs": names[:MOST_SUGGESTED], "policies": [DEFAULT_POLICY, *policies][:MOST_SUGGESTED], "losses": LOSSES}
