"""Groups, leases and dead letters in Redis. All of it shares one slot, so that each method is one script."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from proxy.errors import Conflict, NotFound, StoreUnavailable
from proxy.store.connection import Argument, Script, StoreConnection
from proxy.store.groups import DeadLetter, GroupPolicy, GroupRule, Lease, LeasedGroup, Member, Nothing, PolicyLine
from proxy.store.keys import ARRIVALS, DELIVERY, GROUP_POLICIES, GROUP_TOTALS, pack, pack_versioned, unpack_versioned

REMEMBERED_SECONDS = 86400.0
"""How long an ended lease can still be told from one that never was."""
WAITING_CLAIM_SECONDS = 8.0
"""How long the claim of a waiting consumer outlives its last request: longer than the pause between two of them."""
POLLED_CLAIM_SECONDS = 2.0
"""The same for a consumer that only looked in."""
ANY_POLICY = "*"
"""No policy's name."""
LETTERS_LOOKED_AT = 1000
"""Dead letters that one page of those with a certain reason looks at; such a page may be short."""

PRELUDES = ("_delivery", "_parts", "_ahead", "_leases")

ANNOUNCE = Script.read("announce", *PRELUDES)
RETRACT = Script.read("retract", *PRELUDES)
ANNOUNCED = Script.read("announced", *PRELUDES)
FILL = Script.read("fill", *PRELUDES)
WITHDRAW = Script.read("withdraw", *PRELUDES)
LEASE = Script.read("lease", *PRELUDES)
SETTLE = Script.read("settle", *PRELUDES)
EXTEND = Script.read("extend", *PRELUDES)
LEAVE = Script.read("leave", *PRELUDES)
ADMIT = Script.read("admit", *PRELUDES)
VERSIONS_AHEAD = Script.read("versions_ahead", *PRELUDES)
DISMISS = Script.read("dismiss", *PRELUDES)
UNSEEN = Script.read("unseen", *PRELUDES)
SEEN = Script.read("seen", *PRELUDES)
TEND = Script.read("tend", *PRELUDES)
BURY = Script.read("bury", *PRELUDES)
EXHUME = Script.read("exhume", *PRELUDES)
DEAD_LETTERS = Script.read("dead_letters", *PRELUDES)
COUNTS = Script.read("counts", *PRELUDES)

ENDED = {"acked": "was acknowledged", "nacked": "was given back", "expired": "has expired"}


