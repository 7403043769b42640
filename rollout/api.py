"""Tasks over HTTP: submit, list, look into, watch, cancel; and the nodes. Mounted into the served app, for the admin; nodes may list nodes.

    POST   /tasks                  201; 200 when it was submitted before; 409 when its id was with another body
    GET    /tasks                  newest first; ?status=&limit=&cursor=
    GET    /tasks/{id}             where it stands, and what was submitted
    DELETE /tasks/{id}             cancel: at once and for good
    GET    /tasks/{id}/rollouts    each of its rollouts
    GET    /tasks/{id}/events      server-sent events from the first, or from behind Last-Event-ID, up to the task's end
    GET    /nodes                  the nodes, and how many rollouts wait in each queue

Errors are those of the control side, `{"error": {"code", "message", "param"?}}`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.responses import StreamingResponse
from fastapi.routing import APIRoute

from rollout.store.base import Event, NoSuchTask, StoreUnavailable, TaskConflict
from rollout.store.tasks import RedisTaskStore
from rollout.task_body import (
    BadTask,
    Known,
    event_as_wire,
    node_as_wire,
    rollout_as_wire,
    submitted,
    summary_as_wire,
    task_as_wire,
)

CURSOR = r"^[0-9]{1,15}\z"
EVENT_ID = re.compile(r"[0-9]{1,18}(-[0-9]{1,18})?\Z")
RETRY_AFTER_SECONDS = 1

Status = Literal["queued", "running", "completed", "cancelled"]
ReadBody = Callable[[Request], Awaitable[bytes]]


class TaskRoute(APIRoute):
    """Answers what this package raises in the control side's shape; all else is the app's."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def answered(request: Request) -> Response:
            try:
                return await handler(request)
            except BadTask as error:
                return _error(400, "bad_request", error.message, param=error.param)
            except NoSuchTask as error:
                return _error(404, "not_found", str(error))
            except TaskConflict as error:
                return _error(409, "conflict", str(error), param="task_id")
            except StoreUnavailable as error:
                return _error(503, "store_unavailable", str(error), headers={"retry-after": str(RETRY_AFTER_SECONDS)})

        return answered


def task_router(
    store: RedisTaskStore,
    known: Known,
    *,
    admin: Callable[[Request], None],
    node: Callable[[Request], None],
    read_body: ReadBody,
    keepalive_seconds: float,
    stopping: asyncio.Event,
) -> APIRouter:
    """`admin` and `node` raise for a caller who is none. `read_body` gives the body of a request, within the service's limits. `stopping`
    is set when the process begins to end, and ends streams."""
    router = APIRouter(route_class=TaskRoute)
    admins = [Depends(admin)]

    @router.post("/tasks", dependencies=admins)
    async def submit(request: Request) -> Response:
        task, digest = submitted(await read_body(request), known)
        state, new = await store.submit(task, digest, await store.now())
        return _json(task_as_wire(state), 201 if new else 200)

    @router.get("/tasks", dependencies=admins)
    async def listing(
        status: Status | None = None,
        limit: Annotated[int, Query(ge=1, le=1000)] = 100,
        cursor: Annotated[str | None, Query(pattern=CURSOR)] = None,
    ) -> Response:
        states, following = await store.page(status=status, limit=limit, cursor=cursor)
        return _json({"tasks": [summary_as_wire(state) for state in states], "cursor": following})

    @router.get("/tasks/{task_id}", dependencies=admins)
    async def one(task_id: str) -> Response:
        return _json(task_as_wire(await store.load(task_id)))

    @router.delete("/tasks/{task_id}", dependencies=admins)
    async def cancel(task_id: str) -> Response:
        ended = await store.cancel(task_id, await store.now())
        state = await store.load(task_id)
        return _json(summary_as_wire(state) | {"cancelled_now": [rollout.index for rollout in ended]})

    @router.get("/tasks/{task_id}/rollouts", dependencies=admins)
    async def rollouts(task_id: str) -> Response:
        return _json({"rollouts": [rollout_as_wire(state) for state in await store.rollouts(task_id)]})

    @router.get("/tasks/{task_id}/events", dependencies=admins)
    async def events(request: Request, task_id: str) -> Response:
        after = _last_event(request)
        state = await store.load(task_id)
        following = store.events(task_id, after or "0")
        first = await anext(following, None) if state.ended_at is not None else None
        if after and state.ended_at is not None and first is None:
            # What tells a reader that reconnects by itself that there is no more to come.
            return Response(status_code=204)
        stream = told(_chained(first, following), keepalive_seconds, stopping)
        return StreamingResponse(stream, media_type="text/event-stream", headers={"cache-control": "no-store"})

    @router.get("/nodes", dependencies=[Depends(node)])
    async def nodes() -> Response:
        found = [node_as_wire(state) for state in await store.nodes()]
        waiting = [_queue(name, count) for name, count in sorted((await store.depths()).items())]
        return _json({"nodes": found, "queues": waiting})

    return router


