"""Lists of sessions, with search and filters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

import msgspec

from contract.sessions import SessionStatus, TokenSums
from proxy.api.groups import READ_TOGETHER
from proxy.services import Services
from proxy.store.keys import listing_member
from proxy.store.states import SessionState
from reconstruct.reasons import REASONS, name_reason

PAGE = 50
SEARCHED = 2000
"""Sessions searched for one page; the next page continues."""

STATUSES: tuple[str, ...] = get_args(SessionStatus)


def measure_lost(accounting: TokenSums) -> int:
    """Quarantined tokens, without those that are left out by choice."""
    return sum(tokens for reason, tokens in accounting.quarantined.items() if not REASONS[name_reason(reason)].chosen)


LOSSES: Mapping[str, Callable[[TokenSums], bool]] = {
    "tokens lost": lambda accounting: measure_lost(accounting) > 0,
    "incomplete": lambda accounting: not accounting.complete,
    "truncated": lambda accounting: accounting.truncated,
    "nothing trained": lambda accounting: accounting.exported_tokens == 0,
}


@dataclass(frozen=True, slots=True)
class SessionFilter:
    """`text` is searched in ids, metadata, feedback and errors; rewards are inclusive. `loss` is one of `LOSSES`. None and "": no limit."""

    text: str = ""
    status: str = ""
    at_least: float | None = None
    at_most: float | None = None
    run: str = ""
    loss: str = ""

    @property
    def narrows(self) -> bool:
        return self != SessionFilter(status=self.status, run=self.run)

    def accepts(self, state: SessionState) -> bool:
        if self.at_least is not None and (state.reward is None or state.reward < self.at_least):
            return False
        if self.at_most is not None and (state.reward is None or state.reward > self.at_most):
            return False
        if self.loss and not (state.accounting and LOSSES[self.loss](state.accounting)):
            return False
        return not self.text or _finds_text(state, self.text.casefold())


@dataclass(frozen=True, slots=True)
class ListingPage:
    """`searched` counts the sessions read for it; `cursor` is where the next page begins, None at the end."""

    sessions: Sequence[SessionState]
    cursor: str | None
    searched: int


async def session_page(services: Services, wanted: SessionFilter, cursor: str | None) -> ListingPage:
    """The newest sessions that the filter accepts, from the cursor on."""
    found: list[SessionState] = []
    searched = 0
    limit = READ_TOGETHER if wanted.narrows else PAGE
    while searched < SEARCHED:
        states, cursor = await services.sessions.list_sessions(
            status=wanted.status or None, group_id=None, run=wanted.run or None, limit=limit, cursor=cursor
        )
        for at, state in enumerate(states):
            searched += 1
            if wanted.accepts(state):
                found.append(state)
                if len(found) == PAGE and (at + 1 < len(states) or cursor is not None):
                    return ListingPage(found, listing_member(state.info.created_at, state.info.session_id), searched)
        if cursor is None:
            break
    return ListingPage(found, cursor, searched)


def _finds_text(state: SessionState, wanted: str) -> bool:
    info = state.info
    named = (info.session_id, info.task_id or "", info.group_id or "", state.error or "")
    if any(wanted in name.casefold() for name in named):
        return True
    return wanted in msgspec.json.encode([info.metadata, state.reward_metadata]).decode().casefold()
