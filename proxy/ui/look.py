"""Looks: sessions as the pages show them, built by `proxy.rows` as the API builds them, and kept while nothing changes."""

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
from proxy.rows import Built, build_rows
from proxy.services import Services
from proxy.store.sessions import Intent, SessionState
from reconstruct.accounting import Settled
from reconstruct.forest import Forest, order_key
from reconstruct.messages import reasoning_of
from reconstruct.records import Call
from reconstruct.trajectory import Trajectory

KEPT = 4
KEPT_TOKENS = 16_000_000
"""Tokens in a session's rows beyond which it is not kept in memory, but built for every request."""


@dataclass(frozen=True, slots=True)
class CallLine:
    """`number` counts from 1 in canonical order. `logprob` is the mean of the sampled tokens', None without any. `refused` says why
    the call is quarantined, "" where it is trained."""

    number: int
    call_id: str
    parent_id: str | None
    branch_reason: str
    role: str
    role_source: str
    agent: str
    dialect: str
    api: str
    status: str
    finish_reason: str
    prompt_tokens: int
    sampled_tokens: int
    versions: Sequence[int]
    logprob: float | None
    started_at: float
    engine_seconds: float
    delivered: bool
    refused: str
    said: str
    tools: Sequence[str]
    in_tree: bool


@dataclass(frozen=True)
class Look:
    """A session at one moment. `in_flight` are the ids of calls under way; `refused` says why calls are quarantined."""

    state: SessionState
    built: Built
    delivered: frozenset[str]
    intents: Sequence[Intent]
    in_flight: frozenset[str]
    refused: Mapping[str, str]
    lines: Sequence[CallLine]

    @property
    def session_id(self) -> str:
        return self.state.info.session_id

    @property
    def forest(self) -> Forest:
        return self.built.settled.forest

    @cached_property
    def calls(self) -> Mapping[str, Call]:
        """All of them by id, those without a place in the tree included."""
        return {**self.forest.calls, **{call.call_id: call for call in self.built.settled.stray}}

    def call(self, call_id: str) -> Call:
        """Raises NotFound."""
        if call_id not in self.calls:
            raise NotFound(f"session {self.session_id} has no call {call_id}")
        return self.calls[call_id]

    def row(self, trajectory_id: str) -> Trajectory:
        """Raises NotFound."""
        for row in self.built.rows:
            if row.trajectory_id == trajectory_id:
                return row
        raise NotFound(f"session {self.session_id} has no trajectory {trajectory_id}")

    @cached_property
    def row_of(self) -> Mapping[str, Trajectory]:
        """The row that a call is trained in, or where none trains it the first one it is part of."""
        found: dict[str, Trajectory] = {}
        for row in self.built.rows:
            for call_id in row.call_ids:
                found.setdefault(call_id, row)
        return found


_Stamp = tuple[SessionState, frozenset[str], tuple[str, ...], frozenset[str]]


