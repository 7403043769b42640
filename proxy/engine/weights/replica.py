"""One replica's weight update: claim, check, pause, load, label, commit, resume; and what may be done with it when a step fails."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Literal

from proxy.engine.replica import Replica
from proxy.engine.weights.vllm import SETUP, TORN, Claimed, Loaded, StepRefused, Transfer, WeightApi
from proxy.errors import EngineFailed, StoreUnavailable, VerbatimError

Kind = Literal["full", "lora", "nccl"]
Mode = Literal["keep", "wait", "abort"]
Step = Literal["checking", "pausing", "paused", "loading", "loaded", "resumed"]


@dataclass(frozen=True, slots=True)
class Push:
    """`path` is what the engines read; for nccl, which reads none, a copy of the same weights for engines that come later, if
    there is one. `transfer` says what nccl sends."""

    version: int
    path: str | None
    kind: Kind = "full"
    mode: Mode = "keep"
    policy: str = ""
    transfer: Transfer | None = None


async def _at_once() -> None:
    """Nobody has to be waited for, nothing to be made current."""


@dataclass(frozen=True, slots=True)
class Guard:
    """What an update asks of whoever runs it. `check` raises when the push lock is lost; `together` returns when every replica
    that must load at the same time is ready to; `commit` makes the version current; `tell` hears of each step. `resumes`: nothing else
    has to be loaded before the replica may sample."""

    check: Callable[[], None]
    commit: Callable[[], Awaitable[None]] = _at_once
    together: Callable[[], Awaitable[None]] = _at_once
    tell: Callable[[Step], None] = lambda step: None
    resumes: bool = True


class ReplicaLeft(EngineFailed):
    """The update failed and the replica stays paused: its weights are not whole, not known or not committed."""


async def update_replica(api: WeightApi, replica: Replica, push: Push, guard: Guard) -> None:
    """Return when the replica runs on the new weights, or is paused with them, and says so; they are made current before any token
    of them is sampled.

    Raises ReplicaLeft, or another VerbatimError with the replica resumed on its old, whole weights.
    """
    if not replica.updatable:
        raise EngineFailed(f"the engine has no routes for weights; {SETUP}")
    guard.tell("checking")
    # An engine for adapters need not have the backend, which keeps the claim.
    async with claimed(api, required=push.kind != "lora"):
        before = await _prepare(api, replica, push)
        guard.check()
        try:
            guard.tell("pausing")
            await api.pause(_pause(push))
            guard.tell("paused")
            await guard.together()
            guard.check()
            guard.tell("loading")
            await _load(api, push, before)
            guard.tell("loaded")
        except VerbatimError as error:
            await _resume_intact(api, before, error, guard)
            guard.tell("resumed")
            raise
        await _finish(api, push, guard)


def _pause(push: Push) -> Mode:
    """No call may go on over another adapter: it names its adapter's folder, and vLLM reads that anew at every step, so it would
    bring the old one back."""
    return "abort" if push.kind == "lora" and push.mode == "keep" else push.mode


@asynccontextmanager
async def claimed(api: WeightApi, *, required: bool) -> AsyncIterator[None]:
    """The engine is this service's to change inside, and after it when it is left paused. Not `required`: also one that cannot
    keep a claim. Raises Claimed."""
    try:
        await api.claim()
    except StepRefused:
        if required:
            raise
    try:
        yield
    except ReplicaLeft:
        raise
    except VerbatimError:
        await api.release()
        raise
    await api.release()


async def _prepare(api: WeightApi, replica: Replica, push: Push) -> Loaded | str:
    """What is loaded now; of adapters, which no worker reports, the label. Raises while the replica is untouched and goes on serving."""
    if push.kind == "lora":
        if replica.adapter is None:
            raise EngineFailed(
                "the engine has no LoRA adapter; start vLLM with --enable-lora, --lora-modules NAME=PATH and "
                "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
            )
        return await api.label()
    before = await api.loaded()
    if push.transfer is not None:
        await api.check_transfer(push.transfer)
    else:
        await api.check(str(push.path))
    return before


async def _load(api: WeightApi, push: Push, before: Loaded | str) -> None:
    if push.transfer is not None:
        await api.load_transfer(push.transfer, push.version)
    elif isinstance(before, str):
        await _load_adapter(api, str(push.path), before)
    else:
        await api.load_full(str(push.path), push.version)


async def _load_adapter(api: WeightApi, path: str, label: str) -> None:
    # Should nobody hear how it ended, the next who looks must not take the new adapter for the old one.
    await api.set_label(label if label.startswith(TORN) else f"{TORN}-{label}")
    try:
        await api.load_adapter(path)
    except StepRefused:
        # vLLM reads an adapter before it replaces the old one, so a refusal leaves the old one in place.
        await api.set_label(label)
        raise


async def _resume_intact(api: WeightApi, before: Loaded | str, error: VerbatimError, guard: Guard) -> None:
    """Resume a replica whose old weights are provably whole. Raises ReplicaLeft where they are not, or may not serve."""
    if not guard.resumes:
        raise await _left(api, error.message) from error
    try:
        if isinstance(before, str):
            intact = await api.label() == before and not before.startswith(TORN)
        else:
            intact = before.whole and await api.loaded() == before
        if intact:
            await _check_still_ours(api, guard)
            await api.resume()
            return
    except (Claimed, StoreUnavailable) as failure:
        # The calls in flight are the other's to hold or to cut.
        raise ReplicaLeft(f"{error.message}; then {failure.message}") from error
    except EngineFailed as failure:
        raise await _left(api, f"{error.message}; then {failure.message}") from error
    raise await _left(api, error.message) from error


async def _check_still_ours(api: WeightApi, guard: Guard) -> None:
    """Raises Claimed or StoreUnavailable where another process is, or may be, in the middle of an update of its own."""
    with contextlib.suppress(StepRefused):
        if await api.claim():
            return
    guard.check()


async def _finish(api: WeightApi, push: Push, guard: Guard) -> None:
    try:
        guard.check()
        if push.kind == "lora":
            await api.set_label(push.version)
        else:
            await api.finish_full(push.version)
        await guard.commit()
        if not guard.resumes:
            return
        if push.kind == "lora":
            # Calls that came meanwhile may be queued in the engine, and name the old folder.
            await api.abort_all()
        guard.check()
        await api.resume()
        guard.tell("resumed")
    except VerbatimError as error:
        raise await _left(api, error.message) from error


async def _left(api: WeightApi, reason: str) -> ReplicaLeft:
    # Calls in flight on a replica that stays paused would wait for ever; cut, they end with what they have.
    with contextlib.suppress(EngineFailed):
        await api.abort_all()
    return ReplicaLeft(reason)
