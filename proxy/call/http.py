"""The HTTP of a call: what one caller may take (bytes and seconds of a body, calls at one time and per second), ASGI, the routes.

The head of a request is limited where the connection is (`cli.serving.connection`); nothing of it comes here before it is whole.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from proxy.dialects.base import Action, Dialect, Endpoint
from proxy.errors import EncodingRefused, NotFound, RequestError, RequestTimeout, TooLarge, TooManyCalls
from proxy.timeline import Deadline

SMALL_BYTES = 2**18
"""Bodies up to this size find room always."""


async def read_body(
    receive: Callable[[], Awaitable[MutableMapping[str, Any]]],
    most_bytes: int,
    seconds: float,
    place: BodySeat | None = None,
    declared: int | None = None,
) -> bytes:
    """The request body. Raises TooLarge, RequestTimeout when it is not whole after `seconds` (0: any time), TooManyCalls when there was
    no room for it as long, and RequestError when the caller breaks off. `declared`: its bytes, as its head says."""
    if declared is not None and declared > most_bytes:
        raise _too_large(most_bytes)
    parts: list[bytes] = []
    size, more = 0, True
    try:
        async with Deadline(seconds):
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise RequestError("the request broke off before its body was whole")
                part, more = message.get("body", b""), message.get("more_body", False)
                size += len(part)
                if size > most_bytes:
                    raise _too_large(most_bytes)
                if size > SMALL_BYTES and place is not None:
                    # Before more is read: until then what the caller sends waits in its own system.
                    await place.take(most_bytes if declared is None else declared)
                parts.append(part)
    except TimeoutError as error:
        if place is not None and place.waits:
            raise TooManyCalls(f"there was no room for a large body within {seconds:g} seconds: try again shortly") from error
        raise RequestTimeout(f"the body was not whole after {seconds:g} seconds") from error
    return b"".join(parts)


def refuse_encoding(encoding: str) -> None:
    """Raise EncodingRefused for a body whose `Content-Encoding` is anything: what it unpacks to has no bound that its bytes tell."""
    if encoding.strip().lower() not in ("", "identity"):
        raise EncodingRefused(f"the body has the Content-Encoding '{encoding[:40]}': send it uncompressed, without that header")


def _too_large(most_bytes: int) -> TooLarge:
    return TooLarge(f"the body is larger than {most_bytes} bytes")


class BodyRoom:
    """Bytes that large bodies may take in this process, in all and per session, while their calls are under way. Who finds no room
    waits; a body larger than all the room is let in when it is the only one."""

    def __init__(self, per_process: int, per_session: int) -> None:
        self._per_process = per_process
        self._per_session = per_session
        self._all = 0
        self._taken: Counter[str] = Counter()
        self._waiting: deque[tuple[BodySeat, int, asyncio.Future[None]]] = deque()

    def place(self, session_id: str) -> BodySeat:
        """Where a call of the session may put its body, for as long as its block runs."""
        return BodySeat(self, session_id)

    async def let_in(self, place: BodySeat, size: int) -> None:
        if self._fits(place.session_id, size):
            self._put(place, size)
            return
        turn = asyncio.get_running_loop().create_future()
        entry = (place, size, turn)
        self._waiting.append(entry)
        try:
            await turn
        finally:
            if entry in self._waiting:
                self._waiting.remove(entry)

    def _fits(self, session_id: str, size: int) -> bool:
        session = self._taken.get(session_id, 0)
        return (not self._all or self._all + size <= self._per_process) and (not session or session + size <= self._per_session)

    def _put(self, place: BodySeat, size: int) -> None:
        place.taken = size
        self._all += size
        self._taken[place.session_id] += size

    def give_back(self, place: BodySeat) -> None:
        self._all -= place.taken
        self._taken[place.session_id] -= place.taken
        if not self._taken[place.session_id]:
            del self._taken[place.session_id]
        # In the order in which they came, but a session that has its share keeps nobody else waiting.
        for entry in list(self._waiting):
            waiting, size, turn = entry
            if not turn.done() and self._fits(waiting.session_id, size):
                self._waiting.remove(entry)
                self._put(waiting, size)
                turn.set_result(None)


@dataclass(slots=True, eq=False)
class BodySeat:
    """One call's place in the room; `taken`: the bytes it holds there."""

    room: BodyRoom
    session_id: str
    taken: int = 0
    waits: bool = False

    def __enter__(self) -> BodySeat:
        return self

    def __exit__(self, *_: object) -> None:
        if self.taken:
            self.room.give_back(self)

    async def take(self, size: int) -> None:
        """Returns when there is room for `size` bytes, at once when they were taken before."""
        if self.taken:
            return
        self.waits = True
        await self.room.let_in(self, size)
        self.waits = False


