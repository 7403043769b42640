"""One replica's weight update: pause, load, label, commit, resume; and what may be done with it when a step fails."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal

from proxy.engine.replica import Replica
from proxy.engine.weight_api import SETUP, Loaded, StepRefused, WeightApi
from proxy.errors import EngineFailed, StoreUnavailable, VerbatimError

Kind = Literal["full", "lora"]
Mode = Literal["keep", "wait", "abort"]


@dataclass(frozen=True, slots=True)
class Push:
    version: int
    path: str
    kind: Kind = "full"
    mode: Mode = "keep"


class ReplicaLeft(EngineFailed):
    """The update failed and the replica stays paused: its weights are not whole, not known or not committed."""


async def update_replica(
    api: WeightApi, replica: Replica, push: Push, check: Callable[[], None], commit: Callable[[], Awaitable[None]]
) -> None:
    """Return when the replica runs on the new weights and says so.

    `check` raises when the push lock is lost; `commit` makes the version the pool's current one, before any token of it is
    sampled. Raises ReplicaLeft, or another VerbatimError with the replica resumed on its old, whole weights.
    """
    before = await _prepare(api, replica, push)
    check()
    try:
        await api.pause(push.mode)
        check()
        await _load(api, push)
    except VerbatimError as error:
        await _resume_intact(api, before, error)
        raise
    await _finish(api, push, check, commit)


async def _prepare(api: WeightApi, replica: Replica, push: Push) -> Loaded | None:
    """What is loaded now. Raises while the replica is untouched and goes on serving."""
    if not replica.updatable:
        raise EngineFailed(f"the engine has no routes for weights; {SETUP}")
    if push.kind == "lora":
        if replica.adapter is None:
            raise EngineFailed(
                "the engine has no LoRA adapter; start vLLM with --enable-lora, --lora-modules NAME=PATH and "
                "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
            )
        return None
    before = await api.loaded()
    await api.check(push.path)
    return before


async def _load(api: WeightApi, push: Push) -> None:
    if push.kind == "lora":
        await api.load_adapter(push.path)
    else:
        await api.load_full(push.path, push.version)


async def _resume_intact(api: WeightApi, before: Loaded | None, error: VerbatimError) -> None:
    """Resume a replica whose old weights are provably whole. Raises ReplicaLeft where they are not."""
    try:
        if before is None:
            # vLLM reads an adapter before it replaces the old one, so a refusal leaves the old one in place.
            intact = isinstance(error, (StepRefused, StoreUnavailable))
        else:
            intact = before.whole and await api.loaded() == before
        if intact:
            await api.resume()
            return
    except EngineFailed as failure:
        raise await _left(api, f"{error.message}; then {failure.message}") from error
    raise await _left(api, error.message) from error


async def _finish(api: WeightApi, push: Push, check: Callable[[], None], commit: Callable[[], Awaitable[None]]) -> None:
    try:
        check()
        if push.kind == "lora":
            await api.set_label(push.version)
        else:
            await api.finish_full(push.version)
        await commit()
        await api.resume()
    except VerbatimError as error:
        raise await _left(api, error.message) from error


async def _left(api: WeightApi, reason: str) -> ReplicaLeft:
    # Calls in flight on a replica that stays paused would wait for ever; cut, they end with what they have.
    with contextlib.suppress(EngineFailed):
        await api.abort_all()
    return ReplicaLeft(reason)
