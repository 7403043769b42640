"""Groups in the delivery store: how tests fill, lease and count them. Time is a number here: `now` is always given."""

from __future__ import annotations

from proxy.store.delivery import LeaseQuery
from proxy.store.groups import GroupDefaults, GroupMember, LeaseRecord, Nothing
from tests.support.service.redis_server import Store


def partial(minimum: int) -> GroupDefaults:
    return GroupDefaults("allow_partial", minimum)


ALL = GroupDefaults("require_all")
DROP = GroupDefaults("drop")
PARTIAL = partial(2)


def member(session_id: str, reward: float | None = 1.0, *, usable: bool = True, rows: int = 1, oldest: int = 0) -> GroupMember:
    return GroupMember(session_id, usable, reward, rows, oldest)


def failed(session_id: str) -> GroupMember:
    return member(session_id, None, usable=False, rows=0)


async def fill(
    store: Store, group_id: str, *members: GroupMember, size: int | None = None, defaults: GroupDefaults = ALL, now: float = 1.0
) -> str:
    """The group's state after the last of its members."""
    state = ""
    for each in members:
        state = await store.delivery.fill(group_id, size or len(members), each, defaults, now)
    return state


async def ask(store: Store, consumer: str = "t", now: float = 10.0, **wanted: object) -> LeaseRecord | Nothing:
    limits = {"max_groups": None, "max_trajectories": None, "oldest_version": None}
    options = {"lease_seconds": 60.0, "max_deliveries": 5, "now": now}
    return await store.delivery.lease(LeaseQuery(consumer=consumer, **(limits | options | wanted)))  # type: ignore[arg-type]


async def lease(store: Store, now: float = 10.0, consumer: str = "t", **wanted: object) -> LeaseRecord:
    """One that there is."""
    taken = await ask(store, consumer, now, **wanted)
    assert isinstance(taken, LeaseRecord)
    return taken


async def given(store: Store, consumer: str = "t", now: float = 10.0, **wanted: object) -> list[str]:
    """The groups that a lease gives, by name."""
    taken = await ask(store, consumer, now, **wanted)
    if isinstance(taken, Nothing):
        return []
    assert taken.groups
    return [group.group_id for group in taken.groups]


async def counted(store: Store) -> dict[str, int]:
    return {state: number for state, number in (await store.delivery.count_groups()).items() if number}
