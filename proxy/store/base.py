"""The store as the rest of the service sees it: small Protocols and the values they exchange.

`SessionStore`: sessions and the records of their calls; all keys of a session share one hash tag.
`DeliveryStore`: groups, leases and dead letters; all in one hash tag, so that a lease is one atomic script.
`WeightStore`: the pool's current version and its history.
`PeerStore`: which processes live, and what they tell each other.

Records are opaque bytes here (`reconstruct.codec` writes and reads them). Every method raises `StoreUnavailable` when Redis
cannot take or give what was asked (connection, -LOADING, -OOM, -READONLY, -MISCONF), and only that.

The path of one call is two round trips: `begin` (snapshot + new records + intent) and `commit`.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """What is fixed when a session is created. `key_hash` is sha256 of the session's API key; the key is not stored."""

    session_id: str
    key_hash: bytes
    created_at: float
    task_id: str | None = None
    group_id: str | None = None
    group_size: int = 1
    metadata: Mapping[str, Any] = field(default_factory=dict)
    sampling: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SessionState:
    """A session as it stands. `status` is open, closing, completed, failed, timeout or cancelled; or restoring while an import
    of it has not ended."""

    info: SessionInfo
    status: str = "open"
    calls: int = 0
    reward: float | None = None
    per_call: Mapping[str, float] = field(default_factory=dict)
    per_branch: Mapping[str, float] = field(default_factory=dict)
    reward_metadata: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None
    closed_at: float | None = None
    updated_at: float = 0.0


@dataclass(frozen=True, slots=True)
class Intent:
    """Written before the engine is asked: without a result it becomes a dangling call after a crash.

    `process` is who asked; empty when that process has given the call up. A call is under way while its process lives."""

    call_id: str
    parent_id: str | None
    digest: bytes
    replica: str
    started_at: float
    process: str = ""


@dataclass(frozen=True, slots=True)
class Begun:
    """Answer of `begin`. `status` is the session's, or "missing". `accepted` is true when the intent was written:
    the session is open and `known_calls` was current. Otherwise `records` holds the calls the caller did not know.

    `created_at` is the session's: a cached tree of another `created_at` belongs to a deleted session of the same id.
    "missing" is also the answer when the caller claims to know more calls than there are (the same case)."""

    status: str
    accepted: bool
    records: Sequence[bytes] = ()
    created_at: float = 0.0


class SessionStore(Protocol):
    async def ping(self) -> None:
        """Returns when the store answers; raises `StoreUnavailable` otherwise."""
        ...

    async def create(self, info: SessionInfo) -> bool:
        """False when another session of that id exists. Repeating the same creation is a no-op and True."""
        ...

    async def load(self, session_id: str) -> SessionState | None: ...

    async def listing(
        self, *, status: str | None, group_id: str | None, limit: int, cursor: str | None
    ) -> tuple[list[SessionState], str | None]:
        """Newest first, with the cursor of the next page or None."""
        ...

    async def delete(self, session_id: str) -> bool: ...

    async def begin(self, session_id: str, known_calls: int, intent: Intent) -> Begun: ...

    async def commit(self, session_id: str, intent_id: str, records: Mapping[str, bytes]) -> int:
        """Append `records` (call_id -> bytes, all or none), drop the intent, return the session's number of calls.

        Repeating a commit is a no-op. A call_id that exists with other bytes raises `Conflict`; a session frozen or deleted
        meanwhile raises `Conflict` ("closing" still takes the calls that were in flight)."""
        ...

    async def drop_intent(self, session_id: str, intent_id: str) -> None:
        """The engine refused the call: the tree is as it was."""
        ...

    async def disown(self, running: Container[str]) -> None:
        """Settle the intents of this process whose calls are not `running` any more, though the store could not be told when
        they ended: those that came to nothing are taken away, the others are nobody's from now on, and so dangling."""
        ...

    async def mark_delivered(self, session_id: str, call_ids: Sequence[str]) -> None: ...

    async def delivered(self, session_id: str) -> set[str]: ...

    async def records(self, session_id: str, start: int = 0, stop: int = -1) -> list[bytes]:
        """Records in commit order; indexes as in LRANGE."""
        ...

    async def intents(self, session_id: str) -> list[Intent]: ...

    async def set_reward(
        self,
        session_id: str,
        reward: float | None,
        per_call: Mapping[str, float],
        per_branch: Mapping[str, float],
        metadata: Mapping[str, Any],
    ) -> SessionState:
        """A reward of None keeps the one there. Raises `NotFound`, or `Conflict` once the session was leased."""
        ...

    async def mark_leased(self, session_id: str) -> SessionState | None:
        """The state that a trainer is given; from now on the reward is fixed. None when the session is gone."""
        ...

    async def begin_close(self, session_id: str) -> SessionState:
        """open -> closing: no new call begins. Raises `NotFound`; on a closed session returns its state."""
        ...

    async def close(
        self, session_id: str, status: str, reward: float | None, error: str | None, closed_at: float
    ) -> SessionState:
        """closing -> frozen with `status`. Repeating it with the same status is a no-op; another status raises `Conflict`."""
        ...

    async def unclosed(self, before: float, limit: int = 100) -> Sequence[str]:
        """Sessions not closed and last known to be active before that time, longest ago first."""
        ...

    async def seen(self, session_id: str, at: float | None) -> None:
        """Note when the session was active; None: it is closed or gone."""
        ...

    async def expire(self, session_id: str, idle_since: float, closing_since: float, intents: int) -> bool:
        """open -> closing, if the session was not active after `idle_since` and has `intents` intents. Also taken over is a
        session whose closing somebody left undone at `closing_since`. True for one caller only, who then closes it."""
        ...


