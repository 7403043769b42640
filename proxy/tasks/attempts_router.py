"""Attempts over HTTP, for nodes: take a rollout, keep it, report how far it is, finish or release it.

A node's token opens only the rollouts that the node has: a step of an attempt that is not, or no longer, the node's gets 409,
`superseded`, and changes nothing. Every step may be repeated. Nodes share a token and name themselves; the name belongs to whoever used it
first, shown by a key, so that no node acts as another.
"""

# Without annotations from __future__: a parameter of routes is a type that only exists within a function.
import hashlib
import uuid
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from typing import Annotated, Any, Literal
from urllib.parse import unquote

import msgspec
from fastapi import APIRouter, Depends, Header, Path, Request, Response
from fastapi.routing import APIRoute
from pydantic import Field

from contract.attempts import (
    NODE_HEADER,
    NODE_KEY_HEADER,
    AttemptId,
    Failure,
    FailureRecord,
    NodeState,
    Room,
    Superseded,
    TakenRollout,
    Verdict,
)
from contract.sessions import NewSession, OpenedSession, SessionDetail
from proxy.api import closing
from proxy.api.calls import CallPage, list_calls
from proxy.api.requests import Body, JsonBody, PageCursor, PageSize, json_response, require_node, watch_disconnect
from proxy.api.sessions import AgentLog, get_session, make_base_urls, open_new
from proxy.errors import AttemptSuperseded, Forbidden, RequestError
from proxy.services import Services
from proxy.store.connection import StoreConnection
from proxy.store.tasks.work import WorkStore
from proxy.tasks.attempts import HeldAttempt
from proxy.tasks.takes import Takes
from reconstruct.roles import RoleRule

WHOLE_BYTES = 4 << 20
"""A larger task is not in the answer to a take: the node gets it by itself."""
MSGPACK = "application/msgpack"

ATTEMPT: dict[str, Any] = {"task_id": "bug-7", "index": 0, "attempt": 1}
ROOM: dict[str, Any] = {"labels": {}, "runtimes": ["local"], "cpus": 4.0, "memory_mb": 8192}
STATE: dict[str, Any] = {"name": "node-1", "lease_seconds": 30.0, **ROOM}

NodeName = Annotated[
    str, Header(alias=NODE_HEADER, min_length=1, max_length=768, description="The node's name, percent-encoded.")
]
NodeKey = Annotated[
    str,
    Header(
        alias=NODE_KEY_HEADER, pattern=r"^[!-~]{16,256}$", description="A secret of the node's own, the same in every request."
    ),
]
SUPERSEDED: dict[int | str, dict[str, Any]] = {
    409: {"description": "the node does not have the attempt (any more) (`superseded`)"}
}
OTHERS_NAME: dict[int | str, dict[str, Any]] = {409: {"description": "the name is another node's (`superseded`)"}}
Admit = Callable[..., Awaitable[WorkStore]]


class TakeBody(Body, json_schema_extra={"example": {"token": "5b2f5b2f", "room": ROOM, "lease_seconds": 30.0}}):
    token: str = Field(pattern=r"^[A-Za-z0-9_-]{8,64}$")
    """Of the wanted rollout: a request that is repeated with it gets the rollout that an earlier answer had."""
    room: Room
    lease_seconds: float = Field(gt=0, le=86400)
    """Silence after which the node loses its rollouts."""
    wait_seconds: float = Field(0, ge=0, le=60)
    """How long to wait for one."""


class HeldBody(Body):
    task_id: str
    index: int = Field(ge=0)
    attempt: int = Field(ge=1)


class ExtendBody(Body, json_schema_extra={"example": {"state": STATE, "held": [ATTEMPT]}}):
    state: NodeState
    """Its name is the header's, its times are the service's."""
    held: list[HeldBody] = Field(max_length=10_000)


