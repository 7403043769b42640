"""A client of the proxy's sessions: open, read, reward, close, delete. Used by nodes and by the sweeper of a server.

As `contract.client`, but a 429 is waited out: the service works, but trainers are behind. Every request is safe to repeat; `create` makes
itself so. Raises the errors of `contract.errors`.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

import httpx
import msgpack

from contract.attempts import Ended
from contract.client import ONCE, PATIENT, TRANSIENT, AsyncServiceClient, RetryRule
from contract.errors import HeldBack, NoAnswer, ResourceConflict, ResourceNotFound, ServiceError, ServiceUnavailable

log = logging.getLogger(__name__)

PACKED = "application/msgpack;arrays=packed"
ARRAYS = ("prompt_ids", "completion_ids", "logprobs", "logprob_modes", "weight_versions")
PAGE = 200

LOG_CHARACTERS = 65536


@dataclass(frozen=True, slots=True)
class OpenSession:
    """`base_urls` are by the kind of client: openai, anthropic, gemini, and those of dialects that packages add."""

    session_id: str
    api_key: str = field(repr=False)
    base_urls: Mapping[str, str]


class Sessions(AsyncServiceClient):
    """Use it in an `async with` block, or `close` it. `token` is an admin token, or a function that returns the valid one."""

    def __init__(
        self,
        url: str,
        token: str | Callable[[], str],
        *,
        retry_seconds: float = 120.0,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        super().__init__(url, token, timeout_seconds=60.0, retry_seconds=retry_seconds, transport=transport)

    async def create(self, session_id: str, *, wait: bool = True, **fields: Any) -> OpenSession:
        """Create the session with the fields of `POST /sessions`; None counts as left out. While the service holds new sessions back (429),
        `wait`, or raise `HeldBack`.

        If the answer to an earlier try was lost, the session that it created is deleted first: its key is given only once, so nothing can
        have used it. Raises `ResourceConflict` if the session existed before, and `ServiceError`."""
        body = {"session_id": session_id, **{name: value for name, value in fields.items() if value is not None}}
        lost = False

        async def attempt() -> httpx.Response:
            nonlocal lost
            try:
                return await self.send("POST", "/sessions", body=body)
            except ServiceUnavailable as error:
                lost = lost or error.lost
                raise
            except ResourceConflict:
                if not lost:
                    raise
                await self.delete(session_id)
                return await self.send("POST", "/sessions", body=body)

        answer: dict[str, Any] = (await self.repeat(attempt, retry=PATIENT if wait else TRANSIENT)).json()
        return OpenSession(answer["session_id"], answer["api_key"], answer["base_urls"])

    async def check_ready(self) -> None:
        """Check that the service has its store and an engine. Raises `ServiceUnavailable` if it lacks one."""
        try:
            await self._ask("GET", "/readyz")
        except ServiceUnavailable:
            raise
        except ServiceError as error:
            # A gateway may hide that page from nodes.
            log.debug("cannot find out whether the service is ready: %s", error)

    async def load(self, session_id: str) -> dict[str, Any]:
        """The session as `GET /sessions/{id}` returns it. Raises `ResourceNotFound`, `ServiceError`."""
        answer: dict[str, Any] = (await self._ask("GET", _path(session_id))).json()
        return answer

    async def list_calls(self, session_id: str, *, limit: int | None = None) -> list[dict[str, Any]]:
        """The session's first `limit` calls, in order, without their token arrays. Raises `ResourceNotFound`, `ServiceError`."""
        found: list[dict[str, Any]] = []
        cursor: str | None = None
        while limit is None or len(found) < limit:
            query = {"limit": PAGE if limit is None else min(PAGE, limit - len(found))}
            params = query | ({"cursor": cursor} if cursor else {})
            answer = await self._ask("GET", _path(session_id, "/calls"), params=params, accept=PACKED)
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
        """Raises `ResourceNotFound`, `ServiceError`."""
        body = {"reward": reward, "per_call": dict(per_call or {}), "per_branch": dict(per_branch or {})}
        await self._ask("POST", _path(session_id, "/reward"), body=body | {"metadata": dict(metadata or {})})

    async def store_log(self, session_id: str, text: str) -> None:
        """Store the end of the agent's output with its session. Raises `ResourceNotFound`, `ServiceError`."""
        await self._ask("PUT", _path(session_id, "/log"), body={"text": text[-LOG_CHARACTERS:]})

    async def close_session(
        self, session_id: str, status: Ended, *, reward: float | None = None, error: str | None = None
    ) -> None:
        """Freeze the session. Repeating it with the same status changes nothing. Raises `ResourceNotFound`, `ResourceConflict` if the
        session was closed with another status, and `ServiceError`."""
        body: dict[str, Any] = {"status": status} | ({} if reward is None else {"reward": reward})
        await self._ask("POST", _path(session_id, "/close"), body=body | ({} if error is None else {"error": error[:65536]}))

    async def delete(self, session_id: str) -> bool:
        """Whether the session existed. Raises `ResourceConflict` while a trainer holds it, and `ServiceError`."""
        try:
            await self._ask("DELETE", _path(session_id))
        except ResourceNotFound:
            return False
        return True

    async def _ask(self, method: str, path: str, **described: Any) -> httpx.Response:
        return await self.request(method, path, retry=PATIENT, **described)


