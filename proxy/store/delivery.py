"""Groups, leases and dead letters in Redis. All of it shares one slot, so that each method is one script."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict
from typing import Any

from proxy.errors import Conflict, NotFound
from proxy.store.arrivals import StreamArrivals
from proxy.store.connection import Argument, Script, StoreConnection
from proxy.store.delivery_store import Admission, Announced, CloseRequest, Freshness, LeaseTerms
from proxy.store.groups import DeadLetter, GroupPolicy, GroupRule, Lease, LeasedGroup, Member, Nothing
from proxy.store.keys import ARRIVALS, DELIVERY, GROUP_POLICIES, GROUP_TOTALS
from proxy.store.packing import pack, pack_versioned, unpack_versioned

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
    """Implements `proxy.store.delivery_store.DeliveryStore`."""

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
