"""The harness side as plain ASGI: route, authenticate, parse, then the flow; the answer is streamed or whole.

No framework stands in the path of a call. Paths that are not of the harness side go to the control side, unless that has its own port:
then the port that took the request decides.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, cast
from urllib.parse import parse_qsl

from proxy.auth import check_local, check_once, credential, key_opens, named_session, session_of_key
from proxy.call.answer import TOO_DEEP, Answering
from proxy.call.flow import Flow
from proxy.call.http import JSON, Client, Receive, Scope, Send, headers_of, read_body, send_whole
from proxy.call.routes import Route, Routes
from proxy.call.tree import Draft, ParseTurn, SessionTree
from proxy.dialects.base import Counts, Incoming, Lists, Past, Request, Stores
from proxy.dialects.catalogue import dialects
from proxy.dialects.fields import check_recordable, check_tools
from proxy.errors import Conflict, NotFound, RequestError, Unauthorized, UnknownCall, VerbatimError
from proxy.services import Services
from proxy.store.sessions import SessionInfo
from proxy.timeline import CLOCK, HARNESS, PARSE, CallClock, Waiting

log = logging.getLogger(__name__)


_PROBES = ("/healthz", "/readyz")
"""Control-side paths that the harness side's own port serves too."""


class Harness:
    """The outermost ASGI application: answers harness calls and passes everything else to `control`."""

    def __init__(self, services: Services, control: Callable[[Scope, Receive, Send], Awaitable[None]], flow: Flow) -> None:
        self._services = services
        self._control = control
        self._control_port = services.settings.control_port
        self.description: Callable[[], dict[str, Any]] = dict
        """Returns the service's OpenAPI document; set by whoever makes the application."""
        self._flow = flow
        self._dialects = dialects()
        self._routes = Routes(self._dialects.values())
        self._parsing = Parsing(remote_media=services.settings.remote_media)
        self._answering = Answering(services, self._flow)
        self._since = int(time.time())
        """`created` of every listed model: fixed, since a model must not seem to change between two requests."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._is_ours(scope):
            await self._control(scope, receive, send)
            return
        try:
            await self._route(scope, receive, send)
        except VerbatimError as error:
            refusal = error
        except RecursionError:
            refusal = RequestError(TOO_DEEP)
        except Exception:
            log.exception("a harness call failed inside the service")
            refusal = VerbatimError("the service failed inside; its log says where")
        else:
            return
        await self._answering.refuse(send, self._dialects[self._routes.guess_dialect(scope["path"])], refusal)

    def _is_ours(self, scope: Scope) -> bool:
        """Whether the harness side answers."""
        if scope["type"] != "http":
            return False
        if self._control_port is None:
            return self._routes.is_harness(scope["method"], scope["path"])
        # The socket's own port: what is not known to have come in at the control side's is a harness's.
        _, port = scope.get("server") or ("", None)
        return port != self._control_port and scope["path"] not in _PROBES

    def _clock(self) -> CallClock:
        """Overridden by the harness side that observes its calls."""
        return CallClock()

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        clock = self._clock()
        headers = headers_of(scope)
        if len(headers) < len(scope["headers"]):
            check_once(scope["headers"])
        try:
            if self._control_port is not None and not self._routes.is_harness(scope["method"], scope["path"]):
                raise NotFound(f"{scope['path']} is nothing that harnesses are served; the control side has a port of its own")
            route = self._routes.find(scope["method"], scope["path"], headers)
        except RequestError as error:
            # A harness that asks for a missing endpoint may work worse without saying why.
            log.warning("%d %s: %s", error.status, error.code, error.message)
            raise
        if route.action is None:
            await send_whole(send, 200, JSON, b"{}" if scope["method"] == "GET" else b"")
            return
        if route.action == "call":
            CLOCK.set(clock)
        asked = scope.get("query_string", b"")
        query = _query(asked) if asked else {}
        tree = await self._session(route, headers, query)
        self._services.rate.admit(tree.info.session_id)
        with self._services.slots.take(tree.info.session_id):
            await self._act(Client.of(scope, receive, send), tree, route, query, headers)

    async def _act(
        self, client: Client, tree: SessionTree, route: Route, query: Mapping[str, str], headers: Mapping[str, str]
    ) -> None:
        """Serve the route to a caller who is authenticated."""
        if route.action != "call":
            await self._check_life(tree)
        if route.action not in ("call", "count"):
            await send_whole(client.send, 200, JSON, await self._look_up(tree, route))
            return
        settings = self._services.settings
        declared = headers.get("content-length", "")
        length = int(declared) if declared.isdecimal() else None
        with self._services.body_room.place(tree.info.session_id) as place:
            with Waiting(HARNESS):
                body = await read_body(client.receive, settings.max_body_bytes, settings.body_timeout_seconds, place, length)
            incoming = Incoming(body, route.path, query, settings.later_system_role)
            if route.action == "call":
                await self._answer(client, tree, route, incoming, headers)
            else:
                await self._count(client.send, tree, route, incoming)

    async def _check_life(self, tree: SessionTree) -> None:
        """Refuse a key whose session is gone or closed, also where nothing else is read from the store. Raises NotFound and Conflict."""
        session_id = tree.info.session_id
        state = await self._services.sessions.load(session_id)
        if state is None or state.info.created_at != tree.info.created_at:
            self._services.trees.forget(session_id)
            raise NotFound(f"session '{session_id}' does not exist")
        if state.status != "open":
            raise Conflict(f"session '{session_id}' is {state.status}; its key opens nothing any more")

    async def _look_up(self, tree: SessionTree, route: Route) -> bytes:
        """The body for a model, the list of models, or a stored reply."""
        dialect = self._dialects[route.dialect]
        if route.action in ("stored", "items"):
            return await self._stored(tree, cast(Stores, dialect), route)
        lists, created = cast(Lists, dialect), self._since
        models = self._services.pool.catalogue()
        if route.action == "models":
            return lists.render_models(models, created)
        name = route.path["model"]
        # A model may be served without being listed: see policies.
        window = models[name] if name in models else self._services.pool.pick(tree.info.session_id, name).max_model_len
        return lists.render_model(name, window, created)

    async def _stored(self, tree: SessionTree, stores: Stores, route: Route) -> bytes:
        assert route.action is not None
        response_id = route.path["response_id"]
        try:
            return stores.render_stored(response_id, route.action, Draft(tree))
        except UnknownCall:
            await self._services.trees.refresh(tree)
            return stores.render_stored(response_id, route.action, Draft(tree))

    async def _parse(self, draft: Draft, parse: Parse, incoming: Incoming) -> Request:
        """Parse with what this process knows of the session, and if that is not enough, once more with what the store knows."""
        try:
            return await self._parsing.parse(draft, parse, incoming)
        except UnknownCall:
            await self._services.trees.refresh(draft.tree)
            return await self._parsing.parse(draft, parse, incoming, again=True)

    async def _count(self, send: Send, tree: SessionTree, route: Route, incoming: Incoming) -> None:
        dialect = self._dialects[route.dialect]
        request = await self._parse(Draft(tree), dialect.parse_count, incoming)
        tokens = await self._flow.count(tree, request)
        await send_whole(send, 200, JSON, cast(Counts, dialect).render_count(tokens))

    async def _session(self, route: Route, headers: Mapping[str, str], query: Mapping[str, str]) -> SessionTree:
        """The tree of the session that the request names and may use. Raises Unauthorized, Forbidden or NotFound."""
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
        self, client: Client, tree: SessionTree, route: Route, incoming: Incoming, headers: Mapping[str, str]
    ) -> None:
        """Answer one model call."""
        if (clock := CLOCK.get()) is not None:
            clock.begin(PARSE)
        dialect, draft = self._dialects[route.dialect], Draft(tree)
        request = await self._parse(draft, dialect.parse, incoming)
        self._services.metrics.dropped(request.dialect, request.dropped_tools)
        turn = self._flow.admit(draft, request, incoming.body, headers)
        await self._answering.answer(client, dialect, turn)

    async def drain(self, seconds: float) -> None:
        """Let calls in flight finish for `seconds`; then cut the rest: they are recorded, and their replies ended as their dialects do."""
        self._services.stopping.set()
        await self._services.inflight.drain(seconds)

    async def settle(self) -> None:
        """Wait for background work of answered calls."""
        await self._answering.settle()


def _query(raw: bytes) -> dict[str, str]:
    """The query by name, the last value of each. Raises RequestError for two keys."""
    pairs = parse_qsl(raw.decode("latin-1"))
    if sum(name == "key" for name, _ in pairs) > 1:
        raise RequestError("the URL has several key=…: send one")
    return dict(pairs)


# What a request could make an engine fetch. This service fetches nothing that a caller names, but an engine would, from a network that the
# harness may not reach: media on the chat path, so addresses are accepted only with `remote_media`, and caches of other engines, which only
# the operator may connect.

TRANSFERS = ("kv_transfer_params", "ec_transfer_params")
"""vLLM's fields that name a host and port to fetch a cache from."""


