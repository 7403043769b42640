"""The harness side as plain ASGI: route, authenticate, parse, run the call, answer it.

No framework stands in the path of a call. Paths that are not of the harness side go to the control side, unless that has its own port:
then the port that took the request decides.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Any, cast
from urllib.parse import parse_qsl

from proxy.api.rollouts import open_for_call
from proxy.auth import check_local, check_once, credential, key_opens, named_session, session_of_key
from proxy.call.batch import ArrayMember, PromptArray
from proxy.call.draft import Draft
from proxy.call.http import JSON, BodySeat, Client, Receive, Route, Routes, Scope, Send, headers_of, read_body, refuse_encoding
from proxy.call.observe import Observer
from proxy.call.phases import Admitted
from proxy.call.run import admit, count_tokens, run_call
from proxy.call.session import ParseLane, Session
from proxy.call.window import TOKEN_BYTES, check_length
from proxy.call.writer import FailureNotes, HarnessRequest, ReplyWriter
from proxy.dialects.base import (
    MAX_SEALED_BYTES,
    Action,
    Counts,
    Incoming,
    Lists,
    LongSeals,
    Past,
    Reply,
    Request,
    SeveralCalls,
    Stores,
)
from proxy.dialects.catalogue import dialects
from proxy.dialects.fields import check_recordable, check_tools
from proxy.errors import (
    BudgetExhausted,
    Conflict,
    EngineFailed,
    NotFound,
    ReplayDiverged,
    RequestError,
    ServiceStopping,
    StoreUnavailable,
    Unauthorized,
    UnknownCall,
    VerbatimError,
)
from proxy.images import check_image
from proxy.projects import KEY
from proxy.services import Services
from proxy.store.states import SessionInfo
from proxy.timeline import HARNESS, PARSE, REPLY, TIMELINE, Timeline, Waiting
from reconstruct.records import Call

log = logging.getLogger(__name__)


_PROBES = ("/healthz", "/readyz")
"""Control-side paths that the harness side's own port serves too."""

TOO_DEEP = "the body is nested too deeply"
STOPPED = "the service is stopping, and the call was cut: ask again, another process or the next one answers"


