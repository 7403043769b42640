"""WeightUpdater: new weights into every replica, and the guard that lets only replicas with known, current weights serve.

Version 0 is whatever the engines were started with, before any push. An engine without routes for weights keeps those, so it is
version 0 as long as nothing was pushed; after that it cannot follow and leaves the pool. An engine that restarts has lost what
was pushed: it comes back labelled "default" and is given the current checkpoint again before it serves. So no token carries a
version whose weights it was not sampled under, and none goes without.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast, get_args

from proxy.engine.pool import EnginePool
from proxy.engine.push_lock import PushLock
from proxy.engine.replica import Replica
from proxy.engine.replica_update import Kind, Mode, Push, ReplicaLeft, update_replica
from proxy.engine.weight_api import SETUP, Loaded, WeightApi
from proxy.errors import Conflict, EngineFailed, EngineUnavailable, RequestError, VerbatimError
from proxy.settings import Settings
from proxy.store.base import WeightState, WeightStore

REPAIR_SECONDS = 30.0
"""Pause between two attempts to give a replica the current weights."""


class WeightUpdater:
    def __init__(self, pool: EnginePool, weights: WeightStore, settings: Settings) -> None:
        self._pool = pool
        self._weights = weights
        self._settings = settings
        self._pushes: set[asyncio.Task[dict[str, Any]]] = set()
        self._updating: set[str] = set()
        self._repair_after: dict[str, tuple[float, str]] = {}
        pool.keeper = self

    async def push(self, version: int, path: str, kind: str = "full", mode: str = "keep") -> dict[str, Any]:
        """`{applied, version, kind, mode, seconds, replicas: {name: {ok, seconds, error?}}, error?}`.

        `applied` when at least one replica runs on the new weights; then the pool's version is `version` and replicas that
        failed serve no one until they are repaired. Otherwise nothing has changed and the push can be repeated. Goes on to
        its end even when the caller is cancelled. Raises RequestError, Conflict (version not greater than the current one, or
        another push running for too long), EngineUnavailable (no engine reached), StoreUnavailable.
        """
        push = self._checked(version, path, kind, mode)
        task = asyncio.create_task(self._push(push))
        self._pushes.add(task)
        task.add_done_callback(self._pushes.discard)
        return await asyncio.shield(task)

    async def stop(self) -> None:
        """Wait for a push under way: broken off it would leave its replicas paused."""
        await asyncio.gather(*self._pushes, return_exceptions=True)

    async def status(self) -> dict[str, Any]:
        """`{current: {version, path, kind, updated_at}, history: [newest first], updating, replicas: {name: {...}}}`."""
        return {
            "current": _as_wire(await self._weights.current()),
            "history": [_as_wire(state) for state in await self._weights.history()],
            "updating": bool(self._updating),
            "replicas": {
                replica.name: {
                    "url": replica.url,
                    "api": replica.api,
                    "healthy": replica.healthy,
                    "reason": replica.reason or None,
                    "weight_version": replica.weight_version,
                    "takes_weights": replica.updatable,
                }
                for replica in self._pool.replicas
            },
        }

    def _checked(self, version: int, path: str, kind: str, mode: str) -> Push:
        if kind not in get_args(Kind):
            raise RequestError(f"kind is {kind!r}, must be one of {', '.join(get_args(Kind))}", param="kind")
        if mode not in get_args(Mode):
            raise RequestError(f"mode is {mode!r}, must be one of {', '.join(get_args(Mode))}", param="mode")
        if version < 1:
            raise RequestError(f"version is {version}, must be 1 or more", param="version")
        if not Path(path).is_absolute():
            raise RequestError(f"path {path!r} must be absolute: the engines open it", param="path")
        if "\0" in path:
            raise RequestError("path holds a zero byte", param="path")
        roots = self._settings.weights_roots
        resolved = Path(path).resolve()
        if roots and not any(resolved.is_relative_to(root.resolve()) for root in roots):
            allowed = ", ".join(str(root) for root in roots)
            raise RequestError(f"path {path!r} is outside the folders weights may come from: {allowed}", param="path")
        if ".." in Path(path).parts:
            # After a link that only the engine's machine has, ".." is somewhere else than it seems here.
            raise RequestError(f"path {path!r} must lead straight down, without '..'", param="path")
        return Push(version, path, cast(Kind, kind), cast(Mode, mode))

    async def _push(self, push: Push) -> dict[str, Any]:
        async with PushLock(self._weights, self._settings.weights_timeout_seconds) as lock:
            current = await self._weights.current()
            if push.version <= current.version:
                raise Conflict(f"version {push.version} is not greater than the current {current.version}", param="version")
            replicas = [replica for replica in self._pool.replicas if replica.alive]
            if not replicas:
                raise EngineUnavailable(f"no engine can take the weights: {self._pool.ready()[1]}")
            return await self._push_to(replicas, push, lock)

    async def _push_to(self, replicas: Sequence[Replica], push: Push, lock: PushLock) -> dict[str, Any]:
        started = time.monotonic()
        commit = _Commit(self._weights, push)
        self._updating.update(replica.name for replica in replicas)
        try:
            with self._pool.hold():
                outcomes = await asyncio.gather(*(self._push_one(replica, push, lock, commit) for replica in replicas))
                self._settle_pool(replicas, outcomes, commit.done)
        finally:
            self._updating.clear()
        seconds, results = time.monotonic() - started, {}
        for replica, outcome in zip(replicas, outcomes, strict=True):
            error = {"error": outcome.error.message} if outcome.error else {}
            results[replica.name] = {"ok": outcome.error is None, "seconds": round(outcome.seconds, 4), **error}
        for replica in self._pool.replicas:
            results.setdefault(replica.name, {"ok": False, "seconds": 0.0, "error": replica.reason})
        answer: dict[str, Any] = {"applied": commit.done, "version": push.version, "kind": push.kind, "mode": push.mode}
        answer |= {"seconds": round(seconds, 4), "replicas": results}
        if not commit.done:
            answer["error"] = next(result["error"] for result in results.values() if "error" in result)
        return answer

    async def _push_one(self, replica: Replica, push: Push, lock: PushLock, commit: _Commit) -> _Outcome:
        started = time.monotonic()
        try:
            await update_replica(self._api(replica), replica, push, lock.check, commit)
        except VerbatimError as error:
            return _Outcome(time.monotonic() - started, error)
        replica.weight_version = push.version
        self._repair_after.pop(replica.name, None)
        self._pool.mark_serving(replica)
        return _Outcome(time.monotonic() - started, None)

    def _settle_pool(self, replicas: Sequence[Replica], outcomes: Sequence[_Outcome], applied: bool) -> None:
        for replica, outcome in zip(replicas, outcomes, strict=True):
            if outcome.error is not None and (applied or isinstance(outcome.error, ReplicaLeft)):
                self._pool.mark_failed(replica, f"new weights failed: {outcome.error.message}")

    async def admit(self, replica: Replica) -> None:
        """The pool's question on every visit: see `WeightKeeper.admit`. Puts right what a restart or a killed push left."""
        if replica.name in self._updating:
            return _stay(replica)
        current = await self._weights.current()
        if not replica.updatable:
            if current.version > 0:
                raise EngineFailed(f"weights {current.version} were pushed and it cannot take them; {SETUP}")
            replica.weight_version = 0
            return None
        api = self._api(replica)
        if await _runs_on(api, current.version):
            replica.weight_version = current.version
            return None
        try:
            async with PushLock(self._weights, 0.0) as lock:
                await self._settle(replica, api, lock)
        except Conflict:
            return _stay(replica)

    async def _settle(self, replica: Replica, api: WeightApi, lock: PushLock) -> None:
        """With the lock held nobody is pushing: bring the replica to the pool's current weights."""
        current, label, paused = await self._weights.current(), await api.label(), await api.paused()
        loaded = await _loaded_if_known(api)
        version = int(label) if label.isdecimal() else None
        whole = loaded is None or loaded.whole
        if version is None and current.version == 0 and (loaded is None or loaded.updates == 0):
            await api.set_label(0)
            version = 0
        if whole and version is not None and version > current.version:
            # The engine outlived the store, or someone updates it directly: its weights are newer, and versions only grow.
            path = loaded.path if loaded is not None and loaded.version == version else None
            current = WeightState(version, path, "full", time.time())
            await self._weights.advance(current)
        if whole and version == current.version and (loaded is None or (loaded.version or 0) <= version):
            if paused:
                await api.resume()
            replica.weight_version = version
            return
        await self._repair(replica, api, lock, current, label)

    async def _repair(self, replica: Replica, api: WeightApi, lock: PushLock, current: WeightState, label: str) -> None:
        """Load the current weights into a replica that holds others."""
        after, reason = self._repair_after.get(replica.name, (0.0, ""))
        if time.monotonic() < after:
            raise EngineFailed(reason)
        try:
            for state in await self._chain(current):
                if state.path is None:
                    raise EngineFailed(f"it holds weights {label!r}, not {current.version}, and no path to load those from")
                push = Push(state.version, state.path, cast(Kind, state.kind))
                await update_replica(api, replica, push, lock.check, _committed)
        except EngineFailed as error:
            reason = f"it lacks weights {current.version}, and loading them failed: {error.message}"
            self._repair_after[replica.name] = (time.monotonic() + REPAIR_SECONDS, reason)
            raise EngineFailed(reason) from error
        replica.weight_version = current.version

    async def _chain(self, current: WeightState) -> list[WeightState]:
        """What to load, in order, to arrive at `current`: an adapter needs the last full weights under it."""
        if current.kind == "full":
            return [current]
        full = [state for state in await self._weights.history() if state.kind == "full" and state.version > 0]
        return [*full[:1], current]

    def _api(self, replica: Replica) -> WeightApi:
        return WeightApi(self._pool.http, replica, self._settings.weights_timeout_seconds)


