"""Sessions opened, listed, looked at, rewarded, closed and deleted, for the description."""

from __future__ import annotations

from typing import Any, Literal

from proxy.api.description.operation import PAGE, SESSION_ID, Answer, Operation
from proxy.api.description.shape import Shape
from proxy.api.sessions import Close, NewSession, Reward

Status = Literal["open", "closing", "completed", "failed", "timeout", "cancelled", "restoring"]


class BaseUrls(Shape):
    openai: str
    """For clients of OpenAI: ends in /v1."""
    anthropic: str
    gemini: str


class Opened(Shape):
    session_id: str
    api_key: str
    """Shown here and never again."""
    base_urls: BaseUrls


class SessionShape(Shape):
    session_id: str
    created_at: float
    """Epoch seconds, as all times here."""
    task_id: str | None
    group_id: str | None
    group_size: int
    metadata: dict[str, Any]
    sampling: dict[str, Any]
    """What wins over what the harness sends."""
    trained: bool
    """False: no trainer gets it."""
    echo_policy: Literal["strict", "minted"]
    """What becomes of a reply that its harness replays with an edit."""
    max_calls: int | None
    max_completion_tokens: int | None
    max_total_tokens: int | None
    """Its budget; null: any number."""
    status: Status
    calls: int
    """Recorded calls."""
    reward: float | None
    per_call: dict[str, float]
    per_branch: dict[str, float]
    reward_metadata: dict[str, Any]
    error: str | None
    closed_at: float | None
    updated_at: float


class UnservedShape(Shape):
    at: float
    call_id: str
    code: str
    message: str


class SessionAlone(SessionShape):
    unserved: UnservedShape | None
    """The last of its calls that was not served, also where later ones were; null: none is known."""


class SessionPage(Shape):
    sessions: list[SessionShape]
    cursor: str | None
    """For the next page; null: there is none."""


SESSION: dict[str, Any] = {
    "session_id": "first",
    "created_at": 1767225600.0,
    "task_id": None,
    "group_id": "task-1",
    "group_size": 1,
    "metadata": {},
    "sampling": {},
    "trained": True,
    "echo_policy": "strict",
    "max_calls": None,
    "max_completion_tokens": None,
    "max_total_tokens": None,
    "status": "completed",
    "calls": 2,
    "reward": 1.0,
    "per_call": {},
    "per_branch": {},
    "reward_metadata": {},
    "error": None,
    "closed_at": 1767225700.0,
    "updated_at": 1767225700.0,
}
SESSIONS = (
    Operation(
        "post",
        "/sessions",
        "sessions",
        "node",
        "Open a session",
        "A session is one run of a harness, which gets one of `base_urls` and `api_key` and needs nothing else. 429 with `Retry-After` "
        "while a new group may not be begun, because trainers are behind. 409 when there is a session of the id.",
        {
            201: Answer(
                "opened",
                Opened,
                {
                    "session_id": "first",
                    "api_key": "vb-0123456789abcdef0123456789abcdef01234567-first",
                    "base_urls": {
                        "openai": "http://127.0.0.1:8700/s/first/v1",
                        "anthropic": "http://127.0.0.1:8700/s/first",
                        "gemini": "http://127.0.0.1:8700/s/first",
                    },
                },
            )
        },
        NewSession,
        {"session_id": "first", "group_id": "task-1", "group_size": 1, "sampling": {"temperature": 1.0}},
        (409, 413, 408, 429),
    ),
    Operation(
        "get",
        "/sessions",
        "sessions",
        "admin",
        "List sessions",
        "Newest first, in pages that hold each session once.",
        {200: Answer("a page", SessionPage, {"sessions": [SESSION], "cursor": None})},
        parameters={**PAGE, "status": "Only these.", "group_id": "Only those of this group."},
    ),
    Operation(
        "get",
        "/sessions/{session_id}",
        "sessions",
        "node",
        "Look at a session",
        "As it stands; `unserved` is the last of its calls that service or engine failed, and why.",
        {200: Answer("the session", SessionAlone, {**SESSION, "unserved": None})},
        refusals=(404,),
        parameters=SESSION_ID,
    ),
    Operation(
        "delete",
        "/sessions/{session_id}",
        "sessions",
        "node",
        "Delete a session",
        "Its calls in flight end first; its records and its key are gone for good. A group that lacks it now is dropped or a dead letter.",
        {204: Answer("deleted", media="")},
        refusals=(404, 409),
        parameters=SESSION_ID,
    ),
    Operation(
        "post",
        "/sessions/{session_id}/reward",
        "sessions",
        "node",
        "Give a reward",
        "Before or after the close, until its group was leased (409 then).",
        {200: Answer("the session", SessionShape, SESSION)},
        Reward,
        {"reward": 1.0, "per_call": {}, "metadata": {"judge": "unit tests"}},
        (404, 408, 409, 413),
        SESSION_ID,
    ),
    Operation(
        "post",
        "/sessions/{session_id}/close",
        "sessions",
        "node",
        "Close a session",
        "Freezes it: calls in flight end and are recorded, later ones get 409. With a reward it joins its group at once. Repeating the "
        "same close is no error; another one is 409.",
        {200: Answer("the session", SessionShape, SESSION)},
        Close,
        {"status": "completed", "reward": 1.0},
        (404, 408, 409, 413),
        SESSION_ID,
    ),
)
