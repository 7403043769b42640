"""ShownSession: a session as its pages show it, with rows built as the API builds them; cached until the session changes."""

from __future__ import annotations

import asyncio
import math
from collections import Counter, OrderedDict
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec
import numpy as np

from proxy.errors import NotFound
from proxy.rows import Built, build_rows, sampling_as_wire
from proxy.services import Services
from proxy.store.sessions import is_reference
from proxy.store.states import Intent, SessionState
from proxy.ui.conversation import CallSummary, Conversation, ShownCall, arrange, build_turn
from reconstruct.accounting import Settled
from reconstruct.codec import decode
from reconstruct.messages import reasoning_of
from reconstruct.records import DIVERGED, REPLAY, Call, Forest, order_key
from reconstruct.scores import Scores
from reconstruct.trajectory import Trajectory
from reconstruct.values import estimate

CACHED_SESSIONS = 4
CACHED_TOKENS = 16_000_000
"""A session with more tokens in its rows is not cached but built for every request."""
PREVIEW_CHARACTERS = 160

_decode = msgspec.json.decode


@dataclass(frozen=True)
class ShownSession:
    """A session at one moment. `in_flight`: ids of calls in flight; `quarantined`: the reason of each quarantined call; `summaries`: all
    recorded calls in canonical order."""

    state: SessionState
    built: Built
    delivered: frozenset[str]
    intents: Sequence[Intent]
    in_flight: frozenset[str]
    quarantined: Mapping[str, str]
    summaries: Sequence[CallSummary]

    @property
    def session_id(self) -> str:
        return self.state.info.session_id

    @property
    def forest(self) -> Forest:
        return self.built.settled.forest

    @cached_property
    def calls(self) -> Mapping[str, Call]:
        """All recorded calls by id, including those outside the tree."""
        return {**self.forest.calls, **{call.call_id: call for call in self.built.settled.stray}}

    @cached_property
    def conversation(self) -> Conversation:
        return arrange(self.summaries)

    @cached_property
    def _summaries_by_id(self) -> Mapping[str, CallSummary]:
        return {summary.call_id: summary for summary in self.summaries}

    def find_call(self, call_id: str) -> Call:
        """Raises NotFound."""
        if call_id not in self.calls:
            raise NotFound(f"session {self.session_id} has no call {call_id}")
        return self.calls[call_id]

    def find_summary(self, call_id: str) -> CallSummary:
        """Raises NotFound."""
        self.find_call(call_id)
        return self._summaries_by_id[call_id]

    def find_row(self, trajectory_id: str) -> Trajectory:
        """Raises NotFound."""
        for row in self.built.rows:
            if row.trajectory_id == trajectory_id:
                return row
        raise NotFound(f"session {self.session_id} has no trajectory {trajectory_id}")


Rewards = Mapping[str, Sequence[float]]
"""Of a session's forks, by pivot."""

_Stamp = tuple[SessionState, frozenset[str], frozenset[str], tuple[str, ...], frozenset[str], Rewards]