def _last_event(request: Request) -> str | None:
    """Raises `BadTask` for an id that no event has."""
    given = request.headers.get("last-event-id") or None
    if given is not None and not EVENT_ID.match(given):
        raise BadTask(f"Last-Event-ID: {given!r} is not the id of an event", "Last-Event-ID")
    return given


async def _chained(first: Event | None, rest: AsyncIterator[Event]) -> AsyncIterator[tuple[str, str, str]]:
    """Id, kind and data of each."""
    if first is not None:
        yield first.id, first.kind, json.dumps(event_as_wire(first))
    async for event in rest:
        yield event.id, event.kind, json.dumps(event_as_wire(event))


def _queue(name: str, waiting: int) -> dict[str, Any]:
    priority, kinds, cpus, memory_mb, labels = json.loads(name)
    wanted = {"priority": priority, "runtimes": kinds, "cpus": cpus, "memory_mb": memory_mb, "labels": labels}
    return wanted | {"waiting": waiting}


def _json(content: Any, status: int = 200) -> Response:
    return Response(json.dumps(content), status, media_type="application/json")


def _error(
    status: int, code: str, message: str, *, param: str | None = None, headers: dict[str, str] | None = None
) -> Response:
    error = {"code": code, "message": message} | ({} if param is None else {"param": param})
    return Response(json.dumps({"error": error}), status, headers=headers, media_type="application/json")


# Server-sent events: what is told, as text, with a comment while nothing is, so that no one on the way takes the line for dead.


log = logging.getLogger(__name__)

KEEPALIVE = b": nothing new\n\n"
TOLD_AT_ONCE = 256
"""Events that are read ahead of a slow reader."""

Told = tuple[str, str, str]
"""Id, kind, data of one line."""


async def told(events: AsyncIterator[Told], keepalive_seconds: float, stopping: asyncio.Event) -> AsyncIterator[bytes]:
    """Ends with `events`, when the store cannot be read, and when the process stops: a reader comes back with the id of the last
    event that it got."""
    queue: asyncio.Queue[Told | None] = asyncio.Queue(TOLD_AT_ONCE)
    sources = [asyncio.create_task(_read(events, queue)), asyncio.create_task(_end(stopping, queue))]
    try:
        while True:
            try:
                async with asyncio.timeout(keepalive_seconds):
                    event = await queue.get()
            except TimeoutError:
                yield KEEPALIVE
                continue
            if event is None:
                return
            yield _line(*event)
    finally:
        for source in sources:
            source.cancel()
        await asyncio.wait(sources)


async def _read(events: AsyncIterator[Told], queue: asyncio.Queue[Told | None]) -> None:
    try:
        async for event in events:
            await queue.put(event)
    except NoSuchTask:
        # Deleted meanwhile by retention.
        pass
    except StoreUnavailable as error:
        log.warning("a stream of events ends early: %s", error)
    except Exception:
        log.exception("a stream of events ends early")
    # Not when it is cancelled: of a reader that has gone away nobody empties the queue.
    await queue.put(None)


async def _end(stopping: asyncio.Event, queue: asyncio.Queue[Told | None]) -> None:
    await stopping.wait()
    await queue.put(None)


def _line(id_: str, kind: str, data: str) -> bytes:
    return f"id: {id_}\nevent: {kind}\ndata: {data}\n\n".encode()
