"""WeightKeeper: admits only replicas with known, current weights, and repairs what a restart or a killed push left behind.

Version 0 is whatever the engines were started with. An engine without weight endpoints keeps that, so it is version 0 until
something is pushed; after that it cannot follow and leaves the pool. An engine that restarts has lost what was pushed: it comes
back labelled "default" and gets the current checkpoint again before it serves. So every token has a version, and was sampled under
its weights.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable, Iterator
from types import TracebackType
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from proxy.engine.apis.contact import EngineKinds
from proxy.engine.apis.routers import TOPIC as ROUTER
from proxy.engine.replica import Replica, Served
from proxy.engine.weights.adapters import SETUP_ADAPTERS, find_foreign, find_served, load_version, switch
from proxy.engine.weights.replica import Guard, Kind, Push, hold_claim, update_replica
from proxy.engine.weights.vllm import SETUP, TORN, Claim, Loaded, StepRefused, WeightApi
from proxy.errors import Conflict, EngineFailed, StoreUnavailable
from proxy.settings import Settings
from proxy.store.service import WeightState, WeightStore

log = logging.getLogger(__name__)

LOCK_SECONDS = 30.0
"""How long the push lock outlives a process that died; then another one takes over and repairs what it left. It is renewed six times in
that time, so a store that fails over in seconds costs no push."""
TURN_SECONDS = 1.0
"""How long a replica waits while others of its policy are repaired: several may start at once."""
PAUSED_SECONDS = 5.0
"""How long a silent engine may take to say that it is paused: one that is at work says so between two steps."""
Purpose = Literal["push", "check"]
REPAIR_SECONDS = 30.0
"""Pause between two attempts to load the current weights into a replica."""


class WeightKeeper:
    """`updating` are the replicas this process is pushing into."""

    def __init__(self, kinds: EngineKinds, weights: WeightStore, settings: Settings, metrics: WeightMetrics) -> None:
        self.updating: set[Replica] = set()
        self._kinds = kinds
        self._weights = weights
        self._settings = settings
        self._metrics = metrics
        self._repair_after: dict[Replica, tuple[float, str]] = {}
        self._identity = ""

    def api(self, replica: Replica, identity: str = "", fence: int = 0) -> WeightApi:
        """The replica's weight endpoints; with an identity, for changing what it holds."""
        # The claim is renewed before the load, the longest of the steps.
        seconds = 2 * self._settings.weights_timeout_seconds
        claim = Claim(identity, fence, seconds) if identity else None
        return self._kinds.of(replica).weights(replica, self._settings.weights_timeout_seconds, claim)

    def lock(self, policy: str, wait_seconds: float, purpose: Purpose = "check") -> PushLock:
        return PushLock(self._weights, policy, LOCK_SECONDS, wait_seconds, purpose)

    def forget_failure(self, replica: Replica) -> None:
        """The replica has whole, current weights, whatever failed before."""
        self._repair_after.pop(replica, None)

    async def is_updating(self, replica: Replica) -> bool:
        """Whether this or another service changes the replica's weights now, as far as can be told."""
        if not self.updating.isdisjoint(replica.engine):
            return True
        if not replica.updatable:
            return False
        with contextlib.suppress(StoreUnavailable):
            if (await self._weights.read_owner(replica.policy)).startswith("push "):
                return True
        try:
            async with asyncio.timeout(PAUSED_SECONDS):
                return bool(await self.api(replica).is_paused())
        except (TimeoutError, EngineFailed):
            return False

    async def admit(self, replica: Replica) -> None:
        """See `EnginePool.admit_weights`."""
        if replica in self.updating:
            return _check_serving(replica)
        current = await self._weights.current(replica.policy)
        if replica.adapter is not None:
            return await self._admit_adapter(replica, current)
        if not replica.updatable:
            if current.version > 0:
                way_out = f"it {replica.notes[ROUTER]}" if replica.router else SETUP
                raise EngineFailed(f"weights {current.version} were pushed and it cannot take them; {way_out}")
            replica.weight_version = 0
            return None
        if await _samples_under(self.api(replica), current.version, replica):
            replica.weight_version = current.version
            return None
        try:
            async with self.lock(replica.policy, TURN_SECONDS) as lock:
                await self._settle(replica, lock)
        except Conflict:
            return _check_serving(replica)

    async def refuse_router(self, replica: Replica) -> None:
        """Raises EngineFailed if several engines answer at the replica's URL: the steps of an update would go to different ones."""
        host = replica.host
        await self._kinds.look_behind(host)
        if host.router:
            raise EngineFailed(f"it {host.notes[ROUTER]}")

    async def _settle(self, replica: Replica, lock: PushLock) -> None:
        """Bring the replica to the policy's current weights. With the lock held, no process on this store is pushing."""
        await self.refuse_router(replica)
        api = self.api(replica, await self._weights.identity(), lock.fence)
        # If it is paused, that may be by a service on another store, whose claim then refuses this one. And a process that was
        # suspended during a push must not load into the replica when it resumes.
        async with hold_claim(api, required=False):
            await self._bring_up(replica, api, lock)

    async def _bring_up(self, replica: Replica, api: WeightApi, lock: PushLock) -> None:
        policy, loaded = replica.policy, await _read_loaded(api)
        current, label, paused = await self._weights.current(policy), await api.read_label(), await _may_be_paused(api, replica)
        version, torn = int(label) if label.isdecimal() else None, label.startswith(TORN)
        if version is None and current.version == 0 and not torn and (loaded is None or loaded.updates == 0):
            await api.set_label(0)
            version = 0
        whole = not torn and (loaded is None or (loaded.whole and loaded.version in (None, version)))
        if whole and version is not None and version > current.version:
            # The engine outlived the store, or someone updated it directly: its weights are newer, and versions only grow.
            path = None if loaded is None or loaded.version is None else loaded.path
            kind, root = ("full", None) if loaded is None else (loaded.kind, loaded.root)
            current = WeightState(version, path, kind, time.time(), root=root)
            await self._weights.advance(current, policy, lock.fence)
        if whole and version == current.version:
            if paused:
                lock.check()
                await api.resume()
                self._metrics.count_takeover(policy)
            replica.weight_version = version
            return
        await self._repair(replica, current, label, lambda: self._load_full(api, replica, current, lock))

    async def _load_full(self, api: WeightApi, replica: Replica, current: WeightState, lock: PushLock) -> None:
        # Of a version sent over NCCL, the path is a whole checkpoint; of a delta, it leads to its anchor.
        kind: Kind = "delta" if current.kind == "delta" else "full"
        push = Push(current.version, current.path, kind, policy=replica.policy)

        def agree(root: str | None) -> None:
            if current.root not in (None, root):
                raise EngineFailed(f"{current.path} holds other weights by now than were pushed as version {current.version}")

        await update_replica(api, replica, push, Guard(lock.check, agree))
        replica.weight_version = current.version

    async def _repair(self, replica: Replica, current: WeightState, held: str, load: Callable[[], Awaitable[None]]) -> None:
        """Load the current weights into a replica that holds others."""
        after, reason = self._repair_after.get(replica, (0.0, ""))
        if time.monotonic() < after:
            raise EngineFailed(reason)
        try:
            if current.path is None:
                raise EngineFailed(
                    f"it holds weights {held!r}, not {current.version}, and the current ones have no path to load from"
                )
            await load()
        except EngineFailed as error:
            reason = f"it lacks weights {current.version}, and loading them failed: {error.message}"
            self._repair_after[replica] = (time.monotonic() + REPAIR_SECONDS, reason)
            self._metrics.count_repair(replica.policy, "failed")
            raise type(error)(reason) from error
        log.info("engine %s held weights %s and now holds %d", replica.title, held, current.version)
        self._metrics.count_repair(replica.policy, "done")

    async def _admit_adapter(self, replica: Replica, current: WeightState) -> None:
        """The engine's own list of its adapters tells which versions it holds."""
        self._identity = self._identity or await self._weights.identity()
        served = find_served(replica, current)
        if served is None or find_foreign(replica, current, self._identity):
            try:
                async with self.lock(replica.policy, TURN_SECONDS) as lock:
                    served, current = await self._settle_adapter(replica, lock)
            except Conflict:
                return _check_serving(replica)
        switch(replica, served, cut=current.mode == "abort")
        return None

    async def _settle_adapter(self, replica: Replica, lock: PushLock) -> tuple[Served, WeightState]:
        """What the replica serves as the policy's current version, which is loaded if its engine lacks it. As in `_settle`, no process on
        this store is pushing."""
        api, policy = self.api(replica), replica.policy
        current, replica.host.cards = await self._weights.current(policy), await api.list_adapters()
        if (newer := find_foreign(replica, current, self._identity)) is not None:
            current = WeightState(newer.version, newer.root, "lora", time.time())
            await self._weights.advance(current, policy, lock.fence)
        if (served := find_served(replica, current)) is not None:
            return served, current
        if current.version == 0:
            raise EngineFailed(f"the adapter {replica.adapter!r} that it was started with is not loaded any more")

        async def load() -> None:
            await self.refuse_router(replica)
            if not replica.updatable:
                raise EngineFailed(f"it cannot load versions of its adapters; {SETUP_ADAPTERS}")
            lock.check()
            await load_version(api, replica, current, lock.fence, self._identity)

        await self._repair(replica, current, ", ".join(replica.host.cards), load)
        served = find_served(replica, current)
        assert served is not None, "it was just loaded"
        return served, current


