"""Groups with rows of several policies in the delivery store: on a real Redis, plain and cluster.

`"b"` is a named model, `""` the default one. Time is a number here: `now` is always given.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from proxy.errors import Conflict
from proxy.store.delivery import Freshness
from proxy.store.groups import GroupMember, LeasedGroup, LeaseRecord, PolicyLine, PolicyRows
from tests.support.service.redis_server import Store
from tests.support.sessions.filled_groups import ALL, DROP, PARTIAL, ask, counted, failed, fill, given, lease

B = {"b": PolicyLine(0)}


def member(session_id: str, default: int | None = None, **named: int) -> GroupMember:
    """One row of each policy that is given, with tokens as old as that version."""
    rows = {policy: PolicyRows(1, oldest) for policy, oldest in named.items()}
    return GroupMember(session_id, True, 1.0, int(default is not None), default or 0, rows)


async def leased(store: Store, consumer: str = "t", now: float = 10.0, **wanted: object) -> tuple[str, list[LeasedGroup]]:
    taken = await lease(store, now, consumer, **{"max_groups": 9, "named": B, **wanted})
    return taken.lease_id, list(taken.groups)


async def test_a_lease_of_one_policy_takes_the_groups_that_have_rows_of_it(store: Store) -> None:
    await fill(store, "default", member("s1", 0))
    await fill(store, "named", member("s2", b=0))
    _, groups = await leased(store, policy="b")
    assert [(group.group_id, group.policies) for group in groups] == [("named", ["b"])]
    assert await given(store, "t", policy="b", named=B) == []
    assert await given(store, "t", policy="", named=B) == ["default"]
    assert await store.delivery.list_policies() == ["b"]


async def test_without_a_policy_a_lease_takes_every_row_at_once(store: Store) -> None:
    await fill(store, "both", member("s1", 3, b=1), member("s2", 4))
    lease_id, (group,) = await leased(store)
    assert (group.policies, group.oldest_version, list(group.session_ids)) == (["", "b"], 1, ["s1", "s2"])
    await store.delivery.ack(lease_id, 11.0)
    assert await counted(store) == {"acked": 1}


async def test_two_trainers_have_the_rows_of_two_policies_of_one_group_at_the_same_time(store: Store) -> None:
    await fill(store, "both", member("s1", 0, b=0), member("s2", 0))
    of_b, (part,) = await leased(store, "b's", policy="b")
    assert (part.policies, list(part.session_ids)) == (["b"], ["s1", "s2"]), (
        "a rollout without a row of it belongs to the group"
    )
    of_default, (rest,) = await leased(store, "default's", policy="")
    assert (rest.policies, rest.group_id) == ([""], part.group_id) and rest.reference != part.reference
    assert await counted(store) == {"leased": 2}
    assert await store.delivery.ack(of_b, 11.0) == ["both"]
    assert await counted(store) == {"leased": 1, "acked": 1}
    await store.delivery.nack(of_default, 11.0)
    assert await given(store, "b's", policy="b", named=B) == []
    assert await given(store, "default's", policy="", named=B) == ["both"]


async def test_a_part_that_is_given_back_or_expires_comes_again_in_its_place(store: Store) -> None:
    await fill(store, "first", member("s1", 0, b=0))
    await fill(store, "second", member("s2", b=0))
    lease_id, (part,) = await leased(store, policy="b", max_groups=1)
    await store.delivery.nack(lease_id, 11.0)
    lease_id, groups = await leased(store, now=12.0, policy="b")
    assert [(group.group_id, group.deliveries) for group in groups] == [("first", 2), ("second", 1)]
    assert groups[0].reference == part.reference
    await store.delivery.tend(ALL, 0.0, 100.0)
    _, groups = await leased(store, now=101.0)
    found = sorted((group.group_id, tuple(group.policies)) for group in groups)
    assert found == [("first", ("",)), ("first", ("b",)), ("second", ("b",))]


async def test_a_row_is_measured_on_the_line_of_its_own_policy(store: Store) -> None:
    """The default policy is at version 100, b at 5: a row of b at 4 is one version old."""
    await fill(store, "old", member("s1", 90))
    await fill(store, "new", member("s2", b=4))
    lines: dict[str, Any] = {"oldest_version": 98, "version": 100, "named": {"b": PolicyLine(5, 3)}}
    assert await given(store, "t", max_groups=9, **lines) == ["new"]
    assert await counted(store) == {"stale": 1, "leased": 1}
    lines["named"] = {"b": PolicyLine(9, 7)}
    await fill(store, "older", member("s3", b=6))
    assert await given(store, "t", max_groups=9, **lines) == []
    assert await counted(store) == {"stale": 2, "leased": 1}
    lines["oldest_version"] = 80
    assert await given(store, "t", max_groups=9, **lines) == ["old"]
    lines["named"] = {"b": PolicyLine(9, 6)}
    assert await given(store, "t", max_groups=9, policy="b", **lines) == ["older"]


async def test_rows_too_old_of_one_policy_do_not_keep_those_of_another(store: Store) -> None:
    await fill(store, "both", member("s1", 7, b=0))
    strict: dict[str, Any] = {"oldest_version": 5, "version": 7, "named": {"b": PolicyLine(5, 4)}}
    assert await given(store, "t", policy="b", **strict) == []
    assert await given(store, "t", **strict) == [], "as a whole it is too old"
    assert await given(store, "t", policy="", **strict) == ["both"]
    assert await given(store, "t", policy="b", **(strict | {"named": {"b": PolicyLine(5, 0)}})) == ["both"]


async def test_stale_rows_of_one_policy_are_dropped_alone_where_that_is_set(store: Store) -> None:
    await fill(store, "both", member("s1", 7, b=0))
    strict: dict[str, Any] = {"oldest_version": 5, "version": 7, "named": {"b": PolicyLine(5, 4)}, "stale_groups": "drop"}
    assert await given(store, "t", policy="b", **strict) == []
    assert await counted(store) == {"ready": 1, "dropped": 1}
    assert await given(store, "t", **strict) == ["both"]


async def test_stale_rows_are_marked_by_their_own_policy_where_that_is_set(store: Store) -> None:
    await fill(store, "default", member("s1", 7))
    await fill(store, "named", member("s2", b=0))
    _, groups = await leased(store, oldest_version=5, version=7, named={"b": PolicyLine(5, 4)}, stale_groups="flag")
    assert [(group.group_id, group.stale) for group in groups] == [("default", False), ("named", True)]


async def test_rows_of_a_policy_whose_version_was_not_said_wait_for_the_next_lease(store: Store) -> None:
    """It came up between the look at which policies there are and the lease."""
    await fill(store, "both", member("s1", 0, b=0))
    await fill(store, "default", member("s2", 0))
    assert await given(store, "t", max_groups=9, named={}) == ["default"]
    assert await given(store, "t", max_groups=9, named=B) == ["both"]


async def test_who_wants_one_policy_keeps_nothing_from_who_wants_another(store: Store) -> None:
    assert await given(store, "waits", policy="b", named=B, waits=True, now=10.0) == []
    for number in range(3):
        await fill(store, f"g{number}", member(f"s{number}", 0, b=0))
    assert await given(store, "other", 11.0, policy="", named=B, max_groups=9) == ["g0", "g1", "g2"]
    assert await given(store, "same", 11.0, policy="b", named=B, max_groups=9) == ["g1", "g2"], "the first is who waits's"


async def test_the_limit_of_rows_counts_those_of_the_policy(store: Store) -> None:
    for number in range(3):
        rows = {"b": PolicyRows(1, 0)}
        await fill(store, f"g{number}", GroupMember(f"s{number}", True, 1.0, 50, 0, rows))
    assert await given(store, "t", policy="b", named=B, max_trajectories=2) == ["g0", "g1"]


async def test_a_part_that_nobody_acknowledges_is_a_dead_letter_of_its_own(store: Store) -> None:
    await fill(store, "g", member("s1", 0, b=0))
    lease_id, (part,) = await leased(store, policy="b")
    await store.delivery.nack(lease_id, 11.0)
    assert await given(store, "t", 12.0, policy="b", named=B, max_deliveries=1) == []
    ((letter,), _) = await store.delivery.dead_letters()
    assert (letter.letter_id, letter.group_id, letter.letter_id == part.reference) == ("1/b=g", "g", True)
    assert await counted(store) == {"ready": 1, "dead": 1}
    assert await store.delivery.retry_dead(["g"], ALL, 13.0) == ["1/b=g"]
    _, groups = await leased(store, now=14.0)
    assert sorted((group.reference, group.deliveries) for group in groups) == [("1/b=g", 1), ("1:g", 1)]


async def test_a_group_given_in_part_takes_no_more_members(store: Store) -> None:
    for defaults in (ALL, PARTIAL, DROP):
        name = defaults.members
        await fill(store, name, member(f"{name}-1", 0, b=0), member(f"{name}-2", 0), defaults=defaults)
        await leased(store, policy="b")
        again = await store.delivery.fill(name, 2, member(f"{name}-1", 0, b=0), defaults, 20.0)
        assert again == "ready", "repeating is a no-op"
        assert await store.delivery.fill(name, 2, member(f"{name}-3", 0), defaults, 20.0) == "filling", "of the next round"


async def test_a_session_cannot_be_deleted_while_a_part_of_its_group_is_leased(store: Store) -> None:
    await fill(store, "g", member("a", 0, b=0), failed("x"), member("b", 0), size=2)
    lease_id, _ = await leased(store, policy="b")
    for session in ("a", "b", "x"):
        with pytest.raises(Conflict, match="is leased"):
            await store.delivery.withdraw(session, ALL)
    await store.delivery.ack(lease_id, 11.0)
    await store.delivery.withdraw("a", ALL)
    assert await counted(store) == {"acked": 1, "dropped": 1}, "nobody can take its place"
    for session in ("b", "x"):
        await store.delivery.withdraw(session, ALL)
    for key in ("groups", "members", "rounds", "dead", "ready", "filling"):
        assert await store.connection.execute("EXISTS", f"vb:{{delivery}}:{key}") == 0, key


async def test_what_keeps_a_session_is_the_part_of_its_group_that_is_not_over(store: Store) -> None:
    await fill(store, "g", member("a", 0, b=0))
    of_b, _ = await leased(store, policy="b")
    of_default, _ = await leased(store, policy="")
    await store.delivery.ack(of_default, 11.0)
    assert await store.delivery.load_standings(["a"]) == ["leased"]
    await store.delivery.nack(of_b, 11.0)
    assert await store.delivery.load_standings(["a"]) == ["ready"]
    of_b, _ = await leased(store, policy="b")
    await store.delivery.ack(of_b, 12.0)
    assert await store.delivery.load_standings(["a"]) == ["acked"]


async def test_a_session_is_let_in_when_no_policy_would_be_too_far_ahead(store: Store) -> None:
    """Two groups a version, one version behind at most. b's trainer has published nothing since it took two groups."""

    async def ahead(**versions: int) -> int:
        return await store.delivery.count_versions_ahead(versions.pop("default"), 2, versions)

    asked = Freshness(0, 0, 2, {"b": 0})
    for number in range(2):
        assert (await store.delivery.admit(f"g{number}", f"s{number}", 0, ALL, 1.0, asked)).granted
    assert await ahead(default=0, b=0) == 1, "what an opened group will have is not known: it counts for all"
    for number in range(2):
        await fill(store, f"g{number}", member(f"s{number}", b=0))
    assert await ahead(default=0, b=0) == 1
    assert await ahead(default=0) == 0, "the default policy has nothing to train"
    lease_id, _ = await leased(store, policy="b", version=0)
    await store.delivery.ack(lease_id, 11.0)
    assert await ahead(default=0, b=0) == 1, "they are not in b's weights yet"
    refused = await store.delivery.admit("g9", "s9", 0, ALL, 12.0, asked)
    assert (refused.granted, refused.versions_ahead) == (False, 1)
    newer = Freshness(0, 0, 2, {"b": 1})
    assert (await store.delivery.admit("g9", "s9", 0, ALL, 12.0, newer)).granted


