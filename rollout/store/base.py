"""The store as nodes and servers see it. What is in Redis, and how, is in `keys`; what must be atomic is a Lua script in `scripts/`.

Work is carried by Redis Streams: a rollout that waits is an entry of the stream of its queue, and a node takes it as a member of the
consumer group `nodes`. The entry stays pending with that node until the rollout ended; its idle time, which `beat` sets back, is the
lease. A node that gives no sign of life for its `lease_seconds` loses it: `take` of any other node claims the entry as the next
attempt, or ends the rollout by the task's policy.

Every method raises `StoreUnavailable` when Redis cannot take or give what was asked, and `Superseded` where an attempt is named that
is no longer the rollout's.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Protocol, TypeVar, cast

import msgspec
from pydantic import TypeAdapter, ValidationError

from rollout.attempts import AttemptId, FailureRecord, RolloutState, Status, Verdict
from rollout.task import EvaluatorSpec, PrepareStep, Task, Upload


class StoreUnavailable(Exception):
    """Redis did not take the command. The message names the server, without its password, and what it said."""


class TaskConflict(Exception):
    """A task of that id was submitted with another body."""


class NoSuchTask(Exception):
    pass


@dataclass(frozen=True, slots=True)
class Counts:
    """How many of a task's rollouts are in each state; `usable` of the ended ones have a reward that a trainer may get."""

    by_status: Mapping[Status, int]
    usable: int = 0


@dataclass(frozen=True, slots=True)
class Callback:
    """The one request that tells the outside that the task ended: when it is tried next, or when it was delivered."""

    url: str
    tries: int = 0
    next_try_at: float | None = None
    delivered_at: float | None = None
    last_error: str | None = None


@dataclass(frozen=True, slots=True)
class TaskState:
    """`status`: queued (no rollout was taken yet), running, completed (every rollout ended), cancelled."""

    task: Task
    status: str
    created_at: float
    ended_at: float | None = None
    counts: Counts = Counts({})
    callback: Callback | None = None
    lacks: str | None = None
    """What its waiting rollouts ask for and no node has."""


@dataclass(frozen=True, slots=True)
class Event:
    """`id` orders a task's events and resumes reading behind it. `kind` is task.created, task.waits (for what no node has),
    rollout.<status>, rollout.retried, task.ended or callback.<what became of it>; `data` is what a reader is told."""

    id: str
    kind: str
    at: float
    data: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Room:
    """What a node can take now."""

    labels: Mapping[str, str]
    runtimes: frozenset[str]
    """Names of the kinds it has."""
    cpus: float
    memory_mb: int


@dataclass(frozen=True, slots=True)
class Taken:
    """A rollout that is this node's. `resumed` is a rollout that another node had in `concluding`: its verdict is `state.verdict`, and
    what is left to do is to close its session."""

    attempt: AttemptId
    task: Task
    state: RolloutState
    resumed: bool = False


@dataclass(frozen=True, slots=True)
class NodeState:
    """A node as `GET /nodes` shows it. `seen_at` is its last sign of life; `draining` takes nothing more."""

    name: str
    labels: Mapping[str, str]
    runtimes: Sequence[str]
    cpus: float
    memory_mb: int
    slots: Mapping[str, int] = field(default_factory=dict)
    """Stage -> how many rollouts may be in it: prepare, ready, run, evaluate."""
    busy: Mapping[str, int] = field(default_factory=dict)
    free_cpus: float = 0.0
    free_memory_mb: int = 0
    draining: bool = False
    started_at: float = 0.0
    seen_at: float = 0.0
    lease_seconds: float = 0.0
    """Silence after which it loses its rollouts; 0: what whoever looks thinks right."""


