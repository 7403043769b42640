"""HTTP towards an engine: one way to post JSON, read a stream of events, and ask for the version of the weights.

`proxy.engine.wire.channels` carries it.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import msgspec

from proxy.engine.pool.pool import EnginePool
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
from proxy.errors import ContextTooLong, EngineFailed, EngineUnavailable, NotFound, RequestError, VerbatimError
from proxy.timeline import CLOCK, ENGINE, CallClock, Waiting

_encode = msgspec.json.Encoder().encode

T = TypeVar("T")

_ASKED_AGAIN = (CannotConnect, Unanswered, BrokenOff)
"""How a connection breaks that the engine had just closed."""


class Told(msgspec.Struct):
    """What every answer and every event of a stream may carry."""

    error: Any = None


A = TypeVar("A", bound=Told)


class EventDecoder:
    """Server-sent events from bytes split anywhere: feed bytes, get the data of complete events."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]


class EngineHttp:
    """Requests to replicas over the pool's shared connections; every failure becomes one of our own errors."""

    def __init__(self, pool: EnginePool) -> None:
        self._pool = pool

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
            data = await self._exchange(replica, path, _encoded(replica, body), headers, line)
        except asyncio.CancelledError:
            if line is None or not line.hung_up:
                raise
            raise line.absorb() from None
        except (ChannelError, TimeoutError) as error:
            raise self._broken(replica, error, line) from error
        return _decoded(replica, path, data, answer)

    async def ask(self, replica: Replica, path: str, body: Any, answer: type[T]) -> T:
        """As `post`, for what may be asked twice: a connection that the engine had just closed costs a second try, not the call.
        It samples nothing, so when that one breaks, too, another replica may be asked: EngineUnavailable."""
        data = _encoded(replica, body)
        try:
            raw = await _asked(partial(self._exchange, replica, path, data, None, None))
        except _ASKED_AGAIN as error:
            raise EngineUnavailable(self._broken(replica, error).message) from error
        except (ChannelError, TimeoutError) as error:
            raise self._broken(replica, error) from error
        return _decoded(replica, path, raw, answer)

    async def _exchange(
        self, replica: Replica, path: str, data: bytes, headers: dict[str, str] | None, line: Line | None
    ) -> bytes:
        with Waiting(ENGINE):
            before = None if line is None else line.before
            async with await self._pool.channels.post(replica.url + path, data, headers or {}, before) as answer:
                if line is not None:
                    line.connected(answer)
                if answer.status != 200:
                    raise refusal(replica, path, answer.status, await answer.read_refusal())
                content = await answer.read()
        replica.health.call_worked()
        return content

    async def events(
        self, replica: Replica, path: str, body: Any, line: Line, headers: dict[str, str] | None = None
    ) -> AsyncIterator[bytes]:
        """The data of each event up to [DONE]. Raises as `post`; EngineFailed when the stream ends without [DONE] or the
        line is hung up."""
        decoder, data = EventDecoder(), _encoded(replica, body)
        clock = CLOCK.get() or CallClock()
        clock.wait()
        try:
            async with await self._pool.channels.post(replica.url + path, data, headers or {}, line.before) as answer:
                line.connected(answer)
                if answer.status != 200:
                    raise refusal(replica, path, answer.status, await answer.read_refusal())
                while piece := await answer.piece():
                    clock.waited(ENGINE)
                    for event in decoder.feed(piece):
                        if event == b"[DONE]":
                            replica.health.call_worked()
                            return
                        yield event
                    clock.wait()
        except asyncio.CancelledError:
            if not line.hung_up:
                raise
            raise line.absorb() from None
        except (TimeoutError, ChannelError) as error:
            raise self._broken(replica, error, line) from error
        if not line.hung_up:
            self._pool.call_failed(replica, "streams end without their end", refused=False)
        raise EngineFailed(f"engine {replica.name} broke off in the middle of a reply")

    async def answers(
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
        """The answer, or each event of it where it is streamed. Raises as `post` and `events`; EngineFailed for an event in which
        the engine says that it failed."""
        if not stream:
            yield _whole(replica, await self.post(replica, path, body, answer, headers, line))
            return
        async for data in self.events(replica, path, body, line, headers):
            try:
                event = msgspec.json.decode(data, type=answer)
            except msgspec.DecodeError as error:
                raise EngineFailed(f"engine {replica.name} streamed something else than expected: {error}") from error
            yield _whole(replica, event)

    async def version_since(self, replica: Replica, before: int | None, line: Line) -> int | None:
        """The version under which all of the line's tokens were sampled; None where that is not sure, or not said in time.

        `before`: what the replica was known to hold before the line began. Versions only grow, so what it holds now as well it
        held all the time between; an engine that takes new weights is asked."""
        if not replica.updatable:
            return before
        try:
            async with line.aside():
                after = replica.version_of(await self.label(replica, ("/weight_info",)))
        except EngineFailed:
            return None
        if after == before:
            return before
        # Others push, too: what it holds is looked at before the next calls are taken for sampled under the old weights.
        self._pool.look_at(replica)
        return None

    async def label(self, replica: Replica, routes: Sequence[str]) -> str | None:
        """The replica's weight version as the engine writes it, from the first of the routes that it has; None where none tells."""
        for route in routes:
            try:
                status, content = await _asked(partial(self._got, replica.url + route))
                if status == 200:
                    label = msgspec.json.decode(content).get("weight_version")
                    return None if label is None else str(label)
            except (TimeoutError, ChannelError, ValueError, AttributeError):
                return None
        return None

    async def _got(self, url: str) -> tuple[int, bytes]:
        with Waiting(ENGINE):
            async with await self._pool.channels.get(url) as answer:
                return answer.status, await answer.read()

    async def order(self, replica: Replica, path: str, body: Any) -> None:
        """As `ask`, where nothing is answered."""
        try:
            await self._exchange(replica, path, _encode(body), None, None)
        except (ChannelError, TimeoutError) as error:
            raise self._broken(replica, error) from error

    def _broken(self, replica: Replica, error: Exception, line: Line | None = None) -> VerbatimError:
        refused = isinstance(error, CannotConnect)
        if line is None or not line.hung_up:
            what = f"cannot connect: {error}" if refused else f"calls break off: {error or type(error).__name__}"
            self._pool.call_failed(replica, what, refused=refused)
        if isinstance(error, (CannotConnect, ConnectTimeout, NotAsked)):
            return EngineUnavailable(f"engine {replica.name} cannot be reached")
        if isinstance(error, asyncio.TimeoutError):
            return EngineFailed(f"engine {replica.name} did not answer in time")
        return EngineFailed(f"engine {replica.name} broke off: {type(error).__name__}")


async def _asked(ask: Callable[[], Awaitable[T]]) -> T:
    """What is answered, if need be when it is asked for the second time. Raises as the second one."""
    try:
        return await ask()
    except _ASKED_AGAIN:
        return await ask()


def _decoded(replica: Replica, path: str, data: bytes, answer: type[T]) -> T:
    try:
        return msgspec.json.decode(data, type=answer)
    except msgspec.DecodeError as error:
        raise EngineFailed(f"engine {replica.name} answered {path} with something else than expected: {error}") from error


def _encoded(replica: Replica, body: Any) -> bytes:
    """The body as JSON, with the model by the engine's own name, also in a request that it quotes."""
    return _encode(_addressed(replica, body))


def _addressed(replica: Replica, body: Any) -> Any:
    if not isinstance(body, dict) or replica.served_as(body.get("model", "")) == body.get("model", ""):
        return body
    named = {key: _addressed(replica, value) for key, value in body.items() if isinstance(value, dict) and "model" in value}
    if isinstance(body.get("model"), str):
        named["model"] = replica.served_as(body["model"])
    return {**body, **named}


def _whole(replica: Replica, answer: A) -> A:
    """Raises EngineFailed for an answer in which the engine says that it failed."""
    if answer.error:
        raise EngineFailed(f"engine {replica.name} broke off: {str(answer.error)[:300]}")
    return answer


# Refusals: what an engine's HTTP errors mean to the caller.


class UnknownRoute(EngineFailed):
    """The engine has no such endpoint."""


def refusal(replica: Replica, path: str, status: int, data: bytes) -> VerbatimError:
    """The engine's HTTP error as ours: its 4xx is the caller's to mend, the rest is the engine's fault."""
    message, param = _message(data)
    if status == 404 and param == "model":
        return NotFound(message, param="model")
    if status in (400, 413, 422):
        if is_context_overflow(message):
            return _too_long(message)
        return RequestError(message, param=param)
    if status in (401, 403):
        return EngineUnavailable(f"engine {replica.name} refuses the service's own key (HTTP {status})")
    if status in (429, 503):
        return EngineUnavailable(f"engine {replica.name} is too busy (HTTP {status}): {message[:300]}")
    if status in (404, 405):
        return UnknownRoute(f"engine {replica.name} does not know {path}")
    return EngineFailed(f"engine {replica.name} failed with HTTP {status}: {message[:300]}")


def is_context_overflow(message: str) -> bool:
    """vLLM's wording for a prompt that does not fit, on its chat, render and generate endpoints, SGLang's and llama.cpp's."""
    wordings = (
        *("maximum context length", "longer than the maximum model length"),
        *("longer than the model's context length", "exceeds the available context size"),
    )
    return any(wording in message for wording in wordings)


_PROMPT_TOKENS = re.compile(
    r"(?:Input length \(|The input \(|prompt \(length |contains (?:at least )?|resulted in )(\d+)(?:\)| input tokens| tokens)"
)
_WINDOW_TOKENS = re.compile(r"(?:maximum (?:context|model)|model's context) length (?:is |of |\()(\d+)")


def _too_long(message: str) -> ContextTooLong:
    """With the prompt's tokens and the window where the engine names both."""
    tokens, window = _PROMPT_TOKENS.search(message), _WINDOW_TOKENS.search(message)
    if tokens is None or window is None:
        return ContextTooLong(message, param="messages")
    return ContextTooLong(message, param="messages", tokens=int(tokens[1]), window=int(window[1]))


def _message(data: bytes) -> tuple[str, str | None]:
    try:
        error = msgspec.json.decode(data)
    except msgspec.DecodeError:
        return data[:300].decode("utf-8", "replace"), None
    if isinstance(error, dict):
        error = error.get("error", error)
    if isinstance(error, dict):
        return str(error.get("message") or error.get("detail") or error), error.get("param")
    return str(error), None


# Line: the connection of one sampling request, and the ways it ends before its time.


ASIDE_SECONDS = 60.0
HUNG_UP_SECONDS = 2.0
"""How long an engine may take to say what sampled tokens mean, and how long when nobody waits for them any more."""


class Withheld(Exception):
    """The engine was not given the request; `error` says why. It is no failure of the engine, and nobody on the way is to take it for
    one."""

    def __init__(self, error: VerbatimError) -> None:
        super().__init__(error.message)
        self.error = error


class Line:
    """The connection of one sampling request, so that someone else can hang up. `before`, while it is there, is to return before the
    engine gets the request's end; it may raise `Withheld`."""

    def __init__(self) -> None:
        self.hung_up = False
        self.before: Before | None = None
        self._task = asyncio.current_task()
        self._answer: Answer | None = None
        self._limit: asyncio.Timeout | None = None

    def connected(self, answer: Answer) -> None:
        self._answer = answer

    def redial(self) -> None:
        """The request was refused and is made again. Raises EngineFailed when it was hung up on meanwhile."""
        self._answer = None
        if self.hung_up:
            raise EngineFailed("the call was hung up")

    def over(self) -> None:
        """Nothing is left to hang up on: the task goes on to other things."""
        self._answer, self._task = None, None

    def hang_up(self) -> None:
        """End the request now: the engine sees a client that went away, the reader an EngineFailed."""
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
    async def aside(self) -> AsyncIterator[None]:
        """Around what the engine is asked about tokens that are sampled: soon over once the line is hung up, or an engine that
        hangs would keep them from being recorded. Raises EngineFailed."""
        try:
            async with asyncio.timeout(HUNG_UP_SECONDS if self.hung_up else ASIDE_SECONDS) as self._limit:
                yield
        except TimeoutError as error:
            raise EngineFailed("the engine did not say in time what the sampled tokens mean") from error
        finally:
            self._limit = None

    def absorb(self) -> EngineFailed:
        """What a cancellation that came from `hang_up` becomes."""
        if self._task is not None:
            self._task.uncancel()
        return EngineFailed("the call was hung up")
