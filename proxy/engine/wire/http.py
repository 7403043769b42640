"""EngineHttp: JSON requests, event streams and weight labels over the connections to engines; failures become our own errors."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

import aiohttp
import msgspec

from proxy.engine.in_vllm.frames import MEDIA_TYPE, DoneFrame, FailedFrame, FrameDecoder, PlanFrame
from proxy.engine.replica import Replica
from proxy.engine.wire.channels import (
    BrokenOff,
    CannotConnect,
    ChannelError,
    Channels,
    ConnectTimeout,
    EngineResponse,
    Unanswered,
    WholeResponse,
)
from proxy.engine.wire.refusals import FramesRefused, frames_refusal, is_pause, paused, read_retry_after, refusal
from proxy.errors import EngineFailed, EngineUnavailable, VerbatimError
from proxy.timeline import ENGINE, TIMELINE, CancelScope, Waiting

_encode = msgspec.json.Encoder().encode

T = TypeVar("T")

CONTACT_HEADERS: Mapping[str, str] = {"X-Verbatim-Contact": "first"}
"""Of the requests by which the service finds out at first contact whether an engine can be read."""
_HEAR_SECONDS = 5.0

_STALE_CONNECTION = (CannotConnect, Unanswered, BrokenOff)
"""The errors raised when the engine has already closed the connection."""
_FRESH = {"Connection": "close"}


class EngineAnswer(msgspec.Struct):
    """Base of every answer and stream event."""

    error: Any = None

    def check(self, replica: Replica, path: str, content: bytes) -> None:
        """Raises what the `error` means that the answer reports: EngineFailed, EngineBusy where the engine is paused. `content` is the
        whole of it."""
        if isinstance(self.error, dict) and is_pause(self.error.get("message")):
            raise paused(replica)
        raise EngineFailed(f"engine {replica.name} broke off: {str(self.error)[:300]}")


A = TypeVar("A", bound=EngineAnswer)


class EventDecoder:
    """Server-sent events from bytes split anywhere: feed bytes, get the data of complete events."""

    def __init__(self) -> None:
        self._rest = b""
        self._stray = b""

    @property
    def stray(self) -> str:
        """The beginning of what came that is no event, such as a page or a JSON document; "" if nothing did."""
        found = self._stray or (b"" if self._rest.startswith(_FIELDS) else self._rest)
        return found[:_STRAY].decode("utf-8", "replace")

    def feed(self, data: bytes) -> list[bytes]:
        if not self._rest and data.startswith(b"data:") and data.find(b"\n") == len(data) - 2 and data.endswith(b"\n\n"):
            # One whole event, as an engine sends for every token.
            return [data[5:].strip()]
        *lines, self._rest = (self._rest + data).split(b"\n")
        events = [line[5:].strip() for line in lines if line.startswith(b"data:")]
        if not events:
            self._stray = self._stray or next((line for line in lines if line.strip() and not line.startswith(_FIELDS)), b"")
        return events


_FIELDS = (b"data", b"event", b"id", b"retry", b":")
"""How lines of a stream of events begin."""
_STRAY = 100


class EngineHttp:
    """Requests to replicas. `on_failure` gets each call that broke: the replica, the reason, and whether the connection was refused.
    `on_new_label` gets a replica whose weight label changed. `aside_seconds`: how long a request that samples nothing may take; 0: for
    ever."""

    def __init__(
        self,
        channels: Channels,
        on_failure: Callable[[Replica, str, bool], None],
        on_new_label: Callable[[Replica], None] = lambda replica: None,
        headers: Mapping[str, str] | None = None,
        aside_seconds: float = 0.0,
    ) -> None:
        """`headers` are those of every request."""
        self._aside_seconds = aside_seconds
        self._channels = channels
        self._headers = headers or {}
        self.on_failure = on_failure
        self._on_new_label = on_new_label
        self._session: aiohttp.ClientSession | None = None
        self._probing: aiohttp.ClientSession | None = None

    @property
    def session(self) -> aiohttp.ClientSession:
        """The session for weights."""
        if self._session is None:
            raise RuntimeError("EngineHttp.open() comes first")
        return self._session

    @property
    def probing(self) -> aiohttp.ClientSession:
        """The session for probes: a connection of its own, which is kept as long as the engine lives."""
        return self._probing or self.session

    def open(self, session: aiohttp.ClientSession, probing: aiohttp.ClientSession | None = None) -> None:
        self._session, self._probing = session, probing

    def aside(self) -> EngineHttp:
        """The same connections for what is no call: each request says so, and what breaks counts against no replica."""
        http = EngineHttp(self._channels, lambda replica, reason, refused: None, headers=CONTACT_HEADERS)
        http.open(self.session)
        return http

    async def close(self) -> None:
        self._channels.close()
        for session in (self._session, self._probing):
            if session is not None:
                await session.close()

    async def post(self, replica: Replica, path: str, body: Any, answer: type[T], scope: CancelScope) -> T:
        """The decoded answer to a sampling request. Raises RequestError for the engine's 4xx, EngineFailed or EngineUnavailable for the
        rest."""
        data = await self.sample_whole(replica, path, _encode(body), scope, self._headers)
        scope.heard_at = time.perf_counter()
        return _decode(replica, path, data, answer)

    async def sample_whole(
        self, replica: Replica, path: str, data: bytes, scope: CancelScope, headers: Mapping[str, str]
    ) -> bytes:
        """The answer to a sampling request. Raises as `post`."""
        try:
            answer = await self._channels.ask(replica.url + path, data, headers)
        except (ChannelError, TimeoutError) as error:
            raise self.translate(replica, error, scope) from error
        return _accept(replica, path, answer)

    async def ask(self, replica: Replica, path: str, body: Any, answer: type[T], *, fresh: bool = False) -> T:
        """As `post`, for requests that sample nothing: they are retried once over a new connection, and if that breaks too another replica
        can take the call: EngineUnavailable. `fresh`: the first connection is new as well, since a kept one leads to the same process
        again where several share an address."""
        data, headers = _encode(_address(replica, body)), self._headers
        if fresh:
            headers = {**headers, **_FRESH}
        try:
            whole = await self._channels.ask(replica.url + path, data, headers, self._aside_seconds)
        except (ChannelError, TimeoutError) as error:
            whole = await self._ask_again(replica, path, data, headers, error)
        return _decode(replica, path, _accept(replica, path, whole), answer)

    async def _ask_again(
        self, replica: Replica, path: str, data: bytes, headers: Mapping[str, str], first: Exception
    ) -> WholeResponse:
        """After `first`. Raises as `ask`."""
        try:
            if isinstance(first, TimeoutError):
                # A kept connection may only seem to be open.
                headers = {**headers, **_FRESH}
            elif not isinstance(first, _STALE_CONNECTION):
                raise first
            return await self._channels.ask(replica.url + path, data, headers, self._aside_seconds)
        except (*_STALE_CONNECTION, TimeoutError) as error:
            raise EngineUnavailable(self.translate(replica, error).message) from error
        except ChannelError as error:
            raise self.translate(replica, error) from error

    async def order(self, replica: Replica, path: str, body: Any) -> None:
        """As `post`, ignoring the answer."""
        try:
            answer = await self._channels.ask(replica.url + path, _encode(body), self._headers)
        except (ChannelError, TimeoutError) as error:
            raise self.translate(replica, error) from error
        _accept(replica, path, answer)

    async def ask_aside(self, replica: Replica, path: str, session: str, body: Any = None) -> bytes | None:
        """What is answered over a connection of its own with HTTP 200, to a request of that session for a router; None for any other
        answer. Nothing is thought of the replica for it."""
        headers = {"Connection": "close", "X-Session-ID": session, self._channels.session_header or "X-Session-ID": session}
        try:
            async with asyncio.timeout(_HEAR_SECONDS):
                content = None if body is None else _encode(body)
                answer = await self._channels.ask(replica.url + path, content, headers)
                return answer.body if answer.status == 200 else None
        except (ChannelError, TimeoutError):
            return None

    def receive(
        self,
        replica: Replica,
        path: str,
        body: Any,
        answer: type[A],
        scope: CancelScope,
        *,
        stream: bool,
        headers: dict[str, str] | None = None,
    ) -> ReplyStream[A]:
        """`async with http.receive(…) as answers:` sends a sampling request; `answers.follow(take)` gives its answer, or the events of a
        streamed one. Raises as `post`; EngineFailed if the answer reports an error."""
        return ReplyStream(
            self,
            self._channels,
            replica,
            path,
            _encode(body),
            answer,
            scope,
            stream,
            {**self._headers, **(headers or {})},
        )

    def receive_frames(self, replica: Replica, path: str, data: bytes, scope: CancelScope) -> Frames:
        """As `receive`, of a sampling request to the plugin inside vLLM."""
        return Frames(
            self, self._channels, replica, path, data, EngineAnswer, scope, True, {**self._headers, "Content-Type": MEDIA_TYPE}
        )

    async def try_frames(self, replica: Replica, path: str) -> str:
        """What refuses requests to the plugin on the way, in its words; "" if the plugin itself answers, or nothing does."""
        try:
            async with await self._channels.post(replica.url + path, b"\xc0", {"Content-Type": MEDIA_TYPE}) as answer:
                error = await _read_refusal(replica, path, answer, frames_refusal)
        except (ChannelError, TimeoutError):
            return ""
        return error.message if isinstance(error, FramesRefused) else ""

    async def find_version(self, replica: Replica, before: int | None, scope: CancelScope) -> int | None:
        """The weight version that all tokens of the call were sampled under; None if unknown or not reported in time.

        `before` is what the replica held before the call began. Versions only grow, so if the replica holds it now it held it
        throughout; an engine that takes new weights reports them, also behind a router. Of an adapter it is that of the base model."""
        replica = replica.host
        if not replica.updatable and not replica.router:
            return before
        try:
            async with scope.limit():
                after = replica.version_of(await self.read_label(replica, ("/weight_info",)))
        except EngineFailed:
            return None
        if after == before:
            return before
        # Someone else may have pushed: find out before later calls are recorded under the old version.
        self._on_new_label(replica)
        return None

    async def read_label(self, replica: Replica, routes: Sequence[str]) -> str | None:
        """The weight version as the engine writes it, from the first of the routes it has; None if no route has one."""
        for route in routes:
            try:
                status, content = await _retry_stale(partial(self._get, replica.url + route))
                if status == 200:
                    label = msgspec.json.decode(content).get("weight_version")
                    return None if label is None else str(label)
            except (TimeoutError, ChannelError, ValueError, AttributeError):
                return None
        return None

    async def _get(self, url: str) -> tuple[int, bytes]:
        answer = await self._channels.ask(url, None)
        return answer.status, answer.body

    def translate(self, replica: Replica, error: Exception, scope: CancelScope | None = None) -> VerbatimError:
        """Report a broken call, and make it one of our errors."""
        refused = isinstance(error, CannotConnect)
        if scope is None or not scope.hung_up:
            reason = f"cannot connect: {error}" if refused else f"calls break off: {error or type(error).__name__}"
            self.on_failure(replica, reason, refused)
        if isinstance(error, (CannotConnect, ConnectTimeout)):
            return EngineUnavailable(f"engine {replica.name} cannot be reached")
        if isinstance(error, asyncio.TimeoutError):
            return EngineFailed(f"engine {replica.name} did not answer in time")
        return EngineFailed(f"engine {replica.name} broke off: {type(error).__name__}")


class ReplyStream(Generic[A]):
    """The answer to one sampling request while it arrives, whole or as a stream of events."""

    _refusal = staticmethod(refusal)

    def __init__(
        self,
        http: EngineHttp,
        channels: Channels,
        replica: Replica,
        path: str,
        body: bytes,
        answer: type[A],
        scope: CancelScope,
        stream: bool,
        headers: dict[str, str],
    ) -> None:
        self._http = http
        self._channels = channels
        self._replica = replica
        self._path = path
        self._body = body
        self._decode = msgspec.json.Decoder(answer).decode
        self._scope = scope
        self._stream = stream
        self._events = EventDecoder()
        self._headers = headers
        self._answer: EngineResponse | None = None
        self._content = b""
        self.ended = False
        """Whether all of it was taken."""
        self._error: VerbatimError | None = None

    async def __aenter__(self) -> ReplyStream[A]:
        if not self._stream:
            self._content = await self._http.sample_whole(self._replica, self._path, self._body, self._scope, self._headers)
            return self
        try:
            with Waiting(ENGINE):
                answer = self._answer = await self._channels.post(self._replica.url + self._path, self._body, self._headers)
                self._scope.attach(answer.close)
                if answer.status != 200:
                    raise await _read_refusal(self._replica, self._path, answer, self._refusal)
        except (TimeoutError, ChannelError) as error:
            raise self._http.translate(self._replica, error, self._scope) from error
        except BaseException:
            self._leave(failed=True)
            raise
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._leave(failed=kind is not None)

    async def follow(self, take: Callable[[list[A]], object], seconds: float | None = None) -> None:
        """Give `take` the answer, or the events of a streamed one as they arrive, in one list those that arrive together. Returns once
        `ended`; before that after `seconds`, and where `take` returns True: it wants no more for now. A stream must end with [DONE].

        Raises as `post`, EngineFailed if the answer reports an error, and what `take` raises."""
        if self._answer is None:
            self.ended = True
            take([self._parse_whole()])
            return
        if self._error is not None:
            raise self._error
        timeline, since, worked = TIMELINE.get(), time.perf_counter(), 0.0

        def on_piece(piece: bytes) -> bool:
            nonlocal worked
            began = time.perf_counter()
            taken: list[A] = []
            done = False
            try:
                done = self._read(piece, taken)
            except VerbatimError as error:
                # What is said before an error is taken before it is raised, as it is where it arrives alone.
                self._error = error
            enough = bool(taken) and take(taken) is True
            worked += time.perf_counter() - began
            if done:
                self._end()
            elif self._error is not None and not enough:
                raise self._error
            return not (done or enough)

        try:
            stopped = await self._answer.follow(on_piece, seconds)
        except (TimeoutError, ChannelError) as error:
            raise self._http.translate(self._replica, error, self._scope) from error
        finally:
            # All at once: as if the work between the reads had come before the wait.
            timeline.end_wait(ENGINE, since + worked)
        if stopped is False:
            raise self._break_off()

    def _read(self, piece: bytes, taken: list[A]) -> bool:
        """Append the events that this part of a stream completes; whether it is the last part."""
        for content in self._events.feed(piece):
            if content == b"[DONE]":
                return True
            try:
                answer = self._decode(content)
            except msgspec.DecodeError as error:
                raise self._name_unread(error) from error
            if answer.error:
                answer.check(self._replica, self._path, content)
            self._scope.heard_at = time.perf_counter()
            taken.append(answer)
        return False

    def _parse_whole(self) -> A:
        try:
            answer = self._decode(self._content)
        except msgspec.DecodeError as error:
            raise self._name_unread(error) from error
        if answer.error:
            answer.check(self._replica, self._path, self._content)
        self._scope.heard_at = time.perf_counter()
        return answer

    def _name_unread(self, error: Exception) -> EngineFailed:
        how = "streamed" if self._stream else f"answered {self._path} with"
        return EngineFailed(f"engine {self._replica.name} {how} something unexpected: {error}")

    def _break_off(self) -> EngineFailed:
        """The error for a stream that ended without [DONE]."""
        if stray := self._events.stray:
            what = f"something unexpected: no event, but {stray!r}"
            return EngineFailed(f"engine {self._replica.name} answered {self._path} with {what}")
        if not self._scope.hung_up:
            self._http.on_failure(self._replica, "streams end without [DONE]", False)
        return EngineFailed(f"engine {self._replica.name} broke off in the middle of a reply")

    def _end(self) -> None:
        self.ended = True
        self._replica.health.pass_call()

    def _leave(self, *, failed: bool) -> None:
        if self._answer is not None:
            self._answer.leave(failed=failed)


class Frames(ReplyStream[Any]):
    """The answer of the plugin inside vLLM, whole or streamed, to `follow`. The last frame must be `DoneFrame` or `FailedFrame`. Raises
    FramesRefused where it is refused on the way."""

    _refusal = staticmethod(frames_refusal)

    def __init__(self, *request: Any) -> None:
        super().__init__(*request)
        self._frames = FrameDecoder()

    def _read(self, piece: bytes, taken: list[Any]) -> bool:
        try:
            self._frames.feed(piece, taken)
        except msgspec.MsgspecError as error:
            raise self._name_unread(error) from error
        last = taken[-1] if taken else None
        # The plan is the API server's work, and no sign that the engine behind it samples.
        if taken and not isinstance(last, PlanFrame):
            self._scope.heard_at = time.perf_counter()
        return isinstance(last, DoneFrame | FailedFrame)


async def _read_refusal(
    replica: Replica, path: str, answer: EngineResponse, read: Callable[..., VerbatimError] = refusal
) -> VerbatimError:
    return read(replica, path, answer.status, await answer.read_refusal(), read_retry_after(answer.retry_after))


def _accept(replica: Replica, path: str, answer: WholeResponse) -> bytes:
    """The body of a 200. Raises the refusal that another status is."""
    if answer.status != 200:
        raise refusal(replica, path, answer.status, answer.body, read_retry_after(answer.retry_after))
    replica.health.pass_call()
    return answer.body


async def _retry_stale(ask: Callable[[], Awaitable[T]]) -> T:
    """Ask once more if the engine had just closed the connection."""
    try:
        return await ask()
    except _STALE_CONNECTION:
        return await ask()


def _decode(replica: Replica, path: str, data: bytes, answer: type[T]) -> T:
    try:
        return msgspec.json.decode(data, type=answer)
    except msgspec.DecodeError as error:
        raise EngineFailed(f"engine {replica.name} answered {path} with something unexpected: {error}") from error


def _address(replica: Replica, body: Any) -> Any:
    if not isinstance(body, dict) or replica.name_served(body.get("model", "")) == body.get("model", ""):
        return body
    named = {key: _address(replica, value) for key, value in body.items() if isinstance(value, dict) and "model" in value}
    if isinstance(body.get("model"), str):
        named["model"] = replica.name_served(body["model"])
    return {**body, **named}