class ShownSessions:
    """Caches the views of the sessions requested last."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._cached: OrderedDict[str, tuple[_Stamp, ShownSession]] = OrderedDict()

    async def load(self, session_id: str) -> ShownSession:
        """The session as it is now. Raises NotFound."""
        sessions = self._services.sessions
        state, delivered, untold, intents = await asyncio.gather(
            sessions.load(session_id),
            sessions.load_delivered(session_id),
            sessions.load_untold(session_id),
            sessions.load_intents(session_id),
        )
        if state is None:
            self._cached.pop(session_id, None)
            raise NotFound(f"there is no session {session_id}")
        unclosed = state.status in ("open", "closing")
        in_flight = frozenset(await self._services.peers.in_flight(intents)) if unclosed and intents else frozenset()
        rewards = await self._load_rewards(session_id)
        known = (frozenset(delivered), frozenset(untold), tuple(intent.call_id for intent in intents))
        stamp = (state, *known, in_flight, rewards)
        cached = self._cached.get(session_id)
        if cached is not None and cached[0] == stamp:
            self._cached.move_to_end(session_id)
            return cached[1]
        records = await sessions.load_records(session_id)
        heard = await sessions.load_heard(session_id)
        scores = await self._services.scores.load(session_id) if state.scored else None
        view = await asyncio.to_thread(self._build, state, records, intents, stamp[1], heard, in_flight, rewards, scores)
        self._cache(stamp, view)
        return view

    async def _load_rewards(self, session_id: str) -> Rewards:
        """Those of the closed forks that got to their pivot; forks that left the store count no more."""
        sessions, rewards = self._services.sessions, dict[str, list[float]]()
        for fork in await sessions.load_forks(session_id):
            pivot = fork.info.replay.until if fork.info.replay is not None else None
            if pivot is None or fork.reward is None or fork.closed_at is None:
                continue
            if not await asyncio.to_thread(
                _has_diverged, fork.info.session_id, await sessions.load_entries(fork.info.session_id)
            ):
                rewards.setdefault(pivot, []).append(fork.reward)
        return rewards

    def _build(
        self,
        state: SessionState,
        records: Sequence[bytes],
        intents: Sequence[Intent],
        delivered: frozenset[str],
        heard: Container[str],
        in_flight: frozenset[str],
        rewards: Rewards,
        scores: Mapping[str, Scores] | None,
    ) -> ShownSession:
        left = [intent for intent in intents if intent.call_id not in in_flight]
        built = build_rows(self._services.settings, state, records, left, heard, scores=scores)
        quarantined = {item.call_id: item.reason for item in built.accounting.quarantined}
        summaries = summarize_calls(built.settled, delivered, quarantined, rewards)
        return ShownSession(state, built, delivered, intents, in_flight, quarantined, summaries)

    def _cache(self, stamp: _Stamp, view: ShownSession) -> None:
        self._cached.pop(view.session_id, None)
        if sum(len(row.token_ids) for row in view.built.rows) <= CACHED_TOKENS:
            self._cached[view.session_id] = (stamp, view)
        while len(self._cached) > CACHED_SESSIONS:
            self._cached.popitem(last=False)


def _has_diverged(session_id: str, entries: Sequence[bytes]) -> bool:
    """Whether a fork was sampled before its pivot: its reward says nothing of that. What it replays may be another fork's."""
    calls = [decode(entry) for entry in entries if not is_reference(entry)]
    return any(call.session_id == session_id and call.marks.get(REPLAY) == DIVERGED for call in calls)


def summarize_calls(
    settled: Settled, delivered: Container[str], quarantined: Mapping[str, str], rewards: Rewards
) -> list[CallSummary]:
    """Every recorded call in canonical order. `rewards` has those of forks, by pivot."""
    calls = sorted([*settled.forest.calls.values(), *settled.stray], key=order_key)
    return [
        _summarize(number, call, settled, call.call_id in delivered, quarantined.get(call.call_id, ""), rewards)
        for number, call in enumerate(calls, 1)
    ]


def preview_reply(reply: Mapping[str, Any]) -> tuple[str, list[str]]:
    """The beginning of a reply's text, or else of its reasoning, and the names of the tools it calls."""
    content = reply.get("content")
    text = content if isinstance(content, str) and content.strip() else reasoning_of(reply)
    names = [str((call.get("function") or {}).get("name") or "") for call in reply.get("tool_calls") or ()]
    preview = " ".join(text[: 4 * PREVIEW_CHARACTERS].split())
    if len(text) > 4 * PREVIEW_CHARACTERS or len(preview) > PREVIEW_CHARACTERS:
        preview = f"{preview[: PREVIEW_CHARACTERS - 1]}…"
    return preview, names


def _summarize(
    number: int, call: Call, settled: Settled, delivered: bool, quarantine_reason: str, rewards: Rewards
) -> CallSummary:
    forest, replayed = settled.forest, call.call_id in settled.replayed
    node, in_tree = call.node, call.call_id in forest
    preview, tools = preview_reply(_decode(call.reply))
    mean = float(np.mean(node.logprobs)) if len(node.logprobs) else math.nan
    return CallSummary(
        number=number,
        call_id=call.call_id,
        parent_id=node.parent_id,
        branch_reason=node.branch_reason or "",
        role=call.role,
        role_source=call.role_source,
        agent=call.agent,
        status=call.status,
        finish_reason=call.finish_reason,
        prompt_tokens=forest.prompt_length(call.call_id) if in_tree else len(node.delta_ids),
        sampled_tokens=len(node.completion_ids),
        versions=sorted({span.version for span in node.spans}),
        mean_logprob=mean if math.isfinite(mean) else None,
        started_at=call.started_at,
        engine_seconds=call.engine_seconds,
        delivered=delivered,
        quarantine_reason=quarantine_reason,
        preview=preview,
        tools=tools,
        in_tree=in_tree,
        replayed_from=call.session_id if replayed else "",
        value=estimate(rewards[call.call_id]) if call.call_id in rewards else None,
    )


