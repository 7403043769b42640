"""The values that the store of tasks and rollouts exchanges, its errors, and the encoding of what it keeps.

Work is carried by Redis Streams: a waiting rollout is an entry of its queue's stream, and a node takes it as a member of the consumer
group `nodes`. The entry stays pending with that node until the rollout ends; its idle time, which `beat` resets, is the lease. A node
silent for its `lease_seconds` loses the entry: `take` of another node claims it as the next attempt, or ends the rollout by the task's
policy.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, TypeVar, cast

import msgspec
from pydantic import TypeAdapter, ValidationError

from rollout.attempts import AttemptId, RolloutState, Status
from rollout.task import EvaluatorSpec, PrepareStep, Task, Upload


class StoreUnavailable(Exception):
    """Redis did not take the command. The message names the server, without credentials, and its error."""


class TaskConflict(Exception):
    """A task of that id exists with another body."""


class NoSuchTask(Exception):
    pass


@dataclass(frozen=True, slots=True)
class RolloutCounts:
    """Rollouts of a task by state; `usable`: ended ones with a reward that a trainer may get."""

    by_status: Mapping[Status, int]
    usable: int = 0


@dataclass(frozen=True, slots=True)
class Callback:
    """The request that announces the task's end: when it is tried next, or when it was delivered."""

    url: str
    tries: int = 0
    next_try_at: float | None = None
    delivered_at: float | None = None
    last_error: str | None = None


@dataclass(frozen=True, slots=True)
class TaskState:
    """`status`: queued (no rollout taken yet), running, completed (every rollout ended), cancelled."""

    task: Task
    status: str
    created_at: float
    ended_at: float | None = None
    counts: RolloutCounts = RolloutCounts({})
    callback: Callback | None = None
    lacks: str | None = None
    """What its waiting rollouts require and no node has."""


@dataclass(frozen=True, slots=True)
class Event:
    """`id` orders a task's events; reading resumes behind it. `kind`: task.created, task.waits (for what no node has), rollout.<status>,
    rollout.retried, task.ended or callback.<outcome>. `data`: what a reader gets."""

    id: str
    kind: str
    at: float
    data: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Room:
    """What a node can take now."""

    labels: Mapping[str, str]
    runtimes: frozenset[str]
    """Kinds of runtime that it has."""
    cpus: float
    memory_mb: int


@dataclass(frozen=True, slots=True)
class Taken:
    """A rollout that this node took. `resumed`: another node had it in `concluding`; its verdict is `state.verdict`, and only its session
    is left to close."""

    attempt: AttemptId
    task: Task
    state: RolloutState
    resumed: bool = False


@dataclass(frozen=True, slots=True)
class NodeState:
    """A node as in `GET /nodes`. `runtimes`: kinds that work there now. `seen_at`: its last beat. `draining`: it takes nothing
    more."""

    name: str
    labels: Mapping[str, str]
    runtimes: Sequence[str]
    cpus: float
    memory_mb: int
    slots: Mapping[str, int] = field(default_factory=dict)
    """Stage (prepare, ready, run, evaluate) -> how many rollouts may be in it."""
    busy: Mapping[str, int] = field(default_factory=dict)
    free_cpus: float = 0.0
    free_memory_mb: int = 0
    draining: bool = False
    started_at: float = 0.0
    seen_at: float = 0.0
    lease_seconds: float = 0.0
    """Silence after which it loses its rollouts; 0: use the reader's default."""


# Stored values are msgpack behind a schema version. Fields that a later build adds have defaults, so that values without them can be
# read; a value of another schema is refused instead of being half understood.

SCHEMA = 1
T = TypeVar("T")


class DecodeError(Exception):
    """A stored value that this build cannot read. The message has its type and the reason."""


def encode(value: Any) -> bytes:
    """`[schema, value]`. Raises OverflowError for an integer that needs more than 64 bits."""
    return msgspec.msgpack.encode((SCHEMA, value))


def decode(blob: bytes, kind: type[T]) -> T:
    """Raises `DecodeError`."""
    try:
        schema, value = msgspec.msgpack.decode(blob, type=tuple[int, Any])
        if schema != SCHEMA:
            raise DecodeError(f"a stored {kind.__name__} has schema {schema}; this build reads {SCHEMA}")
        decoded: T = _reader(cast(Hashable, kind)).validate_python(
            value, strict=False, extra="ignore", by_alias=False, by_name=True
        )
        return decoded
    except (msgspec.MsgspecError, UnicodeDecodeError, ValidationError) as error:
        raise DecodeError(f"a stored {kind.__name__} cannot be read: {error}") from error


def outline(task: Task) -> Task:
    """The task without the content of its uploads: small enough for listings."""
    harness = replace(task.harness, skills=tuple(_empty(skill) for skill in task.harness.skills))
    return replace(task, harness=harness, prepare=_outline_steps(task.prepare), evaluator=_outline_evaluator(task.evaluator))


def _outline_evaluator(evaluator: EvaluatorSpec | None) -> EvaluatorSpec | None:
    return evaluator and replace(evaluator, prepare=_outline_steps(evaluator.prepare), options={})


def _outline_steps(steps: tuple[PrepareStep, ...]) -> tuple[PrepareStep, ...]:
    return tuple(_empty(step) if isinstance(step, Upload) else step for step in steps)


def _empty(upload: Upload) -> Upload:
    return upload if upload.content is None else replace(upload, content=b"")


@cache
def _reader(kind: Any) -> TypeAdapter[Any]:
    # Not msgspec's decoder: it cannot decode the steps of a task, a union of dataclasses.
    return TypeAdapter(kind)
