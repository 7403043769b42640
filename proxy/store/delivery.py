"""Groups, leases and dead letters in Redis. All of it shares one slot, so that every method is one atomic script."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, fields
from typing import Any

from contract.sessions import GroupRule
from proxy.errors import Conflict, NotFound
from proxy.store.arrivals import Arrivals
from proxy.store.connection import Argument, Script, StoreConnection
from proxy.store.groups import (
    DeadLetter,
    GroupDefaults,
    GroupMember,
    GroupRound,
    LeasedGroup,
    LeaseRecord,
    Nothing,
    PolicyLine,
    parse_round,
)
from proxy.store.keys import (
    ARRIVALS,
    DELIVERY,
    GROUP_POLICIES,
    GROUP_TOTALS,
    pack,
    pack_versioned,
    parse_hash,
    unpack,
    unpack_versioned,
)
from proxy.store.run import Axis, Curve, Point, PolicyOutcome, RunRecord, encode_outcomes

log = logging.getLogger(__name__)

REMEMBERED_SECONDS = 86400.0
"""How long an ended lease is remembered, and distinguished from one that never existed."""
WAITING_CLAIM_SECONDS = 8.0
"""How long a waiting consumer's claim outlives its last request: longer than the pause between two requests."""
POLLED_CLAIM_SECONDS = 2.0
"""The same for a consumer that does not wait."""
ANY = "*"
"""Stands for every policy, and every run, in a lease; none has this name."""
LETTERS_LOOKED_AT = 1000
"""Dead letters that one page examines; a page filtered by reason may be short."""
CELLS_AT_ONCE = 2000

PRELUDES = ("_delivery", "_run", "_parts", "_ahead", "_leases")
ENDED = {"acked": "was acknowledged", "nacked": "was given back", "expired": "has expired"}


@dataclass(frozen=True, slots=True)
class CloseRequest:
    """What a close or delete requested, kept with the announcement so that it can be finished after a crash.

    `created_at` identifies the session that a delete means: its id may be reused."""

    status: str
    reward: float | None = None
    error: str | None = None
    created_at: float | None = None


@dataclass(frozen=True, slots=True)
class Announced:
    """A session about to enter its group or to be deleted. `request` None: it was frozen already, and its reward came late."""

    session_id: str
    announced_at: float
    request: CloseRequest | None


@dataclass(frozen=True, slots=True)
class Admission:
    """`undelivered`: number of groups. `noted`: the session was unknown and is now counted in an opened group. `versions_ahead`: the
    versions expected until a group begun now is leased; None unless requested."""

    granted: bool
    undelivered: int
    noted: bool
    versions_ahead: int | None = None


@dataclass(frozen=True, slots=True)
class Freshness:
    """Admit no group that would be leased more than `most_behind` versions after the current `version`, at `groups_per_version` groups
    per version. `named`: the current versions of the other policies, which have the same limit."""

    version: int
    most_behind: int
    groups_per_version: int
    named: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseQuery:
    """What a consumer asks for; see `DeliveryStore.lease`."""

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
    run: str | None = None
    complete_only: bool = False
    named: Mapping[str, PolicyLine] = field(default_factory=dict)