class HarnessApp:
    """The outermost ASGI application: answers harness calls and passes everything else to `control`."""

    def __init__(self, services: Services, control: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self._services = services
        self._control = control
        self._settings = services.settings
        self.description: Callable[[], dict[str, Any]] = dict
        """Returns the service's OpenAPI document; set by whoever makes the application."""
        self._failures = FailureNotes(services.sessions, services.stopping)
        self._observer = Observer.of(services.settings)
        self._dialects = dialects()
        self._routes = Routes(self._dialects.values())
        self._parsing = Parsing()
        self._since = int(time.time())
        """`created` of every listed model: fixed, since a model must not seem to change between two requests."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._is_ours(scope):
            await self._control(scope, receive, send)
            return
        client, headers = Client(scope, receive, send), headers_of(scope)
        timeline = Timeline(None if self._observer is None else self._observer.begin_trace(headers))
        TIMELINE.set(timeline)
        exchange = HarnessRequest(client, headers, self._dialects[self._routes.guess_dialect(scope["path"])], timeline)
        await self._answer(exchange, self._serve(scope, exchange))
        await client.close()

    async def _answer(self, exchange: HarnessRequest, work: Awaitable[None]) -> None:
        """Do the work: every error of it becomes the reply, and then the exchange is over."""
        try:
            await work
        except VerbatimError as error:
            exchange.refuse(error, self._services.metrics)
        except RecursionError:
            exchange.refuse(RequestError(TOO_DEEP), self._services.metrics)
        except Exception:
            log.exception("a harness call failed inside the service")
            exchange.refuse(VerbatimError("the service failed inside; its log says where"), self._services.metrics)
        finally:
            if self._observer is not None:
                self._observer.end(exchange)

    async def drain(self, seconds: float) -> None:
        """Let calls in flight finish for `seconds`; then cut the rest: they are recorded, and their replies ended as their dialects do."""
        self._services.stopping.set()
        await self._services.inflight.drain(seconds)

    async def settle(self) -> None:
        """Wait for what answered calls have left to store."""
        await self._failures.settle()
        if self._observer is not None:
            await self._observer.close()

    def _is_ours(self, scope: Scope) -> bool:
        """Whether the harness side answers."""
        if scope["type"] != "http":
            return False
        if self._settings.control_port is None:
            return self._routes.is_harness(scope["method"], scope["path"])
        # The socket's own port: what is not known to have come in at the control side's is a harness's.
        _, port = scope.get("server") or ("", None)
        return port != self._settings.control_port and scope["path"] not in _PROBES

    async def _serve(self, scope: Scope, exchange: HarnessRequest) -> None:
        if len(exchange.headers) < len(scope["headers"]):
            check_once(scope["headers"])
        route = self._find_route(scope, exchange.headers)
        if route.action is None:
            exchange.client.send_whole(200, JSON, b"{}" if scope["method"] == "GET" else b"")
            return
        raw_query = scope.get("query_string", b"")
        query = _query(raw_query) if raw_query else {}
        session = await self._open_session(route, exchange.headers, query)
        exchange.timeline.session_id = session.info.session_id
        self._services.rate.admit(session.info.session_id)
        with self._services.slots.take(session.info.session_id):
            if route.action not in ("call", "count"):
                await self._check_life(session)
                if route.action in ("stored", "items"):
                    await self._give_stored(exchange, session, route)
                else:
                    exchange.client.send_whole(200, JSON, self._look_up(route))
                return
            with self._services.body_room.place(session.info.session_id) as place:
                with Waiting(HARNESS):
                    body = await self._read_body(exchange, place)
                incoming = Incoming(body, route.path, query, self._settings.later_system_role)
                if route.action == "call":
                    try:
                        await self._call(exchange, session, route, incoming)
                    except SeveralCalls as several:
                        await self._call_each(
                            exchange, session, route, [replace(incoming, body=body) for body in several.bodies]
                        )
                else:
                    await self._check_life(session)
                    await self._count(exchange, session, route, incoming)

    def _find_route(self, scope: Scope, headers: Mapping[str, str]) -> Route:
        try:
            if self._settings.control_port is not None and not self._routes.is_harness(scope["method"], scope["path"]):
                raise NotFound(f"{scope['path']} is nothing that harnesses are served; the control side has a port of its own")
            return self._routes.find(scope["method"], scope["path"], headers)
        except RequestError as error:
            # A harness that asks for a missing endpoint may work worse without saying why.
            log.warning("%d %s: %s", error.status, error.code, error.message)
            raise

    async def _open_session(self, route: Route, headers: Mapping[str, str], query: Mapping[str, str]) -> Session:
        """The session that the request names and may use. Raises Unauthorized, Forbidden or NotFound."""
        key = credential(headers, query)
        if route.session is None and key is not None and key.startswith(KEY):
            return await open_for_call(self._services, key, headers, route.rollout)
        if route.rollout is not None:
            raise Unauthorized("the path names a rollout: send the key of its project")
        session_id = named_session(route.session, key, keyless=self._settings.open)
        if key is None or session_of_key(key) is None:
            check_local(headers)
            return await self._services.cache.open(session_id)

        def admits(info: SessionInfo) -> None:
            if not key_opens(key, info.key_hash):
                raise Unauthorized(f"the API key does not open session {session_id}")

        return await self._services.cache.open(session_id, admits)

    async def _read_body(self, exchange: HarnessRequest, place: BodySeat) -> bytes:
        refuse_encoding(exchange.headers.get("content-encoding", ""))
        declared = exchange.headers.get("content-length", "")
        length = int(declared) if declared.isdecimal() else None
        most, seconds = self._settings.max_body_bytes, self._services.limits.body_timeout_seconds
        return await read_body(exchange.client.receive, most, seconds, place, length)

    # Model calls.

    async def _call(self, exchange: HarnessRequest, session: Session, route: Route, incoming: Incoming) -> None:
        """Parse, admit, run and answer. The call runs in a task of its own: a server that gives up on the answer cuts the engine and not
        the recording."""
        exchange.timeline.begin(PARSE)
        exchange.dialect = self._dialects[route.dialect]
        draft = Draft(session, self._services.pool.window)
        request = await self._parse(draft, exchange.dialect.parse, incoming)
        if request.dropped_tools:
            self._services.metrics.count_dropped_tools(request.dialect, request.dropped_tools)
        body, headers = draft.body(incoming.body), exchange.headers
        # A large body takes a tenth of a second.
        digest = body.digest() if body.unhashed_bytes <= LARGE_BYTES else await asyncio.to_thread(body.digest)
        call = exchange.call = await admit(draft, request, digest, headers, exchange.timeline, self._services)
        if isinstance(exchange.client, ArrayMember):
            exchange.client.take_turn(call.call_id, request.n)
        work = asyncio.create_task(self._run(exchange, call))
        try:
            await asyncio.shield(work)
        except asyncio.CancelledError:
            call.scope.cancel()
            await asyncio.wait((work,))
            raise

    async def _call_each(self, exchange: HarnessRequest, session: Session, route: Route, incomings: Sequence[Incoming]) -> None:
        """Run each as a call of its own, and answer with all of them."""
        batch = PromptArray(exchange.client, len(incomings))
        pairs = zip(batch.parts, incomings, strict=True)
        calls = [asyncio.create_task(self._call_part(exchange, session, route, part, each)) for part, each in pairs]
        try:
            await batch.ended.wait()
            flushed = await exchange.client.flushed()
            batch.delivered.set_result(flushed and not batch.failed)
        except asyncio.CancelledError:
            batch.cut()
            raise
        finally:
            if not batch.delivered.done():
                batch.delivered.set_result(False)
            await asyncio.wait(calls)

    async def _call_part(
        self, whole: HarnessRequest, session: Session, route: Route, part: ArrayMember, incoming: Incoming
    ) -> None:
        timeline = Timeline(None if self._observer is None else self._observer.begin_trace(whole.headers))
        timeline.session_id = session.info.session_id
        TIMELINE.set(timeline)
        exchange = HarnessRequest(part, whole.headers, self._dialects[route.dialect], timeline)
        await self._answer(exchange, self._admit_part(exchange, session, route, part, incoming))

    async def _admit_part(
        self, exchange: HarnessRequest, session: Session, route: Route, part: ArrayMember, incoming: Incoming
    ) -> None:
        if part.number:
            # The request itself counts for the first.
            self._services.rate.admit(session.info.session_id)
        with self._services.slots.take(session.info.session_id) if part.number else nullcontext():
            await self._call(exchange, session, route, incoming)

    async def _run(self, exchange: HarnessRequest, call: Admitted) -> None:
        out = ReplyWriter(exchange, call, self._services.metrics, self._settings.keepalive_seconds)
        exchange.client.on_leave(call.scope.cancel)
        delivered = False
        try:
            reply = await run_call(call, out.emit, self._services)
        except VerbatimError as error:
            await self._fail(call, out, error)
        except RecursionError:
            out.fail(RequestError(TOO_DEEP))
        except asyncio.CancelledError:
            # Whoever waits for the answer must not wait for ever.
            out.fail(ServiceStopping(STOPPED) if self._services.stopping.is_set() else EngineFailed("the call was cut"))
            raise
        except Exception:
            log.exception("session %s: call %s failed inside the service", call.session_id, call.call_id)
            failed = VerbatimError("the service failed inside; its log says where")
            await self._failures.note_unserved(call, failed)
            out.fail(failed)
        else:
            delivered = await self._deliver(exchange, call, out, reply)
        finally:
            shown = call.asked.n
            self._services.sessions.note_answered(call.session_id, call.call_ids[:shown], delivered=delivered)
            if shown < len(call.call_ids):
                self._services.sessions.note_answered(call.session_id, call.call_ids[shown:], delivered=False)

    async def _fail(self, call: Admitted, out: ReplyWriter, error: VerbatimError) -> None:
        if call.scope.cancelled and self._services.stopping.is_set():
            # The engine did not break off: this process hung up.
            error = ServiceStopping(STOPPED)
        if isinstance(error, (NotFound, Conflict)) and not isinstance(error, ReplayDiverged):
            self._services.cache.forget(call.session_id)
        if error.status >= 500 or isinstance(error, (BudgetExhausted, ReplayDiverged)):
            log.warning("session %s: call %s failed: %s", call.session_id, call.call_id, error.message)
            await self._failures.note_unserved(call, error)
        out.fail(error)

    async def _deliver(self, exchange: HarnessRequest, call: Admitted, out: ReplyWriter, reply: Reply) -> bool:
        """Whether all of the reply, cut or not, went out to a harness that was still there."""
        if call.scope.cancelled:
            await self._failures.note_unserved(call, ServiceStopping(STOPPED))
        delivered = await out.finish(reply)
        if exchange.timeline.step == REPLY:
            self._services.metrics.steps.took(exchange.timeline)
        return delivered

    async def _parse(self, draft: Draft, parse: Parse, incoming: Incoming) -> Request:
        """Parse with what this process knows of the session, and if that is not enough, once more with what the store knows. New
        images are decoded once, so that nothing of a broken one is kept."""
        request = None
        while request is None:
            try:
                request = await self._parsing.parse(draft, parse, incoming, again=draft.refreshed)
            except UnknownCall:
                if draft.refreshed and not draft.session.lacks_texts:
                    raise
                await self._services.cache.refresh(draft.session)
                draft.refreshed = True
        if draft.images:
            await self._parsing.check_images(draft)
        return request

    # Everything else, which records nothing.

    async def _check_life(self, session: Session) -> None:
        """Refuse a key whose session is gone or closed, also where nothing else is read from the store. Raises NotFound and Conflict."""
        session_id = session.info.session_id
        state = await self._services.sessions.load(session_id)
        if state is None or state.info.created_at != session.info.created_at:
            self._services.cache.forget(session_id)
            raise NotFound(f"session '{session_id}' does not exist")
        if state.status != "open":
            raise Conflict(f"session '{session_id}' is {state.status}; its key opens nothing any more")

    async def _count(self, exchange: HarnessRequest, session: Session, route: Route, incoming: Incoming) -> None:
        dialect = self._dialects[route.dialect]
        draft = Draft(session, self._services.pool.window)
        request = await self._parse(draft, dialect.parse_count, incoming)
        tokens = await count_tokens(draft, request, self._services)
        exchange.client.send_whole(200, JSON, cast(Counts, dialect).render_count(tokens))

    def _look_up(self, route: Route) -> bytes:
        """The body for a model or the list of models."""
        lists, created = cast(Lists, self._dialects[route.dialect]), self._since
        models = self._services.pool.catalogue()
        if route.action == "models":
            return lists.render_models(models, created)
        name = route.path["model"]
        # A model may be served without being listed: see policies.
        window = models[name] if name in models else self._services.pool.find_window(name)
        return lists.render_model(name, window, created)

    async def _give_stored(self, exchange: HarnessRequest, session: Session, route: Route) -> None:
        """Answer with a stored reply, which is thereby delivered, or with what it answered. A reply that broke off stays undelivered, as it
        was when it was given first."""
        stores = cast(Stores, self._dialects[route.dialect])
        call, body = await self._find_stored(session, stores, route.path["response_id"], cast(Action, route.action))
        exchange.client.send_whole(200, JSON, body)
        if route.action == "stored" and call.status != "failed" and await exchange.client.flushed():
            # The harness has its answer; without a store the call stays what it was.
            with suppress(StoreUnavailable):
                await self._services.sessions.note_fetched(session.info.session_id, call.call_id)

    async def _find_stored(self, session: Session, stores: Stores, response_id: str, action: Action) -> tuple[Call, bytes]:
        try:
            if not session.lacks_texts:
                return stores.render_stored(response_id, action, Draft(session))
        except UnknownCall:
            pass
        await self._services.cache.refresh(session)
        return stores.render_stored(response_id, action, Draft(session))


def _query(raw: bytes) -> dict[str, str]:
    """The query by name, the last value of each. Raises RequestError for two keys."""
    pairs = parse_qsl(raw.decode("latin-1"))
    if sum(name == "key" for name, _ in pairs) > 1:
        raise RequestError("the URL has several key=…: send one")
    return dict(pairs)


# What a request could make an engine fetch, from a network that the harness may not reach: media by address (see `proxy.images`), and
# caches of other engines, which only the operator may connect.

TRANSFERS = ("kv_transfer_params", "ec_transfer_params")
"""vLLM's fields that name a host and port to fetch a cache from."""


def refuse_transfers(request: Request) -> None:
    """Raise RequestError if the request names an engine to fetch from."""
    for name in TRANSFERS:
        if name in request.forward:
            raise RequestError(f"'{name}' is not taken from a harness", param=name)


def count_images(request: Request, most: int) -> None:
    """List the request's images. Raises RequestError for more than `most`."""
    request.images = [digest for seen in request.history for digest in seen.images]
    if len(request.images) > most:
        raise RequestError(f"the request has {len(request.images)} images, of at most {most}", param="messages")


# Parsing: on the event loop for a small body, in a thread for a large one.
#
# All calls wait while the loop parses one. The thread takes one body of the process at a time, which bounds memory, and one of a session at
# a time, so that a session with many of them delays only itself. A refused body took time for nothing: its session waits before the next.

SMALL_BYTES = 2**16
LARGE_BYTES = 2**19
MANY_VALUES = 5_000
"""Bodies up to the first size are parsed on the loop, and up to the second if they have at most so many commas, those in texts included.
That takes a few milliseconds, and tens of them if all of it is new message parts. What its seals hold may have the second size."""

Parse = Callable[[Incoming, Past], Request]
"""`parse` or `parse_count` of a dialect."""

REST_FACTOR = 10
"""After a refused request, a session waits so many times as long as parsing it took."""


class Parsing:
    def __init__(self) -> None:
        self._thread = asyncio.Lock()

    async def parse(self, draft: Draft, parse: Parse, incoming: Incoming, *, again: bool = False) -> Request:
        """The request. Raises what the dialect raises. `again`: the second attempt, after a refresh from the store."""
        if draft.session.parse_lane is None and (request := self._parse_quickly(draft, parse, incoming, again)) is not None:
            return request
        turn = draft.session.parse_lane = draft.session.parse_lane or ParseLane()
        async with turn.lock:
            if (left := turn.closed_until - time.monotonic()) > 0:
                await asyncio.sleep(left)
            if (request := self._parse_quickly(draft, parse, incoming, again)) is not None:
                return request
            async with self._thread:
                draft.seals.most_bytes = MAX_SEALED_BYTES
                return await asyncio.to_thread(self._measure, draft, parse, incoming, again)

    def _parse_quickly(self, draft: Draft, parse: Parse, incoming: Incoming, again: bool) -> Request | None:
        """The request, None for one that would keep the event loop for long."""
        body = incoming.body
        if len(body) > SMALL_BYTES and (len(body) > LARGE_BYTES or body.count(b",") > MANY_VALUES):
            return None
        if draft.seals.opened_bytes > LARGE_BYTES:
            return None
        draft.seals.most_bytes = LARGE_BYTES
        try:
            return self._measure(draft, parse, incoming, again)
        except LongSeals:
            return None

    def _measure(self, draft: Draft, parse: Parse, incoming: Incoming, again: bool) -> Request:
        began = time.monotonic()
        try:
            request = parse(incoming, draft)
            check_tools(request.tools)
            check_recordable(request.forward)
            refuse_transfers(request)
            count_images(request, draft.session.bounds.per_call)
            if draft.window is not None and len(incoming.body) > TOKEN_BYTES * draft.window:
                check_length(request, draft.window)
            return request
        except (RequestError, RecursionError) as error:
            if again or not isinstance(error, UnknownCall):
                now = time.monotonic()
                turn = draft.session.parse_lane = draft.session.parse_lane or ParseLane()
                turn.closed_until = now + REST_FACTOR * (now - began)
            raise

    async def check_images(self, draft: Draft) -> None:
        """Decode the request's images that the session has not sent before, one at a time. Raises RequestError."""
        turn = draft.session.parse_lane = draft.session.parse_lane or ParseLane()
        async with turn.lock:
            began = time.monotonic()
            try:
                for digest, data in draft.images.items():
                    if digest in draft.session.kept_images:
                        continue
                    async with self._thread:
                        await asyncio.to_thread(check_image, data, draft.session.bounds)
            except RequestError:
                turn.closed_until = time.monotonic() + REST_FACTOR * (time.monotonic() - began)
                raise