class _Outcome:
    __slots__ = ("error", "seconds")

    def __init__(self, seconds: float, error: VerbatimError | None) -> None:
        self.seconds = seconds
        self.error = error


class _Commit:
    """Makes the version current when the first replica holds it, once."""

    def __init__(self, weights: WeightStore, push: Push) -> None:
        self._weights = weights
        self._state = WeightState(push.version, push.path, push.kind, time.time())
        self._turn = asyncio.Lock()
        self.done = False

    async def __call__(self) -> None:
        async with self._turn:
            if not self.done:
                await self._weights.advance(self._state)
                self.done = True


async def _committed() -> None:
    """A repair loads what is current already."""


async def _runs_on(api: WeightApi, version: int) -> bool:
    try:
        return await api.label() == str(version) and not await api.paused()
    except EngineFailed:
        # A large checkpoint going in, pushed by another process, keeps the engine from answering: the lock tells.
        return False


async def _loaded_if_known(api: WeightApi) -> Loaded | None:
    try:
        return await api.loaded()
    except EngineFailed:
        return None


def _stay(replica: Replica) -> None:
    if not replica.healthy:
        raise EngineFailed("a weight update is running")


def _as_wire(state: WeightState) -> dict[str, Any]:
    return {"version": state.version, "path": state.path, "kind": state.kind, "updated_at": state.updated_at}
