"""Rollouts as they stand: what the store keeps of each, and in which order its states follow each other.

    queued -> preparing -> ready -> running -> evaluating -> concluding -> completed | failed | timeout | cancelled
       ^                                |
       +---- a failure that is tried again, as the next attempt

An attempt belongs to one node. Every step of a node names the attempt it is of; a step of an attempt that is no more the rollout's
current one is refused (`Superseded`), so a node that was taken for dead and wakes up changes nothing. From `concluding` on a rollout
is never run again: its verdict is stored, and whoever finds it there closes the session with it, which may be repeated.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, get_args

Status = Literal[
    "queued", "preparing", "ready", "running", "evaluating", "concluding", "completed", "failed", "timeout", "cancelled"
]
UNDER_WAY: tuple[Status, ...] = ("preparing", "ready", "running", "evaluating", "concluding")
Ended = Literal["completed", "failed", "timeout", "cancelled"]
"""How a rollout ends, and its session with it."""
ENDED: tuple[Ended, ...] = get_args(Ended)


class Superseded(Exception):
    """The rollout is no longer this attempt's: it was cancelled, stopped early, or given to another node."""


@dataclass(frozen=True, slots=True)
class AttemptId:
    """`index` counts the task's rollouts from 0, `attempt` the rollout's attempts from 1."""

    task_id: str
    index: int
    attempt: int

    @property
    def session_id(self) -> str:
        """The attempt's session. An attempt that is not the last one leaves no session behind."""
        return f"{self.task_id}.{self.index}.{self.attempt}"


# Why a rollout gave no usable row: every failure has a class, which says whose fault it is and what becomes of the rollout.


class Failure(StrEnum):
    """The classes, as they stand in records, events and metrics."""

    BAD_RUNTIME = "bad_runtime"
    """The runtime could not be made: no such image, no room, the daemon is gone."""
    PREPARE_FAILED = "prepare_failed"
    """A prepare step ended with an exit code, after its retries."""
    PREPARE_TIMEOUT = "prepare_timeout"
    HARNESS_MISSING = "harness_missing"
    """The command is not in the runtime and could not be installed."""
    HARNESS_FAILED = "harness_failed"
    """It ended with an exit code that is not 0."""
    HARNESS_CRASHED = "harness_crashed"
    """A signal ended it that nobody here sent."""
    NO_CALLS = "no_calls"
    """It ended well and never called the model."""
    AGENT_TIMEOUT = "agent_timeout"
    """The agent's own budget ran out."""
    TOTAL_TIMEOUT = "total_timeout"
    EVALUATOR_FAILED = "evaluator_failed"
    EVALUATOR_TIMEOUT = "evaluator_timeout"
    BAD_REWARD = "bad_reward"
    """The evaluator gave none, or one that is not finite."""
    SERVICE_FAILED = "service_failed"
    """The proxy took no session, or it or its engine failed the agent's last call."""
    NODE_LOST = "node_lost"
    """The node gave no sign of life; the rollout's last attempt was its."""
    NODE_FAILED = "node_failed"
    """Something broke on the node itself: its disk is full, or an error that nobody foresaw."""
    CANCELLED = "cancelled"
    EARLY_STOPPED = "early_stopped"
    """Enough usable samples were there before it ended."""


@dataclass(frozen=True, slots=True)
class FailureRecord:
    """`RolloutFailed` as it is kept."""

    failure: Failure
    message: str
    look: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What becomes of the session. `status` is the one it is closed with; `reward` None: it gets none from here."""

    status: Ended
    reward: float | None = None
    per_call: Mapping[str, float] = field(default_factory=dict)
    per_branch: Mapping[str, float] = field(default_factory=dict)
    feedback: str = ""
    """For people, and for agents that are to learn from it in words."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    failure: FailureRecord | None = None

    @property
    def usable(self) -> bool:
        """Whether a trainer may get it: it ended with a reward, of a whole run or of one that its own budget cut."""
        return self.reward is not None and self.status in ("completed", "timeout")


@dataclass(frozen=True, slots=True)
class RolloutState:
    """`times` maps each state that the current attempt reached to when, in epoch seconds. `failures` are those of earlier
    attempts, oldest first."""

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
    """Where the logs are: `<node>:<directory>`."""


RETRIED = frozenset({Failure.NODE_LOST, Failure.NODE_FAILED, Failure.BAD_RUNTIME, Failure.SERVICE_FAILED})
"""Nothing that the agent did: tried again, elsewhere where there is one, until the task's attempts are used up."""


class RolloutFailed(Exception):
    """Ends a rollout's attempt. `message` names the value and what it broke; `look` is where more is to be seen."""

    def __init__(self, failure: Failure, message: str, look: str = "") -> None:
        super().__init__(message)
        self.failure = failure
        self.message = message
        self.look = look


# Names of runtimes: whose each is, so that a node that starts again finds and removes what it left.


def node_prefix(node: str) -> str:
    """What the names of all of a node's runtimes begin with."""
    return f"vb-{_short(node, 10)}-"


def runtime_name(node: str, attempt: AttemptId, what: str) -> str:
    """At most 63 characters of [a-z0-9-]; `what` tells an attempt's runtimes apart."""
    return f"{node_prefix(node)}{_short(attempt.task_id, 16)}-{attempt.index}-{attempt.attempt}-{what}"


def _short(text: str, digits: int) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:digits]
