"""One replica's weight update: claim, check, pause, load, label, commit, resume; and how it recovers when a step fails."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Literal

from proxy.engine.replica import Replica
from proxy.engine.weights.vllm import SETUP, Claimed, Loaded, StepRefused, Transfer, WeightApi
from proxy.errors import EngineFailed, StoreUnavailable, VerbatimError

Kind = Literal["full", "delta", "lora", "nccl"]
Mode = Literal["keep", "wait", "abort"]
Step = Literal["checking", "pausing", "paused", "loading", "loaded", "resumed"]


@dataclass(frozen=True, slots=True)
class Push:
    """`path` is what the engines read; for nccl, which reads none, an optional copy of the same weights for engines that join later.
    `transfer` describes what nccl sends. What the base of a delta is, its folder says."""

    version: int
    path: str | None
    kind: Kind = "full"
    mode: Mode = "keep"
    policy: str = ""
    transfer: Transfer | None = None


async def _do_nothing(root: str | None = None) -> None: ...


@dataclass(frozen=True, slots=True)
class Guard:
    """The hooks of an update. `check` raises once the push lock is lost; `agree` unless that root is the version's; `together` returns
    when every replica that must load at the same time is ready to; `commit` makes the version current, with its root; `tell` is called
    with each step."""

    check: Callable[[], None]
    agree: Callable[[str | None], None] = lambda root: None
    commit: Callable[[str | None], Awaitable[None]] = _do_nothing
    together: Callable[[], Awaitable[None]] = _do_nothing
    tell: Callable[[Step], None] = lambda step: None


class ReplicaLeft(EngineFailed):
    """The update failed and the replica stays paused: its weights are torn, unknown or not committed."""


async def update_replica(api: WeightApi, replica: Replica, push: Push, guard: Guard) -> None:
    """Returns when the replica holds the new weights, labelled, and samples. They are made current before any token is sampled under
    them.

    Raises ReplicaLeft, or another VerbatimError with the replica resumed on its old, whole weights.
    """
    if not replica.updatable:
        raise EngineFailed(f"the engine has no routes for weights; {SETUP}")
    guard.tell("checking")
    async with hold_claim(api, required=True):
        before, root = await _prepare(api, push)
        guard.check()
        guard.agree(root)
        try:
            guard.tell("pausing")
            await api.pause(push.mode)
            guard.tell("paused")
            await guard.together()
            guard.check()
            guard.tell("loading")
            await _load(api, push)
            guard.tell("loaded")
        except VerbatimError as error:
            await _resume_intact(api, before, error, guard)
            guard.tell("resumed")
            raise
        await _finish(api, push, guard, root)


@asynccontextmanager
async def hold_claim(api: WeightApi, *, required: bool) -> AsyncIterator[None]:
    """Inside, only this service may change the engine; the claim stays on an engine that is left paused. Unless `required`, an engine
    that cannot store a claim is accepted. Raises Claimed."""
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


async def _prepare(api: WeightApi, push: Push) -> tuple[Loaded, str | None]:
    """The loaded weights, and the root of the new ones. On failure the replica is untouched and goes on serving."""
    before = await api.read_loaded()
    if push.transfer is not None:
        await api.check_transfer(push.transfer)
        return before, None
    return before, await api.prepare(str(push.path), push.kind)


async def _load(api: WeightApi, push: Push) -> None:
    if push.transfer is not None:
        await api.load_transfer(push.transfer, push.version)
    else:
        await api.load_full(str(push.path), push.version)


async def _resume_intact(api: WeightApi, before: Loaded, error: VerbatimError, guard: Guard) -> None:
    """Resume a replica whose old weights are provably whole. Raises ReplicaLeft if they are not, or must not serve."""
    try:
        if before.whole and await api.read_loaded() == before:
            await _check_still_ours(api, guard)
            await api.resume()
            return
    except (Claimed, StoreUnavailable) as failure:
        # The other service that holds the engine decides about the calls in flight.
        raise ReplicaLeft(f"{error.message}; then {failure.message}") from error
    except EngineFailed as failure:
        raise await _abandon(api, f"{error.message}; then {failure.message}") from error
    raise await _abandon(api, error.message) from error


async def _check_still_ours(api: WeightApi, guard: Guard) -> None:
    """Raises Claimed or StoreUnavailable if another process is, or may be, updating the engine."""
    with contextlib.suppress(StepRefused):
        if await api.claim():
            return
    guard.check()


async def _finish(api: WeightApi, push: Push, guard: Guard, root: str | None) -> None:
    try:
        guard.check()
        await api.finish_full(push.version)
        await guard.commit(root)
        guard.check()
        await api.resume()
        guard.tell("resumed")
    except VerbatimError as error:
        raise await _abandon(api, error.message) from error


async def _abandon(api: WeightApi, reason: str) -> ReplicaLeft:
    # Calls in flight on a paused replica would wait for ever; aborted, they end with what they have.
    with contextlib.suppress(EngineFailed):
        await api.abort_all()
    return ReplicaLeft(reason)
