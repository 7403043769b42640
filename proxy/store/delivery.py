"""Groups, leases and dead letters in Redis. All of it shares one slot, so that each method is one script."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from proxy.errors import Conflict, NotFound
from proxy.store.base import Announced, CloseRequest, DeadLetter, GroupPolicy, Lease, LeasedGroup, Member
from proxy.store.connection import Argument, Script, StoreConnection
from proxy.store.keys import DELIVERY
from proxy.store.packing import pack_versioned, unpack_versioned

REMEMBERED_SECONDS = 86400.0
"""How long an ended lease can still be told from one that never was."""

ANNOUNCE = Script.read("announce", "_delivery")
RETRACT = Script.read("retract", "_delivery")
ANNOUNCED = Script.read("announced", "_delivery")
FILL = Script.read("fill", "_delivery")
WITHDRAW = Script.read("withdraw", "_delivery")
LEASE = Script.read("lease", "_delivery")
SETTLE = Script.read("settle", "_delivery")
EXTEND = Script.read("extend", "_delivery")
BURY = Script.read("bury", "_delivery")
DEAD_LETTERS = Script.read("dead_letters", "_delivery")
COUNTS = Script.read("counts", "_delivery")

ENDED = {"acked": "was acknowledged", "nacked": "was given back", "expired": "has expired"}


class RedisDeliveryStore:
    """Implements `proxy.store.base.DeliveryStore`."""

    def __init__(self, connection: StoreConnection) -> None:
        self._redis = connection
        self._something_came = asyncio.Condition()

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

    async def fill(self, group_id: str, group_size: int, member: Member, policy: GroupPolicy, now: float) -> str:
        reward = "" if member.reward is None else repr(float(member.reward))
        entry = (member.session_id, int(member.usable), reward, member.rows, member.oldest_version)
        status: bytes = await self._run(FILL, group_id, group_size, *entry, *_decision(policy))
        await self._announce_arrival()
        return status.decode()

    async def withdraw(self, session_id: str, policy: GroupPolicy) -> None:
        if await self._run(WITHDRAW, session_id, *_decision(policy)) == b"leased":
            raise Conflict(f"session {session_id} is leased by a trainer; delete it after the lease has ended")

    async def lease(
        self,
        *,
        consumer: str,
        max_groups: int | None,
        max_trajectories: int | None,
        oldest_version: int | None,
        lease_seconds: float,
        max_deliveries: int,
        now: float,
    ) -> Lease | None:
        if max_groups is None and max_trajectories is None:
            max_groups = 1
        lease_id = uuid.uuid4().hex
        limits = (-1 if limit is None else limit for limit in (max_groups, max_trajectories, oldest_version))
        deadline = repr(now + lease_seconds)
        answer = await self._run(LEASE, lease_id, consumer, *limits, deadline, max_deliveries, repr(now), REMEMBERED_SECONDS)
        if not answer:
            return None
        return Lease(lease_id, float(answer[0]), [_leased_group(group) for group in answer[1:]])

    async def wait(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds), self._something_came:
                await self._something_came.wait()

    async def ack(self, lease_id: str, now: float) -> Sequence[str]:
        return await self._settle(lease_id, "acked", now)

    async def nack(self, lease_id: str, now: float) -> Sequence[str]:
        group_ids = await self._settle(lease_id, "nacked", now)
        await self._announce_arrival()
        return group_ids

    async def extend(self, lease_id: str, lease_seconds: float, now: float) -> float:
        status, *detail = await self._run(EXTEND, lease_id, repr(now + lease_seconds), repr(now))
        if status != b"active":
            raise _ended(lease_id, status.decode())
        return float(detail[0])

    async def bury(self, lease_id: str, group_id: str, reason: str, now: float) -> None:
        await self._run(BURY, lease_id, group_id, reason, repr(now))

    async def dead_letters(self, limit: int = 100) -> Sequence[DeadLetter]:
        return [
            DeadLetter(group_id.decode(), [each.decode() for each in session_ids], reason.decode(), float(died_at))
            for group_id, session_ids, reason, died_at in await self._run(DEAD_LETTERS, limit)
        ]

    async def counts(self) -> Mapping[str, int]:
        flat = await self._run(COUNTS)
        return {state.decode(): number for state, number in zip(flat[::2], flat[1::2], strict=True)}

    async def _settle(self, lease_id: str, wanted: str, now: float) -> list[str]:
        status, *detail = await self._run(SETTLE, lease_id, wanted, repr(now))
        if status.decode() != wanted:
            raise _ended(lease_id, status.decode())
        return [group_id.decode() for group_id in detail[0]]

    async def _run(self, script: Script, *args: Argument) -> Any:
        return await self._redis.run(script, DELIVERY, args)

    async def _announce_arrival(self) -> None:
        async with self._something_came:
            self._something_came.notify_all()


def _decision(policy: GroupPolicy) -> tuple[str, int, str]:
    return policy.members, policy.minimum, policy.zero_variance


def _leased_group(answer: Any) -> LeasedGroup:
    group_id, deliveries, oldest_version, session_ids = answer
    return LeasedGroup(group_id.decode(), [each.decode() for each in session_ids], deliveries, oldest_version)


def _ended(lease_id: str, status: str) -> NotFound | Conflict:
    if status == "missing":
        return NotFound(f"there is no lease {lease_id}")
    return Conflict(f"lease {lease_id} {ENDED[status]}")