async def _samples_under(api: WeightApi, version: int, replica: Replica) -> bool:
    try:
        return await api.read_label() == str(version) and not await _may_be_paused(api, replica)
    except EngineFailed:
        # While another process pushes a large checkpoint the engine does not answer; the lock tells.
        return False


async def _may_be_paused(api: WeightApi, replica: Replica) -> bool:
    """Whether the engine is paused. If it does not say, one that does not serve may be, by a push before it was first seen or when it
    was ejected; resuming a running engine changes nothing."""
    paused = await api.is_paused()
    return not replica.healthy if paused is None else paused


async def _read_loaded(api: WeightApi) -> Loaded | None:
    """None if the engine cannot say."""
    try:
        return await api.read_loaded()
    except StepRefused:
        return None


def _check_serving(replica: Replica) -> None:
    if not replica.healthy:
        raise EngineFailed("a weight update is running")


RENEWALS = 6
"""Renewals of the lock per lease."""
RETRY_SECONDS = 0.1


class PushLock:
    """A policy's push lock, held and renewed, so that two pushes never interleave, in whatever processes.

    Every owner gets a fencing token greater than all before. The store makes a version current only under the last token, and an
    engine loads nothing under an older one: a process that was suspended until another took over can do neither when it resumes.

    Entering raises Conflict if another owner held the lock for `wait_seconds`. The lock outlives a dead process by `lease_seconds`.
    """

    def __init__(
        self, weights: WeightStore, policy: str, lease_seconds: float, wait_seconds: float, purpose: Purpose = "check"
    ) -> None:
        self.fence = 0
        self._weights = weights
        self._policy = policy
        self._lease_seconds = lease_seconds
        self._wait_seconds = wait_seconds
        self._owner = f"{purpose} {socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:8]}"
        self._held_until = 0.0
        self._released = False
        self._renewal: asyncio.Task[None] | None = None

    async def __aenter__(self) -> PushLock:
        deadline = _now() + self._wait_seconds
        while not await self._take():
            if _now() >= deadline:
                raise Conflict("another weight push is running")
            await asyncio.sleep(RETRY_SECONDS)
        self._renewal = asyncio.create_task(self._renew())
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._released = True
        if self._renewal is not None:
            self._renewal.cancel()
            await asyncio.wait([self._renewal])
        # If the store is away, the lock expires.
        with contextlib.suppress(StoreUnavailable):
            await self._weights.unlock(self._owner, self._policy)

    def check(self) -> None:
        """Raises StoreUnavailable if the lock was lost, because it was not renewed within its lease."""
        if _now() >= self._held_until:
            raise StoreUnavailable("the push lock could not be renewed in the store")

    async def _take(self) -> bool:
        sent_at = _now()
        fence = await self._weights.lock(self._owner, self._lease_seconds, self._policy, self.fence)
        if fence:
            self.fence, self._held_until = fence, sent_at + self._lease_seconds
        return bool(fence)

    async def _renew(self) -> None:
        # Checks a flag too: before Python 3.12 a command to Redis can swallow a cancellation.
        while not self._released:
            await asyncio.sleep(self._lease_seconds / RENEWALS)
            with contextlib.suppress(StoreUnavailable):
                if not await self._take():
                    self._held_until = 0.0
                    return


