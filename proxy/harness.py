"""The harness side as plain ASGI: exact routes, the session's key, then the flow; the answer streamed or whole.

No framework stands in the path of a call. The call itself runs in a task of its own, so that a harness that goes away cuts
the engine and not the recording. Paths that are not known here are left to the control side.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any, TypeVar
from urllib.parse import parse_qsl

from proxy.auth import credential, key_opens, named_session, session_of_key
from proxy.dialects.base import Asked, Begun, Delta, Dialect, Reply, Request, StreamRenderer
from proxy.dialects.catalogue import Dialects
from proxy.errors import Conflict, NotFound, RequestError, Unauthorized, UnknownCall, VerbatimError
from proxy.flow import Flow
from proxy.limits import read_body
from proxy.loopback import check_local
from proxy.outward import refuse_remote_media, refuse_transfers
from proxy.routes import Route, dialect_of, find, is_harness
from proxy.services import Services
from proxy.store.base import SessionInfo
from proxy.trees import SessionTree
from proxy.turn import Turn

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Item = Begun | Delta | Reply | VerbatimError
T = TypeVar("T")

log = logging.getLogger(__name__)

_UNBUFFERED = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
_JSON = [(b"content-type", b"application/json")]
_TOO_DEEP = "the body is nested too deeply"


class Harness:
    """The ASGI application in front: harness calls are answered here, everything else goes to `control`."""

    def __init__(self, services: Services, control: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self._services = services
        self._control = control
        self._flow = Flow(services)
        self._dialects = Dialects(services.settings)
        self._background: set[asyncio.Task[None]] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not is_harness(scope["method"], scope["path"]):
            await self._control(scope, receive, send)
            return
        try:
            await self._route(scope, receive, send)
        except VerbatimError as error:
            refusal = error
        except RecursionError:
            refusal = RequestError(_TOO_DEEP)
        except Exception:
            log.exception("a harness call failed inside the service")
            refusal = VerbatimError("the service failed inside; its log says where")
        else:
            return
        await self._refuse(send, self._dialects[dialect_of(scope["path"])], refusal)

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = _headers(scope)
        try:
            route = find(scope["method"], scope["path"], headers)
        except RequestError as error:
            # A harness that asks for what is not there may work worse and not say why.
            log.warning("%d %s: %s", error.status, error.code, error.message)
            raise
        if route.action == "probe":
            await _send_whole(send, 200, _JSON, b"{}" if scope["method"] == "GET" else b"")
            return
        query = dict(parse_qsl(scope.get("query_string", b"").decode("latin-1")))
        tree = await self._session(route, headers, query)
        self._services.rate.admit(tree.info.session_id)
        with self._services.slots.take(tree.info.session_id):
            await self._act(receive, send, tree, route, query, headers)

    async def _act(
        self,
        receive: Receive,
        send: Send,
        tree: SessionTree,
        route: Route,
        query: Mapping[str, str],
        headers: Mapping[str, str],
    ) -> None:
        """Do what the route says for a caller who may ask for it."""
        if route.action != "call":
            await self._check_life(tree)
        if route.action not in ("call", "count"):
            await _send_whole(send, 200, _JSON, await self._looked_up(tree, route))
            return
        settings = self._services.settings
        body = await read_body(receive, settings.max_body_bytes, settings.body_timeout_seconds)
        asked = Asked(body, route.path, query)
        if route.action == "call":
            await self._answer(receive, send, tree, route, asked, headers)
        else:
            await self._count(send, tree, route, asked)

    async def _check_life(self, tree: SessionTree) -> None:
        """A key lives as long as its session, also for what asks nothing else of the store. Raises NotFound and Conflict."""
        session_id = tree.info.session_id
        state = await self._services.sessions.load(session_id)
        if state is None or state.info.created_at != tree.info.created_at:
            self._services.trees.forget(session_id)
            raise NotFound(f"session '{session_id}' does not exist")
        if state.status != "open":
            raise Conflict(f"session '{session_id}' is {state.status}; its key opens nothing any more")

    async def _looked_up(self, tree: SessionTree, route: Route) -> bytes:
        """The body that answers a question about what there is: models, and replies that are kept."""
        if route.action in ("stored", "items"):
            return await self._knowing(
                tree, lambda: self._dialects.responses.stored(route.path["response"], route.action, tree)
            )
        lists, created = self._dialects.lists(route.dialect), int(time.time())
        models = self._models()
        if route.action == "models":
            return lists.models(models, created)
        name = route.path["model"]
        if name not in models:
            raise NotFound(f"the model '{name}' does not exist; there are: {', '.join(models)}", param="model")
        return lists.model(name, models[name], created)

    def _models(self) -> dict[str, int | None]:
        serving = [replica for replica in self._services.pool.replicas if replica.healthy]
        return {name: replica.max_model_len for replica in serving for name in replica.models}

    async def _knowing(self, tree: SessionTree, work: Callable[[], T]) -> T:
        """`work` on what this process knows of the session; once more on what the store knows, where that is not enough."""
        try:
            return work()
        except UnknownCall:
            await self._services.trees.refresh(tree)
            return work()

    async def _parsed(self, tree: SessionTree, work: Callable[[], Request]) -> Request:
        request = await self._knowing(tree, work)
        refuse_transfers(request)
        if not self._services.settings.remote_media:
            refuse_remote_media(request)
        return request

    async def _count(self, send: Send, tree: SessionTree, route: Route, asked: Asked) -> None:
        counts = self._dialects.counts(route.dialect)
        request = await self._parsed(tree, lambda: counts.parse_count(asked, tree))
        tokens = await self._flow.count(tree, request)
        await _send_whole(send, 200, _JSON, counts.count(tokens))

    async def _session(self, route: Route, headers: Mapping[str, str], query: Mapping[str, str]) -> SessionTree:
        """The tree of the session the request names and may use. Raises Unauthorized, Forbidden or NotFound."""
        key = credential(headers, query)
        session_id = named_session(route.session, key, keyless=self._services.settings.open)
        if key is None or session_of_key(key) is None:
            check_local(headers)
            return await self._services.trees.open(session_id)

        def admits(info: SessionInfo) -> None:
            if not key_opens(key, info.key_hash):
                raise Unauthorized(f"the API key does not open session {session_id}")

        return await self._services.trees.open(session_id, admits)

    async def _answer(
        self, receive: Receive, send: Send, tree: SessionTree, route: Route, asked: Asked, headers: Mapping[str, str]
    ) -> None:
        """Answer one model call, whole or streamed, and let the store know that the answer went out."""
        dialect = self._dialects[route.dialect]
        request = await self._parsed(tree, lambda: dialect.parse(asked, tree))
        self._services.metrics.dropped(request.dialect, request.dropped_tools)
        turn = self._flow.admit(tree, request, asked.body, headers)
        items: asyncio.Queue[Item] = asyncio.Queue()
        work = asyncio.create_task(self._work(turn, items))
        leaving = asyncio.create_task(self._watch(receive, turn))
        try:
            if request.stream:
                answered = await self._stream(send, dialect, turn, items)
            else:
                answered = await self._whole(send, dialect, turn, items)
        except asyncio.CancelledError:
            # The server gives up waiting for this answer: end the call, and let it be recorded.
            self._in_background(turn.running.abort())
            raise
        finally:
            leaving.cancel()
            await asyncio.shield(work)
        if answered and not turn.running.cut.is_set():
            self._in_background(self._services.sessions.mark_delivered(turn.session_id, turn.call_ids))

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
            items.put_nowait(RequestError(_TOO_DEEP))
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
                await self._refuse(send, dialect, item)
                return False
            if isinstance(item, Reply):
                await _send_whole(send, 200, _JSON, dialect.render(turn.request, item))
                return True

    async def _stream(self, send: Send, dialect: Dialect, turn: Turn, items: asyncio.Queue[Item]) -> bool:
        """Headers go out with the first token, or with the first keep-alive: an error before that keeps its status."""
        renderer: StreamRenderer | None = None
        while True:
            item = await self._next(items)
            if renderer is None:
                if isinstance(item, VerbatimError) and not dialect.errs_in_stream(item):
                    await self._refuse(send, dialect, item)
                    return False
                renderer = _opened(dialect, turn)
                headers = [(b"content-type", turn.request.stream_type.encode()), *_UNBUFFERED]
                await send({"type": "http.response.start", "status": 200, "headers": headers})
                await _send_part(send, renderer.open())
            if item is None:
                await _send_part(send, renderer.keep_alive())
            elif isinstance(item, Delta):
                await _send_part(send, renderer.delta(item))
            elif not isinstance(item, Begun):
                return await self._close(send, dialect, renderer, item)

    async def _close(self, send: Send, dialect: Dialect, renderer: StreamRenderer, item: Reply | VerbatimError) -> bool:
        if isinstance(item, VerbatimError):
            self._services.metrics.refused(dialect.name, item.code)
            last = renderer.error(item)
        else:
            last = renderer.close(item)
        await send({"type": "http.response.body", "body": last, "more_body": False})
        return isinstance(item, Reply)

    async def _next(self, items: asyncio.Queue[Item]) -> Item | None:
        """The next item, or None when there was none for so long that the harness wants a sign of life."""
        try:
            async with asyncio.timeout(self._services.settings.keepalive_seconds):
                return await items.get()
        except TimeoutError:
            return None

    async def _refuse(self, send: Send, dialect: Dialect, error: VerbatimError) -> None:
        self._services.metrics.refused(dialect.name, error.code)
        answer = dialect.error(error)
        headers = [*_JSON, *((name.encode(), value.encode()) for name, value in answer.headers.items())]
        await _send_whole(send, answer.status, headers, answer.body)

    def _in_background(self, work: Any) -> None:
        async def run() -> None:
            try:
                await work
            except VerbatimError as error:
                log.warning("a call's afterwork was not done: %s", error.message)

        task = asyncio.create_task(run())
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def drain(self, seconds: float) -> None:
        """Let calls in flight finish for `seconds`; the rest is cut: recorded, and its reply ended in the dialect's way."""
        self._services.stopping.set()
        await self._services.inflight.drain(seconds)

    async def settle(self) -> None:
        """Wait for what still runs behind answered calls."""
        await asyncio.gather(*self._background)


def _opened(dialect: Dialect, turn: Turn) -> StreamRenderer:
    prompt_tokens = len(turn.plan.prompt_ids) if turn.plan is not None else 0
    return dialect.open_stream(turn.request, turn.call_ids[0], int(turn.started_at), prompt_tokens)


def _headers(scope: Scope) -> dict[str, str]:
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}


async def _send_whole(send: Send, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [*headers, length]})
    await send({"type": "http.response.body", "body": body})


async def _send_part(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})
