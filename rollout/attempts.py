"""Rollouts and their attempts: states, failures and verdicts, as the store keeps them.

    queued -> preparing -> ready -> running -> evaluating -> concluding -> completed | failed | timeout | cancelled
       ^                                |
       +---- a retried failure, as the next attempt

An attempt belongs to one node. A node names the attempt with every change, and a change for an attempt that is no longer current is
refused (`Superseded`), so a node that was presumed dead changes nothing when it wakes up. From `concluding` on a rollout never runs
again: its verdict is stored, and whoever finds it closes the session with it, which may be repeated.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, get_args
from uuid import uuid4

Status = Literal[
    "queued", "preparing", "ready", "running", "evaluating", "concluding", "completed", "failed", "timeout", "cancelled"
]
UNDER_WAY: tuple[Status, ...] = ("preparing", "ready", "running", "evaluating", "concluding")
Ended = Literal["completed", "failed", "timeout", "cancelled"]
"""How a rollout and its session end."""
ENDED: tuple[Ended, ...] = get_args(Ended)


class Superseded(Exception):
    """The attempt is no longer the rollout's current one: the rollout was cancelled, stopped early, queued again, or given to
    another node."""


@dataclass(frozen=True, slots=True)
class AttemptId:
    """`index` counts the task's rollouts from 0, `attempt` the rollout's attempts from 1."""

    task_id: str
    index: int
    attempt: int

    @property
    def session_id(self) -> str:
        """The attempt's session. Only the last attempt leaves its session behind."""
        return f"{self.task_id}.{self.index}.{self.attempt}"


class Failure(StrEnum):
    """Why a rollout gave no usable row. The values are used in records, events and metrics."""

    BAD_RUNTIME = "bad_runtime"
    """The runtime could not be made: no such image, no daemon."""
    PREPARE_FAILED = "prepare_failed"
    """A prepare step failed after its retries."""
    PREPARE_TIMEOUT = "prepare_timeout"
    HARNESS_MISSING = "harness_missing"
    """The harness is not in the runtime and could not be installed."""
    HARNESS_FAILED = "harness_failed"
    """The harness exited with a code other than 0."""
    HARNESS_CRASHED = "harness_crashed"
    """The harness was ended by a signal that the node did not send."""
    NO_CALLS = "no_calls"
    """The harness exited with 0 and never called the model."""
    AGENT_TIMEOUT = "agent_timeout"
    """The agent's own budget ran out."""
    TOTAL_TIMEOUT = "total_timeout"
    EVALUATOR_FAILED = "evaluator_failed"
    EVALUATOR_TIMEOUT = "evaluator_timeout"
    BAD_REWARD = "bad_reward"
    """The evaluator gave no reward, or one that is not finite."""
    SERVICE_FAILED = "service_failed"
    """The proxy opened no session, or it or its engine failed the agent's last call."""
    NODE_LOST = "node_lost"
    """The node of the last attempt stopped renewing its lease."""
    NODE_FAILED = "node_failed"
    """The node itself failed: a full disk, a quota that is used up, or an unexpected error."""
    CANCELLED = "cancelled"
    EARLY_STOPPED = "early_stopped"
    """The task had enough usable samples before this rollout ended."""


@dataclass(frozen=True, slots=True)
class FailureRecord:
    """A stored `RolloutFailed`."""

    failure: Failure
    message: str
    look: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """How the session is closed: with `status`, and with `reward` unless that is None."""

    status: Ended
    reward: float | None = None
    per_call: Mapping[str, float] = field(default_factory=dict)
    per_branch: Mapping[str, float] = field(default_factory=dict)
    feedback: str = ""
    """For people, and for agents that learn from text."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    failure: FailureRecord | None = None

    @property
    def usable(self) -> bool:
        """Whether a trainer may get it: it has a reward, for a complete run or one that its own budget cut short."""
        return self.reward is not None and self.status in ("completed", "timeout")


@dataclass(frozen=True, slots=True)
class RolloutState:
    """`times` maps the states that the current attempt reached to epoch seconds. `failures` are of earlier attempts, oldest first."""

    task_id: str
    index: int
    status: Status = "queued"
    attempt: int = 0
    node: str | None = None
    session_id: str | None = None
    calls: int | None = None
    exit_code: int | None = None
    verdict: Verdict | None = None
    failures: tuple[FailureRecord, ...] = ()
    times: Mapping[str, float] = field(default_factory=dict)
    logs: str | None = None
    """`<node>:<directory>`"""


RETRIED = frozenset({Failure.NODE_LOST, Failure.NODE_FAILED, Failure.BAD_RUNTIME, Failure.SERVICE_FAILED})
"""Not the agent's doing: retried, on another node if there is one, until the task's attempts are used up."""


class RolloutFailed(Exception):
    """Ends an attempt. `message` names the value and the rule it broke; `look` says where to find more."""

    def __init__(self, failure: Failure, message: str, look: str = "") -> None:
        super().__init__(message)
        self.failure = failure
        self.message = message
        self.look = look


def node_prefix(node: str, service: str) -> str:
    """The prefix of the names of a node's runtimes, by which a restarted node finds and removes what it left. `service` is the service's
    URL, or whatever else identifies it on this machine: nodes of two services often have one name, the machine's."""
    return f"vb-{_digest(f'{node} {service}', 10)}-"


def runtime_name(prefix: str, attempt: AttemptId, what: str) -> str:
    """A new name each time, of at most 63 characters of [a-z0-9-]: what is left of an earlier runtime is in nobody's way. `prefix` is its
    node's, and `what` distinguishes the runtimes of one attempt."""
    return f"{prefix}{_digest(attempt.task_id, 16)}-{attempt.index}-{attempt.attempt}-{what}-{uuid4().hex[:8]}"


def _digest(text: str, digits: int) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:digits]
