"""Groups of closed sessions that a trainer compares, as they are filled, leased and buried."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

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


@dataclass(frozen=True, slots=True)
class GroupRound:
    """One use of a group id, or the rows of one `policy` that were leased on their own. `story`: the reason why it died, or how its last
    lease ended. `sessions` and `usable`: its members; an acknowledged or dropped round knows no usable ones. `before`: ready groups that
    are leased before it, None unless it is ready. `passed`: the last lease wanted newer tokens. `expires_at`: of its lease."""

    reference: str
    policy: str | None
    status: str
    cause: str
    story: str
    sessions: int
    usable: int
    size: int
    deliveries: int
    oldest_version: int | None
    since: float | None
    before: int | None
    passed: bool
    consumer: str
    expires_at: float | None


def parse_round(answer: Sequence[Any]) -> GroupRound:
    """As `scripts/group_rounds.lua` answers it."""
    texts = [each.decode() if isinstance(each, bytes) else str(each) for each in answer]
    reference, status, cause, story, sessions, usable, size, deliveries, oldest, since, before, passed, consumer, expires = (
        texts
    )
    number, _, _ = reference.partition(":")
    policy = number.partition("/")[2].partition("=")[0] if "/" in number else None
    counts = (int(sessions), int(usable), int(size), int(deliveries), int(float(oldest)) if oldest else None)
    times = (float(since) if since else None, int(before) if before else None, passed == "1")
    return GroupRound(reference, policy, status, cause, story, *counts, *times, consumer, float(expires) if expires else None)
