"""EngineHttp: JSON requests, event streams and weight labels over the connections to engines; failures become our own errors.

`Line` is the connection of one sampling request, which another task can hang up.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import aiohttp
import msgspec

from proxy.engine.replica import Replica
from proxy.engine.wire.channel import (
    Answer,
    Before,
    BrokenOff,
    CannotConnect,
    ChannelError,
    ConnectTimeout,
    NotAsked,
    Unanswered,
)
from proxy.engine.wire.channels import Channels
from proxy.errors import ContextTooLong, EngineFailed, EngineUnavailable, NotFound, RequestError, VerbatimError
from proxy.timeline import CLOCK, ENGINE, CallClock, Waiting

_encode = msgspec.json.Encoder().encode

T = TypeVar("T")

_STALE_CONNECTION = (CannotConnect, Unanswered, BrokenOff)
"""The errors raised when the engine has already closed the connection."""


class EngineAnswer(msgspec.Struct):
    """Base of every answer and stream event."""

    error: Any = None


A = TypeVar("A", bound=EngineAnswer)


class EventDecoder:
    """Server-sent events from bytes split anywhere: feed bytes, get the data of complete events."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]


class EngineHttp:
    """Requests to replicas. `on_failure` gets each call that broke: the replica, the reason, and whether the connection was refused.
    `on_new_label` gets a replica whose weight label changed."""

    def __init__(
        self,
        channels: Channels,
        on_failure: Callable[[Replica, str, bool], None],
        on_new_label: Callable[[Replica], None] = lambda replica: None,
    ) -> None:
        self._channels = channels
        self._on_failure = on_failure
        self._on_new_label = on_new_label
        self._session: aiohttp.ClientSession | None = None

    @property
    def session(self) -> aiohttp.ClientSession:
        """The session for probes and weights."""
        if self._session is None:
            raise RuntimeError("EngineHttp.open() comes first")
        return self._session

    def open(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    async def close(self) -> None:
        self._channels.close()
        if self._session is not None:
            await self._session.close()

    async def post(
        self,
        replica: Replica,
        path: str,
        body: Any,
        answer: type[T],
        headers: dict[str, str] | None = None,
        line: Line | None = None,
    ) -> T:
        """The decoded answer. Raises RequestError for the engine's 4xx, EngineFailed or EngineUnavailable for the rest."""
        try:
            data = await self._exchange(replica, path, _encode_body(replica, body), headers, line)
        except asyncio.CancelledError:
            if line is None or not line.hung_up:
                raise
            raise line.absorb() from None
        except (ChannelError, TimeoutError) as error:
            raise self._translate(replica, error, line) from error
        return _decode(replica, path, data, answer)

    async def ask(self, replica: Replica, path: str, body: Any, answer: type[T]) -> T:
        """As `post`, for requests that can be repeated: they are retried once over a new connection.

        Such a request samples nothing, so if the retry breaks too another replica can take the call: EngineUnavailable."""
        data = _encode_body(replica, body)
        try:
            raw = await _retry_stale(partial(self._exchange, replica, path, data, None, None))
        except _STALE_CONNECTION as error:
            raise EngineUnavailable(self._translate(replica, error).message) from error
        except (ChannelError, TimeoutError) as error:
            raise self._translate(replica, error) from error
        return _decode(replica, path, raw, answer)

    async def order(self, replica: Replica, path: str, body: Any) -> None:
        """As `post`, ignoring the answer."""
        try:
            await self._exchange(replica, path, _encode(body), None, None)
        except (ChannelError, TimeoutError) as error:
            raise self._translate(replica, error) from error

    async def stream_events(
        self, replica: Replica, path: str, body: Any, line: Line, headers: dict[str, str] | None = None
    ) -> AsyncIterator[bytes]:
        """The data of each event up to [DONE]. Raises as `post`; EngineFailed if the stream ends without [DONE] or the line is
        hung up."""
        decoder, data = EventDecoder(), _encode_body(replica, body)
        clock = CLOCK.get() or CallClock()
        clock.wait()
        try:
            async with await self._channels.post(replica.url + path, data, headers or {}, line.before) as answer:
                line.attach(answer)
                if answer.status != 200:
                    raise refusal(replica, path, answer.status, await answer.read_refusal())
                while piece := await answer.read_piece():
                    clock.waited(ENGINE)
                    for event in decoder.feed(piece):
                        if event == b"[DONE]":
                            replica.health.pass_call()
                            return
                        yield event
                    clock.wait()
        except asyncio.CancelledError:
            if not line.hung_up:
                raise
            raise line.absorb() from None
        except (TimeoutError, ChannelError) as error:
            raise self._translate(replica, error, line) from error
        if not line.hung_up:
            self._on_failure(replica, "streams end without [DONE]", False)
        raise EngineFailed(f"engine {replica.name} broke off in the middle of a reply")

    async def receive(
        self,
        replica: Replica,
        path: str,
        body: Any,
        answer: type[A],
        line: Line,
        *,
        stream: bool,
        headers: dict[str, str] | None = None,
    ) -> AsyncIterator[A]:
        """The answer, or each event of a streamed one. Raises as `post` and `stream_events`; EngineFailed if it reports an error."""
        if not stream:
            yield _check_error(replica, await self.post(replica, path, body, answer, headers, line))
            return
        async for data in self.stream_events(replica, path, body, line, headers):
            try:
                event = msgspec.json.decode(data, type=answer)
            except msgspec.DecodeError as error:
                raise EngineFailed(f"engine {replica.name} streamed something unexpected: {error}") from error
            yield _check_error(replica, event)

    async def find_version(self, replica: Replica, before: int | None, line: Line) -> int | None:
        """The weight version that all tokens of the line were sampled under; None if unknown or not reported in time.

        `before` is what the replica held before the line began. Versions only grow, so if the replica holds it now it held it
        throughout; an engine that takes new weights is asked."""
        if not replica.updatable:
            return before
        try:
            async with line.limit():
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

    async def _exchange(
        self, replica: Replica, path: str, data: bytes, headers: dict[str, str] | None, line: Line | None
    ) -> bytes:
        with Waiting(ENGINE):
            before = None if line is None else line.before
            async with await self._channels.post(replica.url + path, data, headers or {}, before) as answer:
                if line is not None:
                    line.attach(answer)
                if answer.status != 200:
                    raise refusal(replica, path, answer.status, await answer.read_refusal())
                content = await answer.read()
        replica.health.pass_call()
        return content

    async def _get(self, url: str) -> tuple[int, bytes]:
        with Waiting(ENGINE):
            async with await self._channels.get(url) as answer:
                return answer.status, await answer.read()

    def _translate(self, replica: Replica, error: Exception, line: Line | None = None) -> VerbatimError:
        """Report a broken call, and make it one of our errors."""
        refused = isinstance(error, CannotConnect)
        if line is None or not line.hung_up:
            reason = f"cannot connect: {error}" if refused else f"calls break off: {error or type(error).__name__}"
            self._on_failure(replica, reason, refused)
        if isinstance(error, (CannotConnect, ConnectTimeout, NotAsked)):
            return EngineUnavailable(f"engine {replica.name} cannot be reached")
        if isinstance(error, asyncio.TimeoutError):
            return EngineFailed(f"engine {replica.name} did not answer in time")
        return EngineFailed(f"engine {replica.name} broke off: {type(error).__name__}")


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


def _encode_body(replica: Replica, body: Any) -> bytes:
    """The body as JSON, with the engine's own name of the model, also in a request it quotes."""
    return _encode(_address(replica, body))


def _address(replica: Replica, body: Any) -> Any:
    if not isinstance(body, dict) or replica.served_as(body.get("model", "")) == body.get("model", ""):
        return body
    named = {key: _address(replica, value) for key, value in body.items() if isinstance(value, dict) and "model" in value}
    if isinstance(body.get("model"), str):
        named["model"] = replica.served_as(body["model"])
    return {**body, **named}


def _check_error(replica: Replica, answer: A) -> A:
    """Raises EngineFailed for an answer that reports an error."""
    if answer.error:
        raise EngineFailed(f"engine {replica.name} broke off: {str(answer.error)[:300]}")
    return answer


class UnknownRoute(EngineFailed):
    """The engine has no such endpoint."""


def refusal(replica: Replica, path: str, status: int, data: bytes) -> VerbatimError:
    """The engine's HTTP error as ours: a 4xx is the caller's fault, the rest the engine's."""
    message, param = _read_message(data)
    if status == 404 and param == "model":
        return NotFound(message, param="model")
    if status in (400, 413, 422):
        return _context_error(message) if is_context_overflow(message) else RequestError(message, param=param)
    if status in (401, 403):
        return EngineUnavailable(f"engine {replica.name} refuses the service's own key (HTTP {status})")
    if status in (429, 503):
        return EngineUnavailable(f"engine {replica.name} is too busy (HTTP {status}): {message[:300]}")
    if status in (404, 405):
        return UnknownRoute(f"engine {replica.name} does not know {path}")
    return EngineFailed(f"engine {replica.name} failed with HTTP {status}: {message[:300]}")


def is_context_overflow(message: str) -> bool:
    """Whether vLLM (chat, render, generate), SGLang or llama.cpp says that a prompt is too long."""
    wordings = (
        *("maximum context length", "longer than the maximum model length"),
        *("longer than the model's context length", "exceeds the available context size"),
    )
    return any(wording in message for wording in wordings)


_PROMPT_TOKENS = re.compile(
    r"(?:Input length \(|The input \(|prompt \(length |contains (?:at least )?|resulted in )(\d+)(?:\)| input tokens| tokens)"
)
_WINDOW_TOKENS = re.compile(r"(?:maximum (?:context|model)|model's context) length (?:is |of |\()(\d+)")


def _context_error(message: str) -> ContextTooLong:
    """With the lengths of prompt and window if the engine names both."""
    tokens, window = _PROMPT_TOKENS.search(message), _WINDOW_TOKENS.search(message)
    if tokens is None or window is None:
        return ContextTooLong(message, param="messages")
    return ContextTooLong(message, param="messages", tokens=int(tokens[1]), window=int(window[1]))


def _read_message(data: bytes) -> tuple[str, str | None]:
    try:
        error = msgspec.json.decode(data)
    except msgspec.DecodeError:
        return data[:300].decode("utf-8", "replace"), None
    if isinstance(error, dict):
        error = error.get("error", error)
    if isinstance(error, dict):
        return str(error.get("message") or error.get("detail") or error), error.get("param")
    return str(error), None


ASIDE_SECONDS = 60.0
HUNG_UP_SECONDS = 2.0
"""How long an engine may take to interpret sampled tokens, and how long once the line is hung up."""


class Withheld(Exception):
    """The engine never got the request, because of `error`, which is not a failure of the engine."""

    def __init__(self, error: VerbatimError) -> None:
        super().__init__(error.message)
        self.error = error


class Line:
    """The connection of one sampling request, which another task can hang up.

    `before`, if set, must return before the end of the request is sent; it may raise `Withheld`."""

    def __init__(self) -> None:
        self.hung_up = False
        self.before: Before | None = None
        self._task = asyncio.current_task()
        self._answer: Answer | None = None
        self._limit: asyncio.Timeout | None = None

    def attach(self, answer: Answer) -> None:
        self._answer = answer

    def redial(self) -> None:
        """The request was refused and is sent again. Raises EngineFailed if it was hung up meanwhile."""
        self._answer = None
        if self.hung_up:
            raise EngineFailed("the call was hung up")

    def detach(self) -> None:
        """There is nothing left to hang up; the task goes on to other things."""
        self._answer, self._task = None, None

    def hang_up(self) -> None:
        """End the request now: the engine sees a disconnected client, the reader gets EngineFailed."""
        if self.hung_up:
            return
        self.hung_up = True
        if self._limit is not None and not self._limit.expired():
            self._limit.reschedule(asyncio.get_running_loop().time() + HUNG_UP_SECONDS)
        if self._answer is not None:
            self._answer.close()
        elif self._task is not None:
            self._task.cancel()

    @contextlib.asynccontextmanager
    async def limit(self) -> AsyncIterator[None]:
        """Bounds requests about tokens that are already sampled; the bound shrinks once the line is hung up, or a hanging engine
        would keep the tokens from being recorded. Raises EngineFailed."""
        try:
            async with asyncio.timeout(HUNG_UP_SECONDS if self.hung_up else ASIDE_SECONDS) as self._limit:
                yield
        except TimeoutError as error:
            raise EngineFailed("the engine did not interpret the sampled tokens in time") from error
        finally:
            self._limit = None

    def absorb(self) -> EngineFailed:
        """The error that replaces a cancellation by `hang_up`."""
        if self._task is not None:
            self._task.uncancel()
        return EngineFailed("the call was hung up")
