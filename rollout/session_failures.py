"""What the service says against a request about a session.

SessionFailed             the service does not take it
├── NoAnswer              it gave none, or only that it cannot now, for retry_seconds
├── SessionRefused        400, 413, 422: what was sent is nothing that it will ever take
├── NoSession             404
├── SessionConflict       409: another session has the id, or it was closed otherwise
└── HeldBack              429: trainers are behind; `Sessions` waits it out
"""

from __future__ import annotations

from collections.abc import Mapping

import httpx

UNTOLD_RETRY_SECONDS = 5.0
LONGEST_RETRY_SECONDS = 60.0


class SessionFailed(Exception):
    """`status` is the HTTP status, None where there was no answer. The message names the request and what the service said."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class NoAnswer(SessionFailed):
    """`lost`: the request may have been done all the same. `retry_after_seconds` is what the service asked for."""

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


def failure_of(response: httpx.Response, request: str) -> SessionFailed:
    """What an answer of 300 and above means; `request` is how the message names what was asked."""
    status = response.status_code
    message = f"{request}: {status}: {_said(response)}"
    if status == 429:
        return HeldBack(message, _retry_after(response) or UNTOLD_RETRY_SECONDS)
    if status in (408, 502, 503, 504):
        # What stands between may have given up on a request that the service went on with.
        return NoAnswer(message, status, lost=True, retry_after_seconds=_retry_after(response))
    return KINDS.get(status, SessionFailed)(message, status)


def _said(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return response.text[:200]


def _retry_after(response: httpx.Response) -> float | None:
    """Seconds, at most a minute; None where the header is missing or a date."""
    try:
        return min(LONGEST_RETRY_SECONDS, max(0.1, float(response.headers["retry-after"])))
    except (KeyError, ValueError):
        return None
