"""Rollouts and their attempts: states, failures and verdicts, and what nodes and the service tell each other of them.

    queued -> preparing -> ready -> running -> evaluating -> concluding -> completed | failed | timeout | cancelled
       ^                                |
       +---- a retried failure, as the next attempt

An attempt belongs to one node. A node names the attempt with every change, and a change for an attempt that is no longer current is
refused (`Superseded`), so a node that was presumed dead changes nothing when it wakes up. From `concluding` on a rollout never runs
again: its verdict is stored, and whoever finds it closes the session with it, which may be repeated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Literal, get_args

from contract.rules import FINITE, Metadata, Wire
from contract.tasks import Task

Status = Literal[
    "queued", "preparing", "ready", "running", "evaluating", "concluding", "completed", "failed", "timeout", "cancelled"
]
UNDER_WAY: tuple[Status, ...] = ("preparing", "ready", "running", "evaluating", "concluding")
Ended = Literal["completed", "failed", "timeout", "cancelled"]
"""How a rollout and its session end."""
ENDED: tuple[Ended, ...] = get_args(Ended)
Finite = Annotated[float, FINITE]
NODE_HEADER, NODE_KEY_HEADER = "X-Verbatim-Node", "X-Verbatim-Node-Key"
"""Of each request of a node: its name, percent-encoded, and the secret that the name belongs to."""


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
class FailureRecord(Wire):
    """Why an attempt failed."""

    failure: Failure
    """Its class."""
    message: str
    look: str = ""
    """Where to look next."""


@dataclass(frozen=True, slots=True)
class Verdict(Wire):
    """How the session is closed: with `status`, and with `reward` unless that is None."""

    status: Ended
    reward: Finite | None = None
    per_call: Mapping[str, Finite] = field(default_factory=dict)
    per_branch: Mapping[str, Finite] = field(default_factory=dict)
    feedback: str = ""
    """For people, and for agents that learn from text."""
    metadata: Metadata = field(default_factory=dict)
    failure: FailureRecord | None = None

    @property
    def usable(self) -> bool:
        """Whether a trainer may get it: it has a reward, for a complete run or one that its own budget cut short."""
        return self.reward is not None and self.status in ("completed", "timeout")


@dataclass(frozen=True, slots=True)
class VerdictView(Verdict):
    usable: bool = field(kw_only=True)
    """Whether a trainer may get it."""


@dataclass(frozen=True, slots=True)
class RolloutState(Wire):
    """A rollout as it stands."""

    task_id: str
    index: int
    status: Status = "queued"
    attempt: int = 0
    """The current attempt, from 1; 0: not started."""
    node: str | None = None
    session_id: str | None = None
    calls: int | None = None
    exit_code: int | None = None
    verdict: Verdict | None = None
    failures: tuple[FailureRecord, ...] = ()
    """Of earlier attempts, oldest first."""
    times: Mapping[str, float] = field(default_factory=dict)
    """When the current attempt reached each status, in epoch seconds."""
    logs: str | None = None
    """`<node>:<folder>`"""


@dataclass(frozen=True, slots=True)
class RolloutView(RolloutState):
    verdict: VerdictView | None = None


@dataclass(frozen=True, slots=True)
class Room:
    """What a node can take now."""

    labels: Mapping[str, str]
    runtimes: frozenset[str]
    """Kinds of runtime that it has."""
    cpus: float
    memory_mb: int


@dataclass(frozen=True, slots=True)
class TakenRollout:
    """A rollout that this node took. `resumed`: another node had it in `concluding`; its verdict is `state.verdict`, and only its session
    is left to close."""

    attempt: AttemptId
    task: Task
    state: RolloutState
    resumed: bool = False


@dataclass(frozen=True, slots=True)
class NodeState(Wire):
    """What a node has, and what of it is free."""

    name: str
    labels: Mapping[str, str]
    runtimes: Sequence[str]
    """Kinds that work there now."""
    cpus: float
    memory_mb: int
    slots: Mapping[str, int] = field(default_factory=dict)
    """Stage (prepare, ready, run, evaluate) -> how many rollouts may be in it."""
    busy: Mapping[str, int] = field(default_factory=dict)
    free_cpus: float = 0.0
    free_memory_mb: int = 0
    draining: bool = False
    """It takes no new rollouts."""
    started_at: float = 0.0
    seen_at: float = 0.0
    """Its last heartbeat, by Redis's clock."""
    lease_seconds: float = 0.0
    """Silence after which it loses its rollouts; 0: use the reader's default."""


@dataclass(frozen=True, slots=True)
class NodeView(NodeState):
    silent_seconds: float = field(kw_only=True)
    """How long ago its last heartbeat was, by the same clock."""
