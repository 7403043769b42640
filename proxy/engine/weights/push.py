"""WeightUpdater: pushes new weights into every replica of a policy; pushes of one policy never interleave."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast, get_args

from prometheus_client import CollectorRegistry

from proxy.engine.pool.pool import EnginePool
from proxy.engine.replica import Replica
from proxy.engine.weights.adapters import SETUP_ADAPTERS, find_served, load_version, switch, unload_old
from proxy.engine.weights.keeper import PushLock, WeightKeeper, WeightMetrics
from proxy.engine.weights.replica import Guard, Kind, Mode, Push, ReplicaLeft, Step, update_replica
from proxy.engine.weights.vllm import Transfer, WeightApi
from proxy.errors import Conflict, EngineFailed, EngineUnavailable, NotFound, RequestError, StoreUnavailable, VerbatimError
from proxy.settings import Settings
from proxy.store.service import WeightState, WeightStore

log = logging.getLogger(__name__)


Watcher = Callable[[dict[str, Any]], None]
"""Gets `{replica, step}` at each step of a replica, `{replica, step: "failed", error}`, and `{step: "receiving"}` when a trainer that
sends its weights itself is to begin."""


def ignore_event(event: dict[str, Any]) -> None: ...


class WeightUpdater:
    def __init__(
        self, pool: EnginePool, weights: WeightStore, settings: Settings, metrics: WeightMetrics | None = None
    ) -> None:
        self._pool = pool
        self._weights = weights
        self._settings = settings
        self._metrics = metrics or WeightMetrics(CollectorRegistry(), lambda: pool.replicas)
        self._pushes: set[asyncio.Task[dict[str, Any]]] = set()
        self._keeper = WeightKeeper(pool.kinds, weights, settings, self._metrics)
        pool.admit_weights, pool.is_updating = self._keeper.admit, self._keeper.is_updating

    async def push(
        self,
        version: int,
        path: str | None,
        kind: str = "full",
        mode: str = "keep",
        *,
        policy: str = "",
        transfer: Transfer | None = None,
        watch: Watcher = ignore_event,
    ) -> dict[str, Any]:
        """`{applied, version, kind, mode, seconds, replicas: {name: {ok, seconds, paused_seconds, error?}}, error?}`.

        `applied`: at least one replica runs on the new weights; then the policy's version is `version`, and replicas that failed
        do not serve until they are repaired. Otherwise nothing has changed and the push can be repeated. The push completes even if the
        caller is cancelled. Raises RequestError, NotFound (a policy without replicas), Conflict (a frozen model, a version not greater
        than the current one, or another push running for too long), EngineUnavailable (no engine reached), StoreUnavailable (nothing was
        begun), EngineFailed (the store was lost halfway; `status` tells once it is back).
        """
        push = check_push(self._settings, version, path, kind, mode, policy, transfer)
        self._check_known(policy)
        self._check_kind(push)
        if frozen := self._find_frozen(policy):
            raise Conflict(f"model {frozen!r} is frozen: its weights never change", param="model")
        task = asyncio.create_task(self._push(push, watch))
        self._pushes.add(task)
        task.add_done_callback(self._pushes.discard)
        return await asyncio.shield(task)

    async def plan_group(self, policy: str = "") -> dict[str, Any]:
        """See `plan_group`."""
        return await plan_group(self._apis(policy))

    async def join_group(self, policy: str, world_size: int, nccl: Mapping[str, Any]) -> dict[str, Any]:
        """See `join_group`. No push runs meanwhile."""
        self._check_known(policy)
        async with self._keeper.lock(policy, self._settings.weights_timeout_seconds):
            for replica in self._pool.of(policy):
                if replica.alive:
                    await self._keeper.refuse_router(replica)
            return await join_group(self._apis(policy), world_size, nccl)

    def _check_known(self, policy: str) -> None:
        """Raises NotFound for a policy without replicas, EngineUnavailable where it may be an adapter of an engine that was not reached."""
        if any(replica.listed for replica in self._pool.of(policy)) or not policy:
            return
        if unmet := [replica.name for replica in self._pool.replicas if not replica.met]:
            raise EngineUnavailable(f"there is no model {policy!r} yet; not reached: {', '.join(unmet)}")
        raise NotFound(f"there is no model {policy!r}; {self._describe_models()}", param="model")

    def _describe_models(self) -> str:
        listed = [replica for replica in self._pool.replicas if replica.listed]
        adapters = sorted({replica.policy for replica in listed if replica.adapter})
        others = sorted({replica.policy for replica in listed if not replica.adapter})
        named = ", ".join(repr(policy) if policy else "the default one ('')" for policy in others)
        return f"base models: {named or 'none'}; adapters: {', '.join(map(repr, adapters)) or 'none'}"

    def _check_kind(self, push: Push) -> None:
        """Raises RequestError for an adapter's weights where there is a base model, and the other way round."""
        replicas = self._pool.of(push.policy)
        if push.kind == "lora" and not any(replica.adapter for replica in replicas):
            found = self._describe_models()
            hint = "" if any(replica.adapter for replica in self._pool.replicas) else f"; {SETUP_ADAPTERS}"
            raise RequestError(f"kind lora needs the model of an adapter, not {push.policy!r}; {found}{hint}", param="model")
        if push.kind != "lora" and any(replica.adapter for replica in replicas):
            raise RequestError(
                f"the model {push.policy!r} is a LoRA adapter: it takes kind lora, not {push.kind}", param="kind"
            )

    def _apis(self, policy: str) -> dict[str, WeightApi]:
        self._check_known(policy)
        replicas = [replica for replica in self._pool.of(policy) if replica.alive]
        if any(replica.adapter for replica in replicas):
            raise RequestError(f"the model {policy!r} is a LoRA adapter, which is pushed by path", param="model")
        return {replica.name: self._keeper.api(replica) for replica in replicas}

    async def stop(self) -> None:
        """Wait for running pushes: interrupted, they would leave their replicas paused."""
        await asyncio.gather(*self._pushes, return_exceptions=True)

    async def status(self) -> dict[str, Any]:
        """`{current: {version, path, kind, root, updated_at}, history: [newest first], updating, frozen, replicas: {name: {...}}}` of the
        default policy, and under `models` the same for each other one."""
        others = dict.fromkeys(replica.policy for replica in self._pool.replicas if replica.policy)
        return {**await self._policy_status(""), "models": {policy: await self._policy_status(policy) for policy in others}}

    async def _policy_status(self, policy: str) -> dict[str, Any]:
        replicas = self._pool.of(policy)
        return {
            "current": _state_as_wire(await self._weights.current(policy)),
            "history": [_state_as_wire(state) for state in await self._weights.history(policy)],
            "updating": any(replica in self._keeper.updating for replica in replicas),
            "frozen": self._find_frozen(policy) is not None,
            "replicas": {replica.name: _replica_as_wire(replica) for replica in replicas},
        }

    def _find_frozen(self, policy: str) -> str | None:
        """The name under which the policy is frozen, its own or one its engines serve; None if it is not."""
        names = [policy, *(model for replica in self._pool.of(policy) for model in replica.models)]
        return next((name for name in names if name in self._settings.frozen_models), None)

    async def _push(self, push: Push, watch: Watcher) -> dict[str, Any]:
        async with self._keeper.lock(push.policy, self._settings.weights_timeout_seconds, "push") as lock:
            started = time.monotonic()
            try:
                replicas = await self._find_replicas(push)
            except VerbatimError:
                self._metrics.count_push(push.policy, push.mode, "refused", time.monotonic() - started)
                raise
            self._keeper.updating |= {*replicas}
            try:
                return await self._push_to(replicas, push, lock, watch)
            finally:
                self._keeper.updating -= {*replicas}

    async def _find_replicas(self, push: Push) -> list[Replica]:
        """The replicas to push into. Raises Conflict for a version that is not new, EngineUnavailable if there are none."""
        current = await self._weights.current(push.policy)
        if push.version <= current.version:
            raise Conflict(f"version {push.version} is not greater than the current {current.version}", param="version")
        replicas = [replica for replica in self._pool.of(push.policy) if replica.alive and replica.listed]
        if not replicas:
            reasons = "; ".join(f"{replica.name}: {replica.reason}" for replica in self._pool.of(push.policy))
            raise EngineUnavailable(f"no engine can take the weights: {reasons or 'no engine is configured'}")
        if push.transfer is not None:
            await check_group([self._keeper.api(replica) for replica in replicas], push.transfer)
        return replicas

    async def _push_to(self, replicas: Sequence[Replica], push: Push, lock: PushLock, watch: Watcher) -> dict[str, Any]:
        started = time.monotonic()
        commit = Commit(self._weights, push, lock.fence)
        identity = await self._weights.identity()
        meeting = Meeting([replica.name for replica in replicas], watch) if push.transfer else None
        with self._hold(replicas):
            outcomes = await asyncio.gather(
                *(self._push_one(replica, push, lock, commit, identity, meeting, watch) for replica in replicas)
            )
            try:
                await commit.settle()
            except StoreUnavailable as error:
                # Not StoreUnavailable, which would say that nothing was begun and the push may be repeated.
                raise EngineFailed(f"it is not known whether version {push.version} is current: {error.message}") from error
            finally:
                self._settle_pool(replicas, outcomes, commit.done)
        answer = self._answer(push, outcomes, commit.done, time.monotonic() - started)
        self._count(push, outcomes, answer)
        return answer

    @contextmanager
    def _hold(self, replicas: Sequence[Replica]) -> Iterator[None]:
        """Inside, new calls wait of every policy whose engines pause: adapters stand on base weights, and are loaded beside calls."""
        pausing = {each.policy for replica in replicas if not replica.adapter for each in replica.engine}
        with ExitStack() as held:
            for policy in pausing:
                held.enter_context(self._pool.hold(policy))
            yield

    async def _push_one(
        self,
        replica: Replica,
        push: Push,
        lock: PushLock,
        commit: Commit,
        identity: str,
        meeting: Meeting | None,
        watch: Watcher,
    ) -> ReplicaPush:
        outcome = ReplicaPush(replica.name, watch)
        guard = Guard(lock.check, commit.agree, commit=commit, tell=outcome.tell)
        if meeting is not None:
            guard = replace(guard, together=lambda: meeting.arrive(replica.name))
        try:
            await self._keeper.refuse_router(replica)
            api = self._keeper.api(replica, identity, lock.fence)
            if replica.adapter is not None:
                await self._push_adapter(api, replica, push, guard, lock.fence, identity)
            else:
                await update_replica(api, replica, push, guard)
        except Exception as error:
            if meeting is not None:
                meeting.leave(replica.name)
            outcome.end(_as_replica_error(error, replica))
            return outcome
        outcome.end()
        replica.weight_version = push.version
        self._keeper.forget_failure(replica)
        self._pool.mark_serving(replica)
        return outcome

    async def _push_adapter(
        self, api: WeightApi, replica: Replica, push: Push, guard: Guard, fence: int, identity: str
    ) -> None:
        """Returns when new calls for the adapter get the new version. Raises VerbatimError; then they get the old one."""
        if not replica.updatable:
            raise EngineFailed(f"the engine cannot load versions of its adapters; {SETUP_ADAPTERS}")
        state, before = WeightState(push.version, push.path, push.kind), replica.served
        guard.check()
        guard.tell("loading")
        await load_version(api, replica, state, fence, identity)
        guard.tell("loaded")
        guard.check()
        await guard.commit(None)
        served = find_served(replica, state)
        assert served is not None, "it was just loaded"
        switch(replica, served, cut=push.mode == "abort")
        await unload_old(api, replica, before, identity)

    def _settle_pool(self, replicas: Sequence[Replica], outcomes: Sequence[ReplicaPush], applied: bool) -> None:
        for replica, outcome in zip(replicas, outcomes, strict=True):
            if outcome.error is not None and (applied or isinstance(outcome.error, ReplicaLeft)):
                cause = outcome.error.__cause__
                problem = cause.message if isinstance(cause, StoreUnavailable) else ""
                self._pool.mark_failed(replica, f"new weights failed: {outcome.error.message}", problem)

    def _answer(self, push: Push, outcomes: Sequence[ReplicaPush], applied: bool, seconds: float) -> dict[str, Any]:
        results = {outcome.name: outcome.as_wire() for outcome in outcomes}
        for replica in self._pool.of(push.policy):
            results.setdefault(replica.name, {"ok": False, "seconds": 0.0, "paused_seconds": 0.0, "error": replica.reason})
        answer: dict[str, Any] = {"applied": applied, "version": push.version, "kind": push.kind, "mode": push.mode}
        answer |= {"seconds": round(seconds, 4), "replicas": results}
        if not applied:
            answer["error"] = next(result["error"] for result in results.values() if "error" in result)
        return answer

    def _count(self, push: Push, outcomes: Sequence[ReplicaPush], answer: dict[str, Any]) -> None:
        whole = all(result["ok"] for result in answer["replicas"].values())
        outcome = "failed" if not answer["applied"] else "applied" if whole else "partial"
        self._metrics.count_push(push.policy, push.mode, outcome, answer["seconds"])
        for replica in outcomes:
            self._metrics.add_pause(push.policy, replica.name, push.mode, replica.paused_seconds)