class RedisDeliveryStore:
    """Implements `proxy.store.delivery.DeliveryStore`."""

    def __init__(self, connection: StoreConnection) -> None:
        self._redis = connection
        self._arrivals = StreamArrivals(connection, ARRIVALS)

    async def announce(self, session_id: str, request: CloseRequest | None, now: float) -> None:
        await self._run(ANNOUNCE, session_id, repr(now), b"" if request is None else pack_versioned(request))

    async def retract(self, session_id: str) -> None:
        await self._run(RETRACT, session_id)

    async def announced(self, before: float, limit: int = 100) -> Sequence[Announced]:
        flat = await self._run(ANNOUNCED, repr(before), limit)
        return [
            Announced(session_id.decode(), float(at), unpack_versioned(request, CloseRequest) if request else None)
            for session_id, at, request in zip(flat[::3], flat[1::3], flat[2::3], strict=True)
        ]

    async def fill(
        self,
        group_id: str,
        group_size: int,
        member: Member,
        policy: GroupPolicy,
        now: float,
        rule: GroupRule | None = None,
    ) -> str:
        reward = "" if member.reward is None else repr(float(member.reward))
        entry = (member.session_id, int(member.usable), reward, member.rows, member.oldest_version)
        named = (each for name, rows in member.named.items() for each in (name, rows.rows, rows.oldest_version))
        args = (group_id, group_size, *entry, repr(now), *_decision(policy), _said(rule), int(member.complete), *named)
        status: bytes = await self._run(FILL, *args, durable=True)
        return status.decode()

    async def withdraw(self, session_id: str, policy: GroupPolicy) -> None:
        if await self._run(WITHDRAW, session_id, *_decision(policy)) == b"leased":
            raise Conflict(f"session {session_id} is leased by a trainer; delete it after the lease has ended")

    async def admit(
        self,
        group_id: str,
        session_id: str,
        limit: int,
        policy: GroupPolicy,
        now: float,
        freshness: Freshness | None = None,
        *,
        again: bool = False,
    ) -> Admission:
        asked = freshness or Freshness(-1, -1, 1)
        args = (int(not again), asked.version, asked.most_behind, asked.groups_per_version, *_flat(asked.named))
        answer = await self._run(ADMIT, group_id, session_id, limit, repr(now), policy.members, *args)
        granted, undelivered, noted, ahead = answer
        return Admission(bool(granted), undelivered, bool(noted), ahead if freshness else None)

    async def policies(self) -> Sequence[str]:
        return sorted(name.decode() for name in await self._redis.execute("SMEMBERS", GROUP_POLICIES))

    async def versions_ahead(self, version: int, groups_per_version: int, named: Mapping[str, int] | None = None) -> int:
        return int(await self._run(VERSIONS_AHEAD, version, groups_per_version, *_flat(named or {})))

    async def dismiss(self, session_id: str) -> None:
        await self._run(DISMISS, session_id)

    async def unseen(self, before: float, limit: int = 100) -> Sequence[str]:
        return [session_id.decode() for session_id in await self._run(UNSEEN, repr(before), limit)]

    async def seen(self, session_id: str) -> None:
        await self._run(SEEN, session_id)

    async def tend(self, policy: GroupPolicy, timeout_seconds: float, now: float) -> int:
        return int(await self._run(TEND, repr(now), f"{timeout_seconds:g}", *_decision(policy)))

    async def lease(self, terms: LeaseTerms) -> Lease | Nothing:
        lease_id, now = uuid.uuid4().hex, terms.now
        unlimited = terms.max_groups is None and terms.max_trajectories is None
        most = (1 if unlimited else terms.max_groups, terms.max_trajectories, terms.oldest_version)
        limits = (_or_none(limit) for limit in most)
        times = (repr(now + terms.lease_seconds), terms.max_deliveries, repr(now), REMEMBERED_SECONDS)
        claimed_until = repr(now + (WAITING_CLAIM_SECONDS if terms.waits else POLLED_CLAIM_SECONDS))
        claim = (terms.stale_groups, claimed_until, int(terms.waits), int(terms.complete_only))
        lines = (each for name, line in terms.named.items() for each in (name, _or_none(line.oldest_version), line.version))
        whose = (_or_none(terms.version), ANY_POLICY if terms.policy is None else terms.policy, *lines)
        answer = await self._run(LEASE, lease_id, terms.consumer, *limits, *times, *claim, *whose)
        if answer[0] == b"none":
            return Nothing(float(answer[1]) if answer[1] else None)
        return Lease(lease_id, float(answer[1]), [_leased_group(group) for group in answer[2:]])

    def watch(self) -> AbstractAsyncContextManager[StreamArrivals]:
        return self._arrivals.watched()

    async def leave(self, consumer: str) -> None:
        await self._run(LEAVE, consumer)

    async def ack(self, lease_id: str, now: float) -> Sequence[str]:
        return await self._settle(lease_id, "acked", now)

    async def nack(self, lease_id: str, now: float) -> Sequence[str]:
        return await self._settle(lease_id, "nacked", now)

    async def give_back(self, lease_id: str, now: float) -> None:
        await self._settle(lease_id, "nacked", now, undelivered=True)

    async def extend(self, lease_id: str, lease_seconds: float, now: float) -> float:
        status, *detail = await self._run(EXTEND, lease_id, repr(now + lease_seconds), repr(now))
        if status != b"active":
            raise _ended(lease_id, status.decode())
        return float(detail[0])

    async def bury(self, lease_id: str, reference: str, reason: str, now: float) -> None:
        await self._run(BURY, lease_id, reference, reason, repr(now))

    async def dead_letters(
        self, limit: int = 100, cursor: str | None = None, reason: str | None = None
    ) -> tuple[Sequence[DeadLetter], str | None]:
        following, *letters = await self._run(DEAD_LETTERS, limit, cursor or "", reason or "", LETTERS_LOOKED_AT)
        return [_dead_letter(letter) for letter in letters], following.decode() or None

    async def retry_dead(self, names: Sequence[str], policy: GroupPolicy, now: float) -> Sequence[str]:
        return await self._exhume("retry", names, policy, now)

    async def drop_dead(self, names: Sequence[str]) -> Sequence[str]:
        return await self._exhume("drop", names, GroupPolicy(), 0.0)

    async def counts(self) -> Mapping[str, int]:
        flat = await self._run(COUNTS)
        return {state.decode(): number for state, number in zip(flat[::2], flat[1::2], strict=True)}

    async def totals(self) -> Mapping[str, int]:
        flat = await self._redis.execute("HGETALL", GROUP_TOTALS)
        pairs = flat.items() if isinstance(flat, dict) else zip(flat[::2], flat[1::2], strict=True)
        return {what.decode(): int(times) for what, times in pairs}

    async def _settle(self, lease_id: str, wanted: str, now: float, *, undelivered: bool = False) -> list[str]:
        status, *detail = await self._run(SETTLE, lease_id, wanted, repr(now), int(undelivered), durable=True)
        if status.decode() != wanted:
            raise _ended(lease_id, status.decode())
        return [group_id.decode() for group_id in detail[0]]

    async def _exhume(self, action: str, names: Sequence[str], policy: GroupPolicy, now: float) -> list[str]:
        outcome, found = await self._run(EXHUME, action, repr(now), *_decision(policy), *names)
        if outcome == b"superseded":
            raise Conflict(
                f"dead group {found.decode()} is incomplete, and new sessions of its group id go to a later group: drop it"
            )
        return [reference.decode() for reference in found]

    async def _run(self, script: Script, *args: Argument, durable: bool = False) -> Any:
        return await self._redis.run(script, DELIVERY, args, durable=durable, patient=True)


