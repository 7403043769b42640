"""The rollout service in the served app: its routes on the control side, and its sweeper beside them, in every worker."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Any

import httpx
from fastapi import Request

from proxy import errors
from proxy.api.description.operation import PAGE, Answer, Operation
from proxy.api.description.shape import Shape
from proxy.api.requests import admin_only, node_only, read_body
from proxy.app import Addition
from proxy.auth import tokens_in
from proxy.call.http import Application
from proxy.services import Services
from proxy.settings import Settings
from proxy.store import connection as wire
from proxy.store.connection import StoreConnection
from proxy.structure import check_depth
from rollout.api import Status as TaskStatus
from rollout.api import task_router
from rollout.attempts import Ended, Status
from rollout.evaluators import catalogue as evaluators
from rollout.metrics import RolloutNumbers
from rollout.runtimes import catalogue as runtimes
from rollout.sessions import Sessions
from rollout.store.base import StoreUnavailable
from rollout.store.keys import Argument, Script
from rollout.store.tasks import RedisTaskStore
from rollout.store.work import RedisWorkStore
from rollout.sweeper import Callbacks, RolloutSettings, Sweeper
from rollout.task_body import Known, TaskBody

KNOWN = Known(runtimes.names, runtimes.load, evaluators.names, evaluators.kind)
OWN_URL = "http://127.0.0.1"
"""Under which the application is asked from inside its own process; no connection is made."""


def rollouts(known: Known, services: Services, control: Application) -> Addition:
    """For `create_app`, once `known` is given."""
    settings = services.settings
    assert settings.redis is not None, "create_app has one"
    wire = StoreConnection.to(settings, settings.redis)
    store = RedisTaskStore(RolloutConnection(wire))
    router = task_router(
        store,
        known,
        admin=admin_only,
        node=node_only,
        read_body=_body,
        keepalive_seconds=settings.keepalive_seconds,
        stopping=services.stopping,
    )
    numbers = RolloutNumbers(store)
    services.metrics.registry.register(numbers)
    return Addition(router, partial(_running, settings, wire, store, numbers, control), TASKS)


@contextlib.asynccontextmanager
async def _running(
    settings: Settings, wire: StoreConnection, store: RedisTaskStore, numbers: RolloutNumbers, control: Application
) -> AsyncIterator[None]:
    inside = httpx.ASGITransport(control, raise_app_exceptions=False)
    sessions = Sessions(OWN_URL, partial(admin_secret, settings), transport=inside)
    callbacks, work = Callbacks(store), RedisWorkStore(RolloutConnection(wire))
    sweeper = Sweeper(f"server-{uuid.uuid4().hex}", store, work, sessions, callbacks, numbers, RolloutSettings())
    sweeping = asyncio.create_task(sweeper.run())
    try:
        yield
    finally:
        sweeping.cancel()
        await asyncio.wait([sweeping])
        await callbacks.close()
        await sessions.close()
        await wire.close()


def admin_secret(settings: Settings) -> str:
    """A token that opens the admin side now; "" for a service that is open to its machine."""
    given = [token for token in (settings.admin_token, *settings.admin_tokens) if token]
    if given:
        return given[0].get_secret_value()
    # Asked for every request: the file may have changed since.
    found = tokens_in(settings.admin_token_file) if settings.admin_token_file else []
    return found[0] if found else ""


async def _body(request: Request) -> bytes:
    raw = await read_body(request, request.app.state.services.settings.max_body_bytes)
    check_depth(raw)
    return raw


# The service's connection to Redis, handed to the rollout service, which knows nothing of the proxy.


class RolloutConnection:
    """Implements `rollout.store.keys.Connection`. The connection stays its owner's, who closes it."""

    def __init__(self, connection: wire.StoreConnection) -> None:
        self._redis = connection
        self.timeout_seconds = connection.timeout_seconds

    async def run(self, script: Script, keys: Sequence[str], args: Sequence[Argument], *, durable: bool) -> Any:
        try:
            return await self._redis.run(wire.Script(script.source, script.sha), keys, args, durable=durable, patient=durable)
        except errors.StoreUnavailable as error:
            raise StoreUnavailable(error.message) from error

    async def execute(self, *command: Argument, key: str) -> Any:
        try:
            return await self._redis.execute(*command, key=key)
        except errors.StoreUnavailable as error:
            raise StoreUnavailable(error.message) from error


# What each endpoint about tasks is for, takes and answers: rows for the table of the service's description.


