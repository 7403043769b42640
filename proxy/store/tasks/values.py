"""The values that the store of tasks and rollouts gives, and the encoding of what it keeps.

Work is carried by Redis Streams: a waiting rollout is an entry of its queue's stream, and a node takes it as a member of the consumer
group `nodes`. The entry stays pending with that node until the rollout ends; its idle time, which `beat` resets, is the lease. A node
silent for its `lease_seconds` loses the entry: `take` of another node claims it as the next attempt, or ends the rollout by the task's
policy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from contract.attempts import FailureRecord, NodeState, Status, Verdict
from contract.tasks import EvaluatorSpec, PrepareStep, Task, Upload
from proxy.store.keys import SCHEMA, StoredValueError, unpack


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


T = TypeVar("T")


def unpack_checked(blob: bytes, kind: type[T]) -> T:
    """What `pack_versioned` packed; a field that it lacks has its default. Raises `StoredValueError`."""
    schema, value = unpack(blob, tuple[int, Any])
    if schema != SCHEMA:
        raise StoredValueError(f"a stored {kind.__name__} has schema {schema}; this build reads {SCHEMA}")
    try:
        decoded: T = _READERS[kind].validate_python(value, strict=False, extra="ignore", by_alias=False, by_name=True)
    except ValidationError as error:
        raise StoredValueError(f"a stored {kind.__name__} cannot be read: {error}") from error
    return decoded


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


_READERS: Mapping[type, TypeAdapter[Any]] = {kind: TypeAdapter(kind) for kind in (Task, NodeState, FailureRecord, Verdict)}
"""Not msgspec's decoders: they cannot decode the steps of a task, a union of dataclasses. Made once, before there are threads: pydantic
reads the docstrings of fields from the source, and Python 3.11's parser breaks where two threads parse at once."""
