"""The NCCL group of a trainer and its engines: the trainer is rank 0, the workers of all replicas follow, replica after replica.

A broadcast needs every member: before anything is sent, `check_group` makes sure that those that will be told to receive are all
there are. Checked against vLLM 0.32 (`vllm/distributed/weight_transfer/nccl_engine.py`).
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from proxy.engine.weight_api import Transfer, WeightApi
from proxy.errors import Conflict, EngineUnavailable


async def plan(apis: Mapping[str, WeightApi]) -> dict[str, Any]:
    """`{world_size, replicas: {name: {rank_offset, workers}}}` for these engines, in this order. Raises EngineUnavailable."""
    if not apis:
        raise EngineUnavailable("no engine can take the weights")
    workers = dict(zip(apis, await asyncio.gather(*(api.world_size() for api in apis.values())), strict=True))
    places, offset = {}, 1
    for name, count in workers.items():
        places[name] = {"rank_offset": offset, "workers": count}
        offset += count
    return {"world_size": offset, "replicas": places}


async def join(apis: Mapping[str, WeightApi], world_size: int, nccl: Mapping[str, Any]) -> dict[str, Any]:
    """`{group, world_size, replicas}` once every engine has joined; the trainer, as rank 0, must be joining meanwhile.

    Raises Conflict when the engines are not those that `world_size` was planned for, EngineFailed when one cannot join."""
    planned = await plan(apis)
    if planned["world_size"] != world_size:
        raise Conflict(f"the group has {planned['world_size']} members now, not {world_size}: ask again", param="world_size")
    group = uuid.uuid4().hex
    places = {
        name: {**nccl, "world_size": world_size, "rank_offset": place["rank_offset"]}
        for name, place in planned["replicas"].items()
    }
    await asyncio.gather(*(apis[name].join(group, place) for name, place in places.items()))
    return {"group": group, **planned}


async def check_group(apis: Sequence[WeightApi], transfer: Transfer) -> None:
    """Raises Conflict when these engines are not all of the group's members: the trainer has to connect again."""
    counts = await asyncio.gather(*(api.world_size() for api in apis))
    if 1 + sum(counts) != transfer.world_size:
        raise Conflict(
            f"the engines have {sum(counts)} workers now, the trainer's group {transfer.world_size - 1}: connect again",
            param="transfer",
        )
