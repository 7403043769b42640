"""EnginePool: the replicas, which of them serve, and the placement of calls on them.

Every replica is visited regularly: a visit finds the engine at start, notices its death and its return, and checks that its weights are
known and current. A replica serves if it answers and its weights are admitted; otherwise `reason` says why not. One task follows
the membership: new replicas are visited, those that are gone drain, which means that they get no new call and their calls in flight end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TypeVar

import aiohttp

from proxy.engine.apis.contact import EngineKinds
from proxy.engine.apis.probe import trace_connections
from proxy.engine.apis.renderer import LocalRenderer
from proxy.engine.pool.adapters import explain_conflict, follow_adapters
from proxy.engine.pool.membership import Membership, ReplicaAddress, Resolver, replica_at, resolve_with_system
from proxy.engine.pool.seats import Caller, Gate, Seats, rank_replicas
from proxy.engine.pool.stalls import Stalls
from proxy.engine.pool.standing import Standing, Watches
from proxy.engine.replica import Health, HealthRule, Replica
from proxy.engine.wire.channels import Channels
from proxy.engine.wire.http import EngineHttp
from proxy.engine.wire.tls import build_client_tls
from proxy.errors import EngineBusy, EngineUnavailable, NotFound, StoreUnavailable, VerbatimError
from proxy.metrics import Metrics
from proxy.settings import Settings, find_collector
from proxy.store.service import EngineStore
from proxy.timeline import ENGINE, QUEUE, CancelScope, Timeline, Waiting, carried

log = logging.getLogger(__name__)

T = TypeVar("T")

_RELEASE_TIMEOUT = aiohttp.ClientTimeout(total=5.0)

DEFAULT = ""
"""The name of the default policy."""


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
    ) -> None:
        self._settings = settings
        self._rule = HealthRule(settings.engine_failures, settings.engine_return_probes, settings.engine_flap_seconds)
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
        self.http = EngineHttp(open_channels(settings), self.fail_call, self._watches.wake, aside_seconds=seconds)
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
        self.http.open(open_session(self._settings), open_session(self._settings))
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

    def place(self, model: str, caller: Caller, scope: CancelScope, timeline: Timeline) -> Placement:
        """The placement of one call on a replica that has room for it and can be reached."""
        return Placement(self, model, caller, scope, timeline)

    @property
    def window(self) -> int | None:
        """The largest window of any replica, in tokens; None if one does not say."""
        windows = [replica.max_model_len for replica in self.replicas]
        return None if None in windows else max((each for each in windows if each is not None), default=None)

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
        """Tell routers in front of engines that the session is over, if `engine_release_path` says how. Nobody waits for it."""
        if not self._settings.engine_release_path or self._stopping:
            return
        for replica in self._hosts:
            if replica.healthy:
                task = asyncio.create_task(self._release(replica, session_id))
                self._releasing.add(task)
                task.add_done_callback(self._releasing.discard)

    async def _release(self, replica: Replica, session_id: str) -> None:
        header = self._settings.engine_session_header
        url, headers = replica.url + self._settings.engine_release_path, {header: session_id} if header else {}
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
        return {name: _find_smallest(each for each in serving if each.policy == policy) for name, policy in policies.items()}

    def find_window(self, model: str) -> int | None:
        """The smallest window, in tokens, of any replica that may serve a call for `model`; None if none of them reports one. Raises as
        `pick`."""
        return _find_smallest(self.serving(self.find_policy(model)))

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
            await asyncio.sleep(self._settings.engine_watch_seconds)

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
        replica.max_calls, replica.health = self._settings.engine_max_calls, Health(self._rule)
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


REPLICAS_TRIED = 3
"""How many replicas a call is offered to."""

FIRST_PAUSE, LONGEST_PAUSE = 0.25, 16.0
"""The least time, in seconds, between two requests of a call to engines that are busy: it doubles."""


class Placement:
    """Where one call is sampled, and by which seat."""

    def __init__(self, pool: EnginePool, model: str, caller: Caller, scope: CancelScope, timeline: Timeline) -> None:
        self._pool = pool
        self._model = model
        self._caller = caller
        self._scope = scope
        self._timeline = timeline
        self._tried: set[Replica] = set()
        self._replica: Replica | None = None
        self._waits, self._waited = 0, 0.0

    async def run(self, sample: Callable[[Replica], Awaitable[T]]) -> T:
        """What `sample` gives of the first replica that can be reached; another one is tried only where nothing was sampled yet. Raises as
        `sample` and `Seats.acquire`, NotFound for an unknown model, and EngineUnavailable with every replica's reason if none serves."""
        try:
            while True:
                self._timeline.begin(QUEUE)
                with self._scope.interruptible(), Waiting(ENGINE):
                    replica = await self._find_seat()
                try:
                    return await sample(replica)
                except EngineUnavailable as error:
                    if self._timeline.first_token_at or self._scope.cancelled:
                        raise
                    if not self._try_another(replica) and not await self._wait_out(error):
                        raise
                    self._release()
        finally:
            self._release()

    async def _find_seat(self) -> Replica:
        """On a replica that serves, once no weight update holds calls back and there is room."""
        while True:
            policy = self._pool.find_policy(self._model)
            await self._pool.wait_for_gate(policy)
            self._pool.serving(policy)
            replica = self._replica = await self._pool.seats.acquire(policy, self._caller, self._tried)
            # While it waited, weights may have changed and the replica may have failed over them.
            await self._pool.wait_for_gate(policy)
            if replica.healthy:
                return replica
            self._release()

    def _try_another(self, replica: Replica) -> bool:
        """Whether the call may go to another replica after this one did not take it."""
        self._tried.add(replica)
        policy = self._pool.find_policy(self._model)
        left = any(each.healthy for each in self._pool.of(policy) if each not in self._tried)
        if not left or len(self._tried) >= REPLICAS_TRIED:
            return False
        self._pool.metrics.count_retry(policy)
        return True

    async def _wait_out(self, error: EngineUnavailable) -> bool:
        """Wait as long as the engine asks, without a seat; then all replicas are there again. False if it does not say, or if the call
        would wait longer than `queue_seconds` in all."""
        if not isinstance(error, EngineBusy):
            return False
        # An engine that says "at once" again and again is asked less and less often.
        seconds = max(error.retry_after_seconds, min(LONGEST_PAUSE, FIRST_PAUSE * 2**self._waits))
        if not self._pool.may_wait(self._waited + seconds):
            return False
        self._release()
        self._tried.clear()
        self._waits, self._waited = self._waits + 1, self._waited + seconds
        self._timeline.begin(QUEUE)
        with self._scope.interruptible(), Waiting(ENGINE):
            await self._pool.seats.sleep(seconds, self._caller)
        return True

    def _release(self) -> None:
        if self._replica is not None:
            self._pool.seats.release(self._replica)
            self._replica = None