def refuse_transfers(request: Request) -> None:
    """Raise RequestError if the request names an engine to fetch from."""
    for name in TRANSFERS:
        if name in request.forward:
            raise RequestError(f"'{name}' is not taken from a harness", param=name)


def refuse_remote_media(request: Request) -> None:
    """Raise RequestError if a message names media by anything but a data URL."""
    for message in request.messages:
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            if isinstance(part, dict):
                _refuse_address(part)


def _refuse_address(part: Mapping[str, Any]) -> None:
    for name, value in part.items():
        if not name.endswith("url"):
            continue
        address = value.get("url") if isinstance(value, dict) else value
        if isinstance(address, str) and address[:5].lower() != "data:":
            raise RequestError(
                f"a message names its {name.removesuffix('_url')} by address; here media are taken as data URLs only",
                param="messages",
            )


# Parsing: on the event loop for a small body, in a thread for a large one.
#
# All calls wait while the loop parses one. The thread takes one body of the process at a time, which bounds memory, and one of a session at
# a time, so that a session with many of them delays only itself. A refused body took time for nothing: its session waits before the next.

SMALL_BYTES = 2**16
LARGE_BYTES = 2**19
MANY_VALUES = 5_000
"""Bodies up to the first size are parsed on the loop, and up to the second if they have at most so many commas, those in texts included.
That takes a few milliseconds, and tens of them if all of it is new message parts."""

