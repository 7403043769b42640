"""EnginePool: the replicas, and which of them serve.

Every replica is visited regularly: a visit finds the engine at start, notices its death and its return, and checks that its weights are
known and current. A replica serves if it answers and its weights are admitted; otherwise `reason` says why not. One task follows
the membership: new replicas are visited, those that are gone drain, which means that they get no new call and their calls in flight end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager

import aiohttp

from proxy.engine.apis.contact import EngineKinds
from proxy.engine.apis.renderer import LocalRenderer
from proxy.engine.pool.adapters import explain_conflict, follow_adapters
from proxy.engine.pool.membership import Membership, ReplicaAddress, Resolver, replica_at, resolve_with_system
from proxy.engine.pool.policies import DEFAULT, catalogue, find_policy, find_smallest, is_frozen
from proxy.engine.pool.seats import Gate, Seats, rank_replicas
from proxy.engine.pool.stalls import Stalls
from proxy.engine.pool.standing import Standing, Watches
from proxy.engine.replica import Health, Replica
from proxy.engine.wire.connections import open_channels, open_session
from proxy.engine.wire.http import EngineHttp
from proxy.errors import EngineUnavailable, StoreUnavailable, VerbatimError
from proxy.limits import USUAL, ProcessLimits
from proxy.metrics import Metrics
from proxy.settings import Settings
from proxy.store.service import EngineStore

log = logging.getLogger(__name__)

_RELEASE_TIMEOUT = aiohttp.ClientTimeout(total=5.0)


class EnginePool:
    """`store` holds the engines added at run time. `kinds` and `http` are how its replicas are spoken to.

    `admit_weights`, once set, returns when a replica's weights are the policy's current ones and `weight_version` says so; it raises
    VerbatimError with the reason the replica must not serve. `is_updating` says whether anybody changes a replica's weights now."""

    def __init__(
        self,
        settings: Settings,
        store: EngineStore | None = None,
        resolver: Resolver = resolve_with_system,
        metrics: Metrics | None = None,
        renderer: LocalRenderer | None = None,
        limits: ProcessLimits = USUAL,
    ) -> None:
        self._settings = settings
        self._limits = limits
        self._watches = Watches(self._visit)
        self._following: asyncio.Task[None] | None = None
        self._gate = Gate()
        self._stopping = False
        self._leaving: list[Replica] = []
        self._releasing: set[asyncio.Task[None]] = set()
        self._looking = asyncio.Lock()
        self.admit_weights: Callable[[Replica], Awaitable[None]] | None = None
        self.is_updating: Callable[[Replica], Awaitable[bool]] | None = None
        self.membership = Membership(settings.engine, store, resolver, settings.policy_models)
        self.replicas: list[Replica] = [self._make(member) for member in self.membership.members()]
        self.metrics = metrics or Metrics()
        self.seats = Seats(self.of, settings.queue_seconds, self.metrics)
        self._standing = Standing(self.of, self.seats, self.metrics)
        seconds = settings.engine_stall_seconds
        self.http = EngineHttp(open_channels(settings, limits), self.fail_call, self._watches.wake, aside_seconds=seconds)
        local = renderer or LocalRenderer(settings.renderer, settings.renderer_options)
        self.kinds = EngineKinds(self.http, local)
        self._stalls = Stalls(
            seconds,
            lambda: [*self.replicas, *self.draining],
            self._standing,
            self.kinds.sample_token,
            self.http,
            self._may_be_updating,
            self._watches.wake,
        )
        self._watching: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin visiting. Waits at most `engine_connect_seconds` for a first answer of every replica; never fails."""
        self.http.open(open_session(self._settings, self._limits), open_session(self._settings, self._limits))
        for replica in self.replicas:
            self._watches.begin(replica)
        self._watching = asyncio.create_task(self._stalls.watch())
        looked = asyncio.Event()
        self._following = asyncio.create_task(self._follow(looked))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._settings.engine_connect_seconds):
                await looked.wait()
                await self._watches.wait_for_first_visits()

    async def stop(self) -> None:
        self._stopping = True
        await asyncio.gather(*self._releasing, return_exceptions=True)
        tasks = [task for task in (self._following, self._watching) if task is not None]
        for task in tasks:
            task.cancel()
        await self._watches.stop()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.http.close()

    def of(self, policy: str) -> list[Replica]:
        """The replicas of one policy, serving or not."""
        return [replica for replica in self.replicas if replica.policy == policy]

    def serving(self, policy: str) -> list[Replica]:
        """The policy's replicas that serve, at least one. Raises EngineUnavailable with every replica's reason, and StoreUnavailable if
        one of them would serve but for the store."""
        serving = [replica for replica in self.of(policy) if replica.healthy]
        if not serving:
            if problem := next((replica.store_problem for replica in self.of(policy) if replica.store_problem), ""):
                raise StoreUnavailable(problem)
            raise EngineUnavailable(f"no engine can take the call: {self._reasons(self.of(policy))}")
        return serving

    def pick(self, session_id: str, model: str = "") -> Replica:
        """The replica that serves this session, whether it has room or not. Raises EngineUnavailable with every replica's reason,
        NotFound for an unknown model."""
        return rank_replicas(session_id, self.serving(self.find_policy(model)))[0]

    @property
    def window(self) -> int | None:
        """The largest window of any replica, in tokens; None if one does not say."""
        largest: int | None = None
        for replica in self.replicas:
            if replica.max_model_len is None:
                return None
            largest = max(largest or 0, replica.max_model_len)
        return largest

    @property
    def policy_names(self) -> set[str]:
        """The policies that engines belong to, whether one of their replicas is known or not, and those of known adapters."""
        return {spec.policy for spec in self.membership.specs} | {
            replica.policy for replica in self.replicas if replica.adapter
        }

    @property
    def _hosts(self) -> list[Replica]:
        """The replicas of the engines' base models."""
        return [replica for replica in self.replicas if replica.base is None]

    @property
    def draining(self) -> list[Replica]:
        """Replicas that left the pool with calls in flight."""
        self._leaving = [replica for replica in self._leaving if replica.in_flight]
        return list(self._leaving)

    def find_policy(self, model: str) -> str:
        """The policy of calls for `model`. Raises as the function `find_policy`."""
        strict = self._settings.strict_models
        return find_policy(model, self.replicas, self.policy_names, self.membership.declared, strict=strict)

    def is_frozen(self, replica: Replica, model: str) -> bool:
        """Whether what the replica samples for `model` is never trained."""
        return is_frozen(replica, model, self._settings.frozen_models)

    def ready(self) -> tuple[bool, str]:
        """Whether a replica serves, and if none does, why."""
        if any(replica.healthy for replica in self.replicas):
            return True, ""
        return False, self._reasons(self.replicas)

    def release(self, session_id: str) -> None:
        """Tell routers in front of engines that the session is over, if `release_path` says how. Nobody waits for it."""
        if not self._settings.engine_router.release_path or self._stopping:
            return
        for replica in self._hosts:
            if replica.healthy:
                task = asyncio.create_task(self._release(replica, session_id))
                self._releasing.add(task)
                task.add_done_callback(self._releasing.discard)

    async def _release(self, replica: Replica, session_id: str) -> None:
        router = self._settings.engine_router
        url, headers = replica.url + router.release_path, {router.session_header: session_id} if router.session_header else {}
        try:
            asking = self.http.session.post(url, params={"session_id": session_id}, headers=headers, timeout=_RELEASE_TIMEOUT)
            async with asking as answer:
                answer.raise_for_status()
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            # Routers forget a session that is idle.
            log.info(
                "engine %s was not told that session %s is over: %s", replica.name, session_id, error or "no answer in time"
            )

    def may_wait(self, seconds: float) -> bool:
        """Whether a call may wait so long in all."""
        return not self._settings.queue_seconds or seconds <= self._settings.queue_seconds

    def catalogue(self) -> Mapping[str, int | None]:
        """The models harnesses may ask for now, with the window of each in tokens: see `find_window`."""
        serving = [replica for replica in self.replicas if replica.healthy]
        policies = {name: self.find_policy(name) for name in catalogue(serving)}
        return {name: find_smallest(each for each in serving if each.policy == policy) for name, policy in policies.items()}

    def find_window(self, model: str) -> int | None:
        """The smallest window, in tokens, of any replica that may serve a call for `model`; None if none of them reports one. Raises as
        `pick`."""
        return find_smallest(self.serving(self.find_policy(model)))

    def mark_failed(self, replica: Replica, reason: str, store_problem: str = "") -> None:
        """Send no more calls there, and visit it at once. `store_problem`: see `Standing.set_down`."""
        self._standing.set_down(replica, reason, store_problem)
        self._watches.wake(replica.host)

    def mark_serving(self, replica: Replica) -> None:
        """Its weights were just made current: send calls there again if it is alive."""
        self._standing.admit_updated(replica)

    def fail_call(self, replica: Replica, reason: str, refused: bool) -> None:
        """A call there broke (see `Standing.fail_call`): visit it at once."""
        self._standing.fail_call(replica, reason, refused=refused)
        self._watches.wake(replica.host)

    async def wait_for_gate(self, policy: str = DEFAULT) -> None:
        """Returns when no weight update holds the policy's calls back."""
        await self._gate.wait(policy)

    def hold(self, policy: str | None = None) -> AbstractContextManager[None]:
        """Inside, new calls of one policy or (None) all wait in `wait_for_gate`; calls in flight go on."""
        return self._gate.hold(policy)

    async def look(self) -> None:
        """Bring the replicas in line with the membership as it is now."""
        async with self._looking:
            await self.membership.refresh()
            self._reconcile({member.name: member for member in self.membership.members()})

    async def _follow(self, looked: asyncio.Event) -> None:
        while not self._stopping:
            try:
                await self.look()
            except Exception:
                log.exception("cannot find out which engines there are")
            looked.set()
            await asyncio.sleep(self._limits.engine_watch_seconds)

    def _reconcile(self, wanted: dict[str, ReplicaAddress]) -> None:
        def stays(replica: Replica) -> bool:
            member = wanted.get(replica.name)
            return member is not None and (member.url, member.policy) == (replica.url, replica.policy)

        gone = [replica for replica in self._hosts if not stays(replica)]
        kept = [replica for replica in self._hosts if stays(replica)]
        names = {replica.name for replica in kept}
        new = [self._make(member) for name, member in wanted.items() if name not in names]
        self.replicas = [each for replica in kept for each in replica.engine] + new
        for replica in gone:
            self._retire(replica)
        for replica in new:
            log.info("engine %s joins (%s)", replica.name, replica.source)
            self._watches.begin(replica)

    def _retire(self, replica: Replica) -> None:
        in_flight = sum(each.in_flight for each in replica.engine)
        log.info("engine %s leaves; %d calls in flight end there", replica.name, in_flight)
        for each in replica.engine:
            each.draining = True
        self._standing.set_down(replica, "it left the pool")
        self._leaving += replica.engine
        self._watches.end(replica)

    def _make(self, member: ReplicaAddress) -> Replica:
        replica = replica_at(member.url)
        replica.policy, replica.source = member.policy, member.source
        replica.max_calls, replica.health = self._settings.engine_max_calls, Health()
        return replica

    async def _visit(self, replica: Replica) -> None:
        try:
            logprob_mode = self._settings.engine_logprob_modes.get(replica.policy, "")
            await self.kinds.contact(replica, self._settings.engine_api, logprob_mode)
        except EngineUnavailable as error:
            self._standing.fail_probe(replica, error)
            return
        except Exception:
            # Raised here, it would end the replica's visits for good.
            log.exception("engine %s: the probe failed", replica.name)
            self._standing.fail_probe(replica, EngineUnavailable("the probe failed; the log says why"))
            return
        self._standing.pass_probe(replica)
        if replica.stalled:
            # What asks the engine behind the API server would not come back.
            return
        if conflict := explain_conflict(replica):
            self._standing.set_down(replica, conflict)
        else:
            await self._admit(replica)
        if replica.draining:
            return
        for adapter in follow_adapters(replica, self.replicas, self.membership):
            log.info("engine %s has the adapter %s, policy %s", replica.name, adapter.adapter, adapter.policy)
            self.replicas.append(adapter)
        for adapter in replica.adapters:
            if replica.healthy and adapter.listed:
                await self._admit(adapter)
            else:
                gone = f"the engine no longer has the adapter {adapter.adapter!r}"
                self._standing.set_down(adapter, replica.reason if adapter.listed else gone, replica.store_problem)

    async def _admit(self, replica: Replica) -> None:
        """It serves if its weights are known and current."""
        try:
            if self.admit_weights is not None:
                await self.admit_weights(replica)
        except StoreUnavailable as error:
            self._standing.leave(replica, error.message)
        except VerbatimError as error:
            self._standing.set_down(replica, error.message)
        except Exception:
            log.exception("engine %s: the check of its weights failed", replica.name)
            self._standing.set_down(replica, "the check of its weights failed; the log says why")
        else:
            if replica.sample.missing:
                self._standing.set_down(replica, replica.sample.missing)
            else:
                self._standing.admit(replica)

    async def _may_be_updating(self, replica: Replica) -> bool:
        if any(not self._gate.is_open(each.policy) for each in replica.engine):
            return True
        return self.is_updating is not None and await self.is_updating(replica)

    def _reasons(self, replicas: Sequence[Replica]) -> str:
        if replicas:
            return "; ".join(f"{replica.name}: {replica.reason}" for replica in replicas)
        watched = [spec for spec in self.membership.specs if spec.is_watched]
        return f"no address of {', '.join(spec.url for spec in watched)} is known yet" if watched else "no engine is configured"