def find_policy(
    model: str,
    replicas: Sequence[Replica],
    policies: Collection[str],
    declared: Mapping[str, str] | None = None,
    *,
    strict: bool = False,
) -> str:
    """The policy of calls for `model`: the policy of that name, the one it was declared for, the one whose engines serve it, or, unless
    names are `strict`, the default one, and in its place the only adapter of its engines. `declared` has the policy of each declared
    model.

    Replicas count whether they serve or not, so that no other policy answers for one whose engines are down. Raises EngineUnavailable
    while the model may belong to a policy whose engines were never reached, NotFound if it is unknown and there is no default policy,
    or names are strict and the engines list theirs."""
    declared = declared or {}
    if model and model in policies:
        return model
    if model in declared:
        known = declared[model]
        if known or DEFAULT in policies or not policies:
            return known
    elif model:
        return _find_serving(model, replicas, policies, declared, strict)
    elif DEFAULT in policies or not policies:
        return _find_default(replicas)
    raise _unknown(model, replicas, policies)


def _find_default(replicas: Sequence[Replica]) -> str:
    """The policy of calls that name no model there is: a harness often cannot be told to name the adapter that is trained."""
    adapters = {replica.policy for replica in replicas if replica.adapter and replica.host.policy == DEFAULT}
    return adapters.pop() if len(adapters) == 1 else DEFAULT


