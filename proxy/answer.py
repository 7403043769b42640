"""Answering: one model call and the answer to it, whole or streamed.

The call runs in a task of its own, so that a harness that goes away cuts the engine and not the recording.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from proxy.asgi import JSON, Client, Headers, Receive, Send, send_part, send_whole
from proxy.dialects.base import Delta, Dialect, FirstToken, Reply, StreamRenderer
from proxy.errors import Conflict, EngineFailed, NotFound, RequestError, VerbatimError
from proxy.flow import Flow
from proxy.services import Services
from proxy.turn import Turn

Item = FirstToken | Delta | Reply | VerbatimError

log = logging.getLogger(__name__)

_UNBUFFERED: Headers = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
TOO_DEEP = "the body is nested too deeply"


class Answering:
    def __init__(self, services: Services, flow: Flow) -> None:
        self._services = services
        self._flow = flow
        self._background: set[asyncio.Task[None]] = set()

    async def answer(self, client: Client, dialect: Dialect, turn: Turn) -> None:
        """Run the call that was admitted, answer it, and let the store know that the answer went out."""
        items: asyncio.Queue[Item] = asyncio.Queue()
        work = asyncio.create_task(self._work(turn, items))
        leaving = asyncio.create_task(self._watch(client.receive, turn))
        try:
            answer = self._stream if turn.request.stream else self._whole
            answered = await answer(client.send, dialect, turn, items) and await _arrived(client, leaving)
        except asyncio.CancelledError:
            # The server gives up waiting for this answer: end the call, and let it be recorded.
            self._in_background(turn.running.abort())
            raise
        finally:
            leaving.cancel()
            # Not awaited itself: its end is what counts, however it ended.
            await asyncio.wait((work,))
        if answered and not turn.running.cut.is_set():
            self._in_background(self._services.sessions.mark_delivered(turn.session_id, turn.call_ids))

    async def refuse(self, send: Send, dialect: Dialect, error: VerbatimError) -> None:
        """Answer with the error in the dialect's shape."""
        self._services.metrics.refused(dialect.name, error.code)
        answer = dialect.error(error)
        headers = [*JSON, *((name.encode(), value.encode()) for name, value in answer.headers.items())]
        await send_whole(send, answer.status, headers, answer.body)

    async def settle(self) -> None:
        """Wait for what still runs behind answered calls."""
        await asyncio.gather(*self._background)

    async def _work(self, turn: Turn, items: asyncio.Queue[Item]) -> None:
        """Run the call to its end whatever becomes of the harness; its last item is the reply or an error."""
        try:
            async for item in self._flow.call(turn):
                items.put_nowait(item)
        except VerbatimError as error:
            if isinstance(error, (NotFound, Conflict)):
                self._services.trees.forget(turn.session_id)
            if error.status >= 500:
                log.warning("session %s: call %s failed: %s", turn.session_id, turn.call_ids[0], error.message)
            items.put_nowait(error)
        except RecursionError:
            items.put_nowait(RequestError(TOO_DEEP))
        except asyncio.CancelledError:
            # Whoever waits for the answer must not wait for ever.
            items.put_nowait(EngineFailed("the call was cut"))
            raise
        except Exception:
            log.exception("session %s: call %s failed inside the service", turn.session_id, turn.call_ids[0])
            items.put_nowait(VerbatimError("the service failed inside; its log says where"))
        finally:
            self._flow.leave(turn)

    async def _watch(self, receive: Receive, turn: Turn) -> None:
        """End the call when the harness hangs up."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self._in_background(turn.running.abort())

    async def _whole(self, send: Send, dialect: Dialect, turn: Turn, items: asyncio.Queue[Item]) -> bool:
        while True:
            item = await items.get()
            if isinstance(item, VerbatimError):
                await self.refuse(send, dialect, item)
                return False
            if isinstance(item, Reply):
                await send_whole(send, 200, JSON, dialect.render(turn.request, item))
                return True

    async def _stream(self, send: Send, dialect: Dialect, turn: Turn, items: asyncio.Queue[Item]) -> bool:
        """Headers go out with the first token, or with the first keep-alive: an error before that keeps its status."""
        renderer: StreamRenderer | None = None
        while True:
            item = await self._next(items)
            if renderer is None:
                if isinstance(item, VerbatimError) and not dialect.errs_in_stream(item):
                    await self.refuse(send, dialect, item)
                    return False
                renderer = _opened(dialect, turn)
                headers = [(b"content-type", turn.request.stream_type.encode()), *_UNBUFFERED]
                await send({"type": "http.response.start", "status": 200, "headers": headers})
                await send_part(send, renderer.open())
            if item is None:
                await send_part(send, renderer.keep_alive())
            elif isinstance(item, Delta):
                await send_part(send, renderer.delta(item))
            elif not isinstance(item, FirstToken):
                return await self._close(send, dialect, renderer, item)

    async def _close(self, send: Send, dialect: Dialect, renderer: StreamRenderer, item: Reply | VerbatimError) -> bool:
        if isinstance(item, VerbatimError):
            self._services.metrics.refused(dialect.name, item.code)
            last = renderer.error(item)
        else:
            last = renderer.close(item)
        await send_part(send, last, last=True)
        return isinstance(item, Reply)

    async def _next(self, items: asyncio.Queue[Item]) -> Item | None:
        """The next item, or None when there was none for so long that the harness wants a sign of life."""
        try:
            async with asyncio.timeout(self._services.settings.keepalive_seconds):
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
