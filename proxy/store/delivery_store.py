"""DeliveryStore: groups, leases and dead letters, as the rest of the service sees them.

All of it is in one hash tag, so that a lease is one atomic script.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Protocol

from proxy.store.groups import DeadLetter, GroupPolicy, GroupRule, Lease, Member, Nothing, PolicyLine


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
