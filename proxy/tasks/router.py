"""Tasks over HTTP: submit, list, inspect, follow and cancel them; and list the nodes. Mounted into the served app, for the admin; nodes may
list nodes.

Errors have the control API's shape, `{"error": {"code", "message", "param"?}}`. The models in `responses=` describe answers in the OpenAPI
document; handlers encode their answers themselves.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Annotated, Any, Literal, get_args

from fastapi import APIRouter, Depends, Path, Query, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, ConfigDict

from contract import attempts
from contract.attempts import NodeView, RolloutView
from contract.rules import RULES, Wire, show
from contract.sessions import ForkRequest
from contract.tasks import Task
from proxy.api import forks
from proxy.api.filters import ListQuery, Where, parse_where
from proxy.api.requests import JsonBody, json_response, parse_aside, require_admin, require_node
from proxy.errors import NotFound, RequestError, StoreUnavailable
from proxy.scoring.scorers import check_scores
from proxy.services import Services
from proxy.store.tasks.tasks import TaskStore
from proxy.store.tasks.values import Event, TaskState
from proxy.tasks.views import render_rollout, render_summary, render_task

log = logging.getLogger(__name__)

CURSOR = r"^[0-9]{1,15}\z"
EVENT_ID = re.compile(r"[0-9]{1,18}(-[0-9]{1,18})?\Z")
KEEPALIVE = b": nothing new\n\n"
MAX_QUEUED_EVENTS = 256
"""Events read ahead of a slow reader."""

Status = Literal["queued", "running", "completed", "cancelled"]
TaskId = Annotated[str, Path(description="The task's id.")]
Line = tuple[str, str, str]
"""Id, kind and data of a server-sent event."""

TASK: dict[str, Any] = json.loads("""
{"task_id": "bug-7", "instruction": "Make the tests pass.", "harness": "pi", "num_samples": 8,
 "evaluator": {"kind": "command", "options": {"command": "make test"}}}
""")
SUMMARY: dict[str, Any] = json.loads("""
{"task_id": "bug-7", "status": "queued", "instruction": "Make the tests pass.", "harness": "pi", "num_samples": 8,
 "priority": 50, "rollouts": {"queued": 8}, "usable": 0, "lacks": null, "created_at": 1767225600.0, "ended_at": null,
 "callback": null, "metadata": {}}
""")
ROLLOUT: dict[str, Any] = json.loads("""
{"task_id": "bug-7", "index": 0, "status": "running", "attempt": 1, "node": "node-1", "session_id": "bug-7.0.1", "calls": null,
 "exit_code": null, "verdict": null, "failures": [],
 "times": {"queued": 1767225600.0, "preparing": 1767225601.0, "ready": 1767225604.0, "running": 1767225604.5},
 "logs": "node-1:/srv/verbatim-node/logs/bug-7.0.1"}