def _find_serving(
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
        return _find_default(replicas)
    raise _unknown(model, replicas, policies)


def _unknown(model: str, replicas: Sequence[Replica], policies: Collection[str]) -> NotFound:
    listed = catalogue([replica for replica in replicas if replica.healthy])
    there_are = ", ".join(sorted({*policies, *listed} - {DEFAULT}))
    return NotFound(f"the model '{model}' does not exist; there are: {there_are}", param="model")


def catalogue(serving: Sequence[Replica]) -> list[str]:
    """The models harnesses may ask for now: the names of serving policies, then the engines' own names."""
    names = [each.policy for each in serving] + [name for each in serving for name in each.models]
    return [name for name in dict.fromkeys(names) if name]


def _find_smallest(replicas: Iterable[Replica]) -> int | None:
    return min((each.max_model_len for each in replicas if each.max_model_len is not None), default=None)


def is_frozen(replica: Replica, model: str, frozen: Collection[str]) -> bool:
    """Whether what the replica samples for `model` is never trained: a frozen model, by the requested name, the policy's or the
    engine's own."""
    return not {model, replica.policy, replica.adapter or replica.name_served(model)}.isdisjoint(frozen)


# The connections to engines.


_IDLE_SECONDS = 4.0
"""vLLM's server closes an idle connection after 5 seconds, and a request sent at that moment would be lost."""

_PROBE_AFTER_SECONDS = 30
_PROBE_EVERY_SECONDS = 10
_PROBES = 3


def open_session(settings: Settings) -> aiohttp.ClientSession:
    """A session for probes or weights, with the engines' API key and no limit on connections."""
    key = settings.find_engine_key()
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(
            limit=0, keepalive_timeout=_IDLE_SECONDS, socket_factory=_make_socket, ssl=_build_tls(settings) or True
        ),
        headers={"Authorization": f"Bearer {key}"} if key else None,
        timeout=aiohttp.ClientTimeout(
            total=None, sock_connect=settings.engine_connect_seconds, sock_read=settings.engine_timeout_seconds
        ),
        trace_configs=[trace_connections()],
    )


def open_channels(settings: Settings) -> Channels:
    """The connections for calls, with the same key and timeouts."""
    return Channels(
        settings.find_engine_key(),
        connect_seconds=settings.engine_connect_seconds,
        read_seconds=settings.engine_timeout_seconds,
        idle_seconds=_IDLE_SECONDS,
        socket_factory=_make_socket,
        trace_headers=carried if find_collector() is not None else None,
        session_header=settings.engine_session_header,
        tls=_build_tls(settings),
    )


def _build_tls(settings: Settings) -> ssl.SSLContext | None:
    return build_client_tls(settings.engine_ca_file, settings.engine_client_cert, settings.engine_client_key)


def _make_socket(address: aiohttp.AddrInfoType) -> socket.socket:
    """A socket with keepalive probes: a call to a machine that vanished breaks within a minute or so, and a call to an engine that
    thinks for an hour does not."""
    family, kind, protocol, *_ = address
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    longest_seconds = _PROBE_AFTER_SECONDS + _PROBES * _PROBE_EVERY_SECONDS
    # Not every system has all of these. The last covers sent data that is never acknowledged, during which no probe is sent.
    for name, value in (
        ("TCP_KEEPIDLE", _PROBE_AFTER_SECONDS),
        ("TCP_KEEPINTVL", _PROBE_EVERY_SECONDS),
        ("TCP_KEEPCNT", _PROBES),
        ("TCP_USER_TIMEOUT", longest_seconds * 1000),
    ):
        if hasattr(socket, name):
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return made
