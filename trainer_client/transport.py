"""The wire under the client: one pooled HTTP client, the token, retries, and foreign errors translated once.

Repeated: requests that got no answer, and 502 and 503, with growing random waits or the service's own Retry-After, for at
most `retry_seconds` in all. Never repeated: any other error, because asking again would not change it.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
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
    stop_before_delay,
    wait_random_exponential,
)

from trainer_client.errors import ClientClosed, ConnectionFailed, ServiceError, Unauthorized, Unavailable

_NEVER_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)
_GROWING = wait_random_exponential(multiplier=0.2, max=10)

Transient = Callable[[BaseException], bool]


def is_transient(error: BaseException) -> bool:
    """True for what may pass by itself: no answer at all, 502 and 503."""
    return isinstance(error, (ConnectionFailed, Unavailable))


def never_started(error: BaseException) -> bool:
    """True when the service cannot have begun the work: the request never left, or 503 refused it at the door."""
    if isinstance(error, ConnectionFailed):
        return not error.sent
    return isinstance(error, Unavailable) and error.status == 503


class Transport:
    """Thread-safe. `close` lets requests in flight and open batches finish; the last of them closes the connections."""

    def __init__(self, url: str, token: str, *, timeout_seconds: float, retry_seconds: float) -> None:
        self.closing = threading.Event()
        self.timeout_seconds = timeout_seconds
        self._retry_seconds = retry_seconds
        self._http = httpx.Client(
            base_url=url, headers={"Authorization": f"Bearer {token}"}, timeout=httpx.Timeout(timeout_seconds)
        )
        self._users = 0
        self._lock = threading.Lock()

    def request(
        self,
        method: str,
        path: str,
        *,
        body: Any = None,
        accept: str = "application/json",
        answer_seconds: float = 0.0,
        retry: Transient | None = is_transient,
        until: Callable[[], bool] | None = None,
    ) -> httpx.Response:
        """The answer, below 400. `answer_seconds` is how long the service may think beyond the usual timeout; `retry` says
        which errors to repeat after (None: one attempt); once `until()` is true nothing is repeated.

        Raises: ServiceError or one of its subclasses, ConnectionFailed, ClientClosed.
        """
        read = httpx.Timeout(self.timeout_seconds, read=self.timeout_seconds + answer_seconds)
        request = {"json": body, "headers": {"Accept": accept}, "timeout": read}
        with self.in_use():
            if retry is None:
                return self._once(method, path, request)
            retrying = self._retrying(retry, until)
            try:
                return retrying(self._once, method, path, request)
            except ServiceError as error:
                error.attempts = retrying.statistics["attempt_number"]
                raise

    def lines(self, path: str, body: Any, *, answer_seconds: float) -> Iterator[dict[str, Any]]:
        """What POST `path` answers line by line, with at most `answer_seconds` beyond the usual timeout between two. Not repeated.

        Raises: ServiceError or one of its subclasses, ConnectionFailed, ClientClosed.
        """
        read = httpx.Timeout(self.timeout_seconds, read=self.timeout_seconds + answer_seconds)
        headers = {"Accept": "application/x-ndjson"}
        with self.in_use():
            try:
                with self._http.stream("POST", path, json=body, headers=headers, timeout=read) as response:
                    if response.status_code >= 300:
                        response.read()
                        raise service_error("POST", path, response)
                    for line in response.iter_lines():
                        yield json.loads(line)
            except httpx.TransportError as error:
                raise ConnectionFailed(f"POST {path}: {error or type(error).__name__}", sent=True) from error

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Keeps the connections open for the length of the block, also when `close` is called meanwhile."""
        with self._lock:
            if self.closing.is_set() and not self._users:
                raise ClientClosed("the client is closed")
            self._users += 1
        try:
            yield
        finally:
            self._leave()

    def close(self) -> None:
        with self._lock:
            self.closing.set()
            idle = not self._users
        if idle:
            self._http.close()

    def _leave(self) -> None:
        # A socket closed under a thread that waits on it wakes no one, and its number may be reused: so the last one closes.
        with self._lock:
            self._users -= 1
            last = self.closing.is_set() and not self._users
        if last:
            self._http.close()

    def _once(self, method: str, path: str, request: dict[str, Any]) -> httpx.Response:
        try:
            response = self._http.request(method, path, **request)
        except httpx.TransportError as error:
            raise ConnectionFailed(
                f"{method} {path}: no answer: {error or type(error).__name__}", sent=not isinstance(error, _NEVER_SENT)
            ) from error
        if response.status_code >= 300:
            raise service_error(method, path, response)
        return response

    def _retrying(self, retry: Transient, until: Callable[[], bool] | None) -> Retrying:
        spent = stop_before_delay(self._retry_seconds)
        return Retrying(
            retry=retry_if_exception(retry),
            wait=_wait_seconds,
            stop=lambda state: spent(state) or (until is not None and until()),
            sleep=sleep_using_event(self.closing) if until else time.sleep,
            reraise=True,
        )


def service_error(method: str, path: str, response: httpx.Response) -> ServiceError:
    """The error an answer stands for, with the service's sentence and code when it gave them."""
    status = response.status_code
    code, message = _explanation(response)
    kind = {401: Unauthorized, 403: Unauthorized, 502: Unavailable, 503: Unavailable}.get(status, ServiceError)
    return kind(
        f"{method} {path}: {status} {message}".rstrip(),
        status=status,
        code=code,
        retry_after_seconds=_retry_after(response.headers.get("Retry-After")),
    )


def _explanation(response: httpx.Response) -> tuple[str, str]:
    try:
        error = response.json()["error"]
        return str(error.get("code") or ""), str(error.get("message") or "")
    except (ValueError, KeyError, TypeError, AttributeError):
        return "", response.text[:200]


def _retry_after(value: str | None) -> float | None:
    """Seconds from either form of the header (RFC 9110, 10.2.3); None when there is none or it is malformed."""
    if value is None:
        return None
    if value.strip().replace(".", "", 1).isdecimal():
        return float(value)
    try:
        moment = parsedate_to_datetime(value)
    except ValueError:
        return None
    return max(0.0, (moment.astimezone(UTC) - datetime.now(UTC)).total_seconds())


def _wait_seconds(state: RetryCallState) -> float:
    error = state.outcome.exception() if state.outcome else None
    asked = getattr(error, "retry_after_seconds", None)
    return float(asked) if asked is not None else _GROWING(state)
