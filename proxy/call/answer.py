"""Answering: one model call and the answer to it, whole or streamed.

The call runs in a task of its own, so that a harness that goes away cuts the engine and not the recording.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, Generic, TypeVar

from proxy.call.flow import Flow
from proxy.call.http import JSON, Client, Headers, Receive, Send, send_part, send_whole
from proxy.call.turn import Turn
from proxy.dialects.base import Delta, Dialect, FirstToken, Reply, Sampling, StreamRenderer
from proxy.errors import BudgetExhausted, Conflict, EngineFailed, NotFound, RequestError, StoreUnavailable, VerbatimError
from proxy.services import Services
from proxy.store.sessions import Unserved
from proxy.timeline import HARNESS, REPLY, Deadline, Waiting

Item = Sampling | FirstToken | Delta | Reply | VerbatimError

log = logging.getLogger(__name__)

_UNBUFFERED: Headers = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
_LATER_SECONDS = 1.0
"""Between tries to note what the store could not be told at once."""
TOO_DEEP = "the body is nested too deeply"


class Answering:
    def __init__(self, services: Services, flow: Flow) -> None:
        self._services = services
        self._flow = flow
        self._background: set[asyncio.Task[None]] = set()
        self._unnoted: dict[str, Unserved] = {}
        """Of each session what the store could not be told yet: the last, which alone counts."""

    async def answer(self, client: Client, dialect: Dialect, turn: Turn) -> None:
        """Run the call that was admitted, answer it, and let the store know that the answer went out."""
        items: Handoff[Item] = Handoff()
        work = asyncio.create_task(self._work(turn, items))
        leaving = asyncio.create_task(self._watch(client.receive, turn))
        try:
            answer = self._stream if turn.request.stream else self._whole
            answered = await answer(client.send, dialect, turn, items)
            with Waiting(HARNESS):
                answered = answered and await _arrived(client, leaving)
        except asyncio.CancelledError:
            # The server gives up waiting for this answer: end the call, and let it be recorded.
            self._in_background(turn.running.abort())
            raise
        finally:
            leaving.cancel()
            # Not awaited itself: its end is what counts, however it ended.
            await asyncio.wait((work,))
        if turn.times.step == REPLY:
            self._services.metrics.steps.took(turn.times)
        if answered and not turn.running.cut.is_set():
            self._in_background(self._services.sessions.mark_delivered(turn.session_id, turn.call_ids))

    async def refuse(self, send: Send, dialect: Dialect, error: VerbatimError) -> None:
        """Answer with the error in the dialect's shape."""
        self._services.metrics.refused(dialect.name, error.code)
        answer = dialect.render_error(error)
        headers = [*JSON, *((name.encode(), value.encode()) for name, value in answer.headers.items())]
        await send_whole(send, answer.status, headers, answer.body)

    async def settle(self) -> None:
        """Wait for what still runs behind answered calls, when no more come: what waits for a store that is away tries it once more."""
        self._services.stopping.set()
        await asyncio.gather(*self._background)

    async def _work(self, turn: Turn, items: Handoff[Item]) -> None:
        """Run the call to its end whatever becomes of the harness; its last item is the reply or an error."""
        try:
            async for item in self._flow.call(turn):
                if isinstance(item, Reply) and turn.running.cut.is_set():
                    await self._note_unserved(turn, EngineFailed("the service stopped in the middle of the reply"))
                items.put(item)
                if isinstance(item, FirstToken):
                    # The harness hears of it before anything is made of it.
                    await asyncio.sleep(0)
        except VerbatimError as error:
            if isinstance(error, (NotFound, Conflict)):
                self._services.trees.forget(turn.session_id)
            if error.status >= 500 or isinstance(error, BudgetExhausted):
                log.warning("session %s: call %s failed: %s", turn.session_id, turn.call_ids[0], error.message)
                await self._note_unserved(turn, error)
            items.put(error)
        except RecursionError:
            items.put(RequestError(TOO_DEEP))
        except asyncio.CancelledError:
            # Whoever waits for the answer must not wait for ever.
            items.put(EngineFailed("the call was cut"))
            raise
        except Exception:
            log.exception("session %s: call %s failed inside the service", turn.session_id, turn.call_ids[0])
            failed = VerbatimError("the service failed inside; its log says where")
            await self._note_unserved(turn, failed)
            items.put(failed)
        finally:
            self._flow.leave(turn)

    async def _note_unserved(self, turn: Turn, error: VerbatimError) -> None:
        """Returns before the harness is told: what it does then is nothing that the model made it do. Whoever hung up was not failed."""
        if turn.running.cut.is_set() and not self._services.stopping.is_set():
            return
        unserved = Unserved(time.time(), turn.call_ids[0], error.code, error.message)
        if not isinstance(error, StoreUnavailable):
            with suppress(StoreUnavailable):
                await self._services.sessions.note_unserved(turn.session_id, unserved)
                return
        if turn.session_id not in self._unnoted:
            # One for all of them: a harness that asks again and again while the store is away has many.
            self._in_background(self._noted_later(turn.session_id))
        self._unnoted[turn.session_id] = unserved

    async def _noted_later(self, session_id: str) -> None:
        try:
            while not await self._noted_last(session_id):
                pass
        finally:
            # However it ends: the next one is noted by another task.
            del self._unnoted[session_id]

    async def _noted_last(self, session_id: str) -> bool:
        """Whether there is no more to do after another try: the store has the last one, or cannot be told and the service stops."""
        stopping = self._services.stopping
        with suppress(TimeoutError):
            await asyncio.wait_for(stopping.wait(), _LATER_SECONDS)
        unserved = self._unnoted[session_id]
        try:
            await self._services.sessions.note_unserved(session_id, unserved)
        except StoreUnavailable:
            if not stopping.is_set():
                return False
        return unserved is self._unnoted[session_id]

    async def _watch(self, receive: Receive, turn: Turn) -> None:
        """End the call when the harness hangs up."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self._in_background(turn.running.abort())

    async def _whole(self, send: Send, dialect: Dialect, turn: Turn, items: Handoff[Item]) -> bool:
        while True:
            item = await items.get()
            if isinstance(item, VerbatimError):
                await self.refuse(send, dialect, item)
                return False
            if isinstance(item, Reply):
                await send_whole(send, 200, JSON, dialect.render(turn.request, item))
                return True

    async def _stream(self, send: Send, dialect: Dialect, turn: Turn, items: Handoff[Item]) -> bool:
        """Headers go out with the first token, or with the first keep-alive: an error before that keeps its status. What follows
        them is made while the engine samples."""
        renderer, opening = None, b""
        while True:
            item = await self._next(items)
            if isinstance(item, VerbatimError) and not dialect.is_streamed_error(item):
                await self.refuse(send, dialect, item)
                return False
            if renderer is None or isinstance(item, Sampling):
                renderer = _opened(dialect, turn)
                opening = renderer.open()
            if not isinstance(item, Sampling):
                break
        headers = [(b"content-type", turn.request.stream_type.encode()), *_UNBUFFERED]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send_part(send, opening)
        while not isinstance(item, (Reply, VerbatimError)):
            if item is None:
                await send_part(send, renderer.keep_alive())
            elif isinstance(item, Delta):
                await send_part(send, renderer.write(item))
            item = await self._next(items)
        return await self._close(send, dialect, renderer, item)

    async def _close(self, send: Send, dialect: Dialect, renderer: StreamRenderer, item: Reply | VerbatimError) -> bool:
        if isinstance(item, VerbatimError):
            self._services.metrics.refused(dialect.name, item.code)
            last = renderer.fail(item)
        else:
            last = renderer.close(item)
        await send_part(send, last, last=True)
        return isinstance(item, Reply)

    async def _next(self, items: Handoff[Item]) -> Item | None:
        """The next item, or None when there was none for so long that the harness wants a sign of life."""
        if items:
            return await items.get()
        try:
            async with Deadline(self._services.settings.keepalive_seconds):
                return await items.get()
        except TimeoutError:
            return None

    def _in_background(self, work: Coroutine[Any, Any, Any]) -> None:
        async def run() -> None:
            try:
                await work
            except VerbatimError as error:
                log.warning("a call's afterwork was not done: %s", error.message)

        task = asyncio.create_task(run())
        self._background.add(task)
        task.add_done_callback(self._background.discard)


async def _arrived(client: Client, leaving: asyncio.Task[None]) -> bool:
    """Whether the answer that was just sent went out. Looked at before anything else runs: a server says at the end of an answer, too,
    that its client has left."""
    return await client.flushed() if client.flushed is not None else not leaving.done()


def _opened(dialect: Dialect, turn: Turn) -> StreamRenderer:
    prompt_tokens = len(turn.plan.prompt_ids) if turn.plan is not None else 0
    return dialect.open_stream(turn.request, turn.call_ids[0], int(turn.started_at), prompt_tokens)


# Handoff: an `asyncio.Queue` for a single reader, at a third of its instructions.


T = TypeVar("T")


class Handoff(Generic[T]):
    """Any number of things may wait; `put` never does."""

    __slots__ = ("_reader", "_things")

    def __init__(self) -> None:
        self._things: deque[T] = deque()
        self._reader: asyncio.Future[None] | None = None

    def __len__(self) -> int:
        return len(self._things)

    def put(self, thing: T) -> None:
        self._things.append(thing)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def get(self) -> T:
        """The next thing. Nothing is lost when whoever waits is cancelled."""
        while not self._things:
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        return self._things.popleft()
