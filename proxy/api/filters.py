"""What a list of sessions, groups, tasks or rollouts is asked for, by a page or over the API: filters, an order and a place."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from math import isfinite
from typing import Annotated, Any, TypeVar, get_args

import msgspec
from fastapi import Query

from contract.sessions import SessionStatus, TokenSums
from proxy.api.closing import RUN_LABEL
from proxy.errors import RequestError
from proxy.store.keys import listing_member
from proxy.store.run import choose_label
from proxy.store.states import SessionState
from reconstruct.reasons import REASONS, name_reason

MOST_CHARACTERS = 500
DEFAULT_POLICY = "default"
"""Stands for the policy without a name."""

Where = Annotated[
    list[Annotated[str, Query(max_length=2 * MOST_CHARACTERS)]] | None,
    Query(
        max_length=20,
        description="`NAME=VALUE`; may be repeated. Only entries with this `status`, `run`, `group`, `task`, `label` (of the metadata), "
        "`flag`, `policy` (`default`: the one without a name), weight `version`, `loss` (`tokens lost`, `in quarantine`, `incomplete`, "
        "`truncated` or `nothing trained`), a reward of `at_least` or `at_most`, opened `after` or `before` (ISO time), or with the text "
        "`q` in ids, metadata, feedback or error.",
    ),
]

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
    group: str = ""
    task: str = ""
    label: str = ""
    flag: str = ""
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
        named = (self.group, self.task, self.label, self.flag, self.loss)
        return any(named) or any(each is not None for each in limits)

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
        """All but text, status, run and time."""
        if self.at_least is not None and (state.reward is None or state.reward < self.at_least):
            return False
        if self.at_most is not None and (state.reward is None or state.reward > self.at_most):
            return False
        if self.group not in ("", state.info.group_id) or self.task not in ("", state.info.task_id):
            return False
        if self.flag not in ("", state.flag):
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


# From the address of a page, or from what the API is asked.


WHERE = (
    *("q", "status", "run", "group", "task", "label", "flag", "policy", "version", "loss"),
    *("at_least", "at_most", "after", "before"),
)
"""What an entry of a list can be asked for."""
FILTERS = (*WHERE, "in", "sort")
"""What a page asks for, its place aside."""


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
        group=known["group"],
        task=known["task"],
        label=known["label"],
        flag=known["flag"],
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


def parse_where(given: Sequence[str], statuses: Sequence[str], names: Sequence[str] = WHERE) -> ListQuery:
    """Of a `NAME=VALUE` each, NAME one of `names`. Raises RequestError as `parse_query` does, and for another name or a repeated one."""
    found: dict[str, str] = {}
    for each in given:
        name, sign, value = each.partition("=")
        if not sign or name not in names:
            raise RequestError(f"where is {each!r}; it is NAME=VALUE, and NAME can be: {', '.join(names)}", param="where")
        if name in found:
            raise RequestError(f"where names {name} twice", param="where")
        found[name] = value
    return parse_query(found, {}, statuses)


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
