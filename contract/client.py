"""HTTP clients of the service, sync and async, over one core without I/O: what is sent, what an answer means, when to try again.

Both pool connections, send the token with every request, and raise the errors of `contract.errors`. Retried is what may pass (no answer,
408, 502, 503 and 504), for at most `retry_seconds` since the first failure, after the service's Retry-After or a growing random delay.
"""

from __future__ import annotations

import asyncio
import random
import re
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Generator, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager, closing, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx

from contract.errors import KINDS, ClientClosed, HeldBack, NoAnswer, RequestRefused, ServiceError, ServiceUnavailable

T = TypeVar("T")
Token = str | Callable[[], str]

JSON = "application/json"
HELD_BACK_SECONDS = 5.0
"""Of a 429 without Retry-After."""
LONGEST_PAUSE_SECONDS = 60.0
"""Longer ones are cut: a proxy in front of the service may name any date or number."""
_SHORTEST_PAUSE_SECONDS = 0.1
_FIRST_DELAY_SECONDS, _LONGEST_DELAY_SECONDS = 0.2, 10.0
_NEVER_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)


@dataclass(frozen=True, slots=True)
class RetryRule:
    """Which errors are worth another attempt. `waits`: a 429 is waited out, however long it takes."""

    may_pass: Callable[[ServiceError], bool]
    waits: bool = False


def is_transient(error: ServiceError) -> bool:
    """True for errors that may pass: no answer, 408, 502, 503 and 504."""
    return isinstance(error, ServiceUnavailable)


def is_never_started(error: ServiceError) -> bool:
    """True when the service cannot have started the work: the request was never sent, or 503 refused it."""
    return error.status == 503 or (isinstance(error, NoAnswer) and not error.lost)


TRANSIENT = RetryRule(is_transient)
PATIENT = RetryRule(is_transient, waits=True)
NEVER_STARTED = RetryRule(is_never_started)
ONCE = RetryRule(lambda error: False)


class Attempts:
    """The attempts at one request. After each that fails, `pause_after` says how long to wait before the next, or raises the error."""

    def __init__(self, rule: RetryRule, retry_seconds: float, is_over: Callable[[], bool] | None = None) -> None:
        self._rule, self._retry_seconds, self._is_over = rule, retry_seconds, is_over
        self._failed_at: float | None = None
        self._count = self._delays = 0

    def pause_after(self, error: ServiceError) -> float:
        """Seconds. Raises `error` if it cannot pass, or not in time, or nobody waits for the answer any more."""
        self._count += 1
        error.attempts = self._count
        if self._rule.waits and isinstance(error, HeldBack):
            # It works: whatever fails later is another outage.
            self._failed_at = None
            return hold_seconds(error)
        if not self._rule.may_pass(error):
            raise error
        # From the first failure: a request may have waited for its answer for longer than that before.
        now = time.monotonic()
        self._failed_at = now if self._failed_at is None else self._failed_at
        if error.retry_after_seconds is not None:
            pause = _limit(error.retry_after_seconds)
        else:
            pause = random.uniform(0, min(_LONGEST_DELAY_SECONDS, _FIRST_DELAY_SECONDS * 2.0**self._delays))
            self._delays = min(self._delays + 1, 16)
        if now - self._failed_at + pause >= self._retry_seconds or (self._is_over is not None and self._is_over()):
            raise error
        return pause


def hold_seconds(held: HeldBack) -> float:
    """After how many seconds a request that was held back may be made again."""
    return _limit(HELD_BACK_SECONDS if held.retry_after_seconds is None else held.retry_after_seconds)


def _limit(seconds: float) -> float:
    return min(LONGEST_PAUSE_SECONDS, max(_SHORTEST_PAUSE_SECONDS, seconds))


def check_token(token: str) -> str:
    """The token without the blanks around it: a Secret made from a file ends in a line end. Raises ValueError, which does not show it, for
    what cannot be sent as a token; an error about the header would."""
    token = token.strip()
    if token and not re.fullmatch(r"[!-~]+", token):
        raise ValueError("a token is made of ASCII letters, digits and signs, without blanks")
    return token