class Extended(Body, json_schema_extra={"example": {"lost": [], "now": 1767225600.0}}):
    lost: list[HeldBody]
    """Those that the node no longer has and must stop."""
    now: float
    """By the clock of leases."""


class ReportBody(Body, json_schema_extra={"example": {"status": "ready"}}):
    status: Literal["preparing", "ready", "running", "evaluating"]
    calls: int | None = Field(None, ge=0, lt=2**63)
    exit_code: int | None = Field(None, ge=-(2**31), lt=2**31)
    logs: str | None = None
    """`<node>:<folder>`"""
    harness_roles: list[RoleRule] = Field(default_factory=list, max_length=64)
    """With `running`: of the harness's definition."""


class FinishBody(Body, json_schema_extra={"example": {"verdict": {"status": "completed", "reward": 1.0}}}):
    verdict: Verdict


class ReleaseBody(Body, json_schema_extra={"example": {"why": "put_back"}}):
    why: Literal["put_back", "give_way", "failed", "stopped"]
    """put_back: the harness had not started. give_way: the service holds new groups back. failed: by no fault of the agent. stopped: the
    node ends. Only `failed` uses up an attempt."""
    failure: FailureRecord | None = None
    """Of one that failed, or was stopped."""
    spared: bool = False
    """The node is to blame: the failure uses up no attempt."""


class Released(Body, json_schema_extra={"example": {"queued": True}}):
    queued: bool
    """False: the attempts are used up, or nothing waits that the node could take instead. It keeps the rollout."""


class AttemptRoute(APIRoute):
    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            try:
                return await handler(request)
            except Superseded as error:
                raise AttemptSuperseded(str(error)) from error

        return handle


def read_attempt(
    task_id: Annotated[str, Path(description="The task's id.")],
    index: Annotated[int, Path(ge=0, description="The rollout's index.")],
    attempt: Annotated[int, Path(ge=1, description="The attempt's number.")],
) -> AttemptId:
    return AttemptId(task_id, index, attempt)


Named = Annotated[AttemptId, Depends(read_attempt)]


class NodeAdmission:
    """Tells nodes apart, which share a token: the name that a node gives belongs to the key that it gives with it."""

    def __init__(self, connection: StoreConnection, takes: Takes) -> None:
        self._redis = connection
        self._takes = takes

    async def admit(self, name: NodeName, key: NodeKey) -> WorkStore:
        """The node's work. Raises `AttemptSuperseded` where the name is another node's."""
        work = WorkStore(self._redis, unquote(name))
        if not await work.claim_name(hashlib.sha256(key.encode()).digest(), may_inherit=self._takes.may_recover(0.0)):
            raise AttemptSuperseded(
                f"the name {work.node!r} is another node's: give this one another, or wait until that one was silent for a minute"
            )
        return work


def build_attempt_router(connection: StoreConnection, takes: Takes, services: Services) -> APIRouter:
    router = APIRouter(
        prefix="/attempts",
        tags=["attempts"],
        route_class=AttemptRoute,
        default_response_class=Response,
        dependencies=[Depends(require_node)],
    )
    admit = NodeAdmission(connection, takes).admit
    add_leases(router, takes, admit)
    add_steps(router, connection, services, admit)
    add_sessions(router, connection, services, admit)
    return router