class TaskStore(Protocol):
    """What servers need."""

    async def now(self) -> float:
        """The store's own time in epoch seconds, the only clock of leases and deadlines: nodes and servers have clocks of their own."""
        ...

    async def submit(self, task: Task, digest: bytes, now: float) -> tuple[TaskState, bool]:
        """The task, and whether it is new: one of the same id and digest is left as it is. Raises `TaskConflict`."""

    async def load(self, task_id: str) -> TaskState:
        """Raises `NoSuchTask`."""

    async def rollouts(self, task_id: str) -> list[RolloutState]:
        """In order of their index. Raises `NoSuchTask`."""

    async def page(self, *, status: str | None, limit: int, cursor: str | None) -> tuple[list[TaskState], str | None]:
        """Newest first, and the cursor of the next page."""

    async def cancel(self, task_id: str, now: float) -> list[RolloutState]:
        """Ends every rollout that has not ended as cancelled, at once and for good; those that it ended so, as they stood. Nothing
        that a node says of them afterwards counts. Raises `NoSuchTask`."""

    def events(self, task_id: str, after: str = "0") -> AsyncIterator[Event]:
        """Those behind `after`, then further ones as they come, up to the task's end. Raises `NoSuchTask`."""

    async def nodes(self) -> list[NodeState]: ...

    async def depths(self) -> Mapping[str, int]:
        """Waiting rollouts by queue, for metrics and autoscaling."""


class WorkStore(Protocol):
    """What a node needs."""

    async def now(self) -> float:
        """The store's own time in epoch seconds, the only clock of leases and deadlines: nodes and servers have clocks of their own."""
        ...

    async def take(self, node: str, room: Room, lease_seconds: float, now: float) -> Taken | None:
        """The waiting rollout of the greatest priority that the node has room for, or one whose node was lost: silent for
        `lease_seconds` and for as long as that node told itself; None when there is none. One whose attempts are used up, or
        whose task fails lost nodes, is ended here."""

    async def wait(self, seconds: float) -> None:
        """Returns when something may be there to take, at the latest after `seconds`."""

    async def beat(self, state: NodeState, held: Sequence[AttemptId], now: float) -> list[AttemptId]:
        """Renews the leases; those of `held` that are the node's no more, to be stopped."""

    async def advance(self, attempt: AttemptId, status: Status, now: float, fields: Mapping[str, Any]) -> None:
        """The rollout reached `status`; `fields` are those of `RolloutState` that are known now. Raises `Superseded`."""

    async def conclude(self, attempt: AttemptId, verdict: Verdict, now: float) -> None:
        """The verdict stands from here on. Raises `Superseded`."""

    async def finish(self, attempt: AttemptId, now: float) -> None:
        """The session is closed with the verdict: the rollout ends. Ends the task with its last rollout, stops the others early when
        enough are usable. Raises `Superseded`."""

    async def give_up(
        self, attempt: AttemptId, failure: FailureRecord, now: float, *, retry: bool, spared: bool = False
    ) -> bool:
        """The attempt failed and its session is gone. True: the rollout is queued again. False: it must be concluded as failed, as
        its attempts are used up, among which one that is `spared` does not count. Raises `Superseded`."""

    async def put_back(self, attempt: AttemptId, now: float) -> None:
        """The node ends before the harness was started: queued again, and it costs no attempt. Raises `Superseded`."""

    async def leave(self, node: str) -> None:
        """The node has ended and holds nothing."""


# What the store keeps, as msgpack behind a schema version: one `encode`, one `decode`, one `DecodeError`.
#
# Fields that a later build adds have defaults and are left out of what it reads of an earlier one; a value of another schema is
# refused instead of being half understood.


SCHEMA = 1
T = TypeVar("T")


class DecodeError(Exception):
    """A stored value that this build cannot read. Says of which type, and why."""


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
    """The task without what its uploads hold: small enough to be listed."""
    harness = replace(task.harness, skills=tuple(_emptied(skill) for skill in task.harness.skills))
    return replace(task, harness=harness, prepare=_outlined(task.prepare), evaluator=_judged(task.evaluator))


def _judged(evaluator: EvaluatorSpec | None) -> EvaluatorSpec | None:
    return evaluator and replace(evaluator, prepare=_outlined(evaluator.prepare), options={})


def _outlined(steps: tuple[PrepareStep, ...]) -> tuple[PrepareStep, ...]:
    return tuple(_emptied(step) if isinstance(step, Upload) else step for step in steps)


def _emptied(upload: Upload) -> Upload:
    return upload if upload.content is None else replace(upload, content=b"")


@cache
def _reader(kind: Any) -> TypeAdapter[Any]:
    # Not msgspec's own: it cannot tell the steps of a task, a union of dataclasses, from each other.
    return TypeAdapter(kind)