class DeliveryStore:
    """Every method may raise `StoreUnavailable`. `now` is Redis's time, in epoch seconds (`proxy.store.service.RedisClock`)."""

    def __init__(self, connection: StoreConnection) -> None:
        self._redis = connection
        self._arrivals = Arrivals(connection, ARRIVALS)

    async def announce(self, session_id: str, request: CloseRequest | None, now: float) -> None:
        """Notes that a session is about to be closed, deleted or given a late reward. Sessions and groups are in different slots: whoever
        finds one that stays announced finishes it (`find_announced`)."""
        await self._run("announce", session_id, repr(now), b"" if request is None else pack_versioned(request))

    async def retract(self, session_id: str) -> None:
        """Withdraws the announcement; `fill` does so itself."""
        await self._run("retract", session_id)

    async def find_announced(self, before: float, limit: int = 100) -> Sequence[Announced]:
        """Sessions announced by `before` and neither filled nor retracted since, oldest first."""
        flat = await self._run("announced", repr(before), limit)
        return [
            Announced(session_id.decode(), float(at), unpack_versioned(request, CloseRequest) if request else None)
            for session_id, at, request in zip(flat[::3], flat[1::3], flat[2::3], strict=True)
        ]

    async def fill(
        self,
        group_id: str,
        group_size: int,
        member: GroupMember,
        defaults: GroupDefaults,
        now: float,
        rule: GroupRule | None = None,
        outcomes: Sequence[PolicyOutcome] = (),
    ) -> str:
        """Puts a closed session into its group, and counts its `outcomes` in the numbers of the run. Returns the group's state: filling,
        ready, dropped, leased, acked or dead. From now on `rule` takes precedence over `defaults` for the group.

        Idempotent by session id: a member filled again replaces itself until the group is leased, and is ignored afterwards. Reusing
        a group id after its group is full starts the next round of that id: a new group."""
        reward = "" if member.reward is None else repr(float(member.reward))
        entry = (member.session_id, int(member.usable), reward, member.rows, member.oldest_version)
        named = (each for name, rows in member.named.items() for each in (name, rows.rows, rows.oldest_version))
        rules = (*_default_args(defaults), _pack_rule(rule))
        counted = (member.run, encode_outcomes(outcomes))
        args = (group_id, group_size, *entry, repr(now), *rules, int(member.complete), *counted, *named)
        status: bytes = await self._run("fill", *args, durable=True)
        return status.decode()

    async def withdraw(self, session_id: str, defaults: GroupDefaults, *, uncount: bool = False) -> None:
        """Takes a session to be deleted out of its group and frees its place; it stays announced. Raises `Conflict` while leased. The
        numbers of the run keep the session, unless it is to be uncounted: it was filled again after it had been withdrawn."""
        if await self._run("withdraw", session_id, *_default_args(defaults), int(uncount)) == b"leased":
            raise Conflict(f"session {session_id} is leased by a trainer; delete it after the lease has ended")

    async def admit(
        self,
        group_id: str,
        session_id: str,
        limit: int,
        defaults: GroupDefaults,
        now: float,
        freshness: Freshness | None = None,
        *,
        again: bool = False,
    ) -> Admission:
        """Whether a session may be opened, at `limit` undelivered groups (opened, filling or ready; 0: unlimited). A session of an existing
        group with room is always admitted. A refusal is counted unless this is a repetition (`again`)."""
        wanted = freshness or Freshness(-1, -1, 1)
        args = (int(not again), wanted.version, wanted.most_behind, wanted.groups_per_version, *_flatten(wanted.named))
        answer = await self._run("admit", group_id, session_id, limit, repr(now), defaults.members, *args)
        granted, undelivered, noted, ahead = answer
        return Admission(bool(granted), undelivered, bool(noted), ahead if freshness else None)

    async def list_policies(self) -> Sequence[str]:
        """The named models whose rows were ever filled into a group, sorted."""
        return sorted(name.decode() for name in await self._redis.execute("SMEMBERS", GROUP_POLICIES))

    async def count_versions_ahead(self, version: int, groups_per_version: int, named: Mapping[str, int] | None = None) -> int:
        """As in `Admission`: (undelivered groups + groups leased and not yet in the weights) / groups_per_version, rounded down; the
        maximum over all policies, whose current versions are `version` and `named`.

        Source: the staleness control of Fu et al., "AReaL: A Large-Scale Asynchronous Reinforcement Learning System for Language
        Reasoning", arXiv:2505.24298, counted from the current version instead of the first one."""
        return int(await self._run("versions_ahead", version, groups_per_version, *_flatten(named or {})))

    async def dismiss(self, session_id: str) -> None:
        """An admitted session was not created."""
        await self._run("dismiss", session_id)

    async def find_unconfirmed(self, before: float, limit: int = 100) -> Sequence[str]:
        """Session ids admitted by `before` and neither dismissed nor confirmed since, oldest first. Sessions are in other slots:
        the process that admitted one may have died before it created it."""
        return [session_id.decode() for session_id in await self._run("unseen", repr(before), limit)]

    async def confirm(self, session_id: str) -> None:
        """An admitted session exists."""
        await self._run("seen", session_id)

    async def tend(self, defaults: GroupDefaults, timeout_seconds: float, now: float) -> int:
        """Ends expired leases, and gives up groups that no member joined for `timeout_seconds` (0: never): require_all makes them dead
        letters, drop drops them, allow_partial delivers them if enough members are usable. Returns how many were given up."""
        return int(await self._run("tend", repr(now), f"{timeout_seconds:g}", *_default_args(defaults)))

    async def lease(self, terms: LeaseQuery) -> LeaseRecord | Nothing:
        """Takes ready groups, oldest first, after putting expired leases back. A group already delivered `max_deliveries` times goes to the
        dead letters instead. Groups are whole: the first is taken whatever its size, further ones while they fit `max_trajectories`.
        Without any limit, one group is taken.

        `stale_groups`: a group with a span older than `oldest_version` is passed over and kept for other consumers (keep), dropped
        (drop), or leased with a mark (flag). Each case is counted. `complete_only` leaves groups with an incomplete usable member to
        others.

        A consumer that gets nothing has a claim; `waits`: it asks again when something arrives. Ready groups are dealt, oldest first,
        among all claims that can take them, each to the claim with the fewest groups, then to the one that waits longest; the
        caller gets its own. A claim ends with a lease, with `leave`, or soon after the consumer's last request. Consumers that do
        not wait never keep others from the last group.

        `version` (the current one, for `count_versions_ahead`) and `oldest_version` are the default policy's; `named` has the other
        policies' (of `list_policies`): rows of a policy missing there wait for the next lease. `policy` takes only that policy's rows
        ("" the default's); the others' rows in the same group become groups of their own. A group is stale if any row taken is. `run`
        takes only groups of that run."""
        lease_id, now = uuid.uuid4().hex, terms.now
        unlimited = terms.max_groups is None and terms.max_trajectories is None
        most = (1 if unlimited else terms.max_groups, terms.max_trajectories, terms.oldest_version)
        limits = (_encode_limit(limit) for limit in most)
        times = (repr(now + terms.lease_seconds), terms.max_deliveries, repr(now), REMEMBERED_SECONDS)
        claimed_until = repr(now + (WAITING_CLAIM_SECONDS if terms.waits else POLLED_CLAIM_SECONDS))
        claim = (terms.stale_groups, claimed_until, int(terms.waits), int(terms.complete_only))
        lines = (
            each for name, line in terms.named.items() for each in (name, _encode_limit(line.oldest_version), line.version)
        )
        wanted = (ANY if each is None else each for each in (terms.policy, terms.run))
        whose = (_encode_limit(terms.version), *wanted, *lines)
        answer = await self._run("lease", lease_id, terms.consumer, *limits, *times, *claim, *whose)
        if answer[0] == b"none":
            return Nothing(float(answer[1]) if answer[1] else None)
        return LeaseRecord(lease_id, float(answer[1]), [_parse_group(group) for group in answer[2:]])

    def watch(self) -> AbstractAsyncContextManager[Arrivals]:
        """Arrivals while in the context: one blocking read per process, however many watch."""
        return self._arrivals.watch()

    async def leave(self, consumer: str) -> None:
        """The consumer waits no more: its claim ends."""
        await self._run("leave", consumer)

    async def ack(self, lease_id: str, now: float) -> Sequence[str]:
        """The acknowledged group ids, which are never delivered again. Repeating it is a no-op. Raises `NotFound`, and `Conflict` when the
        lease expired or was given back."""
        return await self._settle(lease_id, "acked", now)

    async def nack(self, lease_id: str, now: float) -> Sequence[str]:
        """The group ids given back, in their old places. Raises as `ack` does."""
        return await self._settle(lease_id, "nacked", now)

    async def give_back(self, lease_id: str, now: float) -> None:
        """Like `nack`, for a lease that was never received: not counted as a delivery."""
        await self._settle(lease_id, "nacked", now, undelivered=True)

    async def extend(self, lease_id: str, lease_seconds: float, now: float) -> float:
        """The new deadline in epoch seconds. Raises as `ack` does."""
        status, *detail = await self._run("extend", lease_id, repr(now + lease_seconds), repr(now))
        if status != b"active":
            raise _refuse_ended(lease_id, status.decode())
        return float(detail[0])

    async def bury(self, lease_id: str, reference: str, reason: str, now: float) -> None:
        """Moves a leased group that cannot be delivered from its lease to the dead letters."""
        await self._run("bury", lease_id, reference, reason, repr(now))

    async def dead_letters(
        self, limit: int = 100, cursor: str | None = None, reason: str | None = None
    ) -> tuple[Sequence[DeadLetter], str | None]:
        """A page of those whose reason contains `reason`, newest first, and the cursor of the next page or None: an empty page is the
        last."""
        following = (cursor or "").encode()
        letters: list[Any] = []
        while not letters:
            following, *letters = await self._run("dead_letters", limit, following, reason or "", LETTERS_LOOKED_AT)
            if not following:
                break
        return [_parse_letter(letter) for letter in letters], following.decode() or None

    async def retry_dead(self, names: Sequence[str], defaults: GroupDefaults, now: float) -> Sequence[str]:
        """Makes dead groups deliverable again as if never delivered, or lets them fill again. `names`: letter ids, or group ids for all
        their dead rounds. Returns the letter ids. Raises `Conflict` when new members could only join a later round."""
        return await self._exhume("retry", names, defaults, now)

    async def drop_dead(self, names: Sequence[str]) -> Sequence[str]:
        """Drops dead groups for good. Returns the letter ids."""
        return await self._exhume("drop", names, GroupDefaults(), 0.0)

    async def count_groups(self) -> Mapping[str, int]:
        """Groups by state: opened (no member closed yet; only while sessions are admitted), filling, ready, leased, acked, dropped,
        dead, stale (ready but last passed over as too old)."""
        flat = await self._run("counts")
        return {state.decode(): number for state, number in zip(flat[::2], flat[1::2], strict=True)}

    async def load_standings(self, session_ids: Sequence[str]) -> list[str]:
        """Per session: announced (about to enter its group), its group's status, or none."""
        return [standing.decode() for standing in await self._run("standings", *session_ids)]

    async def load_rounds(self, group_id: str, newest: int = 20) -> list[GroupRound]:
        """The rounds of a group id, newest first, each with the parts that were split off it."""
        return [parse_round(answer) for answer in await self._run("group_rounds", group_id, newest)]

    async def load_totals(self) -> Mapping[str, int]:
        """How often groups entered each state and met other events, since the store began."""
        flat = await self._redis.execute("HGETALL", GROUP_TOTALS)
        return {event.decode(): int(times) for event, times in parse_hash(flat).items()}

    async def _settle(self, lease_id: str, wanted: str, now: float, *, undelivered: bool = False) -> list[str]:
        status, *detail = await self._run("settle", lease_id, wanted, repr(now), int(undelivered), durable=True)
        if status.decode() != wanted:
            raise _refuse_ended(lease_id, status.decode())
        return [group_id.decode() for group_id in detail[0]]

    async def _exhume(self, action: str, names: Sequence[str], defaults: GroupDefaults, now: float) -> list[str]:
        outcome, found = await self._run("exhume", action, repr(now), *_default_args(defaults), *names)
        if outcome == b"superseded":
            raise Conflict(
                f"dead group {found.decode()} is incomplete, and new sessions of its group id join a later group: drop it"
            )
        return [reference.decode() for reference in found]

    async def load_runs(self, *runs: str) -> list[RunRecord]:
        """All runs, or these as far as there are any; the one that began last first."""
        found = [_parse_run(*each) for each in await self._read("load_runs", *runs)]
        return sorted(found, key=lambda each: (-each.since, each.run))

    async def mark_run(self, run: str, now: float, *, ended: bool | None = None, hidden: bool | None = None) -> bool:
        """Declares the run over or hidden, or not; what is None stays. False when nothing of it was ever counted."""
        marks = ("" if mark is None else int(mark) for mark in (ended, hidden))
        return bool(await self._run("mark_run", run, repr(now), *marks))

    async def load_curves(self, axis: Axis, newest: int = 0, runs: Sequence[str] | None = None) -> list[Curve]:
        """What `fill` has counted: the curves of the axis, by run, policy and label, of these runs or of all; of each only its `newest`
        points, unless that is 0."""
        if runs is not None and not runs:
            return []
        found: list[bytes] = []
        more = 1
        while more:
            last = found[-3] if found else ""
            more, *read = await self._read("load_curves", axis, newest, CELLS_AT_ONCE, last, *(runs or ()))
            found += read
        return await asyncio.to_thread(lambda: [*map(_parse_curve, found[::3], found[1::3], found[2::3])])

    async def _read(self, script: str, *args: Argument) -> Any:
        return await self._redis.run(Script.read(script, "_delivery"), DELIVERY, args)

    async def _run(self, script: str, *args: Argument, durable: bool = False) -> Any:
        return await self._redis.run(Script.read(script, *PRELUDES), DELIVERY, args, durable=durable, patient=True)


