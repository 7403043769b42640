"""The answer to one model call, whole or streamed, and what a call that failed leaves in the session's state.

`HarnessRequest` is one request of a harness and what became of it: the log's line and the trace are made from it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from contract.sessions import Unserved
from proxy.call.http import JSON, Client, Headers
from proxy.call.phases import Admitted
from proxy.dialects.base import Delta, Dialect, FirstToken, PromptReady, Reply, StreamRenderer
from proxy.errors import StoreUnavailable, VerbatimError
from proxy.metrics import Metrics
from proxy.store.sessions import SessionStore
from proxy.timeline import HARNESS, Timeline, Waiting

log = logging.getLogger(__name__)

_UNBUFFERED: Headers = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
_LATER_SECONDS = 1.0
"""Between tries to note what the store could not be told at once."""


@dataclass(slots=True, eq=False)
class HarnessRequest:
    """One request to the harness side. `call` is None until it is known to be a model call that is not refused."""

    client: Client
    headers: Mapping[str, str]
    dialect: Dialect
    timeline: Timeline
    call: Admitted | None = None
    reply: Reply | None = None
    error: VerbatimError | None = None

    def refuse(self, error: VerbatimError, metrics: Metrics) -> None:
        """Answer with the error in the dialect's shape."""
        self.note(error)
        metrics.count_refusal(self.dialect.name, error.code)
        answer = self.dialect.render_error(error)
        headers = [*JSON, *((name.encode(), value.encode()) for name, value in answer.headers.items())]
        self.client.send_whole(answer.status, headers, answer.body)

    def note(self, error: VerbatimError) -> None:
        """The error is what the harness is told. Its traceback goes: that holds this, which holds the error, and with it the body."""
        self.error = error.with_traceback(None)


class ReplyWriter:
    """The answer to a model call. A streamed one begins with the first token, or with the first keep-alive: an error before that keeps
    its HTTP status."""

    def __init__(self, exchange: HarnessRequest, call: Admitted, metrics: Metrics, keepalive_seconds: float) -> None:
        self._exchange = exchange
        self._client = exchange.client
        self._dialect = exchange.dialect
        self._call = call
        self._metrics = metrics
        self._keepalive_seconds = keepalive_seconds
        self._renderer: StreamRenderer | None = None
        self._opening = b""
        self._flowing: StreamRenderer | None = None
        """The renderer of a stream that has begun."""
        self._loop = asyncio.get_running_loop()
        self._written_at = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None
        if call.request.stream and keepalive_seconds:
            self._timer = self._loop.call_later(keepalive_seconds, self._keep_alive)

    def emit(self, piece: PromptReady | FirstToken | Sequence[Delta]) -> None:
        """Send what the harness may see while the engine samples: the deltas that are given together, in one write."""
        if isinstance(piece, PromptReady):
            if self._flowing is None and self._call.request.stream:
                # Made while the engine samples.
                self._open(piece.prompt_tokens)
        elif self._call.withheld:
            return
        elif isinstance(piece, FirstToken):
            if self._call.request.stream:
                self._begin()
        else:
            self._write(b"".join(map((self._flowing or self._begin()).write, piece)))

    async def finish(self, reply: Reply) -> bool:
        """Send what is left; whether everything went out to a client that was still there."""
        self._stop()
        self._exchange.reply = reply
        if not self._call.request.stream:
            self._client.send_whole(200, JSON, self._dialect.render(self._call.asked, reply))
        else:
            renderer = self._begin()
            self._client.write(renderer.close(reply), last=True)
        with Waiting(HARNESS):
            return await self._client.flushed()

    def fail(self, error: VerbatimError) -> None:
        """Send the error: as an event of a stream that has begun, else as an HTTP error."""
        self._stop()
        streamed = self._flowing is not None or (self._call.request.stream and self._dialect.is_streamed_error(error))
        if not streamed:
            self._exchange.refuse(error, self._metrics)
            return
        self._exchange.note(error)
        renderer = self._begin()
        self._metrics.count_refusal(self._dialect.name, error.code)
        self._client.write(renderer.fail(error), last=True)

    def _open(self, prompt_tokens: int) -> StreamRenderer:
        call = self._call
        renderer = self._renderer = self._dialect.open_stream(call.asked, call.call_id, int(call.started_at), prompt_tokens)
        self._opening = renderer.open()
        return renderer

    def _begin(self) -> StreamRenderer:
        renderer = self._renderer or self._open(0)
        if self._flowing is None:
            self._flowing = renderer
            self._client.start(200, [(b"content-type", self._call.request.stream_type.encode()), *_UNBUFFERED])
            self._write(self._opening)
        return renderer

    def _write(self, content: bytes) -> None:
        if content:
            self._written_at = self._loop.time()
            self._client.write(content)

    def _keep_alive(self) -> None:
        """A harness that hears nothing for long gives up: send a sign of life when nothing else was sent."""
        left = self._written_at + self._keepalive_seconds - self._loop.time()
        if left <= 0:
            self._write(self._begin().keep_alive())
            left = self._keepalive_seconds
        self._timer = self._loop.call_later(left, self._keep_alive)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


class FailureNotes:
    """What is still to be stored when a call has failed: why there was no reply."""

    def __init__(self, sessions: SessionStore, stopping: asyncio.Event) -> None:
        self._sessions = sessions
        self._stopping = stopping
        self._tasks: set[asyncio.Task[None]] = set()
        self._unnoted: dict[str, Unserved] = {}
        """Of each session what the store could not be told yet: the last, which alone counts."""

    async def note_unserved(self, call: Admitted, error: VerbatimError) -> None:
        """To be awaited before the error is sent: what the harness does once it has the error is not the model's doing, and the record
        must say so. A harness that hung up was not failed: nothing is noted for it."""
        if call.scope.cancelled and not self._stopping.is_set():
            return
        unserved = Unserved(time.time(), call.call_id, error.code, error.message)
        if not isinstance(error, StoreUnavailable):
            with suppress(StoreUnavailable):
                await self._sessions.note_unserved(call.session_id, unserved)
                return
        if call.session_id not in self._unnoted:
            # One for all of them: a harness that asks again and again while the store is away has many.
            self._spawn(self._note_later(call.session_id))
        self._unnoted[call.session_id] = unserved

    async def settle(self) -> None:
        """Wait for what is left, when no more calls come: what waits for a store that is away tries it once more."""
        self._stopping.set()
        await asyncio.gather(*self._tasks)

    async def _note_later(self, session_id: str) -> None:
        try:
            while not await self._note_last(session_id):
                pass
        finally:
            # However it ends: the next one is noted by another task.
            del self._unnoted[session_id]

    async def _note_last(self, session_id: str) -> bool:
        """Whether there is no more to do after another try: the store has the last one, or cannot be told and the service stops."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), _LATER_SECONDS)
        unserved = self._unnoted[session_id]
        try:
            await self._sessions.note_unserved(session_id, unserved)
        except StoreUnavailable:
            if not self._stopping.is_set():
                return False
        return unserved is self._unnoted[session_id]

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        async def run() -> None:
            try:
                await work
            except VerbatimError as error:
                log.warning("a call's afterwork was not done: %s", error.message)

        task = asyncio.create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