def _now() -> float:
    return asyncio.get_running_loop().time()


_SECONDS = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600)


class WeightVersions(Collector):
    """Reads the replicas at every scrape, since they come and go."""

    def __init__(self, replicas: Callable[[], Iterable[Replica]]) -> None:
        self._replicas = replicas

    def collect(self) -> Iterator[Metric]:
        versions = GaugeMetricFamily(
            "verbatim_weight_version", "The version that a replica holds; absent while unknown.", labels=["policy", "replica"]
        )
        for replica in self._replicas():
            if replica.weight_version is not None:
                versions.add_metric([replica.policy, replica.name], replica.weight_version)
        yield versions


class WeightMetrics:
    """Metrics of weight updates. The settings bound every label."""

    def __init__(self, registry: CollectorRegistry, replicas: Callable[[], Iterable[Replica]]) -> None:
        registry.register(WeightVersions(replicas))
        self._pushes = Counter(
            "verbatim_weight_pushes",
            "Pushes by this process; refused: its version was taken, or no engine could take it.",
            ("policy", "mode", "outcome"),
            registry=registry,
        )
        self._seconds = Histogram(
            "verbatim_weight_push_seconds",
            "A push from start to end, not counting the wait for another one.",
            ("policy", "mode"),
            registry=registry,
            buckets=_SECONDS,
        )
        self._paused = Counter(
            "verbatim_weight_paused_seconds",
            "Time that a replica was paused for pushes.",
            ("policy", "replica", "mode"),
            registry=registry,
        )
        self._repairs = Counter(
            "verbatim_weight_repairs",
            "Replicas given the current weights because they held others.",
            ("policy", "outcome"),
            registry=registry,
        )
        self._takeovers = Counter(
            "verbatim_weight_takeovers",
            "Replicas resumed that another process had left paused.",
            ("policy",),
            registry=registry,
        )

    def count_push(self, policy: str, mode: str, outcome: str, seconds: float) -> None:
        self._pushes.labels(policy, mode, outcome).inc()
        if outcome != "refused":
            self._seconds.labels(policy, mode).observe(seconds)

    def add_pause(self, policy: str, replica: str, mode: str, seconds: float) -> None:
        self._paused.labels(policy, replica, mode).inc(seconds)

    def count_repair(self, policy: str, outcome: str) -> None:
        self._repairs.labels(policy, outcome).inc()

    def count_takeover(self, policy: str) -> None:
        self._takeovers.labels(policy).inc()
