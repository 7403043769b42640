"""Groups of closed sessions that a trainer compares, as they are filled, leased and buried."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from contract.sessions import DEFAULT_RUN


@dataclass(frozen=True, slots=True)
class PolicyRows:
    """What a named model sampled in a session: the number of trained rows, and the oldest of its versions in them."""

    rows: int
    oldest_version: int


@dataclass(frozen=True, slots=True)
class GroupMember:
    """A closed session in its group. `usable`: completed or timed out, with a reward. `rows` and their `oldest_version` are the default
    policy's; `named` has the other policies'. `complete`: as in its accounting. `run`: a group is of its first member's."""

    session_id: str
    usable: bool
    reward: float | None
    rows: int
    oldest_version: int
    named: Mapping[str, PolicyRows] = field(default_factory=dict)
    complete: bool = True
    run: str = DEFAULT_RUN


@dataclass(frozen=True, slots=True)
class GroupDefaults:
    """What a group needs unless its sessions say otherwise (`contract.sessions.GroupRule`). `members`: require_all | allow_partial | drop.
    `minimum`: usable members for allow_partial. `zero_variance`: keep | drop groups of two or more whose rewards are all equal."""

    members: str = "require_all"
    minimum: int = 1
    zero_variance: str = "keep"


@dataclass(frozen=True, slots=True)
class LeasedGroup:
    """`deliveries` includes this one. `session_ids`: the usable members, in the order they closed. `reference` distinguishes the rounds of
    a group id. `stale`: leased although it has a token older than the lease allows. `policies`: those whose rows are leased; "" is
    the default one."""

    reference: str
    group_id: str
    session_ids: Sequence[str]
    deliveries: int
    oldest_version: int
    stale: bool = False
    policies: Sequence[str] = ("",)


@dataclass(frozen=True, slots=True)
class PolicyLine:
    """A named model's current weight `version`, and the `oldest_version` that a lease takes as fresh (None: any)."""

    version: int
    oldest_version: int | None = None


@dataclass(frozen=True, slots=True)
class LeaseRecord:
    lease_id: str
    expires_at: float
    groups: Sequence[LeasedGroup]


@dataclass(frozen=True, slots=True)
class Nothing:
    """No group for this consumer now. `due_at`: when one may become ready without another session closing; None: never."""

    due_at: float | None


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A group no longer delivered. `letter_id` distinguishes the rounds of its group id."""

    letter_id: str
    group_id: str
    session_ids: Sequence[str]
    deliveries: int
    reason: str
    died_at: float
