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
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from types import MappingProxyType, TracebackType
from typing import Protocol

import aiohttp

from proxy.engine.pool.membership import Member, Membership, Resolver, system_resolver
from proxy.engine.pool.seats import Caller, PoolObserver, Seats, preference
from proxy.engine.pool.standing import Gate, Standing, Watches
from proxy.engine.replica import Health, HealthRule, Replica, contact, replica_at
from proxy.engine.wire.channels import Channels, open_channels, open_connections
from proxy.errors import EngineUnavailable, NotFound, VerbatimError
from proxy.settings import Settings
from proxy.store.service import EngineStore

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


# Policies: named models, each with replicas of its own; which of them a call is for.
#
# The name "" is the default policy's. A harness says a model, not a policy: it may be the name of a policy, one that was declared for
# a policy, or one under which a policy's engines serve; every other name means the default policy, unless names are taken strictly. What
# the engines of a policy serve under is known once one of them was reached: until then a name that nobody is known by may be that
# policy's, and is answered by nobody.


DEFAULT = ""


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
        return policy_for(model, self.replicas, self.policy_names, self.membership.declared, strict=strict)

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
        return is_frozen(replica, model, self._settings.frozen_models)

    def ready(self) -> tuple[bool, str]:
        """Whether a replica serves, and if none does, why."""
        if any(replica.healthy for replica in self.replicas):
            return True, ""
        return False, self._reasons(self.replicas)

    def catalogue(self) -> Mapping[str, int | None]:
        """What harnesses may ask for now, and the window of each in tokens."""
        return catalogue(self.replicas)

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

    async def admitted(self, policy: str = DEFAULT) -> None:
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


# Route: one call's way to a replica that takes it.
#
# `next` gives a replica with a seat on it; when that one could not be reached, `another` says whether the call may go on to the next.
# Only who calls knows whether a token may have been sampled: then it must not ask.


REPLICAS_TRIED = 3
"""How many replicas a call is offered to."""


class Route:
    """`async with pool.route(...) as route`: leaving the block gives the seat back."""

    def __init__(self, pool: EnginePool, model: str, caller: Caller) -> None:
        self._pool = pool
        self._model = model
        self._caller = caller
        self._tried: set[Replica] = set()
        self._seat: Replica | None = None

    async def __aenter__(self) -> Route:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._leave()

    async def next(self) -> Replica:
        """A replica that serves, once no weight update holds calls back and there is room. Raises as `Seats.take`, NotFound for a
        model that there is not, and EngineUnavailable with every replica's reason when none serves."""
        self._leave()
        while True:
            policy = self._pool.policy_for(self._model)
            await self._pool.admitted(policy)
            self._pool.serving(policy)
            seat = self._seat = await self._pool.seats.take(policy, self._caller, self._tried)
            # Weights may have changed while it waited, and the replica may have failed over them.
            await self._pool.admitted(policy)
            if seat.healthy:
                return seat
            self._leave()

    def another(self) -> bool:
        """Whether the call, which the replica it was given did not take, may try another one."""
        if self._seat is not None:
            self._tried.add(self._seat)
        policy = self._pool.policy_for(self._model)
        left = any(replica.healthy for replica in self._pool.of(policy) if replica not in self._tried)
        if not left or len(self._tried) >= REPLICAS_TRIED:
            return False
        self._pool.observer.tried_again(policy)
        return True

    def _leave(self) -> None:
        if self._seat is not None:
            self._pool.seats.free(self._seat)
            self._seat = None


NONE_DECLARED: Mapping[str, str] = MappingProxyType({})


def policy_for(
    model: str,
    replicas: Sequence[Replica],
    policies: Collection[str],
    declared: Mapping[str, str] = NONE_DECLARED,
    *,
    strict: bool = False,
) -> str:
    """The policy that a call for `model` goes to; `declared` has the policy of each model that was declared for one. Replicas count
    whether they serve or not, so that a policy whose engines are down is not answered by another.

    Raises EngineUnavailable while the model may be that of a policy whose engines were never reached, NotFound when it is unknown
    and there is no default policy, or names are taken strictly and the engines say theirs."""
    if not model or model in policies:
        known = model
    elif model in declared:
        known = declared[model]
    else:
        return _serving(model, replicas, policies, declared, strict)
    if known or DEFAULT in policies or not policies:
        return known
    raise _unknown(model, replicas, policies)


def _serving(
    model: str, replicas: Sequence[Replica], policies: Collection[str], declared: Mapping[str, str], strict: bool
) -> str:
    serving = {replica.policy for replica in replicas if model in replica.names}
    if serving:
        return DEFAULT if DEFAULT in serving else min(serving)
    if unmet := {*policies} - {DEFAULT, *declared.values(), *(replica.policy for replica in replicas if replica.met)}:
        raise EngineUnavailable(
            f"the model {model!r} is not known, and may be one of {', '.join(sorted(unmet))}, whose engines were not reached yet"
        )
    named = any(replica.names for replica in replicas if replica.policy == DEFAULT)
    if (DEFAULT in policies or not policies) and not (strict and named):
        return DEFAULT
    raise _unknown(model, replicas, policies)


def _unknown(model: str, replicas: Sequence[Replica], policies: Collection[str]) -> NotFound:
    there_are = ", ".join(sorted({*policies, *catalogue(replicas)} - {DEFAULT}))
    return NotFound(f"the model '{model}' does not exist; there are: {there_are}", param="model")


def catalogue(replicas: Sequence[Replica]) -> dict[str, int | None]:
    """What harnesses may ask for now: the names of policies that serve, then the engines' own names of their models; each with
    the window in tokens, None where the engine does not say."""
    serving = [replica for replica in replicas if replica.healthy]
    named = {replica.policy: replica.max_model_len for replica in serving if replica.policy}
    return named | {name: replica.max_model_len for replica in serving for name in replica.models}


def is_frozen(replica: Replica, model: str, frozen: Collection[str]) -> bool:
    """Whether what the replica samples for `model` is never trained: a frozen model by the name that was asked for, by that of the
    policy, or by the engine's own."""
    return not {model, replica.policy, replica.model_for(model)}.isdisjoint(frozen)
