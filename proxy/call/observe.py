"""The harness side with notes taken of every call: the same path, and at its end a log line, a trace, or both.

It stands in for `Harness` and `Flow` where the settings ask for it, so that a service that wants neither pays for neither.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from proxy.call.door import Harness
from proxy.call.flow import Flow
from proxy.call.http import Application, Client, Receive, Scope, Send, headers_of
from proxy.call.routes import Route
from proxy.call.tree import Draft, SessionTree
from proxy.call.turn import Turn
from proxy.dialects.base import Delta, FirstToken, Incoming, Reply, Request, Sampling
from proxy.dialects.catalogue import dialects
from proxy.errors import VerbatimError
from proxy.services import Services
from proxy.timeline import ADMIT, INTERPRET, PLAN, SAMPLE, STEPS, TRACED, CallClock, Traced, Tracing

if TYPE_CHECKING:
    from proxy.call.turn import Turn
    from proxy.dialects.base import Reply


def harness_of(services: Services, control: Application) -> Harness:
    """The harness side as the settings want it."""
    settings = services.settings
    if settings.trace_endpoint is None and not settings.log_calls:
        return Harness(services, control, Flow(services))
    return ObservedHarness(services, control, Tracing.to(settings))


@dataclass(slots=True, eq=False, kw_only=True)
class CallNotes(Traced):
    """`turn` is None while the request is not known to be a model call, or was refused as one."""

    headers: Mapping[str, str]
    dialect: str
    started: float = field(default_factory=time.perf_counter)
    first_token: float | None = None
    turn: Turn | None = None
    reply: Reply | None = None
    error: VerbatimError | None = None
    http_status: int | None = None
    """None where no answer was begun."""

    def step(self, name: str, attributes: Mapping[str, str] | None = None) -> None:
        if self.trace is not None:
            self.trace.step(name, attributes)

    def began(self) -> None:
        """The engine sampled the first token."""
        self.first_token = time.perf_counter()
        if self.trace is not None:
            self.trace.event("first_token")

    def forget(self) -> None:
        """Let go of everything: what the call started and outlives it, the watch of an engine that failed say, holds its notes."""
        self.turn = self.reply = self.error = self.trace = None

    @property
    def outcome(self) -> str:
        """finished, aborted (cut by the harness, a close or a stop), failed, or refused: it never became a call."""
        if self.turn is None:
            return "refused"
        if self.turn.running.cut.is_set():
            return "aborted"
        return "finished" if self.reply is not None else "failed"

    @property
    def code(self) -> str:
        """The error's code, "" where there was none."""
        if self.error is not None:
            return self.error.code
        return "" if self.reply is not None or (self.http_status or 500) < 500 else VerbatimError.code


class ObservedHarness(Harness):
    """`tracing` None: calls are only logged."""

    def __init__(self, services: Services, control: Application, tracing: Tracing | None) -> None:
        super().__init__(services, control, ObservedFlow(services))
        self._tracing = tracing
        self._logs = services.settings.log_calls

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._is_ours(scope):
            await super().__call__(scope, receive, send)
            return
        headers = headers_of(scope)
        notes = CallNotes(headers=headers, dialect=self._routes.guess_dialect(scope["path"]))
        if self._tracing is not None:
            notes.trace = self._tracing.begin(headers)

        async def noted(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                notes.http_status = message["status"]
            await send(message)

        before = TRACED.set(notes)
        try:
            await super().__call__(scope, receive, noted)
        finally:
            TRACED.reset(before)
            self._ended(notes)
            notes.forget()

    def _ended(self, notes: CallNotes) -> None:
        if notes.turn is None and notes.error is None and (notes.http_status or 500) < 500:
            # A list of models, a count of tokens: no call, and nothing went wrong.
            return
        if notes.trace is not None:
            notes.trace.end(attributes_of(notes), notes.code)
        if self._logs:
            log_call(notes)

    def _clock(self) -> CallClock:
        return NotedClock(_notes())

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super()._route(scope, receive, send)
        except VerbatimError as error:
            _notes().error = error
            raise

    async def _answer(
        self, client: Client, tree: SessionTree, route: Route, incoming: Incoming, headers: Mapping[str, str]
    ) -> None:
        _notes().dialect = route.dialect
        await super()._answer(client, tree, route, incoming, headers)

    async def settle(self) -> None:
        await super().settle()
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing.close)


class ObservedFlow(Flow):
    def admit(self, draft: Draft, request: Request, body: bytes, headers: Mapping[str, str]) -> Turn:
        turn = super().admit(draft, request, body, headers)
        _notes().turn = turn
        return turn

    async def call(self, turn: Turn) -> AsyncIterator[Sampling | FirstToken | Delta | Reply]:
        notes = _notes()
        try:
            async for item in super().call(turn):
                if isinstance(item, FirstToken):
                    notes.began()
                elif isinstance(item, Reply):
                    notes.reply = item
                yield item
        except VerbatimError as error:
            notes.error = error
            raise