def _or_none(number: int | None) -> int:
    """None, which a script has no word for, as -1."""
    return -1 if number is None else number


def _flat(versions: Mapping[str, int]) -> list[Argument]:
    return [each for pair in versions.items() for each in pair]


def _said(rule: GroupRule | None) -> bytes:
    return pack({name: value for name, value in asdict(rule).items() if value is not None}) if rule else b""


def _decision(policy: GroupPolicy) -> tuple[str, int, str]:
    return policy.members, policy.minimum, policy.zero_variance


def _leased_group(answer: Any) -> LeasedGroup:
    reference, group_id, deliveries, oldest_version, stale, session_ids, names = answer
    members, policies = [each.decode() for each in session_ids], sorted(each.decode() for each in names)
    return LeasedGroup(reference.decode(), group_id.decode(), members, deliveries, oldest_version, bool(stale), policies)


def _dead_letter(answer: Any) -> DeadLetter:
    letter_id, group_id, session_ids, deliveries, reason, died_at = answer
    members = [each.decode() for each in session_ids]
    return DeadLetter(letter_id.decode(), group_id.decode(), members, deliveries, reason.decode(), float(died_at))


def _ended(lease_id: str, status: str) -> NotFound | Conflict:
    if status == "missing":
        return NotFound(f"there is no lease {lease_id}")
    return Conflict(f"lease {lease_id} {ENDED[status]}")


# What comes into the store, told to everybody who waits for it in this process by one blocking read.
#
# The store keeps a stream of one entry, made anew whenever groups become ready. Reading goes on where it stopped, so that nothing
# is missed between two reads, nor while nobody was watching; a read that fails is waited out, and whoever waits looks by himself
# now and then.


log = logging.getLogger(__name__)

BLOCK_SECONDS = 5.0
PAUSE_SECONDS = 1.0
"""After a read that failed."""


class StreamArrivals:
    """Implements `proxy.store.delivery.Arrivals` for the stream `key`."""

    def __init__(self, connection: StoreConnection, key: str) -> None:
        self.mark = 0
        self._redis = connection
        self._key = key
        self._last: str | None = None
        self._watchers = 0
        self._changed = asyncio.Condition()
        self._turn = asyncio.Lock()
        self._reader: asyncio.Task[None] | None = None

    @contextlib.asynccontextmanager
    async def watched(self) -> AsyncIterator[StreamArrivals]:
        """Reads while anybody is in here. Raises `StoreUnavailable` when that cannot begin."""
        self._watchers += 1
        try:
            await self._begin()
            yield self
        finally:
            self._watchers -= 1
            if not self._watchers:
                await self._end()

    async def after(self, mark: int, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds), self._changed:
                await self._changed.wait_for(lambda: self.mark != mark)

    async def _begin(self) -> None:
        async with self._turn:
            if self._last is None:
                self._last = await self._newest()
            if self._reader is None or self._reader.done():
                self._reader = asyncio.create_task(self._read())

    async def _end(self) -> None:
        """Not left to itself: a blocked read would hold its connection when the store is closed."""
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.cancel()
            await asyncio.wait([reader])

    async def _newest(self) -> str:
        entries = await self._redis.execute("XREVRANGE", self._key, "+", "-", "COUNT", 1)
        return entries[0][0].decode() if entries else "0-0"

    async def _read(self) -> None:
        while True:
            try:
                await self._read_once()
            except StoreUnavailable as error:
                log.warning("waiting consumers look by themselves: %s", error.message)
                await asyncio.sleep(PAUSE_SECONDS)

    async def _read_once(self) -> None:
        block = max(1, int(min(BLOCK_SECONDS, self._redis.timeout_seconds / 2) * 1000))
        read = await self._redis.execute("XREAD", "BLOCK", block, "STREAMS", self._key, self._last or "0-0", key=self._key)
        if not read:
            return
        ((_, entries),) = read
        self._last = entries[-1][0].decode()
        self.mark += 1
        async with self._changed:
            self._changed.notify_all()