class _Core:
    """What both clients know and neither does."""

    def __init__(
        self, url: str, token: Token, timeout_seconds: float, retry_seconds: float, closing: threading.Event | asyncio.Event
    ) -> None:
        self.url = url.rstrip("/")
        self.timeout_seconds = timeout_seconds
        self.retry_seconds = retry_seconds
        self._token = token if callable(token) else check_token(token)
        self._closing = closing
        self._users = 0
        self._lock = threading.Lock()

    def _enter(self) -> None:
        with self._lock:
            if self._closing.is_set() and not self._users:
                raise ClientClosed("the client is closed")
            self._users += 1

    def _leave(self) -> bool:
        """Whether the connections are to be closed: by the last user, since closing a socket wakes no thread that waits on it, and its
        number may be reused."""
        with self._lock:
            self._users -= 1
            return self._closing.is_set() and not self._users

    def _begin_closing(self) -> bool:
        """The same, of a client that nobody uses."""
        with self._lock:
            self._closing.set()
            return not self._users

    def _sign(self, request: httpx.Request) -> httpx.Request:
        request.headers["Authorization"] = f"Bearer {self._token() if callable(self._token) else self._token}"
        return request

    def _build(
        self,
        http: httpx.Client | httpx.AsyncClient,
        method: str,
        path: str,
        *,
        body: Any = None,
        content: bytes | None = None,
        params: Mapping[str, Any] | None = None,
        accept: str = JSON,
        answer_seconds: float = 0.0,
        headers: Mapping[str, str] | None = None,
    ) -> httpx.Request:
        timeout = httpx.Timeout(self.timeout_seconds, read=self.timeout_seconds + answer_seconds)
        given = {"Accept": accept, **(headers or {})}
        try:
            return http.build_request(method, path, json=body, content=content, params=params, headers=given, timeout=timeout)
        except ValueError as error:
            raise RequestRefused(f"{method} {self.url}{path}: it cannot be written as JSON: {error}") from error

    @contextmanager
    def _translate(self, method: str, path: str) -> Iterator[None]:
        try:
            yield
        except httpx.RequestError as error:
            sentence = f"{method} {self.url}{path}: no answer: {error or type(error).__name__}"
            raise NoAnswer(sentence, lost=not isinstance(error, _NEVER_SENT)) from error