def _as_replica_error(error: Exception, replica: Replica) -> VerbatimError:
    """An unexpected error fails only this replica: raised, it would end the push, and its lock, while others still load."""
    if isinstance(error, VerbatimError):
        return error
    log.error("engine %s: an unexpected error while loading new weights", replica.name, exc_info=error)
    return ReplicaLeft(f"{type(error).__name__}: {error}")


def _replica_as_wire(replica: Replica) -> dict[str, Any]:
    return {
        "url": replica.url,
        "api": replica.api,
        "healthy": replica.healthy,
        "reason": replica.reason or None,
        "weight_version": replica.weight_version,
        "takes_weights": replica.updatable,
    }


def _state_as_wire(state: WeightState) -> dict[str, Any]:
    told = {"version": state.version, "path": state.path, "kind": state.kind, "root": state.root}
    return {**told, "updated_at": state.updated_at}


def check_push(
    settings: Settings, version: int, path: str | None, kind: str, mode: str, policy: str, transfer: Transfer | None
) -> Push:
    """The push, if it is allowed. Raises RequestError."""
    if kind not in get_args(Kind):
        raise RequestError(f"kind is {kind!r}, must be one of {', '.join(get_args(Kind))}", param="kind")
    if mode not in get_args(Mode):
        raise RequestError(f"mode is {mode!r}, must be one of {', '.join(get_args(Mode))}", param="mode")
    if version < 1:
        raise RequestError(f"version is {version}, must be 1 or more", param="version")
    if (kind == "nccl") != (transfer is not None):
        raise RequestError("a transfer belongs to kind nccl, and kind nccl to a transfer", param="transfer")
    if path is not None:
        _check_path(path, settings.weights_roots)
    elif kind != "nccl":
        raise RequestError(f"kind {kind} needs a path", param="path")
    return Push(version, path, cast(Kind, kind), cast(Mode, mode), policy, transfer)