def show_turn(view: ShownSession, summary: CallSummary, *, with_forks: bool = True, **limit: int) -> ShownCall:
    forks = view.conversation.forks.get(summary.call_id, ()) if with_forks else ()
    return build_turn(view.calls[summary.call_id], summary, view.forest, forks, **limit)


def describe_call(view: ShownSession, call_id: str) -> dict[str, Any]:
    call, summary = view.find_call(call_id), view.find_summary(call_id)
    sampling = {name: value for name, value in sampling_as_wire(call.sampling).items() if value not in (None, [])}
    parent = view.find_summary(summary.parent_id) if summary.parent_id and summary.parent_id in view.calls else None
    return {"call": call, "summary": summary, "parent": parent, "sampling": sampling}


def summarize(view: ShownSession) -> dict[str, Any]:
    """The session's tokens by what became of them, its weight versions, branches and seconds, of the calls that it sampled."""
    calls, accounting = [call for call in view.summaries if not call.replayed_from], view.built.accounting
    started = min((call.started_at for call in calls), default=None)
    return {
        "sampled": accounting.sampled_tokens,
        "exported": accounting.exported_tokens,
        "quarantined": accounting.sampled_tokens - accounting.exported_tokens,
        "replayed": accounting.replayed_tokens,
        "reasons": Counter(item.reason for item in accounting.quarantined).most_common(),
        "branches": Counter(call.branch_reason for call in calls if call.branch_reason).most_common(),
        "versions": sorted({version for call in calls for version in call.versions}),
        "engine_seconds": sum(call.engine_seconds for call in calls),
        "seconds": None if started is None else (view.state.closed_at or view.state.updated_at) - started,
    }


# Search in a session's calls.


@dataclass(frozen=True, slots=True)
class CallFilter:
    """Selects calls; "" selects all. `text` is searched in the call's new messages, its reply, its id, and its reasons and names."""

    text: str = ""
    role: str = ""
    only: str = ""

    @property
    def narrows(self) -> bool:
        return self != CallFilter()

    def select(self, view: ShownSession) -> list[CallSummary]:
        return [each for each in view.summaries if self._accepts(each, view.calls[each.call_id])]

    def _accepts(self, summary: CallSummary, call: Call) -> bool:
        if self.role and summary.role != self.role:
            return False
        return _has_property(self.only, summary) and (not self.text or self._finds_text(summary, call))

    def _finds_text(self, summary: CallSummary, call: Call) -> bool:
        wanted = self.text.casefold()
        names = (call.call_id, summary.branch_reason, call.finish_reason, call.agent, summary.quarantine_reason)
        texts = (*names, *summary.tools, *list_strings([_decode(call.messages), _decode(call.reply)]))
        return any(wanted in text.casefold() for text in texts)


ONLY: Mapping[str, str] = {
    "": "all calls",
    "trained": "trained",
    "quarantined": "quarantined",
    "branch": "begin a branch",
    "tools": "call tools",
    "cut": "cut short",
}


def _has_property(only: str, summary: CallSummary) -> bool:
    tests = {
        "trained": not summary.quarantine_reason,
        "quarantined": bool(summary.quarantine_reason),
        "branch": bool(summary.branch_reason),
        "tools": bool(summary.tools),
        "cut": summary.finish_reason in ("length", "abort") or summary.status != "finished",
    }
    return tests.get(only, True)


def list_strings(value: Any) -> Iterable[str]:
    """Every string in a JSON value, at any depth."""
    left = [value]
    while left:
        each = left.pop()
        if isinstance(each, str):
            yield each
        elif isinstance(each, dict):
            left.extend(each.values())
        elif isinstance(each, list):
            left.extend(each)
