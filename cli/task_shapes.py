"""The JSON of the answers about tasks, as the description of the service has it. Nothing is made of these."""

from __future__ import annotations

from typing import Any

from proxy.api.description.shape import Shape
from rollout.api import Status as TaskStatus
from rollout.attempts import Ended, Status


class CallbackShape(Shape):
    url: str
    tries: int
    next_try_at: float | None
    delivered_at: float | None
    last_error: str | None


class TaskSummary(Shape):
    task_id: str
    status: TaskStatus
    instruction: str
    harness: str
    num_samples: int
    priority: int
    rollouts: dict[Status, int]
    """How many are in each state."""
    usable: int
    """Rollouts that a trainer may get."""
    lacks: str | None
    """What no node has that it needs."""
    created_at: float
    ended_at: float | None
    callback: CallbackShape | None
    metadata: dict[str, Any]


class TaskShape(TaskSummary):
    task: dict[str, Any]
    """What was submitted, defaults filled in; of uploads only how long they are."""


class CancelledTask(TaskSummary):
    cancelled_now: list[int]
    """Rollouts that this request ended, by index."""


class TaskPage(Shape):
    tasks: list[TaskSummary]
    cursor: str | None


class FailureShape(Shape):
    failure: str
    """Its class."""
    message: str
    look: str
    """Where to look further."""


class VerdictShape(Shape):
    status: Ended
    reward: float | None
    per_call: dict[str, float]
    per_branch: dict[str, float]
    feedback: str
    metadata: dict[str, Any]
    failure: FailureShape | None
    usable: bool


class RolloutShape(Shape):
    index: int
    status: Status
    attempt: int
    """The one that it is in, from 1; 0: none yet."""
    node: str | None
    session_id: str | None
    calls: int | None
    exit_code: int | None
    verdict: VerdictShape | None
    failures: list[FailureShape]
    """Of earlier attempts."""
    times: dict[str, float]
    """When each state was reached."""
    logs: str | None
    """`<node>:<folder>`"""


class Rollouts(Shape):
    rollouts: list[RolloutShape]


class NodeShape(Shape):
    name: str
    labels: dict[str, str]
    runtimes: list[str]
    cpus: float
    memory_mb: int
    slots: dict[str, int]
    busy: dict[str, int]
    free_cpus: float
    free_memory_mb: int
    draining: bool
    """It takes nothing more."""
    started_at: float
    seen_at: float
    """Its last sign of life."""
    lease_seconds: float
    """Silence after which it loses its rollouts."""


class Queue(Shape):
    """Rollouts that ask the same of a node."""

    priority: int
    runtimes: list[str]
    cpus: float
    memory_mb: int
    labels: dict[str, str]
    waiting: int


class Nodes(Shape):
    nodes: list[NodeShape]
    queues: list[Queue]