def _check_path(path: str, roots: list[Path]) -> None:
    if not Path(path).is_absolute():
        raise RequestError(f"path {path!r} must be absolute: the engines open it", param="path")
    if "\0" in path:
        raise RequestError("path holds a zero byte", param="path")
    resolved = Path(path).resolve()
    if roots and not any(resolved.is_relative_to(root.resolve()) for root in roots):
        allowed = ", ".join(str(root) for root in roots)
        raise RequestError(f"path {path!r} is outside the folders weights may come from: {allowed}", param="path")
    if ".." in Path(path).parts:
        # Behind a symlink that only the engine's machine has, ".." leads elsewhere than it seems here.
        raise RequestError(f"path {path!r} must lead straight down, without '..'", param="path")


@dataclass(slots=True)
class ReplicaPush:
    """One replica's part of a push: `error` is None if it runs on the new weights. It sampled nothing for `paused_seconds`."""

    name: str
    watch: Watcher
    started: float = field(default_factory=time.monotonic)
    seconds: float = 0.0
    paused_seconds: float = 0.0
    error: VerbatimError | None = None
    paused_at: float | None = None

    def tell(self, step: Step) -> None:
        now = time.monotonic()
        if step == "paused":
            self.paused_at = now
        elif step == "resumed" and self.paused_at is not None:
            self.paused_seconds, self.paused_at = now - self.paused_at, None
        self.watch({"replica": self.name, "step": step})

    def end(self, error: VerbatimError | None = None) -> None:
        now = time.monotonic()
        self.seconds, self.error = now - self.started, error
        if self.paused_at is not None:
            self.paused_seconds = now - self.paused_at
        done = {"step": "done"} if error is None else {"step": "failed", "error": error.message}
        self.watch({"replica": self.name, **done})

    def as_wire(self) -> dict[str, Any]:
        times = {"seconds": round(self.seconds, 4), "paused_seconds": round(self.paused_seconds, 4)}
        return {"ok": self.error is None, **times, **({"error": self.error.message} if self.error else {})}


