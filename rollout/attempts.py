"""Rollouts as they stand: what the store keeps of each, and in which order its states follow each other.

    queued -> preparing -> ready -> running -> evaluating -> concluding -> completed | failed | timeout | cancelled
       ^                                |
       +---- a failure that is tried again, as the next attempt

An attempt belongs to one node. Every step of a node names the attempt it is of; a step of an attempt that is no more the rollout's
current one is refused (`Superseded`), so a node that was taken for dead and wakes up changes nothing. From `concluding` on a rollout
is never run again: its verdict is stored, and whoever finds it there closes the session with it, which may be repeated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from rollout.failures import FailureRecord

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
