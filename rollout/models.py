"""Models behind the service, asked as any harness asks them: the first one it names, and a frozen one as a judge."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import httpx

from rollout.session_failures import NoAnswer, SessionFailed
from rollout.sessions import OpenSession, Sessions

JUDGE_SECONDS = 600.0
LATER = (408, 429, 502, 503, 504)


async def first_model(url: str, opened: OpenSession) -> str:
    """The first model that the session's own list names. Raises `NoAnswer` as long as it names none, and `SessionFailed`."""
    answer = await _asked(url, opened, "GET", "models", None)
    try:
        return str(answer["data"][0]["id"])
    except (KeyError, IndexError, TypeError) as error:
        raise NoAnswer(f"{url} names no model: no engine is up; wait for one, or give the task a model") from error


class Judge:
    """Asks a model in a session of its own, which no trainer ever gets, and which is not held back where trainers are behind: rollouts
    wait for its verdict."""

    def __init__(self, sessions: Sessions, url: str) -> None:
        """`url`: where harnesses call the service."""
        self._sessions, self._url = sessions, url

    async def ask(self, model: str, messages: Sequence[Mapping[str, Any]], sampling: Mapping[str, Any]) -> str:
        """The text of the reply. Raises `SessionFailed`."""
        opened = await self._sessions.create(f"judge-{uuid.uuid4().hex}", metadata={"purpose": "judge"}, trained=False)
        try:
            body = {**sampling, "model": model, "messages": list(messages)}
            answer = await _asked(self._url, opened, "POST", "chat/completions", body)
            return str(answer["choices"][0]["message"].get("content") or "")
        finally:
            with suppress(SessionFailed):
                await self._sessions.close_session(opened.session_id, "completed")


async def _asked(url: str, opened: OpenSession, method: str, path: str, body: Mapping[str, Any] | None) -> Any:
    where = f"{url.rstrip('/')}/s/{opened.session_id}/v1/{path}"
    headers = {"Authorization": f"Bearer {opened.api_key}"}
    try:
        async with httpx.AsyncClient(timeout=JUDGE_SECONDS) as client:
            response = await client.request(method, where, json=body, headers=headers)
    except httpx.TransportError as error:
        raise NoAnswer(f"{method} {where}: no answer: {error or type(error).__name__}") from error
    if response.status_code >= 300:
        # What cannot be answered now may be in a while.
        kind = NoAnswer if response.status_code in LATER else SessionFailed
        raise kind(f"{method} {where}: {response.status_code}: {response.text[:500]}", response.status_code)
    return response.json()