class Commit:
    """Makes the version current once, when the first replica holds it."""

    def __init__(self, weights: WeightStore, push: Push, fence: int) -> None:
        self._weights = weights
        self._policy = push.policy
        self._state = WeightState(push.version, push.path, push.kind, time.time(), push.mode)
        self._fence = fence
        self._turn = asyncio.Lock()
        self._asked = False
        self._agreed: list[str | None] = []
        self.done = False

    def agree(self, root: str | None) -> None:
        """Raises EngineFailed if a replica before has read other weights: a path may be another folder on each machine."""
        self._agreed.append(root)
        if root != self._agreed[0]:
            raise EngineFailed(f"{self._state.path} holds other weights for this replica than for another one")

    async def __call__(self, root: str | None) -> None:
        async with self._turn:
            if not self.done:
                self._state = replace(self._state, root=root)
                self._asked = True
                await self._weights.advance(self._state, self._policy, self._fence)
                self.done = True

    async def settle(self) -> None:
        """After a lost answer of the store, find out whether the version is current, and make it current if a replica has it. Raises
        StoreUnavailable or Conflict if that fails."""
        if self._asked and not self.done:
            if await self._weights.current(self._policy) == self._state:
                self.done = True
            else:
                await self(self._state.root)


class Meeting:
    """Where replicas that must load at the same time wait for each other: a missing one would stall the others in the middle of the
    transfer. A replica that drops out calls `leave`."""

    def __init__(self, names: Sequence[str], watch: Watcher) -> None:
        self._missing = set(names)
        self._lost = ""
        self._watch = watch
        self._over = asyncio.Event()

    async def arrive(self, name: str) -> None:
        """Raises EngineFailed if one drops out."""
        self._missing.discard(name)
        if not self._missing and not self._over.is_set():
            self._over.set()
            self._watch({"step": "receiving"})
        await self._over.wait()
        if self._lost:
            raise EngineFailed(f"nothing was sent because {self._lost} cannot take part")

    def leave(self, name: str) -> None:
        if not self._over.is_set():
            self._lost = name
            self._over.set()


