"""EnginePool: the replicas, the visits that tell who of them serves, and the gate that holds calls while weights change.

Every replica is watched (`watches`). A visit finds the engine at start, notices its death and its return, and asks the keeper
(`weight_keeper`) whether the replica's weights are known and current. A replica serves when it answers and the keeper lets it;
`reason` says why it does not (`standing`). One task follows the membership: a replica that comes is watched, one that is gone
drains, which means that it gets no new call and those in flight end. A session stays on one replica as long as that serves and
has room (`routing`, `seats`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import aiohttp

from proxy.engine import policies
from proxy.engine.channels import Channels
from proxy.engine.connections import open_channels, open_connections
from proxy.engine.gate import Gate
from proxy.engine.health import Health, HealthRule
from proxy.engine.membership import Member, Membership, Resolver, system_resolver
from proxy.engine.replica import Replica, contact, replica_at
from proxy.engine.route import Route
from proxy.engine.routing import preference
from proxy.engine.seats import Caller, PoolObserver, Seats
from proxy.engine.standing import Standing
from proxy.engine.watches import Watches
from proxy.errors import EngineUnavailable, VerbatimError
from proxy.settings import Settings
from proxy.store.engines import EngineStore

log = logging.getLogger(__name__)


class WeightKeeper(Protocol):
    async def admit(self, replica: Replica) -> None:
        """Return once the replica's weights are the pool's current ones and `weight_version` says so.

        Raises VerbatimError with the reason it must not serve."""
        ...


class _Unobserved:
    def waited(self, policy: str, seconds: float) -> None:
        pass

    def tried_again(self, policy: str) -> None:
        pass

    def ejected(self, policy: str) -> None:
        pass


class EnginePool:
    """`store` holds the engines that were added at run time; `observer` is told what happens."""

    def __init__(
        self,
        settings: Settings,
        store: EngineStore | None = None,
        resolver: Resolver = system_resolver,
        observer: PoolObserver | None = None,
    ) -> None:
        self._settings = settings
        self._rule = HealthRule(settings.engine_failures, settings.engine_return_probes, settings.engine_flap_seconds)
        self._http: aiohttp.ClientSession | None = None
        self._channels: Channels | None = None
        self._watches = Watches(self._visit)
        self._following: asyncio.Task[None] | None = None
        self._gate = Gate()
        self._stopping = False
        self._leaving: list[Replica] = []
        self._looking = asyncio.Lock()
        self.keeper: WeightKeeper | None = None
        self.membership = Membership(settings.engine, store, resolver, settings.policy_models)
        self.replicas: list[Replica] = [self._made(member) for member in self.membership.members()]
        self.observer = observer or _Unobserved()
        self.seats = Seats(self.of, settings.queue_seconds, self.observer)
        self._standing = Standing(self.of, self.seats, self.observer)

    @property
    def http(self) -> aiohttp.ClientSession:
        """The session for what is asked of engines beside calls: no cap on connections, kept alive, authorised."""
        if self._http is None:
            raise RuntimeError("EnginePool.start() comes first")
        return self._http

    @property
    def channels(self) -> Channels:
        """What calls go over; likewise."""
        if self._channels is None:
            raise RuntimeError("EnginePool.start() comes first")
        return self._channels

    async def start(self) -> None:
        """Begin watching. Waits for a first answer of every replica, at most `engine_connect_seconds`; never fails."""
        self._http, self._channels = open_connections(self._settings), open_channels(self._settings)
        for replica in self.replicas:
            self._watches.begin(replica)
        looked = asyncio.Event()
        self._following = asyncio.create_task(self._follow(looked))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._settings.engine_connect_seconds):
                await looked.wait()
                await self._watches.visited()

    async def stop(self) -> None:
        self._stopping = True
        if self._following is not None:
            self._following.cancel()
        await self._watches.stop()
        if self._following is not None:
            await asyncio.gather(self._following, return_exceptions=True)
        if self._channels is not None:
            self._channels.close()
        if self._http is not None:
            await self._http.close()

    def of(self, policy: str) -> list[Replica]:
        """The replicas of one policy, serving or not; "" is the default one."""
        return [replica for replica in self.replicas if replica.policy == policy]

    @property
    def policy_names(self) -> set[str]:
        """The policies that engines belong to, whether there is a replica of them now or not."""
        return {spec.policy for spec in self.membership.specs}

    @property
    def draining(self) -> list[Replica]:
        """Replicas that left the pool and have calls to end."""
        self._leaving = [replica for replica in self._leaving if replica.in_flight]
        return list(self._leaving)

    def policy_for(self, model: str) -> str:
        """The policy that a call for `model` goes to. Raises as `policies.policy_for`."""
        strict = self._settings.strict_models
        return policies.policy_for(model, self.replicas, self.policy_names, self.membership.declared, strict=strict)

    def pick(self, session_id: str, model: str = "") -> Replica:
        """The replica that serves this session, whether it has room or not. Raises EngineUnavailable with every replica's reason,
        and NotFound for a model that there is not."""
        return preference(session_id, self.serving(self.policy_for(model)))[0]

    def serving(self, policy: str) -> list[Replica]:
        """The policy's replicas that serve, at least one. Raises EngineUnavailable with every replica's reason."""
        serving = [replica for replica in self.of(policy) if replica.healthy]
        if not serving:
            raise EngineUnavailable(f"no engine can take the call: {self._reasons(self.of(policy))}")
        return serving

    def route(self, model: str, caller: Caller) -> Route:
        """The way of one call to a replica that has room for it and can be reached."""
        return Route(self, model, caller)

    def is_frozen(self, replica: Replica, model: str) -> bool:
        """Whether what the replica samples for `model` is never trained."""
        return policies.is_frozen(replica, model, self._settings.frozen_models)

    def ready(self) -> tuple[bool, str]:
        """Whether a replica serves, and if none does, why."""
        if any(replica.healthy for replica in self.replicas):
            return True, ""
        return False, self._reasons(self.replicas)

    def catalogue(self) -> Mapping[str, int | None]:
        """What harnesses may ask for now, and the window of each in tokens."""
        return policies.catalogue(self.replicas)

    def mark_failed(self, replica: Replica, reason: str) -> None:
        """Stop sending calls there; its watch looks at once whether it answers again."""
        self._standing.down(replica, reason)
        self._watches.look_at(replica)

    def mark_serving(self, replica: Replica) -> None:
        """Its weights were just made current: send calls there again if it lives (see `Standing.updated`)."""
        self._standing.updated(replica)

    def call_failed(self, replica: Replica, reason: str, *, refused: bool) -> None:
        """A call there broke, which may take the replica out (see `Standing.call_failed`); its watch looks at it at once."""
        self._standing.call_failed(replica, reason, refused=refused)
        self._watches.look_at(replica)

    def look_at(self, replica: Replica) -> None:
        """Its watch visits it at once."""
        self._watches.look_at(replica)

    async def admitted(self, policy: str = policies.DEFAULT) -> None:
        """Wait until no weight update holds the policy's calls back."""
        await self._gate.passed(policy)

    def hold(self, policy: str | None = None) -> AbstractContextManager[None]:
        """Inside, calls that arrive wait in `admitted`, those of one policy or (None) all; those in flight go on."""
        return self._gate.hold(policy)

    async def look(self) -> None:
        """Learn which replicas there should be now, and take in and let go accordingly."""
        async with self._looking:
            await self.membership.refresh()
            self._reconcile({member.name: member for member in self.membership.members()})

    async def _follow(self, looked: asyncio.Event) -> None:
        while not self._stopping:
            try:
                await self.look()
            except Exception:
                log.exception("which engines there are cannot be told")
            looked.set()
            await asyncio.sleep(self._settings.engine_watch_seconds)

    def _reconcile(self, wanted: dict[str, Member]) -> None:
        stay = {replica.name for replica in self.replicas if _is(replica, wanted.get(replica.name))}
        gone = [replica for replica in self.replicas if replica.name not in stay]
        new = [self._made(member) for name, member in wanted.items() if name not in stay]
        self.replicas = [*(replica for replica in self.replicas if replica.name in stay), *new]
        for replica in gone:
            self._retire(replica)
        for replica in new:
            log.info("engine %s joins (%s)", replica.name, replica.source)
            self._watches.begin(replica)

    def _retire(self, replica: Replica) -> None:
        log.info("engine %s leaves; %d calls in flight end there", replica.name, replica.in_flight)
        replica.draining = True
        self._standing.down(replica, "it left the pool")
        self._leaving.append(replica)
        self._watches.end(replica)

    def _made(self, member: Member) -> Replica:
        replica = replica_at(member.url)
        replica.policy, replica.source = member.policy, member.source
        replica.max_calls, replica.health = self._settings.engine_max_calls, Health(self._rule)
        return replica

    async def _visit(self, replica: Replica) -> None:
        try:
            await contact(self.http, replica, self._settings.engine_api, renders=self._settings.renderer is not None)
        except EngineUnavailable as error:
            self._standing.probe_failed(replica, error)
            return
        self._standing.probe_worked(replica)
        try:
            if self.keeper is not None:
                await self.keeper.admit(replica)
        except VerbatimError as error:
            self._standing.down(replica, error.message)
        except Exception:
            log.exception("engine %s: the check of its weights failed", replica.name)
            self._standing.down(replica, "the check of its weights failed; the log says why")
        else:
            self._standing.admit(replica)

    def _reasons(self, replicas: Sequence[Replica]) -> str:
        if replicas:
            return "; ".join(f"{replica.name}: {replica.reason}" for replica in replicas)
        watched = [spec for spec in self.membership.specs if spec.watched]
        return f"no address of {', '.join(spec.url for spec in watched)} is known yet" if watched else "no engine is configured"


def _is(replica: Replica, member: Member | None) -> bool:
    return member is not None and (member.url, member.policy) == (replica.url, replica.policy)
