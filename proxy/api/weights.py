"""Weights over HTTP: a trainer pushes versions into the engines and sees which version each of them holds."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal, Self

import msgspec
from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import Field, model_validator

from proxy.api.requests import Body, JsonBody, Served, json_response, require_trainer
from proxy.engine.weights.push import Watcher, ignore_event
from proxy.engine.weights.vllm import Transfer
from proxy.errors import VerbatimError
from proxy.services import Services

log = logging.getLogger(__name__)
router = APIRouter(
    prefix="/weights", tags=["weights"], dependencies=[Depends(require_trainer)], default_response_class=Response
)

NDJSON = "application/x-ndjson"
FAILED: dict[int | str, dict[str, Any]] = {
    400: {"description": "an adapter's weights for a base model, or the other way round (`bad_request`)"},
    404: {"description": "no engine serves such a model (`not_found`)"},
    502: {"description": "an engine broke off or answered nonsense (`engine_failed`)"},
}


class SentParameters(Body):
    """What a trainer sends itself: its parameters, in order."""

    group: str = Field(max_length=64)
    world_size: int = Field(ge=2)
    names: list[str] = Field(min_length=1)
    dtype_names: list[str]
    shapes: list[list[int]]


class PushRequest(Body, json_schema_extra={"example": {"version": 12, "path": "/shared/weights/version-12", "mode": "keep"}}):
    version: int = Field(ge=0, lt=2**53)
    """Greater than the current one."""
    path: str | None = Field(None, min_length=1, max_length=4096)
    """A safetensors file or folder, a delta's folder, or an adapter's, that the engines can read."""
    kind: Literal["full", "delta", "lora", "nccl"] = "full"
    """A delta is what changed since the version in the folder beside it that it names; engines fold it with those before it."""
    mode: Literal["keep", "wait", "abort"] = "keep"
    """Calls in flight continue under the new weights, finish first, or are cut. Those of an adapter end under the version they began with,
    or are cut."""
    model: str = Field("", max_length=200)
    """The policy; empty: the default one. Kind lora goes to an adapter, the others to a base model."""
    transfer: SentParameters | None = None
    """For nccl: what the trainer is about to send."""

    @model_validator(mode="after")
    def _check_has_weights(self) -> Self:
        if self.path is None and self.transfer is None:
            raise ValueError("a push needs a path, or what a trainer sends")
        return self


class NcclGroup(Body, json_schema_extra={"example": {"world_size": 3, "master_address": "10.0.0.5", "master_port": 29600}}):
    """Where the trainer, rank 0 of `world_size`, waits for the engines, and how it packs what it sends."""

    model: str = Field("", max_length=200)
    world_size: int = Field(ge=2)
    master_address: str = Field(max_length=253)
    master_port: int = Field(ge=1, le=65535)
    packed: bool = True
    packed_buffer_size_bytes: int | None = Field(None, ge=1)
    packed_num_buffers: int | None = Field(None, ge=1)


class PushedReplica(Body):
    ok: bool
    seconds: float
    paused_seconds: float
    """How long it sampled nothing."""
    error: str | None = None


RESULT: dict[str, Any] = json.loads("""
{"applied": true, "version": 12, "kind": "full", "mode": "keep", "seconds": 1.9,
 "replicas": {"127.0.0.1:8000": {"ok": true, "seconds": 1.9, "paused_seconds": 0.12}}}
""")


class PushResult(Body, json_schema_extra={"example": RESULT}):
    applied: bool
    """Whether it is the current version: at least one replica runs it."""
    version: int
    kind: str
    mode: str
    seconds: float
    replicas: dict[str, PushedReplica]
    error: str | None = None
    """Why it was not applied."""


class VersionShape(Body):
    version: int
    path: str | None
    kind: str | None
    root: str | None
    """A digest over all tensors. Null: they were pushed without digests."""
    updated_at: float | None


class ReplicaWeights(Body):
    url: str
    api: str | None
    healthy: bool
    reason: str | None
    weight_version: int | None
    """Null: unknown."""
    takes_weights: bool


class PolicyWeights(Body):
    current: VersionShape
    history: list[VersionShape]
    """Newest first."""
    updating: bool
    frozen: bool
    replicas: dict[str, ReplicaWeights]


STATUS: dict[str, Any] = json.loads("""
{"current": {"version": 12, "path": "/shared/weights/version-12", "kind": "full", "root": null, "updated_at": 1767225600.0},
 "history": [{"version": 12, "path": "/shared/weights/version-12", "kind": "full", "root": null,
  "updated_at": 1767225600.0}],
 "updating": false, "frozen": false,
 "replicas": {"127.0.0.1:8000": {"url": "http://127.0.0.1:8000", "api": "token", "healthy": true, "reason": null,
  "weight_version": 12, "takes_weights": true}},
 "models": {}}