class NotedClock(CallClock):
    """Notes each step of a call as it begins. What the sampled ids say is found out within the sampling."""

    __slots__ = ("_noted", "_notes")

    def __init__(self, notes: CallNotes) -> None:
        super().__init__()
        self._notes = notes
        self._noted = ADMIT
        notes.step(STEPS[ADMIT])

    def begin(self, step: int) -> None:
        super().begin(step)
        if step in (self._noted, INTERPRET):
            return
        self._noted = step
        turn = self._notes.turn
        at = turn.replica.name if turn is not None and turn.replica is not None and step in (PLAN, SAMPLE) else None
        self._notes.step(STEPS[step], {"verbatim.replica": at} if at else None)


def _notes() -> CallNotes:
    notes = TRACED.get()
    assert isinstance(notes, CallNotes), "a call comes in through ObservedHarness"
    return notes


# One log line per call: who called, the outcome, the times. Never content.
#
# Every field is bounded, including those a harness chooses. A formatter finds the fields in the record's `fields`; the message has the
# most important ones.


log = logging.getLogger(__name__)

_LONGEST = 200
"""Characters of a text that a caller chose."""
_REQUEST_IDS = ("x-request-id", "x-client-request-id", "request-id")
"""Headers in which clients and what stands between them and the service name a request."""

Field = str | int | float | bool | None


def log_call(notes: CallNotes) -> None:
    """At level info; a call that failed by no fault of its harness at warning."""
    fields = fields_of(notes)
    level = logging.WARNING if notes.outcome != "aborted" and (notes.http_status or 0) >= 500 else logging.INFO
    log.log(level, "call %s", _line(fields), extra={"fields": {"event": "call", **fields}})


def fields_of(notes: CallNotes) -> dict[str, Field]:
    """What is known of the call; None where it did not come so far."""
    turn, reply, replica = notes.turn, notes.reply, notes.turn.replica if notes.turn else None
    now = time.perf_counter()
    return {
        "outcome": notes.outcome,
        "code": notes.code or None,
        "http_status": notes.http_status,
        "session_id": turn.session_id if turn else None,
        "call_id": turn.call_ids[0] if turn else None,
        "request_id": next((_cut(notes.headers[name]) for name in _REQUEST_IDS if name in notes.headers), None),
        "trace_id": notes.trace.trace_id if notes.trace else None,
        "dialect": notes.dialect,
        "model": _cut(turn.request.model) if turn else None,
        "stream": turn.request.stream if turn else None,
        "api": replica.api if replica else None,
        "replica": replica.name if replica else None,
        "finish_reason": _cut(reply.choices[0].finish_reason) if reply and reply.choices else None,
        "choices": turn.request.n if turn else None,
        "prompt_tokens": reply.prompt_tokens if reply else None,
        "sampled_tokens": reply.completion_tokens if reply else None,
        "seconds": round(now - notes.started, 4),
        "first_token_seconds": round(notes.first_token - notes.started, 4) if notes.first_token is not None else None,
        "engine_seconds": round(turn.engine_seconds, 4) if turn else None,
    }


def attributes_of(notes: CallNotes) -> dict[str, str | int | float | list[str]]:
    """The same for a trace, by OpenTelemetry's names where it has some (semantic conventions for generative AI and HTTP)."""
    fields = fields_of(notes)
    named = {f"verbatim.{name}": fields[name] for name in _OUR_OWN} | {theirs: fields[ours] for theirs, ours in _THEIRS.items()}
    found: dict[str, str | int | float | list[str]] = {name: value for name, value in named.items() if value is not None}
    if notes.turn is not None:
        info = notes.turn.tree.info
        kept = {"verbatim.group_id": info.group_id, "verbatim.task_id": info.task_id, "verbatim.role": notes.turn.purpose.role}
        found |= {name: value for name, value in kept.items() if value}
        found["gen_ai.operation.name"] = dialects()[notes.dialect].operation
    if notes.reply is not None:
        found["gen_ai.response.finish_reasons"] = [_cut(choice.finish_reason) for choice in notes.reply.choices]
    return found


_OUR_OWN = ("outcome", "session_id", "call_id", "request_id", "dialect", "stream", "api", "replica", "engine_seconds")
_THEIRS: Mapping[str, str] = {
    "gen_ai.request.model": "model",
    "gen_ai.request.choice.count": "choices",
    "gen_ai.response.id": "call_id",
    "gen_ai.usage.input_tokens": "prompt_tokens",
    "gen_ai.usage.output_tokens": "sampled_tokens",
    "http.response.status_code": "http_status",
    "error.type": "code",
}


def _line(fields: Mapping[str, Field]) -> str:
    return " ".join(f"{name}={value}" for name, value in fields.items() if value is not None)


def _cut(text: str) -> str:
    """Its beginning, on one line and without blanks, so that one field cannot pass for two."""
    shown = "".join(letter if letter.isprintable() and not letter.isspace() else "_" for letter in text[:_LONGEST])
    return shown if len(text) <= _LONGEST else f"{shown}..."