class CallSlots:
    """How many calls run at once in this process, in all and per session; 0 of either is any number."""

    def __init__(self, per_process: int, per_session: int) -> None:
        self._per_process = per_process
        self._per_session = per_session
        self._taken: Counter[str] = Counter()
        self._all = 0

    @contextmanager
    def take(self, session_id: str) -> Iterator[None]:
        """A slot for as long as the block runs. Raises TooManyCalls."""
        if self._per_process and self._all >= self._per_process:
            raise TooManyCalls(f"this process has {self._all} calls under way, as many as it takes at once: try again shortly")
        if self._per_session and self._taken[session_id] >= self._per_session:
            raise TooManyCalls(f"session {session_id} has {self._per_session} calls under way, as many as it may have at once")
        self._taken[session_id] += 1
        self._all += 1
        try:
            yield
        finally:
            self._all -= 1
            self._taken[session_id] -= 1
            if not self._taken[session_id]:
                del self._taken[session_id]


class CallRate:
    """How many calls a session may begin per second in this process; 0 is any number.

    A bucket of tokens per session: it fills with `per_second` and holds those of one second, at least one, so that a harness's
    short bursts pass.
    """

    _MOST_BUCKETS = 10_000

    def __init__(self, per_second: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_second = per_second
        self._most = max(1.0, per_second)
        self._clock = clock
        self._buckets: dict[str, tuple[float, float]] = {}

    def admit(self, session_id: str) -> None:
        """Count a call. Raises TooManyCalls, which says when the next one may come."""
        if not self._per_second:
            return
        now = self._clock()
        tokens = self._tokens(session_id, now)
        if tokens < 1:
            error = TooManyCalls(f"session {session_id} begins more than {self._per_second:g} calls per second")
            error.retry_after_seconds = (1 - tokens) / self._per_second
            raise error
        self._buckets[session_id] = (tokens - 1, now)
        if len(self._buckets) > self._MOST_BUCKETS:
            self._forget_full(now)

    def _tokens(self, session_id: str, now: float) -> float:
        tokens, at = self._buckets.get(session_id, (self._most, now))
        return min(self._most, tokens + (now - at) * self._per_second)

    def _forget_full(self, now: float) -> None:
        """A full bucket is as good as none."""
        self._buckets = {each: bucket for each, bucket in self._buckets.items() if self._tokens(each, now) < self._most}


# ASGI: the types, and sending a body whole or in parts.


Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

JSON: Headers = [(b"content-type", b"application/json")]
EXTENSION = "verbatim"
"""The scope's extension under which a server offers `DirectWriter`."""


class DirectWriter(Protocol):
    """What ASGI's `send` and `receive` cannot do."""

    def send(self, message: MutableMapping[str, Any]) -> None:
        """As ASGI's, without waiting for a client that reads slowly."""
        ...

    def write(self, body: bytes) -> None:
        """Send a part of the body of an answer that has begun, and more will follow: what a stream does for every token."""
        ...

    async def flushed(self) -> bool:
        """Whether all that was sent went out to a client that was still there; waits until that is known. ASGI's `send` returns without
        a word where the client has left, and as soon as the answer lies in the server's memory where it has not."""
        ...

    def on_leave(self, leave: Callable[[], None]) -> None:
        """Call `leave` when the client disconnects, at once if it has."""
        ...


class Client:
    """Who asked, and the answer to it. Sending never waits: a harness that reads slowly does not hold up what is recorded.

    On a server without `DirectWriter`, messages are sent by a task of their own."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.status: int | None = None
        """The answer's, once it has begun."""
        self.receive = receive
        self._send = send
        self._direct: DirectWriter | None = (scope.get("extensions") or {}).get(EXTENSION)
        self._queue: deque[MutableMapping[str, Any]] = deque()
        self._sending: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._left = False

    def start(self, status: int, headers: Headers) -> None:
        self.status = status
        self._put({"type": "http.response.start", "status": status, "headers": headers})

    def write(self, body: bytes, *, last: bool = False) -> None:
        if self._direct is not None and not last:
            self._direct.write(body)
        else:
            self._put({"type": "http.response.body", "body": body, "more_body": not last})

    def send_whole(self, status: int, headers: Headers, body: bytes) -> None:
        self.start(status, [*headers, (b"content-length", str(len(body)).encode())])
        self.write(body, last=True)

    def on_leave(self, leave: Callable[[], None]) -> None:
        """Call `leave` when the client disconnects. The request's body must have been read."""
        if self._direct is not None:
            self._direct.on_leave(leave)
        else:
            self._watching = asyncio.create_task(self._watch(leave))

    async def flushed(self) -> bool:
        """Whether everything went out to a client that was still there."""
        if self._direct is not None:
            return await self._direct.flushed()
        if self._sending is not None:
            await self._sending
        return not self._left

    async def close(self) -> None:
        """The request is over; returns when all was sent."""
        if self._sending is not None:
            await self._sending
        if self._watching is not None:
            self._watching.cancel()
            # The cancelled task holds this, which would hold it.
            self._watching = None

    def _put(self, message: MutableMapping[str, Any]) -> None:
        if self._direct is not None:
            self._direct.send(message)
            return
        self._queue.append(message)
        if self._sending is None or self._sending.done():
            self._sending = asyncio.create_task(self._send_queued())

    async def _send_queued(self) -> None:
        while self._queue:
            await self._send(self._queue.popleft())
            # Looked at before anything else runs: a server says at the end of an answer, too, that its client has left.
            self._left = self._watching is not None and self._watching.done()

    async def _watch(self, leave: Callable[[], None]) -> None:
        while (await self.receive())["type"] != "http.disconnect":
            pass
        leave()


def headers_of(scope: Scope) -> dict[str, str]:
    """By lower-case name; of several of one name the last."""
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}


