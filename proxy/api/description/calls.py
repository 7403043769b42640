"""The calls of a session, for the description."""

from __future__ import annotations

from typing import Any

from proxy.api.description.operation import MSGPACK, PAGE, SESSION_ID, Answer, Operation
from proxy.api.description.shape import Shape, Span


class CallShape(Shape):
    call_id: str
    parent_id: str | None
    """The call it was sampled after; null: a root."""
    branch_reason: str | None
    """Why it does not simply go on from its parent."""
    role: str | None
    role_source: str | None
    """Who says so: declared (the harness or its definition), rule (the operator's) or inferred."""
    dialect: str | None
    api: str | None
    """Which way of the engine it took: token, completions, sglang or chat."""
    model: str | None
    """The name that the harness asked for."""
    status: str
    """finished; aborted: it was cut; failed: its engine broke off; in_flight; or dangling: its process died."""
    prompt_ids: list[int]
    completion_ids: list[int]
    logprobs: list[float]
    """As long as completion_ids."""
    weight_versions: list[Span]
    """Spans of completion_ids."""
    finish_reason: str | None
    stop_reason: str | int | None = None
    invalid_tool_call: bool
    """Whether the engine's parser could not read a tool call of the reply."""
    sampling: dict[str, Any] | None
    """What was in effect."""
    delivered: bool
    """Whether the answer went out whole."""
    projection: str | None = None
    """Under which declared equality its history was recognised."""
    control_tokens: list[str] | None = None
    """What opens or closes turns for a chat template and stands in texts of its new messages."""
    messages: list[dict[str, Any]] | None
    reply: dict[str, Any] | None
    replica: str | None
    started_at: float
    engine_seconds: float | None
    own_seconds: float | None


class CallPage(Shape):
    calls: list[CallShape]
    cursor: str | None


CALLS = (
    Operation(
        "get",
        "/sessions/{session_id}/calls",
        "sessions",
        "node",
        "The calls of a session",
        f"In the order they were recorded, then those that are under way. With n > 1 every choice is a call of its own. {MSGPACK}",
        {
            200: Answer(
                "a page",
                CallPage,
                {
                    "calls": [
                        {
                            "call_id": "c0ffee",
                            "parent_id": None,
                            "branch_reason": None,
                            "role": "main",
                            "role_source": "inferred",
                            "dialect": "chat",
                            "api": "token",
                            "model": "policy",
                            "status": "finished",
                            "prompt_ids": [101, 102],
                            "completion_ids": [7, 8],
                            "logprobs": [-0.5, -1.25],
                            "weight_versions": [[12, 0, 2]],
                            "finish_reason": "stop",
                            "stop_reason": None,
                            "invalid_tool_call": False,
                            "sampling": {"temperature": 1.0, "max_tokens": 32},
                            "delivered": True,
                            "projection": None,
                            "control_tokens": [],
                            "messages": [{"role": "user", "content": "Say hello."}],
                            "reply": {"role": "assistant", "content": "Hello."},
                            "replica": "127.0.0.1:8000",
                            "started_at": 1767225600.0,
                            "engine_seconds": 0.8,
                            "own_seconds": 0.001,
                        }
                    ],
                    "cursor": None,
                },
            )
        },
        refusals=(404,),
        parameters={**SESSION_ID, **PAGE},
    ),
)
