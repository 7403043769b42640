"""A client of the proxy's sessions: open, read, reward, close, delete. Used by nodes and by the sweeper of a server.

Requests without an answer, and 408, 502, 503 and 504, are repeated for at most `retry_seconds`, after the service's Retry-After or
growing random waits. A 429 is waited out: the service works, but trainers are behind. Every request is safe to repeat; `create` makes
itself so.

    SessionFailed             the service did not fulfil a request
    ├── NoAnswer              no answer, or 408, 502, 503 or 504, for retry_seconds
    ├── SessionRefused        400, 413, 422: it will never accept this request
    ├── NoSession             404
    ├── SessionConflict       409: the id is taken, or the session was closed with another status
    └── HeldBack              429: trainers are behind; `Sessions` waits, unless a caller of `create` asks it not to
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar
from urllib.parse import quote

import httpx
import msgpack
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, stop_before_delay, wait_random_exponential

from contract.attempts import Ended

log = logging.getLogger(__name__)
T = TypeVar("T")

ACCEPT = "application/msgpack;arrays=packed"
ARRAYS = ("prompt_ids", "completion_ids", "logprobs", "logprob_modes", "weight_versions")
PAGE = 200

LOG_CHARACTERS = 65536
_GROWING = wait_random_exponential(multiplier=0.2, max=10)


@dataclass(frozen=True, slots=True)
class OpenSession:
    """`base_urls` are by the kind of client: openai, anthropic, gemini, and those of dialects that packages add."""

    session_id: str
    api_key: str = field(repr=False)
    base_urls: Mapping[str, str]


class Sessions:
    """A connection pool to the service at `url`. Use it in an `async with` block, or `close` it.

    `token` is an admin token, or a function that returns the valid one. `timeout_seconds` is the longest silence within one request.
    `transport` replaces the network, for a service in the same process."""

    def __init__(
        self,
        url: str,
        token: str | Callable[[], str],
        *,
        timeout_seconds: float = 60.0,
        retry_seconds: float = 120.0,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.url = url.rstrip("/")
        self._token = token
        self._retry_seconds = retry_seconds
        self._http = httpx.AsyncClient(
            base_url=self.url,
            auth=self._sign,
            transport=transport,
            timeout=timeout_seconds,
            limits=httpx.Limits(max_connections=64, max_keepalive_connections=16),
        )

    async def create(self, session_id: str, *, wait: bool = True, **fields: Any) -> OpenSession:
        """Create the session with the fields of `POST /sessions`; None counts as left out. While the service holds new sessions back (429),
        `wait`, or raise `HeldBack`.

        If the answer to an earlier try was lost, the session that it created is deleted first: its key is given only once, so nothing can
        have used it. Raises `SessionConflict` if the session existed before, and `SessionFailed`."""
        body = {"session_id": session_id, **{name: value for name, value in fields.items() if value is not None}}
        lost = False

        async def attempt() -> httpx.Response:
            nonlocal lost
            try:
                return await self._send("POST", "/sessions", body)
            except NoAnswer as error:
                lost = lost or error.lost
                raise
            except SessionConflict:
                if not lost:
                    raise
                await self.delete(session_id)
                return await self._send("POST", "/sessions", body)

        answer: dict[str, Any] = (await self.repeat(attempt, wait=wait)).json()
        return OpenSession(answer["session_id"], answer["api_key"], answer["base_urls"])

    async def check_ready(self) -> None:
        """Check that the service has its store and an engine. Raises `NoAnswer` if it lacks one."""
        try:
            await self._ask("GET", "/readyz")
        except NoAnswer:
            raise
        except SessionFailed as error:
            # A gateway may hide that page from nodes.
            log.debug("cannot find out whether the service is ready: %s", error)

    async def load(self, session_id: str) -> dict[str, Any]:
        """The session as `GET /sessions/{id}` returns it. Raises `NoSession`, `SessionFailed`."""
        answer: dict[str, Any] = (await self._ask("GET", _path(session_id))).json()
        return answer

    async def list_calls(self, session_id: str, *, limit: int | None = None) -> list[dict[str, Any]]:
        """The session's first `limit` calls, in order, without their token arrays. Raises `NoSession`, `SessionFailed`."""
        found: list[dict[str, Any]] = []
        cursor: str | None = None
        while limit is None or len(found) < limit:
            query = {"limit": PAGE if limit is None else min(PAGE, limit - len(found))}
            answer = await self._ask("GET", _path(session_id, "/calls"), params=query | ({"cursor": cursor} if cursor else {}))
            page = msgpack.unpackb(answer.content, strict_map_key=False)
            found += [{name: value for name, value in call.items() if name not in ARRAYS} for call in page["calls"]]
            cursor = page["cursor"]
            if cursor is None:
                break
        return found

    async def reward(
        self,
        session_id: str,
        reward: float,
        *,
        per_call: Mapping[str, float] | None = None,
        per_branch: Mapping[str, float] | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        """Raises `NoSession`, `SessionFailed`."""
        body = {"reward": reward, "per_call": dict(per_call or {}), "per_branch": dict(per_branch or {})}
        await self._ask("POST", _path(session_id, "/reward"), body | {"metadata": dict(metadata or {})})

    async def store_log(self, session_id: str, text: str) -> None:
        """Store the end of the agent's output with its session. Raises `NoSession`, `SessionFailed`."""
        await self._ask("PUT", _path(session_id, "/log"), {"text": text[-LOG_CHARACTERS:]})

    async def close_session(
        self, session_id: str, status: Ended, *, reward: float | None = None, error: str | None = None
    ) -> None:
        """Freeze the session. Repeating it with the same status changes nothing. Raises `NoSession`, `SessionConflict` if the session was
        closed with another status, and `SessionFailed`."""
        body: dict[str, Any] = {"status": status} | ({} if reward is None else {"reward": reward})
        await self._ask("POST", _path(session_id, "/close"), body | ({} if error is None else {"error": error[:65536]}))

    async def delete(self, session_id: str) -> bool:
        """Whether the session existed. Raises `SessionConflict` while a trainer holds it, and `SessionFailed`."""
        try:
            await self._ask("DELETE", _path(session_id))
        except NoSession:
            return False
        return True

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    def _sign(self, request: httpx.Request) -> httpx.Request:
        request.headers["Authorization"] = f"Bearer {self._token() if callable(self._token) else self._token}"
        return request

    async def _ask(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, params: Mapping[str, Any] | None = None
    ) -> httpx.Response:
        return await self.repeat(partial(self._send, method, path, body, params))

    async def repeat(self, send: Callable[[], Awaitable[T]], *, wait: bool = True) -> T:
        """What `send` gives, which is tried again after `NoAnswer` for at most `retry_seconds`. Raises `SessionFailed`."""
        retry, stop = retry_if_exception_type(NoAnswer), stop_before_delay(self._retry_seconds)
        while True:
            try:
                return await AsyncRetrying(retry=retry, wait=_pause_seconds, stop=stop, reraise=True)(send)
            except HeldBack as held:
                if not wait:
                    raise
                await asyncio.sleep(held.retry_after_seconds)

    async def _send(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, params: Mapping[str, Any] | None = None
    ) -> httpx.Response:
        headers = {"Accept": ACCEPT if path.endswith("/calls") else "application/json"}
        try:
            response = await self._http.request(method, path, json=body, params=params, headers=headers)
        except ValueError as error:
            raise SessionRefused(f"{method} {self.url}{path}: it cannot be written as JSON: {error}", 400) from error
        except httpx.TransportError as error:
            lost = not isinstance(error, (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout))
            raise NoAnswer(f"{method} {self.url}{path}: no answer: {error or type(error).__name__}", lost=lost) from error
        if response.status_code >= 300:
            raise read_failure(response, f"{method} {self.url}{path}")
        return response


def _path(session_id: str, part: str = "") -> str:
    return f"/sessions/{quote(session_id, safe='')}{part}"


def _pause_seconds(state: RetryCallState) -> float:
    error = state.outcome.exception() if state.outcome else None
    requested = error.retry_after_seconds if isinstance(error, NoAnswer) else None
    return requested if requested is not None else _GROWING(state)


DEFAULT_RETRY_SECONDS = 5.0
"""Of a 429 without Retry-After."""
LONGEST_RETRY_SECONDS = 60.0


class SessionFailed(Exception):
    """`status` is the HTTP status; None without an answer. The message names the request and quotes the service."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class NoAnswer(SessionFailed):
    """`lost`: the request may have been carried out. `retry_after_seconds` is the service's request."""

    def __init__(
        self, message: str, status: int | None = None, *, lost: bool = False, retry_after_seconds: float | None = None
    ) -> None:
        super().__init__(message, status)
        self.lost = lost
        self.retry_after_seconds = retry_after_seconds


class SessionRefused(SessionFailed):
    pass


class NoSession(SessionFailed):
    pass


class SessionConflict(SessionFailed):
    pass


class HeldBack(SessionFailed):
    def __init__(self, message: str, retry_after_seconds: float) -> None:
        super().__init__(message, 429)
        self.retry_after_seconds = retry_after_seconds


KINDS: Mapping[int, type[SessionFailed]] = {
    **dict.fromkeys((400, 413, 422), SessionRefused),
    404: NoSession,
    409: SessionConflict,
}


def read_failure(response: httpx.Response, request: str) -> SessionFailed:
    """The error for a status of 300 and above; `request` names the request in its message."""
    status = response.status_code
    message = f"{request}: {status}: {_read_message(response)}"
    if status == 429:
        return HeldBack(message, _read_retry_after(response) or DEFAULT_RETRY_SECONDS)
    if status in (408, 502, 503, 504):
        # A gateway may have given up on a request that the service carried out.
        return NoAnswer(message, status, lost=True, retry_after_seconds=_read_retry_after(response))
    return KINDS.get(status, SessionFailed)(message, status)


def _read_message(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return response.text[:200]


def _read_retry_after(response: httpx.Response) -> float | None:
    """Seconds, at most a minute; None if the header is missing or a date."""
    try:
        return min(LONGEST_RETRY_SECONDS, max(0.1, float(response.headers["retry-after"])))
    except (KeyError, ValueError):
        return None


# Models, called as a harness calls them.


JUDGE_SECONDS = 600.0
ERROR_KINDS: Mapping[int, type[SessionFailed]] = {
    **dict.fromkeys((408, 429, 502, 503, 504), NoAnswer),
    **dict.fromkeys((400, 404, 413, 422), SessionRefused),
}


async def find_first_model(url: str, opened: OpenSession) -> Mapping[str, Any]:
    """The first entry of the session's model list. Raises `NoAnswer` while the list is empty, and `SessionFailed`."""
    answer = await _request(url, opened, "GET", "models", None)
    try:
        return {**answer["data"][0], "id": str(answer["data"][0]["id"])}
    except (KeyError, IndexError, TypeError) as error:
        raise NoAnswer(f"{url} names no model: no engine is up; wait for one, or give the task a model") from error


async def describe_model(url: str, opened: OpenSession, name: str) -> Mapping[str, Any]:
    """The model's entry in the session's list; empty if the service refuses to say: the harness will be told why. Raises `NoAnswer`."""
    try:
        return {**await _request(url, opened, "GET", f"models/{quote(name)}", None)}
    except NoAnswer:
        raise
    except (SessionFailed, TypeError, ValueError):
        return {}


class Judge:
    """Asks a model in a separate session, which reaches no trainer and is not held back when trainers are behind: rollouts wait for the
    verdict."""

    def __init__(self, sessions: Sessions, url: str) -> None:
        """`url` is the one that harnesses use."""
        self._sessions, self._url = sessions, url

    async def ask(self, model: str, messages: Sequence[Mapping[str, Any]], sampling: Mapping[str, Any]) -> str:
        """The text of the reply; a call that is not served is made again. Raises `SessionRefused` for a call that never will be, and
        `SessionFailed`."""
        opened = await self._sessions.create(f"judge-{uuid.uuid4().hex}", metadata={"purpose": "judge"}, trained=False)
        try:
            body = {**sampling, "model": model, "messages": list(messages)}
            answer = await self._sessions.repeat(partial(_request, self._url, opened, "POST", "chat/completions", body))
            return str(answer["choices"][0]["message"].get("content") or "")
        finally:
            with suppress(SessionFailed):
                await self._sessions.close_session(opened.session_id, "completed")


async def _request(url: str, opened: OpenSession, method: str, path: str, body: Mapping[str, Any] | None) -> Any:
    where = f"{url.rstrip('/')}/s/{opened.session_id}/v1/{path}"
    headers = {"Authorization": f"Bearer {opened.api_key}"}
    try:
        async with httpx.AsyncClient(timeout=JUDGE_SECONDS) as client:
            response = await client.request(method, where, json=body, headers=headers)
    except httpx.TransportError as error:
        raise NoAnswer(f"{method} {where}: no answer: {error or type(error).__name__}") from error
    if response.status_code >= 300:
        kind = ERROR_KINDS.get(response.status_code, SessionFailed)
        raise kind(f"{method} {where}: {response.status_code}: {response.text[:500]}", response.status_code)
    return response.json()
