"""WeightUpdater: new weights into every replica of a policy, as one push, which no other push of that policy interleaves."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry

from proxy.engine import nccl_group
from proxy.engine.pool import EnginePool
from proxy.engine.push_course import Commit, Meeting, Outcome, Watcher, unwatched
from proxy.engine.push_lock import PushLock
from proxy.engine.push_request import checked
from proxy.engine.replica import Replica
from proxy.engine.replica_update import Guard, Push, ReplicaLeft, update_replica
from proxy.engine.weight_api import TORN, Transfer, WeightApi
from proxy.engine.weight_keeper import WeightKeeper
from proxy.engine.weight_metrics import WeightMetrics
from proxy.errors import Conflict, EngineFailed, EngineUnavailable, NotFound, StoreUnavailable, VerbatimError
from proxy.settings import Settings
from proxy.store.weight_store import WeightState, WeightStore

log = logging.getLogger(__name__)


class WeightUpdater:
    def __init__(
        self, pool: EnginePool, weights: WeightStore, settings: Settings, metrics: WeightMetrics | None = None
    ) -> None:
        self._pool = pool
        self._weights = weights
        self._settings = settings
        self._metrics = metrics or WeightMetrics(CollectorRegistry(), lambda: pool.replicas)
        self._pushes: set[asyncio.Task[dict[str, Any]]] = set()
        self._keeper = WeightKeeper(pool, weights, settings, self._metrics)
        pool.keeper = self._keeper

    async def push(
        self,
        version: int,
        path: str | None,
        kind: str = "full",
        mode: str = "keep",
        *,
        policy: str = "",
        transfer: Transfer | None = None,
        watch: Watcher = unwatched,
    ) -> dict[str, Any]:
        """`{applied, version, kind, mode, seconds, replicas: {name: {ok, seconds, paused_seconds, error?}}, error?}`.

        `applied` when at least one replica runs on the new weights; then the policy's version is `version` and replicas that
        failed serve no one until they are repaired. Otherwise nothing has changed and the push can be repeated. Goes on to
        its end even when the caller is cancelled. Raises RequestError, NotFound (a policy without replicas), Conflict (a frozen
        model, a version not greater than the current one, or another push running for too long), EngineUnavailable (no engine
        reached), StoreUnavailable (nothing was begun), EngineFailed (the store was lost in the middle; `status` tells once it is back).
        """
        push = checked(self._settings, version, path, kind, mode, policy, transfer)
        self._check_known(policy)
        if frozen := self._frozen(policy):
            raise Conflict(f"model {frozen!r} is frozen: its weights never change", param="model")
        task = asyncio.create_task(self._push(push, watch))
        self._pushes.add(task)
        task.add_done_callback(self._pushes.discard)
        return await asyncio.shield(task)

    async def plan_group(self, policy: str = "") -> dict[str, Any]:
        """What an NCCL group of a trainer and the policy's engines would be: see `nccl_group.plan`."""
        return await nccl_group.plan(self._apis(policy))

    async def join_group(self, policy: str, world_size: int, nccl: Mapping[str, Any]) -> dict[str, Any]:
        """Have the policy's engines join the trainer's NCCL group: see `nccl_group.join`. No push runs meanwhile."""
        self._check_known(policy)
        async with self._keeper.lock(policy, self._settings.weights_timeout_seconds):
            return await nccl_group.join(self._apis(policy), world_size, nccl)

    def _check_known(self, policy: str) -> None:
        """Raises NotFound for a policy without replicas."""
        if policy and not self._pool.of(policy):
            raise NotFound(f"there is no model {policy!r}", param="model")

    def _apis(self, policy: str) -> dict[str, WeightApi]:
        self._check_known(policy)
        return {replica.name: self._keeper.api(replica) for replica in self._pool.of(policy) if replica.alive}

    async def stop(self) -> None:
        """Wait for a push under way: broken off it would leave its replicas paused."""
        await asyncio.gather(*self._pushes, return_exceptions=True)

    async def status(self) -> dict[str, Any]:
        """`{current: {version, path, kind, updated_at}, history: [newest first], updating, frozen, replicas: {name: {...}}}` of the
        default policy, and under `models` the same of each other one."""
        others = dict.fromkeys(replica.policy for replica in self._pool.replicas if replica.policy)
        return {**await self._line(""), "models": {policy: await self._line(policy) for policy in others}}

    async def _line(self, policy: str) -> dict[str, Any]:
        replicas = self._pool.of(policy)
        return {
            "current": _as_wire(await self._weights.current(policy)),
            "history": [_as_wire(state) for state in await self._weights.history(policy)],
            "updating": any(replica.name in self._keeper.updating for replica in replicas),
            "frozen": self._frozen(policy) is not None,
            "replicas": {replica.name: _standing(replica) for replica in replicas},
        }

    def _frozen(self, policy: str) -> str | None:
        """The name under which the policy is frozen, its own or one that its engines serve; None: it is not."""
        names = [policy, *(model for replica in self._pool.of(policy) for model in replica.models)]
        return next((name for name in names if name in self._settings.frozen_models), None)

    async def _push(self, push: Push, watch: Watcher) -> dict[str, Any]:
        async with self._keeper.lock(push.policy, self._settings.weights_timeout_seconds) as lock:
            started = time.monotonic()
            try:
                replicas = await self._ready(push)
            except VerbatimError:
                self._metrics.pushed(push.policy, push.mode, "refused", time.monotonic() - started)
                raise
            names = {replica.name for replica in replicas}
            self._keeper.updating |= names
            try:
                return await self._push_to(replicas, push, lock, watch)
            finally:
                self._keeper.updating -= names

    async def _ready(self, push: Push) -> list[Replica]:
        """The replicas to push into. Raises Conflict for a version that is taken, EngineUnavailable when there are none."""
        current = await self._weights.current(push.policy)
        if push.version <= current.version:
            raise Conflict(f"version {push.version} is not greater than the current {current.version}", param="version")
        replicas = [replica for replica in self._pool.of(push.policy) if replica.alive]
        if not replicas:
            reasons = "; ".join(f"{replica.name}: {replica.reason}" for replica in self._pool.of(push.policy))
            raise EngineUnavailable(f"no engine can take the weights: {reasons or 'no engine is configured'}")
        if push.transfer is not None:
            await nccl_group.check_group([self._keeper.api(replica) for replica in replicas], push.transfer)
        return replicas

    async def _push_to(self, replicas: Sequence[Replica], push: Push, lock: PushLock, watch: Watcher) -> dict[str, Any]:
        started = time.monotonic()
        commit = Commit(self._weights, push, lock.fence)
        identity = await self._weights.identity()
        meeting = Meeting([replica.name for replica in replicas], watch) if push.transfer else None
        with self._pool.hold(push.policy):
            outcomes = await asyncio.gather(
                *(self._push_one(replica, push, lock, commit, identity, meeting, watch) for replica in replicas)
            )
            try:
                await commit.settle()
            except StoreUnavailable as error:
                # Not as the store's own error, which would say that nothing was begun and the push may be sent again.
                raise EngineFailed(f"it is not known whether version {push.version} is current: {error.message}") from error
            finally:
                self._settle_pool(replicas, outcomes, commit.done)
        answer = self._answer(push, outcomes, commit.done, time.monotonic() - started)
        self._count(push, outcomes, answer)
        return answer

    async def _push_one(
        self,
        replica: Replica,
        push: Push,
        lock: PushLock,
        commit: Commit,
        identity: str,
        meeting: Meeting | None,
        watch: Watcher,
    ) -> Outcome:
        outcome = Outcome(replica.name, watch)
        guard = Guard(lock.check, commit, tell=outcome.tell)
        if meeting is not None:
            guard = Guard(lock.check, commit, lambda: meeting.arrive(replica.name), outcome.tell)
        try:
            api = self._keeper.api(replica, identity, lock.fence)
            await self._check_other_half(api, replica, push)
            await update_replica(api, replica, push, guard)
        except Exception as error:
            if meeting is not None:
                meeting.leave(replica.name)
            outcome.end(_foreseen(error, replica))
            return outcome
        outcome.end()
        replica.weight_version = push.version
        self._keeper.repaired(replica)
        self._pool.mark_serving(replica)
        return outcome

    async def _check_other_half(self, api: WeightApi, replica: Replica, push: Push) -> None:
        """An adapter and the weights under it are pushed apart: raise EngineFailed where the half that stays is not current."""
        if replica.adapter is None:
            return
        current, label = (await self._weights.current(push.policy)).version, await api.label()
        if label != str(current) and not (push.kind == "lora" and label == f"{TORN}-{current}"):
            raise EngineFailed(f"it holds weights {label!r}, not {current}, and is to be given those first")

    def _settle_pool(self, replicas: Sequence[Replica], outcomes: Sequence[Outcome], applied: bool) -> None:
        for replica, outcome in zip(replicas, outcomes, strict=True):
            if outcome.error is not None and (applied or isinstance(outcome.error, ReplicaLeft)):
                self._pool.mark_failed(replica, f"new weights failed: {outcome.error.message}")

    def _answer(self, push: Push, outcomes: Sequence[Outcome], applied: bool, seconds: float) -> dict[str, Any]:
        results = {outcome.name: outcome.as_wire() for outcome in outcomes}
        for replica in self._pool.of(push.policy):
            results.setdefault(replica.name, {"ok": False, "seconds": 0.0, "paused_seconds": 0.0, "error": replica.reason})
        answer: dict[str, Any] = {"applied": applied, "version": push.version, "kind": push.kind, "mode": push.mode}
        answer |= {"seconds": round(seconds, 4), "replicas": results}
        if not applied:
            answer["error"] = next(result["error"] for result in results.values() if "error" in result)
        return answer

    def _count(self, push: Push, outcomes: Sequence[Outcome], answer: dict[str, Any]) -> None:
        whole = all(result["ok"] for result in answer["replicas"].values())
        outcome = "failed" if not answer["applied"] else "applied" if whole else "partial"
        self._metrics.pushed(push.policy, push.mode, outcome, answer["seconds"])
        for replica in outcomes:
            self._metrics.paused(push.policy, replica.name, push.mode, replica.paused_seconds)


def _foreseen(error: Exception, replica: Replica) -> VerbatimError:
    """Any other error is this replica's end alone: raised, it would end the push, and its lock, while others still load."""
    if isinstance(error, VerbatimError):
        return error
    log.error("engine %s: new weights broke on an error that nobody foresaw", replica.name, exc_info=error)
    return ReplicaLeft(f"{type(error).__name__}: {error}")


def _standing(replica: Replica) -> dict[str, Any]:
    return {
        "url": replica.url,
        "api": replica.api,
        "healthy": replica.healthy,
        "reason": replica.reason or None,
        "weight_version": replica.weight_version,
        "takes_weights": replica.updatable,
    }


def _as_wire(state: WeightState) -> dict[str, Any]:
    return {"version": state.version, "path": state.path, "kind": state.kind, "updated_at": state.updated_at}