def add_leases(router: APIRouter, takes: Takes, admit: Admit) -> None:
    Node = Annotated[WorkStore, Depends(admit)]

    @router.post(
        "/take",
        responses={
            200: {"content": {MSGPACK: {}}, "description": "a rollout: attempt, state, whether it is resumed, and its task"},
            204: {"description": "there was none in time"},
            **OTHERS_NAME,
        },
    )
    async def take_rollout(
        request: Request, node: Node, body: Annotated[TakeBody, Depends(JsonBody(TakeBody).read)]
    ) -> Response:
        """The waiting rollout of the greatest priority that the node has room for, or one whose node was lost."""
        async with watch_disconnect(request.receive) as gone:
            taken = await takes.take(node.node, body.room, body.lease_seconds, body.token, body.wait_seconds, gone)
            if taken is not None and gone.done():
                await node.put_back(taken.attempt, await node.now())
                taken = None
        return Response(status_code=204) if taken is None else Response(_encode_taken(taken), media_type=MSGPACK)

    @router.post("/extend", responses={200: {"model": Extended, "description": "extended"}, **OTHERS_NAME})
    async def extend_leases(node: Node, body: Annotated[ExtendBody, Depends(JsonBody(ExtendBody).read)]) -> Response:
        """The node lives: renews the leases of what it holds."""
        now = await node.now()
        held = [AttemptId(each.task_id, each.index, each.attempt) for each in body.held]
        state = replace(body.state, name=node.node, seen_at=now, started_at=body.state.started_at or now)
        try:
            lost = await node.beat(state, held, now)
        except OverflowError as error:
            raise RequestError(f"state: it cannot be stored: {error}", param="state") from error
        named = [{"task_id": each.task_id, "index": each.index, "attempt": each.attempt} for each in lost]
        return json_response({"lost": named, "now": now})

    @router.post("/leave", status_code=204, responses={204: {"description": "left"}, **OTHERS_NAME})
    async def leave(node: Node) -> Response:
        """The node has ended and holds nothing. Its name is free."""
        await node.leave()
        return Response(status_code=204)


def add_steps(router: APIRouter, connection: StoreConnection, services: Services, admit: Admit) -> None:
    def name_attempt(named: Named, node: Annotated[WorkStore, Depends(admit)]) -> HeldAttempt:
        return HeldAttempt(services, connection, named, node)

    Held = Annotated[HeldAttempt, Depends(name_attempt)]

    @router.post(
        "/{task_id}/{index}/{attempt}/report",
        status_code=204,
        responses={
            200: {"model": OpenedSession, "description": "it runs: its session"},
            204: {"description": "noted"},
            429: {"description": "no new group may begin now; see `Retry-After` (`backpressure`)"},
            **SUPERSEDED,
        },
    )
    async def report(request: Request, held: Held, body: Annotated[ReportBody, Depends(JsonBody(ReportBody).read)]) -> Response:
        """How far the attempt is. With `running` its session is opened; the answer to a repeated report has another key."""
        if body.status == "running":
            key = await held.open(body.harness_roles, body.logs or "", request.is_disconnected)
            return _describe_opened(request, services, held.attempt.session_id, key)
        fields = {name: value for name in ("calls", "exit_code", "logs") if (value := getattr(body, name)) is not None}
        await held.advance(body.status, fields)
        return Response(status_code=204)

    @router.post(
        "/{task_id}/{index}/{attempt}/finish",
        status_code=204,
        responses={
            204: {"description": "ended"},
            400: {"description": "the reward is refused, and nothing was done (`bad_request`)"},
            **SUPERSEDED,
        },
    )
    async def finish(held: Held, body: Annotated[FinishBody, Depends(JsonBody(FinishBody).read)]) -> Response:
        """Fixes the verdict, closes the session with it and ends the rollout."""
        await held.finish(body.verdict)
        return Response(status_code=204)

    @router.post(
        "/{task_id}/{index}/{attempt}/release",
        responses={200: {"model": Released, "description": "whether it waits for a node again"}, **SUPERSEDED},
    )
    async def release(held: Held, body: Annotated[ReleaseBody, Depends(JsonBody(ReleaseBody).read)]) -> Response:
        """Back to the queue, without its session."""
        queued = True
        if body.why == "put_back":
            await held.put_back()
        elif body.why == "give_way":
            queued = await held.give_way()
        else:
            failure = body.failure or FailureRecord(Failure.NODE_LOST, f"node {held.node} gave it up")
            queued = await held.give_up(failure, spared=body.spared or body.why == "stopped")
        return json_response({"queued": queued})


