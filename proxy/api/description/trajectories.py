"""The training rows of a session, for the description."""

from __future__ import annotations

from typing import Any, Literal

from proxy.api.description.operation import MSGPACK, SESSION_ID, Answer, Operation
from proxy.api.description.shape import Shape, Span
from proxy.settings import Role


class Trajectory(Shape):
    trajectory_id: str
    """The same for the same calls, always."""
    session_id: str
    group_id: str | None
    task_id: str | None
    role: Role
    role_source: Literal["declared", "rule", "inferred"]
    """Who says so: the harness or its definition, a rule of the operator, or nobody."""
    agent: str | None
    token_ids: list[int]
    """The first tokens are the first prompt."""
    loss_mask: list[Literal[0, 1]]
    """As long as token_ids; 1: sampled, and trained in this row."""
    logprobs: list[float]
    """As long as token_ids; 0.0 where the mask is 0."""
    weight_versions: list[Span]
    """Cover exactly the trained tokens."""
    reward: float | None
    call_ids: list[str]
    finish_reason: str | None
    truncated: bool
    metadata: dict[str, Any]
    rollout_id: str
    row_weight: float
    """1 / (rows of the rollout and the policy that train anything)"""
    logprob_mode: str
    policy: str
    """Empty: the default one."""
    top_token_ids: list[Any] | None = None
    top_logprobs: list[Any] | None = None
    prompt_logprobs: list[float | None] | None = None
    routed_experts: list[Any] | None = None


class Quarantined(Shape):
    call_id: str
    tokens: int
    reason: str


class Accounting(Shape):
    """sampled_tokens = exported_tokens + the tokens in quarantine"""

    sampled_tokens: int
    exported_tokens: int
    quarantined: list[Quarantined]
    dangling_calls: int
    """Calls whose process died while the engine sampled."""
    complete: bool
    """No call dangles, none is damaged, and none is in quarantine that the outcome rests on, but for roles and models not trained."""


class Trajectories(Shape):
    trajectories: list[Trajectory]
    accounting: Accounting


ROW: dict[str, Any] = {
    "trajectory_id": "6f1c7d0a",
    "session_id": "first",
    "group_id": "task-1",
    "task_id": None,
    "role": "main",
    "role_source": "inferred",
    "agent": "",
    "token_ids": [101, 102, 7, 8],
    "loss_mask": [0, 0, 1, 1],
    "logprobs": [0.0, 0.0, -0.5, -1.25],
    "weight_versions": [[12, 2, 4]],
    "reward": 1.0,
    "call_ids": ["c0ffee"],
    "finish_reason": "stop",
    "truncated": False,
    "metadata": {},
    "rollout_id": "first",
    "row_weight": 1.0,
    "logprob_mode": "raw_logprobs",
    "policy": "",
}
ACCOUNTING: dict[str, Any] = {
    "sampled_tokens": 2,
    "exported_tokens": 2,
    "quarantined": [],
    "dangling_calls": 0,
    "complete": True,
}
TRAJECTORIES = (
    Operation(
        "get",
        "/sessions/{session_id}/trajectories",
        "sessions",
        "admin",
        "The training rows of a session",
        f"And what became of every sampled token: sampled = exported + quarantined. {MSGPACK}",
        {
            200: Answer(
                "the rows",
                Trajectories,
                {"trajectories": [ROW], "accounting": ACCOUNTING},
            )
        },
        refusals=(404,),
        parameters={
            **SESSION_ID,
            "builder": "`merged`: one row per branch; `per_call`: one row per call; or one of your own. Left out: as the service is set.",
        },
    ),
)