""")


class WeightStatus(PolicyWeights, json_schema_extra={"example": STATUS}):
    models: dict[str, PolicyWeights]
    """The other policies."""


class RankRange(Body):
    rank_offset: int
    workers: int


PLAN = {"world_size": 3, "replicas": {"127.0.0.1:8000": {"rank_offset": 1, "workers": 2}}}


class GroupPlan(Body, json_schema_extra={"example": PLAN}):
    world_size: int
    """Including the trainer, which is rank 0."""
    replicas: dict[str, RankRange]


class JoinedGroup(GroupPlan, json_schema_extra={"example": {"group": "9f", **PLAN}}):
    group: str
    """To be named in pushes."""


@router.post(
    "",
    responses={
        200: {"model": PushResult, "description": "the result, by replica"},
        **FAILED,
        409: {"description": "the version is not greater than the current one, or the model is frozen (`conflict`)"},
    },
)
async def push_weights(
    services: Served, request: Request, body: Annotated[PushRequest, Depends(JsonBody(PushRequest).read)]
) -> Response:
    """Checks the weights, then pauses every replica of the model, loads them, sets the version and resumes; a version of an adapter is
    loaded without a pause. With
    `Accept: application/x-ndjson`, one line of JSON for each step, then `{result}` or `{error}`."""
    if NDJSON in request.headers.get("accept", ""):
        return StreamingResponse(_stream_push(services, body), media_type=NDJSON)
    return json_response(await _push(services, body, ignore_event))


@router.get("", responses={200: {"model": WeightStatus, "description": "the versions"}})
async def get_weights(services: Served) -> Response:
    """The current version, what each replica holds, and earlier pushes; other policies under `models`."""
    return json_response(await services.updater.status())


@router.get("/group", responses={200: {"model": GroupPlan, "description": "the plan"}, **FAILED})
async def plan_nccl_group(
    services: Served, model: Annotated[str, Query(description="The policy; empty: the default one.")] = ""
) -> Response:
    """The group consists of the trainer, as rank 0, and the workers of all engines of the model."""
    return json_response(await services.updater.plan_group(model))


@router.post(
    "/group",
    responses={
        200: {"model": JoinedGroup, "description": "joined"},
        **FAILED,
        409: {"description": "the engines are not those of the plan (`conflict`)"},
    },
)
async def join_nccl_group(services: Served, body: Annotated[NcclGroup, Depends(JsonBody(NcclGroup).read)]) -> Response:
    """Answers once every engine has joined; the trainer must be joining at the same time."""
    nccl = body.model_dump(exclude={"model", "world_size"}, exclude_none=True)
    return json_response(await services.updater.join_group(body.model, body.world_size, nccl))


async def _push(services: Services, body: PushRequest, watch: Watcher) -> dict[str, Any]:
    transfer = Transfer(**body.transfer.model_dump()) if body.transfer else None
    return await services.updater.push(
        body.version, body.path, body.kind, body.mode, policy=body.model, transfer=transfer, watch=watch
    )


async def _stream_push(services: Services, body: PushRequest) -> AsyncIterator[bytes]:
    """Each step as a line of JSON; the last line is `{"result": ...}` or `{"error": {code, message}, "status": ...}`."""
    events: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

    async def run() -> None:
        try:
            events.put_nowait({"result": await _push(services, body, events.put_nowait)})
        except VerbatimError as error:
            events.put_nowait(_error_line(error))
        except Exception:
            # The response has begun: without a last line its reader would wait forever.
            log.exception("a push of weights failed")
            events.put_nowait(_error_line(VerbatimError("the push failed; the service's log has the cause")))

    running = asyncio.create_task(run())
    try:
        event: dict[str, Any] = {}
        while not event.keys() & {"result", "status"}:
            event = await events.get()
            yield msgspec.json.encode(event) + b"\n"
    finally:
        # The push itself continues after its watcher is gone.
        running.cancel()


def _error_line(error: VerbatimError) -> dict[str, Any]:
    return {"error": {"code": error.code, "message": error.message}, "status": error.status}