def add_sessions(router: APIRouter, connection: StoreConnection, services: Services, admit: Admit) -> None:
    async def held(named: Named, node: Annotated[WorkStore, Depends(admit)]) -> HeldAttempt:
        """Raises `Superseded`."""
        found = HeldAttempt(services, connection, named, node)
        await found.check()
        return found

    Held = Annotated[HeldAttempt, Depends(held)]

    @router.get(
        "/{task_id}/{index}/{attempt}/task",
        responses={200: {"content": {MSGPACK: {}}, "description": "the whole task"}, **SUPERSEDED},
    )
    async def get_attempt_task(found: Held) -> Response:
        """With the content of its uploads."""
        return Response(msgspec.msgpack.encode(await found.load_task()), media_type=MSGPACK)

    @router.put("/{task_id}/{index}/{attempt}/log", status_code=204, responses={204: {"description": "stored"}, **SUPERSEDED})
    async def store_attempt_log(body: Annotated[AgentLog, Depends(JsonBody(AgentLog).read)], found: Held) -> Response:
        """The end of what the agent printed, for its page in the web UI."""
        await services.sessions.set_log(found.attempt.session_id, body.text)
        return Response(status_code=204)

    @router.get(
        "/{task_id}/{index}/{attempt}/session", responses={200: {"model": SessionDetail, "description": "it"}, **SUPERSEDED}
    )
    async def get_attempt_session(found: Held) -> Response:
        """The attempt's session."""
        return await get_session(services, found.attempt.session_id)

    @router.get(
        "/{task_id}/{index}/{attempt}/calls", responses={200: {"model": CallPage, "description": "a page"}, **SUPERSEDED}
    )
    async def list_attempt_calls(request: Request, found: Held, cursor: PageCursor = None, limit: PageSize = 100) -> Response:
        """The session's calls, as `GET /sessions/{id}/calls` lists them."""
        return await list_calls(request, services, found.attempt.session_id, cursor, limit)

    @router.post(
        "/{task_id}/{index}/{attempt}/judges",
        status_code=201,
        responses={201: {"model": OpenedSession, "description": "opened"}, **SUPERSEDED},
    )
    async def open_judge(request: Request, found: Held) -> Response:
        """A session for the model that judges the run. It reaches no trainer and is not held back."""
        session_id = f"{_judge_prefix(found.attempt)}{uuid.uuid4().hex}"
        body = NewSession(session_id=session_id, metadata={"purpose": "judge"}, trained=False)
        _, key = await open_new(services, body, request.is_disconnected)
        return _describe_opened(request, services, session_id, key, 201)

    @router.post(
        "/{task_id}/{index}/{attempt}/judges/{session_id}/close",
        status_code=204,
        responses={204: {"description": "closed"}, **SUPERSEDED},
    )
    async def close_judge(session_id: Annotated[str, Path(description="The judge's session.")], found: Held) -> Response:
        """The verdict is spoken."""
        if not session_id.startswith(_judge_prefix(found.attempt)):
            raise Forbidden(f"session {session_id} is no judge of this attempt")
        await closing.close_session(services, session_id, "completed", None, None)
        return Response(status_code=204)


def _describe_opened(request: Request, services: Services, session_id: str, key: str, status: int = 200) -> Response:
    urls = make_base_urls(request, services.settings, session_id)
    return json_response({"session_id": session_id, "api_key": key, "base_urls": urls}, status)


def _judge_prefix(attempt: AttemptId) -> str:
    """Of the ids of the attempt's judges."""
    return f"judge-{hashlib.sha256(attempt.session_id.encode()).hexdigest()[:16]}-"


def _encode_taken(taken: TakenRollout) -> bytes:
    task = msgspec.msgpack.encode(taken.task)
    whole = msgspec.Raw(task) if len(task) <= WHOLE_BYTES else None
    return msgspec.msgpack.encode({"attempt": taken.attempt, "state": taken.state, "resumed": taken.resumed, "task": whole})