# DeliveryStore: groups, leases and dead letters, as the rest of the service sees them.
#
# All of it is in one hash tag, so that a lease is one atomic script.


@dataclass(frozen=True, slots=True)
class CloseRequest:
    """What a close or delete asked for, kept beside the announcement so that a crash in between can be made good.

    `created_at` says of a delete which session it means: its id may be used again."""

    status: str
    reward: float | None = None
    error: str | None = None
    created_at: float | None = None


@dataclass(frozen=True, slots=True)
class Announced:
    """A session on its way into its group, or out of the store. `request` is None when it was frozen already and only its reward
    was late."""

    session_id: str
    announced_at: float
    request: CloseRequest | None


@dataclass(frozen=True, slots=True)
class Admission:
    """`undelivered` counts the groups. `noted`: the session was unknown and counts now as one of an opened group. `versions_ahead`:
    how many versions will probably have come when a group that is begun now is leased; None when nobody asked."""

    granted: bool
    undelivered: int
    noted: bool
    versions_ahead: int | None = None


@dataclass(frozen=True, slots=True)
class Freshness:
    """Begin no group that would probably be leased more than `most_behind` versions after `version`, the current one, when a
    version takes `groups_per_version` groups. `named` has the current versions of the other policies, for which the same goes."""

    version: int
    most_behind: int
    groups_per_version: int
    named: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseTerms:
    """What a consumer asks for: see `DeliveryStore.lease`."""

    consumer: str
    max_groups: int | None = None
    max_trajectories: int | None = None
    oldest_version: int | None = None
    lease_seconds: float
    max_deliveries: int
    now: float
    waits: bool = False
    stale_groups: str = "keep"
    version: int | None = None
    policy: str | None = None
    complete_only: bool = False
    named: Mapping[str, PolicyLine] = field(default_factory=dict)


class Arrivals(Protocol):
    """What comes into the store while it is watched. `mark` grows with every arrival; take it before asking for groups."""

    mark: int

    async def after(self, mark: int, seconds: float) -> None:
        """Return when something has come since `mark`, at the latest after `seconds`."""
        ...