class Looks:
    """The last few sessions that were looked at."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._kept: OrderedDict[str, tuple[_Stamp, Look]] = OrderedDict()

    async def at(self, session_id: str) -> Look:
        """The session as it is now. Raises NotFound."""
        sessions = self._services.sessions
        state, delivered, intents = await asyncio.gather(
            sessions.load(session_id), sessions.load_delivered(session_id), sessions.load_intents(session_id)
        )
        if state is None:
            self._kept.pop(session_id, None)
            raise NotFound(f"there is no session {session_id}")
        unclosed = state.status in ("open", "closing")
        in_flight = frozenset(await self._services.peers.in_flight(intents)) if unclosed and intents else frozenset()
        stamp = (state, frozenset(delivered), tuple(intent.call_id for intent in intents), in_flight)
        kept = self._kept.get(session_id)
        if kept is not None and kept[0] == stamp:
            self._kept.move_to_end(session_id)
            return kept[1]
        records = await sessions.load_records(session_id)
        look = await asyncio.to_thread(self._build, state, records, intents, stamp[1], in_flight)
        self._keep(stamp, look)
        return look

    def _build(
        self,
        state: SessionState,
        records: Sequence[bytes],
        intents: Sequence[Intent],
        delivered: frozenset[str],
        in_flight: frozenset[str],
    ) -> Look:
        left = [intent for intent in intents if intent.call_id not in in_flight]
        built = build_rows(self._services.settings, state, records, left, delivered)
        refused = {item.call_id: item.reason for item in built.accounting.quarantined}
        return Look(state, built, delivered, intents, in_flight, refused, call_lines(built.settled, delivered, refused))

    def _keep(self, stamp: _Stamp, look: Look) -> None:
        self._kept.pop(look.session_id, None)
        if sum(len(row.token_ids) for row in look.built.rows) <= KEPT_TOKENS:
            self._kept[look.session_id] = (stamp, look)
        while len(self._kept) > KEPT:
            self._kept.popitem(last=False)


# The list of calls and its filters.


SAID_CHARACTERS = 160

_decode = msgspec.json.decode


@dataclass(frozen=True, slots=True)
class CallFilter:
    """What a list of calls is cut down to; "" is no limit. `text` is looked for in what the call says and is told."""

    text: str = ""
    role: str = ""
    only: str = ""

    def takes(self, line: CallLine, call: Call) -> bool:
        return (not self.role or line.role == self.role) and _is(self.only, line) and self._tells(line, call)

    def _tells(self, line: CallLine, call: Call) -> bool:
        if not self.text:
            return True
        wanted = self.text.casefold()
        named = (line.call_id, line.branch_reason, line.finish_reason, line.agent, line.refused, *line.tools)
        return any(wanted in name.casefold() for name in named) or _in_json(wanted, call)


ONLY: Mapping[str, str] = {
    "": "all calls",
    "trained": "trained",
    "quarantined": "quarantined",
    "branch": "begin a branch",
    "tools": "call tools",
    "cut": "cut short",
}


def call_lines(settled: Settled, delivered: Container[str], refused: Mapping[str, str]) -> list[CallLine]:
    """Every recorded call in canonical order."""
    calls = sorted([*settled.forest.calls.values(), *settled.stray], key=order_key)
    return [
        _line(number, call, settled.forest, call.call_id in delivered, refused.get(call.call_id, ""))
        for number, call in enumerate(calls, 1)
    ]


def branch_reasons(lines: Iterable[CallLine]) -> dict[str, int]:
    """How often calls did not go on from their parent, by reason, the most frequent first."""
    return dict(Counter(line.branch_reason for line in lines if line.branch_reason).most_common())


def said_of(reply: Mapping[str, Any]) -> tuple[str, list[str]]:
    """The beginning of what a reply says, and the names of the tools it calls."""
    content = reply.get("content")
    text = content if isinstance(content, str) and content.strip() else reasoning_of(reply)
    names = [str((call.get("function") or {}).get("name") or "") for call in reply.get("tool_calls") or ()]
    begun = " ".join(text[: 4 * SAID_CHARACTERS].split())
    whole = len(text) <= 4 * SAID_CHARACTERS and len(begun) <= SAID_CHARACTERS
    return begun if whole else f"{begun[: SAID_CHARACTERS - 1]}…", names


def _line(number: int, call: Call, forest: Forest, delivered: bool, refused: str) -> CallLine:
    node, in_tree = call.node, call.call_id in forest
    said, tools = said_of(_decode(call.reply))
    mean = float(np.mean(node.logprobs)) if len(node.logprobs) else math.nan
    return CallLine(
        number=number,
        call_id=call.call_id,
        parent_id=node.parent_id,
        branch_reason=node.branch_reason or "",
        role=call.role,
        role_source=call.role_source,
        agent=call.agent,
        dialect=call.dialect,
        api=call.api,
        status=call.status,
        finish_reason=call.finish_reason,
        prompt_tokens=forest.prompt_length(call.call_id) if in_tree else len(node.delta_ids),
        sampled_tokens=len(node.completion_ids),
        versions=sorted({span.version for span in node.spans}),
        logprob=mean if math.isfinite(mean) else None,
        started_at=call.started_at,
        engine_seconds=call.engine_seconds,
        delivered=delivered,
        refused=refused,
        said=said,
        tools=tools,
        in_tree=in_tree,
    )


def _is(only: str, line: CallLine) -> bool:
    tests = {
        "trained": not line.refused,
        "quarantined": bool(line.refused),
        "branch": bool(line.branch_reason),
        "tools": bool(line.tools),
        "cut": line.finish_reason in ("length", "abort") or line.status != "finished",
    }
    return tests.get(only, True)


def _in_json(wanted: str, call: Call) -> bool:
    """Whether a string of the call's own messages or of its reply holds the text."""
    return any(wanted in text.casefold() for text in _strings([_decode(call.messages), _decode(call.reply)]))


def _strings(value: Any) -> Iterable[str]:
    left = [value]
    while left:
        each = left.pop()
        if isinstance(each, str):
            yield each
        elif isinstance(each, dict):
            left.extend(each.values())
        elif isinstance(each, list):
            left.extend(each)