@dataclass(frozen=True, slots=True)
class Member:
    """A closed session's entry in its group. `usable`: completed with a reward. `oldest_version`: of its sampled tokens."""

    session_id: str
    usable: bool
    reward: float | None
    rows: int
    oldest_version: int


@dataclass(frozen=True, slots=True)
class GroupPolicy:
    """`members`: require_all | allow_partial | drop; `minimum` usable members for allow_partial;
    `zero_variance`: keep | drop groups whose rewards are all equal (groups of two and more)."""

    members: str = "require_all"
    minimum: int = 1
    zero_variance: str = "keep"


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
class DeadLetter:
    """A group that is not delivered any more. `letter_id` names it among all rounds of its group id."""

    letter_id: str
    group_id: str
    session_ids: Sequence[str]
    deliveries: int
    reason: str
    died_at: float


@dataclass(frozen=True, slots=True)
class LeasedGroup:
    """`deliveries` counts this one. `session_ids` are the usable members, in the order they closed. `reference` tells it from
    other rounds of its group id. `stale`: it has a token older than the lease asked for, and is given all the same."""

    reference: str
    group_id: str
    session_ids: Sequence[str]
    deliveries: int
    oldest_version: int
    stale: bool = False


@dataclass(frozen=True, slots=True)
class Lease:
    lease_id: str
    expires_at: float
    groups: Sequence[LeasedGroup]


@dataclass(frozen=True, slots=True)
class Nothing:
    """No group for this consumer now. `due_at`: when one may be there without anybody closing a session, None if never."""

    due_at: float | None


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
    version takes `groups_per_version` groups."""

    version: int
    most_behind: int
    groups_per_version: int


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

    async def fill(self, group_id: str, group_size: int, member: Member, policy: GroupPolicy, now: float) -> str:
        """Put a closed session into its group. Returns the group's state: filling, ready, dropped, leased, acked or dead.

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

    async def versions_ahead(self, version: int, groups_per_version: int) -> int:
        """As in `Admission`: (undelivered groups + groups leased and not yet in the weights) / groups_per_version, rounded down.

        Source: the staleness control of Fu et al., "AReaL: A Large-Scale Asynchronous Reinforcement Learning System for Language
        Reasoning", arXiv:2505.24298, counted from the current version instead of the first one."""
        ...

    async def dismiss(self, session_id: str) -> None:
        """A session that was let in did not come to be."""
        ...

    async def tend(self, policy: GroupPolicy, timeout_seconds: float, now: float) -> int:
        """End expired leases, and give up the groups in which no member came for `timeout_seconds` (0: never): require_all
        makes them dead letters, drop drops them, allow_partial delivers them if enough members are usable. How many."""
        ...

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
        waits: bool = False,
        stale_groups: str = "keep",
        version: int | None = None,
    ) -> Lease | Nothing:
        """Take ready groups, oldest first, expired leases put back before. A group delivered `max_deliveries` times goes to the
        dead letters instead. `stale_groups`: a group with a span older than `oldest_version` is passed over and kept for
        others (keep), dropped (drop) or given with a mark (flag); counted in each case.

        Groups are whole: the first is taken whatever its size, further ones while they fit `max_trajectories`. No limit
        at all means one group.

        Who gets nothing has a claim; `waits` says that it will ask again as soon as something comes. Ready groups are dealt,
        oldest first, among all claims that can take them, each to the one with the fewest, the longest waiting of several;
        the caller gets its own. Claims end when groups are given, by `leave`, or soon after the last request, and those that
        do not wait keep nobody from a last group. `version`, the current one, is what `versions_ahead` counts from."""
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


@dataclass(frozen=True, slots=True)
class WeightState:
    version: int = 0
    path: str | None = None
    kind: str = "full"
    updated_at: float = 0.0


KEPT_WEIGHTS = 1000
"""How many versions of a policy its history goes back."""


class WeightStore(Protocol):
    """Every policy has a version line and a push lock of its own; "" is the default one."""

    async def current(self, policy: str = "") -> WeightState: ...

    async def history(self, policy: str = "", limit: int = 100) -> list[WeightState]:
        """Newest first."""
        ...

    async def advance(self, state: WeightState, policy: str = "", fence: int | None = None) -> None:
        """Make `state` current. Raises `Conflict` unless its version is greater than the current one, and when the push lock was
        given to another owner since it was taken with `fence`."""
        ...

    async def lock(self, owner: str, seconds: float, policy: str = "", fence: int = 0) -> int:
        """Take the push lock: a fencing token greater than every one before, or 0 while another owner holds it.

        With the `fence` that the owner was given, renew it: that fence, or 0 once another owner has had the lock."""
        ...

    async def unlock(self, owner: str, policy: str = "") -> None: ...

    async def identity(self) -> str:
        """What this store is called, the same for good and for every process: tells its services from those of other stores."""
        ...


class PeerStore(Protocol):
    async def beat(self, process: str, seconds: float) -> None:
        """Say that the process lives, and will for `seconds`."""
        ...

    async def leave(self, process: str) -> None:
        """It has ended, with nothing under way."""
        ...

    async def alive(self, processes: Collection[str]) -> set[str]:
        """Those of the processes that live."""
        ...

    async def ask_to_cut(self, session_id: str) -> None:
        """Tell every process to end its calls of the session."""
        ...

    async def to_cut(self, after: str, wait_seconds: float) -> tuple[list[str], str]:
        """Sessions that processes were told to cut since the mark `after` ("" at first), and the next mark. Waits for the first
        one."""
        ...