class ServiceClient(_Core):
    """Thread-safe. `token` is one, or a function that returns the valid one. `timeout_seconds` is how long the service may stay silent;
    `transport` replaces the network. `close` lets requests in flight finish; the last of them closes the connections."""

    def __init__(
        self,
        url: str,
        token: Token,
        *,
        timeout_seconds: float = 30.0,
        retry_seconds: float = 120.0,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        """Raises ValueError for what cannot be sent as a token, and httpx.InvalidURL."""
        self.closing = threading.Event()
        super().__init__(url, token, timeout_seconds, retry_seconds, self.closing)
        self._http = httpx.Client(base_url=self.url, auth=self._sign, timeout=timeout_seconds, transport=transport)

    def request(
        self,
        method: str,
        path: str,
        *,
        retry: RetryRule = TRANSIENT,
        until: Callable[[], bool] | None = None,
        consume: Callable[[httpx.Response], object] = httpx.Response.read,
        **described: Any,
    ) -> httpx.Response:
        """The answer, with a status below 300. `described`: `body` is sent as JSON, `content` as it is, `params` in the path; `accept` is
        the type of the answer, and `answer_seconds` is added to the time that the service may stay silent.

        `consume` reads the body of such an answer as it arrives, and again when the answer breaks off and the request is repeated. Nothing
        is retried once `until()` is true. Raises `ServiceError`, `ClientClosed`."""
        with self.keep_open():
            return self.repeat(lambda: self._send(method, path, consume, described), retry=retry, until=until)

    def repeat(self, send: Callable[[], T], *, retry: RetryRule = TRANSIENT, until: Callable[[], bool] | None = None) -> T:
        """What `send` returns, which is called again as the rule says. Raises `ServiceError`."""
        attempts = Attempts(retry, self.retry_seconds, until)
        while True:
            try:
                return send()
            except ServiceError as error:
                pause = attempts.pause_after(error)
            if until is None:
                time.sleep(pause)
            else:
                self.closing.wait(pause)

    def stream(self, method: str, path: str, *, silence_seconds: float, **described: Any) -> Generator[str, None, None]:
        """The lines of the answer as they arrive, at most `silence_seconds` apart. Not retried. Raises `ServiceError`, `ClientClosed`."""
        described["answer_seconds"] = silence_seconds - self.timeout_seconds
        lines = _Lines()
        with self.keep_open(), self._open(method, path, described) as response:
            for piece in response.iter_text():
                yield from lines.split(piece)
            yield from lines.end()

    @contextmanager
    def keep_open(self) -> Iterator[None]:
        """Keep the connections open inside the block, even if `close` is called meanwhile."""
        self._enter()
        try:
            yield
        finally:
            if self._leave():
                self._http.close()

    def close(self) -> None:
        if self._begin_closing():
            self._http.close()

    def _send(
        self, method: str, path: str, consume: Callable[[httpx.Response], object], described: Mapping[str, Any]
    ) -> httpx.Response:
        with self._open(method, path, described) as response:
            consume(response)
            return response

    @contextmanager
    def _open(self, method: str, path: str, described: Mapping[str, Any]) -> Iterator[httpx.Response]:
        """A good answer, its body not read yet."""
        request = self._build(self._http, method, path, **described)
        with self._translate(method, path), closing(self._http.send(request, stream=True)) as response:
            if response.status_code >= 300:
                response.read()
                raise read_error(response, f"{method} {self.url}{path}")
            yield response


class AsyncServiceClient(_Core):
    """As `ServiceClient`, for the tasks of one event loop. Use it in an `async with` block, or `close` it."""

    def __init__(
        self,
        url: str,
        token: Token,
        *,
        timeout_seconds: float = 30.0,
        retry_seconds: float = 120.0,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """Raises ValueError for what cannot be sent as a token, and httpx.InvalidURL."""
        self.closing = asyncio.Event()
        super().__init__(url, token, timeout_seconds, retry_seconds, self.closing)
        limits = httpx.Limits(max_connections=64, max_keepalive_connections=16)
        self._http = httpx.AsyncClient(
            base_url=self.url, auth=self._sign, timeout=timeout_seconds, transport=transport, limits=limits
        )

    async def request(
        self,
        method: str,
        path: str,
        *,
        retry: RetryRule = TRANSIENT,
        until: Callable[[], bool] | None = None,
        consume: Callable[[httpx.Response], Awaitable[object]] = httpx.Response.aread,
        **described: Any,
    ) -> httpx.Response:
        async with self.keep_open():
            return await self.repeat(lambda: self._send(method, path, consume, described), retry=retry, until=until)

    async def repeat(
        self, send: Callable[[], Awaitable[T]], *, retry: RetryRule = TRANSIENT, until: Callable[[], bool] | None = None
    ) -> T:
        attempts = Attempts(retry, self.retry_seconds, until)
        while True:
            try:
                return await send()
            except ServiceError as error:
                pause = attempts.pause_after(error)
            if until is None:
                await asyncio.sleep(pause)
            else:
                with suppress(TimeoutError):
                    await asyncio.wait_for(self.closing.wait(), pause)

    async def stream(self, method: str, path: str, *, silence_seconds: float, **described: Any) -> AsyncGenerator[str, None]:
        described["answer_seconds"] = silence_seconds - self.timeout_seconds
        lines = _Lines()
        async with self.keep_open(), self._open(method, path, described) as response:
            async for piece in response.aiter_text():
                for line in lines.split(piece):
                    yield line
            for line in lines.end():
                yield line

    @asynccontextmanager
    async def keep_open(self) -> AsyncIterator[None]:
        self._enter()
        try:
            yield
        finally:
            if self._leave():
                await self._http.aclose()

    async def close(self) -> None:
        if self._begin_closing():
            await self._http.aclose()

    async def _send(
        self, method: str, path: str, consume: Callable[[httpx.Response], Awaitable[object]], described: Mapping[str, Any]
    ) -> httpx.Response:
        async with self._open(method, path, described) as response:
            await consume(response)
            return response

    @asynccontextmanager
    async def _open(self, method: str, path: str, described: Mapping[str, Any]) -> AsyncIterator[httpx.Response]:
        request = self._build(self._http, method, path, **described)
        with self._translate(method, path):
            async with aclosing(await self._http.send(request, stream=True)) as response:
                if response.status_code >= 300:
                    await response.aread()
                    raise read_error(response, f"{method} {self.url}{path}")
                yield response

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()


def read_error(response: httpx.Response, request: str) -> ServiceError:
    """The error for a status of 300 and above, its body read; `request` names the request in its message."""
    status = response.status_code
    code = reason = ""
    try:
        error = response.json()["error"]
        code, reason = str(error.get("code") or ""), str(error.get("message") or "")
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    kind = KINDS.get(status, ServiceError)
    return kind(
        f"{request}: {status} {reason or response.text[:200]}".rstrip(),
        status=status,
        code=code,
        reason=reason,
        retry_after_seconds=_parse_retry_after(response.headers.get("Retry-After")),
        # A gateway may have given up on a request that the service carried out.
        lost=issubclass(kind, ServiceUnavailable),
    )


def _parse_retry_after(value: str | None) -> float | None:
    """Seconds from either form of the header (RFC 9110, 10.2.3); None if it is absent or malformed."""
    if value is None:
        return None
    if value.strip().replace(".", "", 1).isdecimal():
        return float(value)
    try:
        moment = parsedate_to_datetime(value)
    except ValueError:
        return None
    return max(0.0, (moment.astimezone(UTC) - datetime.now(UTC)).total_seconds())


class _Lines:
    """Not httpx's lines, which also end at characters that JSON strings hold as they are, such as U+2028."""

    def __init__(self) -> None:
        self._rest = ""

    def split(self, piece: str) -> list[str]:
        """The lines that end in the piece."""
        *lines, self._rest = (self._rest + piece).split("\n")
        return lines

    def end(self) -> list[str]:
        """The last line, if no line feed ended it."""
        return [self._rest] if self._rest else []