ID = {"task_id": "The task's id."}
SUMMARY: dict[str, Any] = {
    "task_id": "bug-7",
    "status": "queued",
    "instruction": "Make the tests pass.",
    "harness": "pi",
    "num_samples": 8,
    "priority": 50,
    "rollouts": {"queued": 8},
    "usable": 0,
    "lacks": None,
    "created_at": 1767225600.0,
    "ended_at": None,
    "callback": None,
    "metadata": {},
}
SUBMITTED = {
    "task_id": "bug-7",
    "instruction": "Make the tests pass.",
    "harness": "pi",
    "num_samples": 8,
    "evaluator": {"kind": "command", "options": {"command": "make test"}},
}
ROLLOUT: dict[str, Any] = {
    "index": 0,
    "status": "running",
    "attempt": 1,
    "node": "node-1",
    "session_id": "bug-7.0.1",
    "calls": None,
    "exit_code": None,
    "verdict": None,
    "failures": [],
    "times": {"queued": 1767225600.0, "preparing": 1767225601.0, "ready": 1767225604.0, "running": 1767225604.5},
    "logs": "node-1:/srv/verbatim-node/logs/bug-7.0.1",
}

# The JSON of the answers about tasks, as the description of the service has it. Nothing is made of these.


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


class CancelledTask(TaskSummary):
    cancelled_now: list[int]
    """Rollouts that this request ended, by index."""


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


class TaskPage(Shape):
    tasks: list[TaskSummary]
    cursor: str | None


class TaskShape(TaskSummary):
    task: dict[str, Any]
    """What was submitted, defaults filled in; of uploads only how long they are."""


TASKS = (
    Operation(
        "post",
        "/tasks",
        "tasks",
        "admin",
        "Submit a task",
        "Its rollouts wait for nodes. A name alone stands for `harness`, `runtime` or `evaluator` objects. The same body under the same "
        "`task_id` again is 200 and changes nothing; another body is 409.",
        {
            201: Answer("submitted", TaskShape, {**SUMMARY, "task": SUBMITTED}),
            200: Answer("it was submitted before", TaskShape),
        },
        TaskBody,
        SUBMITTED,
        (408, 409, 413),
    ),
    Operation(
        "get",
        "/tasks",
        "tasks",
        "admin",
        "List tasks",
        "Newest first.",
        {200: Answer("a page", TaskPage, {"tasks": [SUMMARY], "cursor": None})},
        parameters={**PAGE, "status": "Only these."},
    ),
    Operation(
        "get",
        "/tasks/{task_id}",
        "tasks",
        "admin",
        "Look at a task",
        "Where it stands, and what was submitted.",
        {200: Answer("the task", TaskShape, {**SUMMARY, "task": SUBMITTED})},
        refusals=(404,),
        parameters=ID,
    ),
    Operation(
        "delete",
        "/tasks/{task_id}",
        "tasks",
        "admin",
        "Cancel a task",
        "At once and for good; rollouts that had ended stay.",
        {
            200: Answer(
                "cancelled", CancelledTask, {**SUMMARY, "status": "cancelled", "cancelled_now": [0, 1, 2, 3, 4, 5, 6, 7]}
            )
        },
        refusals=(404,),
        parameters=ID,
    ),
    Operation(
        "get",
        "/tasks/{task_id}/rollouts",
        "tasks",
        "admin",
        "The rollouts of a task",
        "In order of their index.",
        {200: Answer("all of them", Rollouts, {"rollouts": [ROLLOUT]})},
        refusals=(404,),
        parameters=ID,
    ),
    Operation(
        "get",
        "/tasks/{task_id}/events",
        "tasks",
        "admin",
        "Follow a task",
        "Server-sent events from the first, or from behind the header `Last-Event-ID`, up to `task.ended`.",
        {
            200: Answer("the stream", media="text/event-stream"),
            204: Answer("the task has ended, and the reader has everything", media=""),
        },
        refusals=(404,),
        parameters=ID,
    ),
    Operation(
        "get",
        "/nodes",
        "tasks",
        "node",
        "List nodes",
        "With their room, and what waits for which kind of node.",
        {
            200: Answer(
                "the nodes",
                Nodes,
                {
                    "nodes": [],
                    "queues": [
                        {"priority": 50, "runtimes": ["local"], "cpus": 1.0, "memory_mb": 2048, "labels": {}, "waiting": 8},
                    ],
                },
            )
        },
    ),
)
