"""Weights: push a version into the engines, and see what each of them holds. For the trainer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal, Self

import msgspec
from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import Field, model_validator

from proxy.api.requests import Body, Served, body_of, json_response, trainer_only
from proxy.engine.weights.push import Watcher, unwatched
from proxy.engine.weights.vllm import Transfer
from proxy.errors import VerbatimError
from proxy.services import Services

log = logging.getLogger(__name__)
router = APIRouter(prefix="/weights", dependencies=[Depends(trainer_only)])

LINES = "application/x-ndjson"


class Sent(Body):
    """What a trainer sends itself: its parameters in order."""

    group: str = Field(max_length=64)
    world_size: int = Field(ge=2)
    names: list[str] = Field(min_length=1)
    dtype_names: list[str]
    shapes: list[list[int]]


class Push(Body):
    version: int = Field(ge=0, lt=2**53)
    """Greater than the current one."""
    path: str | None = Field(None, min_length=1, max_length=4096)
    """A safetensors file or folder, or an adapter's folder, that the engines can read."""
    kind: Literal["full", "lora", "nccl"] = "full"
    mode: Literal["keep", "wait", "abort"] = "keep"
    """Calls in flight go on under the new weights, end first, or are cut."""
    model: str = Field("", max_length=200)
    """The policy; empty: the default one."""
    transfer: Sent | None = None
    """For nccl: what the trainer is about to send."""

    @model_validator(mode="after")
    def _has_weights(self) -> Self:
        if self.path is None and self.transfer is None:
            raise ValueError("a push needs a path, or what a trainer sends")
        return self


class Group(Body):
    """Where the trainer, rank 0 of `world_size`, waits for the engines, and how it will pack what it sends."""

    model: str = Field("", max_length=200)
    world_size: int = Field(ge=2)
    master_address: str = Field(max_length=253)
    master_port: int = Field(ge=1, le=65535)
    packed: bool = True
    packed_buffer_size_bytes: int | None = Field(None, ge=1)
    packed_num_buffers: int | None = Field(None, ge=1)


@router.post("")
async def push(services: Served, request: Request, body: Annotated[Push, Depends(body_of(Push))]) -> Response:
    if LINES in request.headers.get("accept", ""):
        return StreamingResponse(_lines(services, body), media_type=LINES)
    return json_response(await _push(services, body, unwatched))


@router.get("")
async def status(services: Served) -> Response:
    return json_response(await services.updater.status())


@router.get("/group")
async def plan(services: Served, model: str = "") -> Response:
    return json_response(await services.updater.plan_group(model))


@router.post("/group")
async def join(services: Served, body: Annotated[Group, Depends(body_of(Group))]) -> Response:
    nccl = body.model_dump(exclude={"model", "world_size"}, exclude_none=True)
    return json_response(await services.updater.join_group(body.model, body.world_size, nccl))


async def _push(services: Services, body: Push, watch: Watcher) -> dict[str, Any]:
    transfer = Transfer(**body.transfer.model_dump()) if body.transfer else None
    return await services.updater.push(
        body.version, body.path, body.kind, body.mode, policy=body.model, transfer=transfer, watch=watch
    )


async def _lines(services: Services, body: Push) -> AsyncIterator[bytes]:
    """Each step as a line of JSON; the last line is `{"result": ...}`, or `{"error": {code, message}, "status": ...}`."""
    events: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

    async def run() -> None:
        try:
            events.put_nowait({"result": await _push(services, body, events.put_nowait)})
        except VerbatimError as error:
            events.put_nowait(_last_line(error))
        except Exception:
            # The answer has begun: without a last line its reader would wait for ever.
            log.exception("a push of weights failed")
            events.put_nowait(_last_line(VerbatimError("the push failed; the log of the service says why")))

    running = asyncio.create_task(run())
    try:
        event: dict[str, Any] = {}
        while not event.keys() & {"result", "status"}:
            event = await events.get()
            yield msgspec.json.encode(event) + b"\n"
    finally:
        # The push itself goes on when the one who watches is gone.
        running.cancel()


def _last_line(error: VerbatimError) -> dict[str, Any]:
    return {"error": {"code": error.code, "message": error.message}, "status": error.status}
