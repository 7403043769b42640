"""Weights: push a version into the engines, and see what each of them holds. For the trainer."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Response
from pydantic import Field

from proxy.api.access import Served, trainer_only
from proxy.api.answers import json_response
from proxy.api.bodies import Body, body_of

router = APIRouter(prefix="/weights", dependencies=[Depends(trainer_only)])


class Push(Body):
    version: int = Field(ge=0, lt=2**53)
    path: str = Field(min_length=1, max_length=4096)
    kind: Literal["full", "lora"] = "full"
    mode: Literal["keep", "wait", "abort"] = "keep"


@router.post("")
async def push(services: Served, body: Annotated[Push, Depends(body_of(Push))]) -> Response:
    return json_response(await services.updater.push(body.version, body.path, body.kind, body.mode))


@router.get("")
async def status(services: Served) -> Response:
    return json_response(await services.updater.status())