# The routing table: which endpoint of which dialect a request is for. Exact: a path that no dialect lists is 404.
#
# The paths of an endpoint may follow `/s/{session}`, or a project's `/r/{rollout}`, and may end in a slash. HEAD is answered at every
# endpoint, and at the paths that clients probe before their first call. A WebSocket upgrade is answered 426, so that a client that tries
# it falls back at once.


_SESSION = r"(?:/s/(?P<session>[^/]+)|/r/(?P<rollout>[^/]+))?"
_DEFAULT = "chat"
"""Whose error shape is used where no other dialect claims the path."""


class MethodNotAllowed(RequestError):
    status = 405
    code = "method_not_allowed"


class UpgradeRefused(RequestError):
    status = 426
    code = "upgrade_refused"


@dataclass(frozen=True, slots=True)
class Route:
    """`session` or `rollout` is the one named in the path; `path` holds the path's other names. `action` None: a probe."""

    session: str | None
    dialect: str
    action: Action | None
    path: Mapping[str, str] = field(default_factory=dict)
    rollout: str | None = None


@dataclass(frozen=True, slots=True)
class TableEntry:
    pattern: re.Pattern[str]
    dialect: str
    endpoint: Endpoint


class Routes:
    """The table of a set of dialects, built once."""

    def __init__(self, dialects: Iterable[Dialect]) -> None:
        known = list(dialects)
        entries = [TableEntry(_compile(each), dialect.name, each) for dialect in known for each in dialect.endpoints]
        # Calls first, since they are nearly all there is; an endpoint that asks for a header before one at its path that does not.
        self.entries = tuple(sorted(entries, key=lambda entry: (entry.endpoint.action != "call", entry.endpoint.header or "~")))
        self._owned = [(re.compile(each.paths), each.name) for each in known if each.paths and each.name != _DEFAULT]
        self._harness = re.compile("|".join([r"/[sr]/[^/]+(?:/|\Z)", *(each.paths for each in known if each.paths)]))
        probes = "|".join(["/", *(probe for each in known for probe in each.probes)])
        self._probes = re.compile(rf"{_SESSION}(?:{probes})?\Z")

    def is_harness(self, method: str, path: str) -> bool:
        """Whether the path is of the harness side; all others are the control side's."""
        return bool(self._harness.match(path)) or (method == "HEAD" and path == "/")

    def guess_dialect(self, path: str) -> str:
        """The dialect whose error shape a client expects at this path, whether or not there is such an endpoint."""
        rest = re.sub(r"\A/[sr]/[^/]+", "", path)
        for pattern, name in self._owned:
            if pattern.match(rest):
                return name
        return _DEFAULT

    def find(self, method: str, path: str, headers: Mapping[str, str]) -> Route:
        """Raises NotFound for an unknown path, MethodNotAllowed and UpgradeRefused. Header names are lower case."""
        if "websocket" in headers.get("upgrade", "").lower():
            raise UpgradeRefused("this service speaks HTTP and server-sent events, not WebSocket")
        allowed: dict[str, None] = {}
        for entry in self.entries:
            match = entry.pattern.match(path)
            endpoint = entry.endpoint
            if match is None or (endpoint.header is not None and endpoint.header not in headers):
                continue
            if method == endpoint.method:
                names = {name: value for name, value in match.groupdict().items() if value is not None}
                session, rollout = names.pop("session", None), names.pop("rollout", None)
                return Route(session, entry.dialect, endpoint.action, {**names, **endpoint.names}, rollout)
            allowed[endpoint.method] = None
        if method in ("GET", "HEAD") and (self._probes.match(path) or (method == "HEAD" and allowed)):
            return Route(None, self.guess_dialect(path), None)
        if allowed:
            raise MethodNotAllowed(f"{path} takes {' or '.join(allowed)}, not {method}")
        raise NotFound(f"{method} {path} is not an endpoint of this service")


def _compile(endpoint: Endpoint) -> re.Pattern[str]:
    _, _, rest = endpoint.path[1:].partition("/")
    pieces = re.split(r"\{(\w+)\}", f"/{rest}")
    named = [rf"(?P<{name}>{'[^:]+?' if name == 'model' else '[^/]+'})" for name in pieces[1::2]]
    path = "".join(re.escape(text) + name for text, name in zip(pieces[::2], [*named, ""], strict=True))
    return re.compile(f"{_SESSION}{endpoint.versions}{path}/?\\Z")
