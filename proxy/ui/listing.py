"""What the lists of sessions, groups, tasks and rollouts are asked for: filters, an order, a place; and the list of sessions.

A list that is filtered or ordered looks at a window of bounded size, and its page says so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from math import isfinite
from typing import Any, Generic, TypeVar, get_args

import msgspec

from contract.sessions import SessionStatus, TokenSums
from proxy.api.closing import RUN_LABEL
from proxy.errors import RequestError
from proxy.store.keys import listing_member
from proxy.store.run import choose_label
from proxy.store.states import SessionState
from proxy.ui.catalogue import LISTED, SessionCatalogue, Window
from proxy.ui.causes import Cause, group_causes
from proxy.ui.searching import Findings, search_messages
from proxy.ui.shown import Ui
from reconstruct.reasons import REASONS, name_reason

PAGE = 50
MOST_CHARACTERS = 500
MOST_SUGGESTED = 100
"""Labels offered for choice."""
DEFAULT_POLICY = "default"
"""Stands for the policy without a name."""

STATUSES: tuple[str, ...] = get_args(SessionStatus)

T = TypeVar("T")
Columns = Mapping[str, Callable[[T], Any]]
"""By the name of a column what a line has in it, None for nothing."""


def measure_lost(accounting: TokenSums) -> int:
    """Quarantined tokens, without those that are left out by choice."""
    return sum(tokens for reason, tokens in accounting.quarantined.items() if not REASONS[name_reason(reason)].chosen)


LOSSES: Mapping[str, Callable[[TokenSums], bool]] = {
    "tokens lost": lambda accounting: measure_lost(accounting) > 0,
    "in quarantine": lambda accounting: any(accounting.quarantined.values()),
    "incomplete": lambda accounting: not accounting.complete,
    "truncated": lambda accounting: accounting.truncated,
    "nothing trained": lambda accounting: accounting.exported_tokens == 0,
}


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


@dataclass(frozen=True, slots=True, kw_only=True)
class ListQuery:
    """What a list is asked for. `given`: the query as it came, of the names that lists know. `text` is searched in ids, metadata, feedback
    and errors, or in all messages (`in_texts`). `loss` is one of LOSSES. Rewards are inclusive, times in epoch seconds. None and "": no
    limit. `start`: how many lines of the window come before; `cursor`: where the window begins."""

    given: Mapping[str, str]
    text: str = ""
    in_texts: bool = False
    status: str = ""
    run: str = ""
    label: str = ""
    policy: str | None = None
    version: int | None = None
    loss: str = ""
    at_least: float | None = None
    at_most: float | None = None
    after: float | None = None
    before: float | None = None
    sort: str = ""
    descending: bool = True
    start: int = 0
    cursor: str | None = None

    @property
    def members_narrow(self) -> bool:
        """Whether something is asked of sessions beside their text, status, run and time."""
        limits = (self.policy, self.version, self.at_least, self.at_most)
        return bool(self.label or self.loss) or any(each is not None for each in limits)

    @property
    def narrows(self) -> bool:
        """Whether lines have to be looked at one by one."""
        return bool(self.text or self.status or self.sort) or self.members_narrow

    @property
    def is_asked(self) -> bool:
        """Whether anything but the place is asked for."""
        return any(self.given.get(name) for name in FILTERS)

    @property
    def window_cursor(self) -> str | None:
        return self.cursor or (None if self.before is None else listing_member(self.before, ""))

    def accepts_member(self, state: SessionState) -> bool:
        """All but text and status."""
        if self.at_least is not None and (state.reward is None or state.reward < self.at_least):
            return False
        if self.at_most is not None and (state.reward is None or state.reward > self.at_most):
            return False
        if self.label and choose_label(state.info.metadata, RUN_LABEL) != self.label:
            return False
        if self.loss and not (state.accounting and LOSSES[self.loss](state.accounting)):
            return False
        return (self.policy is None and self.version is None) or _has_version(state, self.policy, self.version)

    def accepts(self, state: SessionState) -> bool:
        if self.status and state.status != self.status:
            return False
        if not self.accepts_member(state):
            return False
        return not self.text or self.in_texts or finds_text(state, self.text.casefold())


def _has_version(state: SessionState, policy: str | None, version: int | None) -> bool:
    spans = state.accounting.versions if state.accounting else {}
    found = [span for name, span in spans.items() if policy in (None, name)]
    return any(version is None or oldest <= version <= newest for oldest, newest in found)


def finds_text(state: SessionState, wanted: str) -> bool:
    info = state.info
    named = (info.session_id, info.task_id or "", info.group_id or "", state.error or "")
    if any(wanted in name.casefold() for name in named):
        return True
    return wanted in msgspec.json.encode([info.metadata, state.reward_metadata]).decode().casefold()


# From the address.


FILTERS = ("q", "in", "status", "run", "label", "policy", "version", "loss", "at_least", "at_most", "after", "before", "sort")


def parse_query(given: Mapping[str, str], columns: Columns[Any], statuses: Sequence[str]) -> ListQuery:
    """Raises RequestError for what no line can be, or a column that there is not."""
    known = {name: given.get(name, "").strip() for name in FILTERS}
    for name, value in known.items():
        if len(value) > MOST_CHARACTERS:
            raise RequestError(f"{name} has {len(value)} characters; at most {MOST_CHARACTERS} are searched", param=name)
    sort = known["sort"]
    return ListQuery(
        given=known,
        text=known["q"],
        in_texts=_choose("in", known["in"], ("texts",)) == "texts",
        status=_choose("status", known["status"], statuses),
        run=known["run"],
        label=known["label"],
        policy=None if not known["policy"] else known["policy"] if known["policy"] != DEFAULT_POLICY else "",
        version=_parse_whole("version", known["version"]),
        loss=_choose("loss", known["loss"], tuple(LOSSES)),
        at_least=_parse_number("at_least", known["at_least"]),
        at_most=_parse_number("at_most", known["at_most"]),
        after=_parse_time("after", known["after"]),
        before=_parse_time("before", known["before"]),
        sort=_choose("sort", sort.removeprefix("-"), tuple(columns)),
        descending=sort.startswith("-"),
        start=_parse_whole("start", given.get("start", "")) or 0,
        cursor=given.get("cursor", "")[:MOST_CHARACTERS] or None,
    )


def _choose(name: str, value: str, known: Sequence[str]) -> str:
    if value and value not in known:
        raise RequestError(f"{name} is {value!r}; it can be: {', '.join(known)}", param=name)
    return value


def _parse_number(name: str, text: str) -> float | None:
    try:
        number = float(text) if text else None
    except ValueError:
        number = float("nan")
    if number is not None and not isfinite(number):
        raise RequestError(f"{name} is {text!r}, which is no number", param=name)
    return number


def _parse_whole(name: str, text: str) -> int | None:
    if not text:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) < 16):
        raise RequestError(f"{name} is {text!r}, which is no whole number", param=name)
    return int(text)


def _parse_time(name: str, text: str) -> float | None:
    """Epoch seconds of an ISO time, which is UTC unless it says otherwise."""
    if not text:
        return None
    try:
        read = datetime.fromisoformat(text)
        seconds = (read if read.tzinfo else read.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        seconds = -1.0
    if seconds < 0:
        raise RequestError(f"{name} is {text!r}, which is no time since 1970 like 2026-01-31T18:00", param=name)
    return seconds


# Lines of a window.


@dataclass(frozen=True, slots=True)
class Listing(Generic[T]):
    """A page of `lines` from `start` on, of the `matched` ones among the `searched`. `cursor`: where the next window begins, None if
    there is none. Without a filter or order `matched` and `searched` are None: the window is the page. `labels`: those in the window;
    `causes`: of the failures among the matched ones."""

    lines: Sequence[T]
    start: int = 0
    matched: int | None = None
    searched: int | None = None
    cursor: str | None = None
    labels: Sequence[str] = ()
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
    part, labels = lines[query.start : query.start + PAGE], suggest_labels(window.sessions)
    return Listing(part, query.start, len(lines), len(window.sessions), window.cursor, labels)


async def load_window(catalogue: SessionCatalogue, query: ListQuery, limit: int | None = None) -> Window:
    """The newest sessions of the run and time that are asked for; `limit`: LISTED unless given."""
    return await catalogue.load(run=query.run or None, after=query.after, cursor=query.window_cursor, limit=limit or LISTED)


async def list_sessions(ui: Ui, query: ListQuery) -> Listing[SessionState]:
    catalogue = ui.catalogue
    if query.in_texts and query.text:
        return await _list_findings(ui, query)
    if not query.narrows:
        window = await load_window(catalogue, query, PAGE)
        return Listing(window.sessions, cursor=window.cursor, labels=suggest_labels(window.sessions))
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
    return Listing(lines, cursor=cursor, labels=suggest_labels(window.sessions), findings=findings)


def suggest_labels(sessions: Iterable[SessionState]) -> list[str]:
    """Labels that the sessions have, as many as one can choose from."""
    found = dict.fromkeys(choose_label(state.info.metadata, RUN_LABEL) for state in sessions)
    return sorted(label for label in found if label)[:MOST_SUGGESTED]


async def load_choices(ui: Ui) -> dict[str, Any]:
    """What the forms of all lists offer."""
    runs, policies = await asyncio.gather(ui.services.delivery.load_runs(), ui.services.delivery.list_policies())
    names = [record.run for record in runs if not record.hidden]
    return {"runs": names[:MOST_SUGGESTED], "policies": [DEFAULT_POLICY, *policies][:MOST_SUGGESTED], "losses": LOSSES}