@pytest.mark.parametrize("seed", range(4))
async def test_every_policys_rows_of_every_group_are_acknowledged_once_whoever_leases_them(store: Store, seed: int) -> None:
    """Random groups of three policies; trainers of one policy and of all; leases that are kept, given back, or expire."""
    chance, names = random.Random(seed), ["", "b", "c"]
    lines: dict[str, Any] = {"named": {"b": PolicyLine(0), "c": PolicyLine(0)}}
    made: set[tuple[str, str]] = set()
    held: dict[str, list[tuple[str, str]]] = {}
    acknowledged: list[tuple[str, str]] = []
    now = 10.0

    async def lease(policy: str | None, groups: int) -> bool:
        wanted = {"policy": policy, "max_groups": groups, "max_deliveries": 10**6, **lines}
        taken = await ask(store, "t", now, **wanted)
        if not isinstance(taken, LeaseRecord):
            return False
        held[taken.lease_id] = [(group.group_id, each) for group in taken.groups for each in group.policies]
        assert policy is None or {each for _, each in held[taken.lease_id]} == {policy}
        out = [pair for pairs in held.values() for pair in pairs] + acknowledged
        assert len(out) == len(set(out)), "nobody else has them"
        return True

    for step in range(60):
        now += 1.0
        act = chance.choice(("fill", "lease", "lease", "ack", "nack", "expire"))
        if act == "fill":
            of = chance.sample(names, chance.randint(1, 3))
            default = 0 if "" in of else None
            await fill(store, f"g{step}", member(f"s{step}", default, **{name: 0 for name in of if name}), now=now)
            made |= {(f"g{step}", name) for name in of}
        elif act == "lease":
            await lease(chance.choice([None, *names]), chance.randint(1, 3))
        elif act == "expire":
            now += 100.0
            held.clear()
        elif held:
            lease_id = chance.choice(sorted(held))
            pairs = held.pop(lease_id)
            if act == "ack":
                await store.delivery.ack(lease_id, now)
                acknowledged += pairs
            else:
                await store.delivery.nack(lease_id, now)
    now += 100.0
    held.clear()
    while await lease(chance.choice([None, *names]), 9) or await lease(None, 9):
        for lease_id in list(held):
            await store.delivery.ack(lease_id, now)
            acknowledged += held.pop(lease_id)
    assert sorted(acknowledged) == sorted(made)
    assert set(await counted(store)) == {"acked"}