""")
QUEUE: dict[str, Any] = json.loads("""
{"priority": 50, "runtimes": ["local"], "cpus": 1.0, "memory_mb": 2048, "labels": {}, "waiting": 8}
""")


class Shape(BaseModel):
    """The JSON of an answer, for the OpenAPI document only."""

    model_config = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True)


class CallbackShape(Shape):
    url: str
    tries: int
    next_try_at: float | None
    delivered_at: float | None
    last_error: str | None


class TaskSummary(Shape):
    task_id: str
    status: Status
    instruction: str
    harness: str
    num_samples: int
    priority: int
    rollouts: dict[attempts.Status, int]
    """Number of rollouts by status."""
    usable: int
    """Rollouts that may be delivered to a trainer."""
    lacks: str | None
    """A requirement that no node meets."""
    created_at: float
    ended_at: float | None
    callback: CallbackShape | None
    metadata: dict[str, Any]


class TaskShape(TaskSummary, json_schema_extra={"example": {**SUMMARY, "task": TASK}}):
    task: dict[str, Any]
    """What was submitted, with defaults filled in; uploads are replaced by their sizes."""


class TaskPage(Shape, json_schema_extra={"example": {"tasks": [SUMMARY], "cursor": None}}):
    tasks: list[TaskSummary]
    cursor: str | None


class CancelledTask(
    TaskSummary,
    json_schema_extra={"example": {**SUMMARY, "status": "cancelled", "cancelled_now": [0, 1, 2, 3, 4, 5, 6, 7]}},
):
    cancelled_now: list[int]
    """Indices of the rollouts that this request ended."""


@dataclass(frozen=True, slots=True)
class RolloutPage(Wire):
    __pydantic_config__ = RULES | show({"rollouts": [ROLLOUT]})

    rollouts: Sequence[RolloutView]


@dataclass(frozen=True, slots=True)
class Queue(Wire):
    """Rollouts with the same requirements."""

    priority: int
    runtimes: Sequence[str]
    cpus: float
    memory_mb: int
    labels: Mapping[str, str]
    waiting: int


@dataclass(frozen=True, slots=True)
class Nodes(Wire):
    __pydantic_config__ = RULES | show({"nodes": [], "queues": [QUEUE]})

    nodes: Sequence[NodeView]
    queues: Sequence[Queue]


def accepts_task(query: ListQuery, state: TaskState) -> bool:
    """Whether the task has the status, run, time and text that are asked for."""
    task, wanted = state.task, query.text.casefold()
    if query.status not in ("", state.status) or query.run not in ("", task.run):
        return False
    if not (query.after or 0.0) <= state.created_at < (query.before or math.inf):
        return False
    return any(wanted in text.casefold() for text in (task.task_id, task.instruction, task.harness.name))


def build_task_router(store: TaskStore, read_task: Callable[[bytes], tuple[Task, bytes]], services: Services) -> APIRouter:
    """`read_task` reads a checked task and its digest from the body of a submission, or raises RequestError."""
    router = APIRouter(tags=["tasks"], default_response_class=Response)
    admins, nodes = [Depends(require_admin)], [Depends(require_node)]

    @router.post(
        "/tasks",
        dependencies=admins,
        status_code=201,
        responses={
            201: {"model": TaskShape, "description": "submitted"},
            200: {"model": TaskShape, "description": "it was submitted before"},
            409: {"description": "the id belongs to a task with another body (`conflict`)"},
        },
        openapi_extra={"requestBody": {"content": {"application/json": {"example": TASK}}}},
    )
    async def submit_task(raw: bytes = Depends(JsonBody(Task).read_raw)) -> Response:
        """Its rollouts wait for nodes. A string for `harness`, `runtime` or `evaluator` stands for an object with that name. Submitting the
        same body under the same `task_id` again is 200 and changes nothing."""
        task, digest = await parse_aside(raw, read_task)
        check_scores(services.settings.scorers, task.scores)
        # What an earlier submission replays may be gone by now.
        if task.fork is not None and not await store.holds(task.task_id):
            await check_fork(services, task.fork)
        state, new = await store.submit(task, digest, await store.now())
        return json_response(render_task(state), 201 if new else 200)

    @router.get("/tasks", dependencies=admins, responses={200: {"model": TaskPage, "description": "a page"}})
    async def list_tasks(
        status: Annotated[Status | None, Query(description="Only tasks with this status.")] = None,
        where: Where = None,
        limit: Annotated[int, Query(ge=1, le=1000, description="Entries per page.")] = 100,
        cursor: Annotated[str | None, Query(pattern=CURSOR, description="`cursor` of the previous page.")] = None,
    ) -> Response:
        """Newest first. `where` takes `status`, `run`, `q` (a text in id, instruction or harness), `after` and `before`."""
        asked = parse_where(where or (), get_args(Status), ("status", "run", "q", "after", "before"))
        accepts = partial(accepts_task, asked)
        states, following = await store.list_tasks(status=status, accepts=accepts, limit=limit, cursor=cursor)
        return json_response({"tasks": [render_summary(state) for state in states], "cursor": following})

    @router.get("/tasks/{task_id}", dependencies=admins, responses={200: {"model": TaskShape, "description": "the task"}})
    async def get_task(task_id: TaskId) -> Response:
        """Its current state, and what was submitted."""
        return json_response(render_task(await store.load(task_id)))

    @router.delete(
        "/tasks/{task_id}", dependencies=admins, responses={200: {"model": CancelledTask, "description": "cancelled"}}
    )
    async def cancel_task(task_id: TaskId) -> Response:
        """Immediately and for good. Rollouts that have already ended keep their results."""
        ended = await store.cancel(task_id, await store.now())
        state = await store.load(task_id)
        return json_response(render_summary(state) | {"cancelled_now": [rollout.index for rollout in ended]})

    @router.get(
        "/tasks/{task_id}/rollouts", dependencies=admins, responses={200: {"model": RolloutPage, "description": "all of them"}}
    )
    async def list_rollouts(task_id: TaskId) -> Response:
        """Ordered by index."""
        return json_response({"rollouts": [render_rollout(state) for state in await store.load_rollouts(task_id)]})

    @router.get(
        "/tasks/{task_id}/events",
        dependencies=admins,
        responses={
            200: {"content": {"text/event-stream": {}}, "description": "the stream"},
            204: {"description": "the task has ended and the reader has all its events"},
        },
    )
    async def follow_task(request: Request, task_id: TaskId) -> Response:
        """Server-sent events up to `task.ended`, from the first one or from the one after the header `Last-Event-ID`."""
        after = _parse_last_event_id(request)
        state = await store.load(task_id)
        following = store.watch_events(task_id, after or "0")
        first = await anext(following, None) if state.ended_at is not None else None
        if after and state.ended_at is not None and first is None:
            # 204 tells a reader that reconnects automatically to stop.
            return Response(status_code=204)
        stream = stream_events(_as_lines(first, following), services.settings.keepalive_seconds, services.stopping)
        return StreamingResponse(stream, media_type="text/event-stream", headers={"cache-control": "no-store"})

    @router.get("/nodes", dependencies=nodes, responses={200: {"model": Nodes, "description": "the nodes"}})
    async def list_nodes() -> Response:
        """Nodes with their free capacity, and how many rollouts wait for which kind of node."""
        states, now = await store.list_nodes(), await store.now()
        found = [asdict(state) | {"silent_seconds": max(0.0, now - state.seen_at)} for state in states]
        waiting = [_queue_as_wire(name, count) for name, count in sorted((await store.count_waiting()).items())]
        return json_response({"nodes": found, "queues": waiting})

    return router


def _parse_last_event_id(request: Request) -> str | None:
    """Raises RequestError for a malformed id."""
    given = request.headers.get("last-event-id") or None
    if given is not None and not EVENT_ID.match(given):
        raise RequestError(f"Last-Event-ID: {given!r} is not the id of an event", param="Last-Event-ID")
    return given


def _render_event(event: Event) -> str:
    return json.dumps({"kind": event.kind, "at": event.at, **event.data})


def _queue_as_wire(name: str, waiting: int) -> dict[str, Any]:
    needs = zip(("priority", "runtimes", "cpus", "memory_mb", "labels"), json.loads(name), strict=True)
    return {**dict(needs), "waiting": waiting}


async def check_fork(services: Services, fork: ForkRequest) -> None:
    """Raises RequestError if no session can be opened that replays so."""
    try:
        await forks.check(services, fork.session_id, fork.until)
    except RequestError as error:
        raise RequestError(f"fork: {error.message}", param=(error.param or "fork").replace("replay", "fork")) from error


# Server-sent events.


async def stream_events(lines: AsyncIterator[Line], keepalive_seconds: float, stopping: asyncio.Event) -> AsyncIterator[bytes]:
    """Ends with `lines`, when the store cannot be read, or when the process stops; the reader reconnects with the id of its last event.
    Sends a comment every `keepalive_seconds` (0: never) while nothing happens, so that no proxy in between drops the idle connection."""
    queue: asyncio.Queue[Line | None] = asyncio.Queue(MAX_QUEUED_EVENTS)
    sources = [asyncio.create_task(_read(lines, queue)), asyncio.create_task(_end(stopping, queue))]
    try:
        while True:
            try:
                async with asyncio.timeout(keepalive_seconds or None):
                    line = await queue.get()
            except TimeoutError:
                yield KEEPALIVE
                continue
            if line is None:
                return
            id_, kind, data = line
            yield f"id: {id_}\nevent: {kind}\ndata: {data}\n\n".encode()
    finally:
        for source in sources:
            source.cancel()
        await asyncio.wait(sources)


async def _as_lines(first: Event | None, rest: AsyncIterator[Event]) -> AsyncIterator[Line]:
    if first is not None:
        yield first.id, first.kind, _render_event(first)
    async for event in rest:
        yield event.id, event.kind, _render_event(event)


async def _read(lines: AsyncIterator[Line], queue: asyncio.Queue[Line | None]) -> None:
    try:
        async for line in lines:
            await queue.put(line)
    except NotFound:
        # Retention deleted it meanwhile.
        pass
    except StoreUnavailable as error:
        log.warning("an event stream ends early: %s", error.message)
    except Exception:
        log.exception("an event stream ends early")
    # Not in a finally: when the reader is gone, this task is cancelled, and with nothing emptying the queue `put` would block.
    await queue.put(None)


async def _end(stopping: asyncio.Event, queue: asyncio.Queue[Line | None]) -> None:
    await stopping.wait()
    await queue.put(None)
