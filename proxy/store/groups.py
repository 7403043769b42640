"""Groups: the closed sessions that a trainer compares with each other, from their first member to a lease or the dead letters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class PolicyRows:
    """What a named model sampled in a session: so many trained rows, and the oldest version of it in them."""

    rows: int
    oldest_version: int


@dataclass(frozen=True, slots=True)
class Member:
    """A closed session's entry in its group. `usable`: completed or timed out, with a reward. `rows` are those of the default policy and
    `oldest_version` that of their sampled tokens; `named` has the rows of other policies. `complete`: as its accounting says."""

    session_id: str
    usable: bool
    reward: float | None
    rows: int
    oldest_version: int
    named: Mapping[str, PolicyRows] = field(default_factory=dict)
    complete: bool = True


@dataclass(frozen=True, slots=True)
class GroupPolicy:
    """`members`: require_all | allow_partial | drop; `minimum` usable members for allow_partial;
    `zero_variance`: keep | drop groups whose rewards are all equal (groups of two and more)."""

    members: str = "require_all"
    minimum: int = 1
    zero_variance: str = "keep"


@dataclass(frozen=True, slots=True)
class GroupRule:
    """What of a `GroupPolicy` the sessions of one group say themselves; None: as the service is set."""

    policy: str | None = None
    minimum: int | None = None
    zero_variance: str | None = None
    replacements: bool | None = None
    """False: no session takes the place of a failed member, so that with its last member the group is whole or never will be."""
    max_quarantined_share: float | None = None
    """How much of what a session sampled may be lost for it to be usable, 0 to 1; see `reconstruct.accounting.lost_share`."""


@dataclass(frozen=True, slots=True)
class LeasedGroup:
    """`deliveries` counts this one. `session_ids` are the usable members, in the order they closed. `reference` tells it from
    other rounds of its group id. `stale`: it has a token older than the lease asked for, and is given all the same. `policies`: whose
    rows are given; "" is the default one."""

    reference: str
    group_id: str
    session_ids: Sequence[str]
    deliveries: int
    oldest_version: int
    stale: bool = False
    policies: Sequence[str] = ("",)


@dataclass(frozen=True, slots=True)
class PolicyLine:
    """Where a named model's weights stand, for a lease: the current `version`, and the `oldest_version` that is not stale (None: any)."""

    version: int
    oldest_version: int | None = None


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
class DeadLetter:
    """A group that is not delivered any more. `letter_id` names it among all rounds of its group id."""

    letter_id: str
    group_id: str
    session_ids: Sequence[str]
    deliveries: int
    reason: str
    died_at: float