async def plan_group(apis: Mapping[str, WeightApi]) -> dict[str, Any]:
    """The NCCL group of a trainer, as rank 0, and these engines' workers, replica after replica:
    `{world_size, replicas: {name: {rank_offset, workers}}}`.

    Raises EngineUnavailable. Source: vLLM 0.32, vllm/distributed/weight_transfer/nccl_engine.py."""
    if not apis:
        raise EngineUnavailable("no engine can take the weights")
    workers = dict(zip(apis, await asyncio.gather(*(api.world_size() for api in apis.values())), strict=True))
    places, offset = {}, 1
    for name, count in workers.items():
        places[name] = {"rank_offset": offset, "workers": count}
        offset += count
    return {"world_size": offset, "replicas": places}


async def join_group(apis: Mapping[str, WeightApi], world_size: int, nccl: Mapping[str, Any]) -> dict[str, Any]:
    """`{group, world_size, replicas}` once every engine has joined; the trainer must be joining meanwhile.

    Raises Conflict if the engines are not those that `world_size` was planned for, EngineFailed if one cannot join."""
    planned = await plan_group(apis)
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
    """Raises Conflict unless these engines are all members of the group: a broadcast needs every member, so the trainer has to
    connect again."""
    counts = await asyncio.gather(*(api.world_size() for api in apis))
    if 1 + sum(counts) != transfer.world_size:
        raise Conflict(
            f"the engines have {sum(counts)} workers now, the trainer's group {transfer.world_size - 1}: connect again",
            param="transfer",
        )
