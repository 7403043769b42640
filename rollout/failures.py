"""Why a rollout gave no usable row: every failure has a class, which says whose fault it is and what becomes of the rollout."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


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


RETRIED = frozenset({Failure.NODE_LOST, Failure.NODE_FAILED, Failure.BAD_RUNTIME, Failure.SERVICE_FAILED})
"""Nothing that the agent did: tried again, elsewhere where there is one, until the task's attempts are used up."""


class RolloutFailed(Exception):
    """Ends a rollout's attempt. `message` names the value and what it broke; `look` is where more is to be seen."""

    def __init__(self, failure: Failure, message: str, look: str = "") -> None:
        super().__init__(message)
        self.failure = failure
        self.message = message
        self.look = look


@dataclass(frozen=True, slots=True)
class FailureRecord:
    """`RolloutFailed` as it is kept."""

    failure: Failure
    message: str
    look: str = ""