Parse = Callable[[Incoming, Past], Request]
"""`parse` or `parse_count` of a dialect."""

REST_FACTOR = 10
"""After a refused request, a session waits so many times as long as parsing it took."""


class Parsing:
    def __init__(self, *, remote_media: bool) -> None:
        self._remote_media = remote_media
        self._thread = asyncio.Lock()

    async def parse(self, draft: Draft, parse: Parse, incoming: Incoming, *, again: bool = False) -> Request:
        """The request. Raises what the dialect raises. `again`: the second attempt, after a refresh from the store."""
        quick, turn = _is_quick(incoming.body), draft.tree.parse_turn
        if quick and turn is None:
            return self._measure(draft, parse, incoming, again)
        if turn is None:
            turn = draft.tree.parse_turn = ParseTurn()
        async with turn.lock:
            if (left := turn.rests_until - time.monotonic()) > 0:
                await asyncio.sleep(left)
            if quick:
                return self._measure(draft, parse, incoming, again)
            async with self._thread:
                return await asyncio.to_thread(self._measure, draft, parse, incoming, again)

    def _measure(self, draft: Draft, parse: Parse, incoming: Incoming, again: bool) -> Request:
        began = time.monotonic()
        try:
            return self._check(draft, parse, incoming)
        except (RequestError, RecursionError) as error:
            if again or not isinstance(error, UnknownCall):
                now = time.monotonic()
                turn = draft.tree.parse_turn = draft.tree.parse_turn or ParseTurn()
                turn.rests_until = now + REST_FACTOR * (now - began)
            raise

    def _check(self, draft: Draft, parse: Parse, incoming: Incoming) -> Request:
        request = parse(incoming, draft)
        check_tools(request.tools)
        check_recordable(request.forward)
        refuse_transfers(request)
        if not self._remote_media:
            refuse_remote_media(request)
        return request


def _is_quick(body: bytes) -> bool:
    return len(body) <= SMALL_BYTES or (len(body) <= LARGE_BYTES and body.count(b",") <= MANY_VALUES)