class DeliveryStore(Protocol):
    async def announce(self, session_id: str, request: CloseRequest | None, now: float) -> None:
        """Say that a session is about to be closed (or given its late reward, or deleted), before it is. Sessions and groups
        live in different slots; what stays announced is found by `announced` and finished by whoever finds it."""
        ...

    async def retract(self, session_id: str) -> None:
        """Nothing is to be filled after all. `fill` retracts by itself."""
        ...

    async def announced(self, before: float, limit: int = 100) -> Sequence[Announced]:
        """Announced no later than `before` and neither filled nor retracted, oldest first."""
        ...

    async def fill(
        self,
        group_id: str,
        group_size: int,
        member: Member,
        policy: GroupPolicy,
        now: float,
        rule: GroupRule | None = None,
    ) -> str:
        """Put a closed session into its group. Returns the group's state: filling, ready, dropped, leased, acked or dead. What `rule`
        says holds for its group from now on, over any `policy`.

        Idempotent by session id: a member filled again replaces itself while the group is not leased, and changes nothing
        afterwards. A group id used again after its group is full starts the next round of that id: a group of its own."""
        ...

    async def withdraw(self, session_id: str, policy: GroupPolicy) -> None:
        """Take a session that is to be deleted out of its group, whose place is free again; it stays announced. Raises
        `Conflict` while it is leased."""
        ...

    async def admit(
        self,
        group_id: str,
        session_id: str,
        limit: int,
        policy: GroupPolicy,
        now: float,
        freshness: Freshness | None = None,
        *,
        again: bool = False,
    ) -> Admission:
        """Whether a session may be opened while at most `limit` groups (0: any number) may be undelivered: opened, filling or
        ready. A session of a group that is there and has room is always let in. A refusal is counted unless it comes `again`."""
        ...

    async def policies(self) -> Sequence[str]:
        """The named models whose rows were ever filled into a group."""
        ...

    async def versions_ahead(self, version: int, groups_per_version: int, named: Mapping[str, int] | None = None) -> int:
        """As in `Admission`: (undelivered groups + groups leased and not yet in the weights) / groups_per_version, rounded down; the
        greatest of all policies, whose versions are `version` and `named`.

        Source: the staleness control of Fu et al., "AReaL: A Large-Scale Asynchronous Reinforcement Learning System for Language
        Reasoning", arXiv:2505.24298, counted from the current version instead of the first one."""
        ...

    async def dismiss(self, session_id: str) -> None:
        """A session that was let in did not come to be."""
        ...

    async def unseen(self, before: float, limit: int = 100) -> Sequence[str]:
        """Session ids let in no later than `before`, oldest first, that were neither dismissed nor `seen`: sessions live in
        other slots, and whoever let them in may have died before it opened them."""
        ...

    async def seen(self, session_id: str) -> None:
        """A session that was let in is there."""
        ...

    async def tend(self, policy: GroupPolicy, timeout_seconds: float, now: float) -> int:
        """End expired leases, and give up the groups in which no member came for `timeout_seconds` (0: never): require_all
        makes them dead letters, drop drops them, allow_partial delivers them if enough members are usable. How many."""
        ...

    async def lease(self, terms: LeaseTerms) -> Lease | Nothing:
        """Take ready groups, oldest first, expired leases put back before. A group delivered `max_deliveries` times goes to the
        dead letters instead. `stale_groups`: a group with a span older than `oldest_version` is passed over and kept for
        others (keep), dropped (drop) or given with a mark (flag); counted in each case.

        Groups are whole: the first is taken whatever its size, further ones while they fit `max_trajectories`. No limit
        at all means one group.

        Who gets nothing has a claim; `waits` says that it will ask again as soon as something comes. Ready groups are dealt,
        oldest first, among all claims that can take them, each to the one with the fewest, the longest waiting of several;
        the caller gets its own. Claims end when groups are given, by `leave`, or soon after the last request, and those that
        do not wait keep nobody from a last group. `version`, the current one, is what `versions_ahead` counts from.

        `version` and `oldest_version` are the default policy's; `named` has the other policies' (of `policies`): rows of one that it
        lacks are left for the next lease. With `policy` only that one's rows are taken, "" being the default one's; the others'
        in the same group stay for their own lease, as a group of their own. A group is stale by any of the rows that are taken.

        With `complete_only` groups with a usable member that is not complete are left for others."""
        ...

    def watch(self) -> AbstractAsyncContextManager[Arrivals]:
        """What comes, by one blocking read of this process however many watch."""
        ...

    async def leave(self, consumer: str) -> None:
        """The consumer does not wait any more."""
        ...

    async def ack(self, lease_id: str, now: float) -> Sequence[str]:
        """The group ids acknowledged, never delivered again; repeating it is a no-op. Raises `NotFound`, or `Conflict`
        when the lease expired or was given back."""
        ...

    async def nack(self, lease_id: str, now: float) -> Sequence[str]:
        """The group ids given back, in their old place. Raises as `ack` does."""
        ...

    async def give_back(self, lease_id: str, now: float) -> None:
        """As `nack`, for a lease that reached nobody: it does not count as a delivery."""
        ...

    async def extend(self, lease_id: str, lease_seconds: float, now: float) -> float:
        """The new deadline in epoch seconds. Raises as `ack` does."""
        ...

    async def bury(self, lease_id: str, reference: str, reason: str, now: float) -> None:
        """A leased group that cannot be delivered goes to the dead letters and out of its lease."""
        ...

    async def dead_letters(
        self, limit: int = 100, cursor: str | None = None, reason: str | None = None
    ) -> tuple[Sequence[DeadLetter], str | None]:
        """Newest first, those whose reason contains `reason`, with the cursor of the next page or None."""
        ...

    async def retry_dead(self, names: Sequence[str], policy: GroupPolicy, now: float) -> Sequence[str]:
        """Deliver dead groups again, as if never delivered, or wait for their members again. `names` are letter ids, or group
        ids that mean all dead rounds. The letter ids; raises `Conflict` when a member could only go to a later round."""
        ...

    async def drop_dead(self, names: Sequence[str]) -> Sequence[str]:
        """Take dead groups off the list, for good. The letter ids."""
        ...

    async def counts(self) -> Mapping[str, int]:
        """Groups by state: opened (no member closed yet; only while sessions are admitted), filling, ready, leased, acked,
        dropped, dead, stale (ready but last passed over as too old)."""
        ...

    async def totals(self) -> Mapping[str, int]:
        """How often groups came into each state since the store began, and what else befell them."""
        ...
