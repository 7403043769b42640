"""The harness side with notes taken of every call: the same path, and at its end a log line, a trace, or both.

It stands in for `Harness` and `Flow` where the settings ask for it, so that a service that wants neither pays for neither.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, MutableMapping
from typing import Any

from proxy.asgi import Application, Client, Receive, Scope, Send, headers_of
from proxy.call_log import attributes_of, log_call
from proxy.call_notes import NOTES, CallNotes
from proxy.dialects.base import Asked, Delta, FirstToken, Reply, Request, Sampling
from proxy.errors import VerbatimError
from proxy.flow import Flow
from proxy.harness import Harness
from proxy.routes import Route, dialect_of
from proxy.services import Services
from proxy.session_tree import Draft, SessionTree
from proxy.steps import ADMIT, INTERPRET, PLAN, SAMPLE, STEPS, CallClock
from proxy.tracing import Tracing
from proxy.turn import Turn


def harness_of(services: Services, control: Application) -> Harness:
    """The harness side as the settings want it."""
    settings = services.settings
    if settings.trace_endpoint is None and not settings.log_calls:
        return Harness(services, control, Flow(services))
    return ObservedHarness(services, control, Tracing.to(settings))


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
        notes = CallNotes(headers, dialect_of(scope["path"]))
        if self._tracing is not None:
            notes.trace = self._tracing.begin(headers)

        async def noted(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                notes.http_status = message["status"]
            await send(message)

        before = NOTES.set(notes)
        try:
            await super().__call__(scope, receive, noted)
        finally:
            NOTES.reset(before)
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

    async def _answer(self, client: Client, tree: SessionTree, route: Route, asked: Asked, headers: Mapping[str, str]) -> None:
        _notes().dialect = route.dialect
        await super()._answer(client, tree, route, asked, headers)

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
    notes = NOTES.get()
    assert notes is not None, "a call comes in through ObservedHarness"
    return notes