def _path(session_id: str, part: str = "") -> str:
    return f"/sessions/{quote(session_id, safe='')}{part}"


# Models, called as a harness calls them.


MODEL_SECONDS = 600.0
_SERVED = RetryRule(lambda error: isinstance(error, ServiceUnavailable | HeldBack))
"""A call that is held back counts as one that is not served: it is made again for as long, and no longer."""


async def find_first_model(url: str, opened: OpenSession) -> Mapping[str, Any]:
    """The first entry of the session's model list. Raises `NoAnswer` while the list is empty, and `ServiceError`."""
    answer = await _call(url, opened, "GET", "/models")
    try:
        return {**answer["data"][0], "id": str(answer["data"][0]["id"])}
    except (KeyError, IndexError, TypeError) as error:
        raise NoAnswer(f"{url} names no model: no engine is up; wait for one, or give the task a model") from error


async def describe_model(url: str, opened: OpenSession, name: str) -> Mapping[str, Any]:
    """The model's entry in the session's list; empty if the service refuses to say: the harness will be told why. Raises
    `ServiceUnavailable` and `HeldBack`."""
    try:
        return {**await _call(url, opened, "GET", f"/models/{quote(name)}")}
    except (ServiceUnavailable, HeldBack):
        raise
    except (ServiceError, TypeError, ValueError):
        return {}


class Judge:
    """Asks a model in a separate session, which reaches no trainer and is not held back when trainers are behind: rollouts wait for the
    verdict."""

    def __init__(self, sessions: Sessions, url: str) -> None:
        """`url` is the one that harnesses use."""
        self._sessions, self._url = sessions, url

    async def ask(self, model: str, messages: Sequence[Mapping[str, Any]], sampling: Mapping[str, Any]) -> str:
        """The text of the reply; a call that is not served is made again. Raises `RequestRefused` or `ResourceNotFound` for a call that
        never will be, and `ServiceError`."""
        opened = await self._sessions.create(f"judge-{uuid.uuid4().hex}", metadata={"purpose": "judge"}, trained=False)
        try:
            body = {**sampling, "model": model, "messages": list(messages)}
            within = self._sessions.retry_seconds
            answer = await _call(self._url, opened, "POST", "/chat/completions", _SERVED, within, body=body)
            return str(answer["choices"][0]["message"].get("content") or "")
        finally:
            with suppress(ServiceError):
                await self._sessions.close_session(opened.session_id, "completed")


async def _call(
    url: str, opened: OpenSession, method: str, path: str, retry: RetryRule = ONCE, retry_seconds: float = 0.0, **described: Any
) -> Any:
    where = f"{url.rstrip('/')}/s/{opened.session_id}/v1"
    async with AsyncServiceClient(where, opened.api_key, timeout_seconds=MODEL_SECONDS, retry_seconds=retry_seconds) as client:
        return (await client.request(method, path, retry=retry, **described)).json()
