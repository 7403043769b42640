"""One pooled HTTP client with the token, retries, and httpx errors translated into this package's.

Retried: requests that got no answer, 502 and 503, for at most `retry_seconds` since the first of them failed, after the service's
Retry-After or a growing random delay. Every other error is final.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import httpx
from tenacity import (
    RetryCallState,
    Retrying,
    retry_if_exception,
    sleep_using_event,
    wait_random_exponential,
)

from trainer_client.errors import ClientClosed, ConnectionFailed, ServiceError, Unauthorized, Unavailable

_NEVER_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)
_BACKOFF = wait_random_exponential(multiplier=0.2, max=10)

ErrorFilter = Callable[[BaseException], bool]


def is_transient(error: BaseException) -> bool:
    """True for errors that may pass: no answer, 502 and 503."""
    return isinstance(error, (ConnectionFailed, Unavailable))


def is_never_started(error: BaseException) -> bool:
    """True when the service cannot have started the work: the request was never sent, or 503 refused it."""
    if isinstance(error, ConnectionFailed):
        return not error.sent
    return isinstance(error, Unavailable) and error.status == 503


def check_token(token: str) -> str:
    """The token without the blanks around it: a Secret made from a file ends in a line end. Raises ValueError, which does not show it, for
    what cannot be sent as a token; an error about the header would."""
    token = token.strip()
    if token and not re.fullmatch(r"[!-~]+", token):
        raise ValueError("a token is made of ASCII letters, digits and signs, without blanks")
    return token


class Transport:
    """Thread-safe. `close` lets requests in flight and open batches finish; the last of them closes the connections."""

    def __init__(self, url: str, token: str, *, timeout_seconds: float, retry_seconds: float) -> None:
        """Raises ValueError for what cannot be sent as a token."""
        headers = {"Authorization": f"Bearer {check_token(token)}"}
        self.closing = threading.Event()
        self.timeout_seconds = timeout_seconds
        self._retry_seconds = retry_seconds
        self._http = httpx.Client(base_url=url, headers=headers, timeout=timeout_seconds)
        self._users = 0
        self._lock = threading.Lock()

    def request(
        self,
        method: str,
        path: str,
        *,
        body: Any = None,
        content: bytes | None = None,
        params: Mapping[str, Any] | None = None,
        accept: str = "application/json",
        answer_seconds: float = 0.0,
        retry: ErrorFilter | None = is_transient,
        until: Callable[[], bool] | None = None,
        consume: Callable[[httpx.Response], object] = httpx.Response.read,
    ) -> httpx.Response:
        """The answer, with a status below 300. `body` is sent as JSON, `content` as it is.

        `consume` reads the body of such an answer as it arrives, and again when the answer breaks off and the request is repeated.
        `answer_seconds` is added to the read timeout. `retry` selects the errors to retry after (None: one attempt); nothing is
        retried once `until()` is true.

        Raises: ServiceError or one of its subclasses, ConnectionFailed, ClientClosed.
        """
        request = {
            "json": body,
            "content": content,
            "params": params,
            "headers": {"Accept": accept},
            "timeout": httpx.Timeout(self.timeout_seconds, read=self.timeout_seconds + answer_seconds),
        }
        with self.keep_open():
            if retry is None:
                return self._send(method, path, request, consume)
            retrying = self._retrying(retry, until)
            try:
                return retrying(self._send, method, path, request, consume)
            except ServiceError as error:
                error.attempts = retrying.statistics["attempt_number"]
                raise

    def stream(
        self, method: str, path: str, *, headers: Mapping[str, str], silence_seconds: float, body: Any = None
    ) -> Generator[str, None, None]:
        """The lines of the answer as they arrive, at most `silence_seconds` apart. Not retried.

        Raises: ServiceError or one of its subclasses, ConnectionFailed, ClientClosed.
        """
        timeout = httpx.Timeout(self.timeout_seconds, read=silence_seconds)
        with self.keep_open():
            try:
                with self._http.stream(method, path, json=body, headers=headers, timeout=timeout) as response:
                    if response.status_code >= 300:
                        response.read()
                        raise service_error(method, path, response)
                    yield from _split_lines(response.iter_text())
            except httpx.RequestError as error:
                raise _connection_failed(method, path, error) from error

    @contextmanager
    def keep_open(self) -> Iterator[None]:
        """Keep the connections open inside the block, even if `close` is called meanwhile."""
        with self._lock:
            if self.closing.is_set() and not self._users:
                raise ClientClosed("the client is closed")
            self._users += 1
        try:
            yield
        finally:
            # Closing a socket wakes no thread that waits on it, and its number may be reused: the last user closes.
            with self._lock:
                self._users -= 1
                last = self.closing.is_set() and not self._users
            if last:
                self._http.close()

    def close(self) -> None:
        with self._lock:
            self.closing.set()
            idle = not self._users
        if idle:
            self._http.close()

    def _send(
        self, method: str, path: str, request: dict[str, Any], consume: Callable[[httpx.Response], object]
    ) -> httpx.Response:
        try:
            with self._http.stream(method, path, **request) as response:
                if response.status_code < 300:
                    consume(response)
                    return response
                response.read()
        except httpx.RequestError as error:
            raise _connection_failed(method, path, error) from error
        raise service_error(method, path, response)

    def _retrying(self, retry: ErrorFilter, until: Callable[[], bool] | None) -> Retrying:
        failed_at: list[float] = []

        def gives_up(state: RetryCallState) -> bool:
            # From the first failure: a request may have waited for its answer for longer than that before.
            failed_at.append(time.monotonic())
            spent = failed_at[-1] - failed_at[0] + state.upcoming_sleep
            return spent >= self._retry_seconds or (until is not None and until())

        return Retrying(
            retry=retry_if_exception(retry),
            wait=_choose_delay,
            stop=gives_up,
            sleep=sleep_using_event(self.closing) if until else time.sleep,
            reraise=True,
        )


def _split_lines(pieces: Iterable[str]) -> Iterator[str]:
    """Not httpx's lines, which also end at characters that JSON strings hold as they are, such as U+2028."""
    rest = ""
    for piece in pieces:
        *lines, rest = (rest + piece).split("\n")
        yield from lines
    if rest:
        yield rest


def _connection_failed(method: str, path: str, error: httpx.RequestError) -> ConnectionFailed:
    sentence = f"{method} {path}: no answer: {error or type(error).__name__}"
    return ConnectionFailed(sentence, sent=not isinstance(error, _NEVER_SENT))


def service_error(method: str, path: str, response: httpx.Response) -> ServiceError:
    status = response.status_code
    code = reason = ""
    try:
        error = response.json()["error"]
        code, reason = str(error.get("code") or ""), str(error.get("message") or "")
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    kind = {401: Unauthorized, 403: Unauthorized, 502: Unavailable, 503: Unavailable}.get(status, ServiceError)
    return kind(
        f"{method} {path}: {status} {reason or response.text[:200]}".rstrip(),
        status=status,
        code=code,
        reason=reason,
        retry_after_seconds=_parse_retry_after(response.headers.get("Retry-After")),
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


def _choose_delay(state: RetryCallState) -> float:
    error = state.outcome.exception() if state.outcome else None
    requested = getattr(error, "retry_after_seconds", None)
    return float(requested) if requested is not None else _BACKOFF(state)
