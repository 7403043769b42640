"""Models, called as a harness calls them: what an attempt's session lists, and the judge of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import quote

import httpx

from contract.attempts import AttemptId
from contract.client import read_error
from contract.errors import HeldBack, NoAnswer, RequestRefused, ResourceNotFound, ServiceError, ServiceUnavailable
from rollout.attempts_client import AttemptsClient, OpenSession

JUDGE_SECONDS = 600.0


async def find_first_model(url: str, opened: OpenSession) -> Mapping[str, Any]:
    """The first entry of the session's model list. Raises `ServiceUnavailable` while the list is empty, and `ServiceError`."""
    answer = await _request(url, opened, "GET", "models", None)
    try:
        return {**answer["data"][0], "id": str(answer["data"][0]["id"])}
    except (KeyError, IndexError, TypeError) as error:
        raise ServiceUnavailable(f"{url} names no model: no engine is up; wait for one, or give the task a model") from error


async def describe_model(url: str, opened: OpenSession, name: str) -> Mapping[str, Any]:
    """The model's entry in the session's list; empty if the service refuses to say: the harness will be told why. Raises
    `ServiceUnavailable`."""
    try:
        return {**await _request(url, opened, "GET", f"models/{quote(name)}", None)}
    except ServiceUnavailable:
        raise
    except (ServiceError, TypeError, ValueError):
        return {}


class Judge:
    """Asks a model in a separate session, which reaches no trainer and is not held back when trainers are behind: rollouts wait for the
    verdict."""

    def __init__(self, attempts: AttemptsClient, url: str) -> None:
        """`url` is the one that harnesses use."""
        self._attempts, self._url = attempts, url

    async def ask(
        self, attempt: AttemptId, model: str, messages: Sequence[Mapping[str, Any]], sampling: Mapping[str, Any]
    ) -> str:
        """The text of the reply; a call that is not served is made again. Raises `RequestRefused` for a call that never will be, and
        `ServiceError`."""
        opened = await self._attempts.open_judge(attempt)
        body = {**sampling, "model": model, "messages": list(messages)}
        try:
            answer = await self._attempts.repeat(lambda: _request(self._url, opened, "POST", "chat/completions", body))
            return str(answer["choices"][0]["message"].get("content") or "")
        finally:
            with suppress(ServiceError):
                await self._attempts.close_judge(attempt, opened)


async def _request(url: str, opened: OpenSession, method: str, path: str, body: Mapping[str, Any] | None) -> Any:
    """Raises `ServiceUnavailable` for what may pass, `RequestRefused` for what will not, and `ServiceError`."""
    where = f"{url.rstrip('/')}/s/{opened.session_id}/v1/{path}"
    headers = {"Authorization": f"Bearer {opened.api_key}"}
    try:
        async with httpx.AsyncClient(timeout=JUDGE_SECONDS) as client:
            response = await client.request(method, where, json=body, headers=headers)
    except httpx.TransportError as error:
        raise NoAnswer(f"{method} {where}: no answer: {error or type(error).__name__}") from error
    if response.status_code >= 300:
        told = read_error(response, f"{method} {where}")
        if isinstance(told, HeldBack):
            raise ServiceUnavailable(str(told), status=429, retry_after_seconds=told.retry_after_seconds)
        raise RequestRefused(str(told), status=404) if isinstance(told, ResourceNotFound) else told
    return response.json()
