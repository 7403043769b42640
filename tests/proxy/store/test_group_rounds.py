"""What the store says of each round of a group id. Time is a number here: `now` is always given."""

from __future__ import annotations

from proxy.store.groups import GroupMember, GroupRound, PolicyLine, PolicyRows
from tests.support.service.redis_server import Store
from tests.support.sessions.filled_groups import ALL, DROP, ask, failed, fill, lease, member


async def newest(store: Store, group_id: str) -> GroupRound:
    return (await store.delivery.load_rounds(group_id))[0]


async def test_a_round_is_told_from_its_first_member_to_its_acknowledgement(store: Store) -> None:
    await fill(store, "other", member("o", oldest=1), now=1.0)
    await fill(store, "g", member("a", oldest=3), failed("b"), size=2, now=5.0)
    filling = await newest(store, "g")
    assert (filling.status, filling.sessions, filling.usable, filling.size, filling.since) == ("filling", 2, 1, 2, 5.0)
    await fill(store, "g", member("c", oldest=4), size=2, now=6.0)
    ready = await newest(store, "g")
    assert (ready.status, ready.before, ready.oldest_version, ready.deliveries) == ("ready", 1, 3, 0)
    held = await lease(store, 10.0, "trainer", max_groups=9)
    leased = await newest(store, "g")
    assert (leased.status, leased.consumer, leased.expires_at, leased.before) == ("leased", "trainer", 70.0, None)
    await store.delivery.nack(held.lease_id, 11.0)
    again = await newest(store, "g")
    assert (again.status, again.story, again.deliveries) == ("ready", "given back by trainer", 1)
    held = await lease(store, 12.0, "trainer", max_groups=9)
    await store.delivery.ack(held.lease_id, 13.0)
    acked = await newest(store, "g")
    assert (acked.status, acked.sessions, acked.consumer) == ("acked", 3, "")
    assert await store.delivery.load_rounds("nobody") == []


async def test_a_round_that_ended_says_its_cause(store: Store) -> None:
    await fill(store, "dropped", member("a"), failed("b"), defaults=DROP)
    await fill(store, "dead", member("c"), failed("d"), size=2, now=1.0)
    await store.delivery.tend(ALL, 5.0, 100.0)
    assert [(each.status, each.cause) for each in await store.delivery.load_rounds("dropped")] == [
        ("dropped", "too_few_usable")
    ]
    dead = await newest(store, "dead")
    assert (dead.status, dead.cause) == ("dead", "incomplete") and dead.story.startswith("incomplete: no member came for 5")


async def test_a_ready_round_says_that_it_was_passed_over_as_too_old(store: Store) -> None:
    await fill(store, "old", member("a", oldest=1))
    await ask(store, max_groups=1, oldest_version=2)
    old = await newest(store, "old")
    assert (old.status, old.passed, old.oldest_version, old.before) == ("ready", True, 1, None)


async def test_rounds_come_newest_first_with_the_parts_split_off_them(store: Store) -> None:
    for name in ("a", "b", "c"):
        await fill(store, "g", GroupMember(name, True, 1.0, 1, 1, {"b": PolicyRows(1, 2)}))
    await lease(store, policy="b", max_groups=1, named={"b": PolicyLine(0)})
    told = [(each.reference, each.policy, each.status) for each in await store.delivery.load_rounds("g", 3)]
    assert told == [
        ("3:g", None, "ready"),
        ("2:g", None, "ready"),
        ("1:g", None, "ready"),
        ("1/b=g", "b", "leased"),
    ]