def _encode_limit(number: int | None) -> int:
    """-1 stands for None in scripts."""
    return -1 if number is None else number


def _flatten(versions: Mapping[str, int]) -> list[Argument]:
    return [each for pair in versions.items() for each in pair]


def _pack_rule(rule: GroupRule | None) -> bytes:
    """The fields of the rule that are set, as `fill.lua` names them: without `group_`."""
    named = ((each.name, getattr(rule, each.name)) for each in fields(GroupRule)) if rule else ()
    own = {name.removeprefix("group_"): value for name, value in named if value is not None}
    return pack(own) if own else b""


def _default_args(defaults: GroupDefaults) -> tuple[str, int, str]:
    return defaults.members, defaults.minimum, defaults.zero_variance


def _parse_group(answer: Any) -> LeasedGroup:
    reference, group_id, deliveries, oldest_version, stale, session_ids, names = answer
    members, policies = [each.decode() for each in session_ids], sorted(each.decode() for each in names)
    return LeasedGroup(reference.decode(), group_id.decode(), members, deliveries, oldest_version, bool(stale), policies)


def _parse_letter(answer: Any) -> DeadLetter:
    letter_id, group_id, session_ids, deliveries, reason, died_at = answer
    members = [each.decode() for each in session_ids]
    return DeadLetter(letter_id.decode(), group_id.decode(), members, deliveries, reason.decode(), float(died_at))


def _refuse_ended(lease_id: str, status: str) -> NotFound | Conflict:
    if status == "missing":
        return NotFound(f"there is no lease {lease_id}")
    return Conflict(f"lease {lease_id} {ENDED[status]}")


def _parse_run(name: bytes, packed: bytes, states: Sequence[Any]) -> RunRecord:
    kept, groups = unpack(packed, dict[str, Any]), dict[tuple[str, str], int]()
    for named, number in zip(states[::2], states[1::2], strict=True):
        state, cause = named.decode().split("=", 1)
        groups[state, cause] = number
    return RunRecord(name.decode(), kept["since"], kept["at"], kept.get("ended_at"), kept.get("hidden", False), groups)


def _parse_curve(name: bytes, starts: bytes, cells: bytes) -> Curve:
    _, run, policy, label = name.decode().split("=", 3)
    points = map(Point, unpack(starts, list[int]), unpack(cells, list[dict[str, float]]))
    return Curve(policy, label, list(points), run)
