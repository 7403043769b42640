"""What the delivery store does with groups that wait, grow old, or are wanted by several: on a real Redis, plain and cluster.

Time is a number here: `now` is always given.
"""

from __future__ import annotations

import asyncio

import pytest

from contract.sessions import GroupRule
from proxy.errors import Conflict
from proxy.store.delivery import Freshness
from proxy.store.groups import GroupDefaults, LeaseRecord, Nothing
from tests.support.service.redis_server import RedisKind, Store
from tests.support.sessions.filled_groups import ALL, DROP, PARTIAL, ask, counted, failed, fill, given, lease, member


async def ready(store: Store, *names: str, oldest: int = 0) -> None:
    for name in names:
        assert await fill(store, name, member(f"s-{name}", oldest=oldest)) == "ready"


# Groups that nobody completes.


async def test_a_group_whose_failed_member_nobody_replaces_is_given_up_with_its_reason(store: Store) -> None:
    assert await fill(store, "g", member("a"), failed("b"), size=3, now=100.0) == "filling"
    assert await store.delivery.tend(ALL, 60.0, 159.0) == 0
    assert await store.delivery.tend(ALL, 60.0, 160.0) == 1
    ((letter,), cursor) = await store.delivery.dead_letters()
    assert cursor is None
    assert letter.reason == ("incomplete: no member came for 60 seconds; 1 of 3 members usable, 1 failed, 1 never closed")
    assert list(letter.session_ids) == ["a", "b"]
    assert await counted(store) == {"dead": 1}
    assert await store.delivery.tend(ALL, 60.0, 500.0) == 0


async def test_every_member_that_comes_gives_the_group_its_time_anew(store: Store) -> None:
    await fill(store, "g", member("a"), size=3, now=100.0)
    await fill(store, "g", member("b"), size=3, now=150.0)
    assert await store.delivery.tend(ALL, 60.0, 165.0) == 0
    assert await fill(store, "g", member("c"), size=3, now=170.0) == "ready"
    assert await store.delivery.tend(ALL, 60.0, 1e6) == 0, "a ready group is not waiting for anybody"


async def test_without_a_timeout_a_group_waits_for_ever(store: Store) -> None:
    await fill(store, "g", member("a"), size=2)
    assert await store.delivery.tend(ALL, 0.0, 1e12) == 0
    assert await counted(store) == {"filling": 1}


async def test_allow_partial_delivers_what_has_come_when_the_time_is_over(store: Store) -> None:
    await fill(store, "enough", member("a"), member("b"), size=4, defaults=PARTIAL)
    await fill(store, "few", member("c"), size=4, defaults=PARTIAL)
    assert await store.delivery.tend(PARTIAL, 60.0, 100.0) == 2
    assert await counted(store) == {"ready": 1, "dropped": 1}
    assert await given(store, "t", max_groups=9) == ["enough"]


async def test_a_group_given_up_is_not_joined_but_followed_by_another_of_its_id(store: Store) -> None:
    await fill(store, "g", member("a"), member("b"), size=4, defaults=PARTIAL)
    await store.delivery.tend(PARTIAL, 60.0, 100.0)
    assert await fill(store, "g", member("late"), size=4, defaults=PARTIAL, now=101.0) == "filling"
    assert await fill(store, "g", member("a"), size=4, defaults=PARTIAL, now=102.0) == "ready", "a corrected reward stays in it"
    taken = await lease(store, 103.0, max_groups=9)
    assert [list(group.session_ids) for group in taken.groups] == [["a", "b"]]


async def test_drop_drops_a_group_with_a_missing_member_when_the_time_is_over(store: Store) -> None:
    await fill(store, "g", member("a"), size=2, defaults=DROP)
    await store.delivery.tend(DROP, 60.0, 100.0)
    assert await counted(store) == {"dropped": 1}
    assert await store.delivery.dead_letters() == ([], None)


async def test_an_incomplete_dead_group_that_is_tried_again_waits_for_its_members(store: Store) -> None:
    await fill(store, "g", member("a"), failed("b"), size=2)
    await store.delivery.tend(ALL, 60.0, 100.0)
    assert await store.delivery.retry_dead(["g"], ALL, 200.0) == ["1:g"]
    assert await store.delivery.tend(ALL, 60.0, 259.0) == 0, "from now on it has its time anew"
    assert await fill(store, "g", member("c"), size=2, now=259.0) == "ready"
    assert await given(store, "t") == ["g"]


async def test_an_incomplete_dead_group_with_a_successor_can_only_be_dropped(store: Store) -> None:
    await fill(store, "g", member("a"), size=2)
    await store.delivery.tend(ALL, 60.0, 100.0)
    await fill(store, "g", member("b"), size=2, now=101.0)
    with pytest.raises(Conflict, match="drop it"):
        await store.delivery.retry_dead(["1:g"], ALL, 200.0)
    assert await store.delivery.drop_dead(["1:g"]) == ["1:g"]
    assert await counted(store) == {"filling": 1, "dropped": 1}


# Dead letters.


async def dead(store: Store, *names: str, now: float = 10.0) -> None:
    """Groups of these names that were delivered once and never acknowledged."""
    await ready(store, *names)
    taken = await lease(store, now, max_groups=99, max_deliveries=1)
    await store.delivery.nack(taken.lease_id, now)
    assert await given(store, "t", now, max_groups=99, max_deliveries=1) == []


async def test_dead_letters_come_newest_first_in_pages_that_survive_what_is_taken_off_meanwhile(store: Store) -> None:
    for number in range(7):
        await dead(store, f"g{number}", now=10.0 + number // 3)
    first, cursor = await store.delivery.dead_letters(3)
    assert cursor is not None
    await store.delivery.drop_dead([first[-1].letter_id])
    second, cursor = await store.delivery.dead_letters(3, cursor)
    assert cursor is not None
    third, cursor = await store.delivery.dead_letters(3, cursor)
    assert cursor is None
    seen = [letter.group_id for letter in (*first, *second, *third)]
    assert seen == ["g6", "g5", "g4", "g3", "g2", "g1", "g0"]


async def test_a_page_of_dead_letters_of_a_rare_reason_is_never_empty_before_the_end(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("proxy.store.delivery.LETTERS_LOOKED_AT", 2)
    await fill(store, "rare", member("a"), size=2)
    await store.delivery.tend(ALL, 60.0, 100.0)
    for number in range(7):
        await dead(store, f"g{number}", now=200.0 + number)
    (letter,), cursor = await store.delivery.dead_letters(3, None, "incomplete")
    assert letter.group_id == "rare" and cursor is None


async def test_dead_letters_are_found_by_a_part_of_their_reason(store: Store) -> None:
    await dead(store, "often")
    await fill(store, "never", member("a"), size=2)
    await store.delivery.tend(ALL, 60.0, 100.0)
    for part, names in (("incomplete", ["never"]), ("never acknowledged", ["often"]), ("no such (%d", [])):
        letters, cursor = await store.delivery.dead_letters(9, None, part)
        assert ([letter.group_id for letter in letters], cursor) == (names, None)


async def test_a_dead_group_that_is_tried_again_is_as_if_never_delivered(store: Store) -> None:
    await dead(store, "g")
    await ready(store, "later")
    assert await store.delivery.retry_dead(["g"], ALL, 20.0) == ["1:g"]
    assert await store.delivery.retry_dead(["g"], ALL, 20.0) == [], "it is no dead letter any more"
    taken = await lease(store, 21.0, max_groups=9)
    assert [(group.group_id, group.deliveries) for group in taken.groups] == [("g", 1), ("later", 1)]


async def test_a_dead_group_that_is_dropped_never_comes_again(store: Store) -> None:
    await dead(store, "g")
    assert await store.delivery.drop_dead(["g"]) == ["1:g"]
    assert await store.delivery.dead_letters() == ([], None)
    assert await fill(store, "g", member("s-g")) == "dropped"
    assert await given(store, "t") == []
    await store.delivery.withdraw("s-g", ALL)
    assert await counted(store) == {"dropped": 1}


async def test_a_group_id_means_all_its_dead_rounds_and_a_letter_id_one(store: Store) -> None:
    for session in ("a", "b", "c"):
        await fill(store, "g", member(session))
        taken = await lease(store, max_deliveries=1)
        await store.delivery.bury(taken.lease_id, taken.groups[0].reference, "broken", 11.0)
    assert await store.delivery.drop_dead(["2:g"]) == ["2:g"]
    assert await store.delivery.retry_dead(["g"], ALL, 12.0) == ["1:g", "3:g"]


async def test_a_dead_group_that_lost_a_member_is_not_delivered_as_whole(store: Store) -> None:
    await fill(store, "g", member("a"), member("b"))
    taken = await lease(store)
    await store.delivery.bury(taken.lease_id, taken.groups[0].reference, "broken", 11.0)
    await store.delivery.withdraw("b", ALL)
    await store.delivery.retry_dead(["g"], ALL, 12.0)
    assert await counted(store) == {"filling": 1}
    assert await given(store, "t") == []


async def test_burying_one_round_leaves_another_of_the_same_id_in_the_lease(store: Store) -> None:
    await fill(store, "g", member("a"))
    await fill(store, "g", member("b"))
    taken = await lease(store, max_groups=2)
    await store.delivery.bury(taken.lease_id, taken.groups[0].reference, "broken", 11.0)
    assert await store.delivery.ack(taken.lease_id, 12.0) == ["g"]
    assert await counted(store) == {"acked": 1, "dead": 1}


async def test_deleting_the_sessions_of_ended_groups_leaves_no_group_behind(store: Store) -> None:
    await fill(store, "acked", member("a"), member("b"))
    taken = await lease(store)
    await store.delivery.ack(taken.lease_id, 11.0)
    await dead(store, "dead")
    for session in ("a", "b", "s-dead"):
        await store.delivery.withdraw(session, ALL)
    assert await store.delivery.dead_letters() == ([], None)
    for key in ("groups", "members", "rounds", "dead", "ready", "filling"):
        assert await store.connection.execute("EXISTS", f"vb:{{delivery}}:{key}") == 0, key
    assert await counted(store) == {"acked": 1}


# A lease that reached nobody.


async def test_a_lease_that_reached_nobody_is_no_delivery(store: Store) -> None:
    await ready(store, "g")
    for _ in range(9):
        taken = await lease(store, max_deliveries=1)
        assert taken.groups[0].deliveries == 1
        await store.delivery.give_back(taken.lease_id, 10.0)


# Stale groups.


async def test_stale_groups_are_dropped_where_that_is_set(store: Store) -> None:
    await ready(store, "old", oldest=1)
    await ready(store, "new", oldest=5)
    assert await given(store, "t", max_groups=9, oldest_version=3, stale_groups="drop") == ["new"]
    assert await counted(store) == {"dropped": 1, "leased": 1}
    assert (await store.delivery.load_totals())["stale_dropped"] == 1


async def test_stale_groups_are_given_with_a_mark_where_that_is_set(store: Store) -> None:
    await ready(store, "old", oldest=1)
    await ready(store, "new", oldest=5)
    for _ in range(2):
        taken = await lease(store, max_groups=9, oldest_version=3, stale_groups="flag")
        assert [(group.group_id, group.stale) for group in taken.groups] == [("old", True), ("new", False)]
        await store.delivery.nack(taken.lease_id, 11.0)
    assert (await store.delivery.load_totals())["stale_flagged"] == 2
    taken = await lease(store, max_groups=9)
    assert not any(group.stale for group in taken.groups), "nobody asked for newer ones"


async def test_a_kept_stale_group_is_counted_once_however_often_it_is_passed_over(store: Store) -> None:
    await ready(store, "old", oldest=1)
    for _ in range(3):
        assert await given(store, "strict", oldest_version=3) == []
        await store.delivery.leave("strict")
    assert (await store.delivery.load_totals())["stale_kept"] == 1
    assert await given(store, "lax", oldest_version=1) == ["old"]


# Several consumers.


async def test_two_waiting_consumers_share_what_becomes_ready_whatever_their_appetite(store: Store) -> None:
    assert await given(store, "greedy", 10.0, max_groups=64, waits=True) == []
    assert await given(store, "modest", 10.1, max_groups=64, waits=True) == []
    await ready(store, *(f"g{i}" for i in range(5)))
    assert await given(store, "greedy", 10.2, max_groups=64, waits=True) == ["g0", "g2", "g4"]
    assert await given(store, "modest", 10.3, max_groups=64, waits=True) == ["g1", "g3"]


async def test_a_small_appetite_leaves_the_rest_to_the_others(store: Store) -> None:
    await given(store, "modest", 10.0, max_groups=1, waits=True)
    await given(store, "greedy", 10.1, max_groups=64, waits=True)
    await ready(store, *(f"g{i}" for i in range(4)))
    assert await given(store, "greedy", 10.2, max_groups=64, waits=True) == ["g1", "g2", "g3"]
    assert await given(store, "modest", 10.3, max_groups=1, waits=True) == ["g0"]


async def test_groups_that_trickle_in_go_to_both_in_turn_even_if_one_is_always_first_to_ask(store: Store) -> None:
    got: dict[str, list[str]] = {"fast": [], "slow": []}
    for number in range(6):
        now = 10.0 + number
        for consumer in ("fast", "slow"):
            assert await given(store, consumer, now, max_groups=64, waits=True) == []
        await ready(store, f"g{number}")
        for consumer in ("fast", "slow"):
            got[consumer] += await given(store, consumer, now + 0.5, max_groups=64, waits=True)
    assert got == {"fast": ["g0", "g2", "g4"], "slow": ["g1", "g3", "g5"]}


async def test_a_limit_of_trajectories_bounds_a_share_too(store: Store) -> None:
    await given(store, "modest", 10.0, max_trajectories=1, waits=True)
    await given(store, "greedy", 10.1, max_trajectories=99, waits=True)
    await ready(store, "g0", "g1", "g2")
    assert await given(store, "greedy", 10.2, max_trajectories=99, waits=True) == ["g1", "g2"]


async def test_a_consumer_that_could_not_take_a_group_keeps_it_from_nobody(store: Store) -> None:
    await given(store, "strict", 10.0, oldest_version=5, waits=True)
    await ready(store, "old", oldest=1)
    assert await given(store, "lax", 10.1, waits=True) == ["old"]


async def test_a_consumer_that_vanished_keeps_a_group_from_nobody_for_long(store: Store) -> None:
    await given(store, "vanished", 10.0, waits=True)
    await ready(store, "g")
    nothing = await ask(store, "other", 11.0, waits=True)
    assert isinstance(nothing, Nothing) and nothing.due_at is not None
    assert 11.0 < nothing.due_at < 21.0
    assert await given(store, "other", nothing.due_at + 0.001, waits=True) == ["g"]


async def test_a_consumer_that_left_keeps_a_group_from_nobody(store: Store) -> None:
    await given(store, "left", 10.0, waits=True)
    await store.delivery.leave("left")
    await ready(store, "g")
    assert await given(store, "other", 10.1) == ["g"]


async def test_consumers_that_only_look_in_share_too_but_never_withhold_the_last_group(store: Store) -> None:
    await given(store, "a", 10.0, max_groups=64)
    await given(store, "b", 10.1, max_groups=64)
    await ready(store, *(f"g{i}" for i in range(4)))
    assert await given(store, "a", 10.2, max_groups=64) == ["g0", "g2"]
    assert await given(store, "c", 10.3, max_groups=1) == ["g3"], "behind b, but b does not wait"
    await ready(store, "h")
    assert await given(store, "b", 10.4, max_groups=64) == ["g1", "h"]


# Waiting.


async def test_waiting_ends_when_a_group_becomes_ready_wherever_it_was_filled(store: Store, redis_kind: RedisKind) -> None:
    other = Store.at(redis_kind.url)
    async with store.delivery.watch() as arrivals:
        for number in range(3):
            mark = arrivals.mark
            waiting = asyncio.create_task(arrivals.wait(mark, 60.0))
            await fill(other, f"half{number}", member(f"h{number}"), size=2)
            await ready(other, f"g{number}")
            await asyncio.wait_for(waiting, 30.0)
            assert arrivals.mark == mark + 1, "an unfinished group wakes nobody"
    await other.connection.close()


async def test_what_came_between_the_mark_and_the_waiting_is_not_missed(store: Store) -> None:
    async with store.delivery.watch() as arrivals:
        mark = arrivals.mark
        await ready(store, "g")
        await asyncio.wait_for(arrivals.wait(mark, 60.0), 30.0)
    async with store.delivery.watch() as arrivals:
        await arrivals.wait(arrivals.mark, 0.05)


async def test_groups_given_back_expired_or_tried_again_wake_too(store: Store) -> None:
    await ready(store, "g")

    async def nack() -> None:
        taken = await lease(store)
        await store.delivery.nack(taken.lease_id, 11.0)

    async def expire() -> None:
        assert isinstance(await ask(store, "t", 12.0), LeaseRecord)
        await store.delivery.tend(ALL, 0.0, 100.0)

    async def revive() -> None:
        taken = await lease(store, 101.0)
        await store.delivery.bury(taken.lease_id, taken.groups[0].reference, "broken", 102.0)
        await store.delivery.retry_dead(["g"], ALL, 103.0)

    async with store.delivery.watch() as arrivals:
        await asyncio.sleep(0.1)
        for happens in (nack, expire, revive):
            mark = arrivals.mark
            await happens()
            await asyncio.wait_for(arrivals.wait(mark, 60.0), 30.0)


async def test_who_gets_nothing_hears_when_the_first_lease_ends(store: Store) -> None:
    assert await ask(store, "t") == Nothing(None)
    await ready(store, "g", "h")
    assert isinstance(await ask(store, "t", 10.0, lease_seconds=300.0), LeaseRecord)
    assert isinstance(await ask(store, "t", 10.0, lease_seconds=60.0), LeaseRecord)
    assert await ask(store, "t", 11.0) == Nothing(70.0)


# Back-pressure.


async def admit(store: Store, group_id: str, session_id: str, limit: int = 2, now: float = 1.0) -> bool:
    return (await store.delivery.admit(group_id, session_id, limit, ALL, now)).granted


async def test_no_group_is_begun_beyond_the_limit_until_one_is_leased(store: Store) -> None:
    assert await admit(store, "g1", "a")
    assert await admit(store, "g2", "b")
    assert not await admit(store, "g3", "c")
    assert await counted(store) == {"opened": 2}
    await fill(store, "g1", member("a"))
    assert await counted(store) == {"opened": 1, "ready": 1}
    assert not await admit(store, "g3", "c")
    assert await given(store, "t") == ["g1"]
    assert await admit(store, "g3", "c")
    assert (await store.delivery.load_totals())["refused"] == 2


async def test_sessions_of_a_group_that_is_there_are_let_in(store: Store) -> None:
    assert await admit(store, "g", "a", 1)
    assert await admit(store, "g", "b", 1)
    await fill(store, "g", member("a"), size=3)
    assert await admit(store, "g", "c", 1)
    assert await counted(store) == {"filling": 1}
    await fill(store, "g", member("b"), member("c"), size=3)
    assert not await admit(store, "g", "d", 1), "the next round of the id is a new group"


async def test_a_session_is_let_in_once_and_counted_once(store: Store) -> None:
    first = await store.delivery.admit("g", "a", 1, ALL, 1.0)
    again = await store.delivery.admit("g", "a", 1, ALL, 1.0)
    assert (first.granted, first.noted, again.granted, again.noted) == (True, True, True, False)
    assert (await counted(store)) == {"opened": 1}


async def test_an_opened_group_ends_with_its_last_session(store: Store) -> None:
    assert await admit(store, "g", "a", 1)
    assert await admit(store, "g", "b", 1)
    await store.delivery.dismiss("a")
    assert not await admit(store, "h", "c", 1)
    await store.delivery.withdraw("b", ALL)
    assert await admit(store, "h", "c", 1)


async def test_an_opened_group_in_which_nothing_happens_is_forgotten_in_time(store: Store) -> None:
    assert await admit(store, "g", "a", 1, 10.0)
    await store.delivery.tend(ALL, 60.0, 69.0)
    assert not await admit(store, "h", "b", 1)
    await store.delivery.tend(ALL, 60.0, 70.0)
    assert await admit(store, "h", "b", 1)


async def test_stale_groups_that_nobody_takes_do_not_stop_the_rollouts(store: Store) -> None:
    assert await admit(store, "g", "a", 1)
    await fill(store, "g", member("a", oldest=1))
    assert await given(store, "t", oldest_version=5) == []
    assert await admit(store, "h", "b", 1)


# Freshness: how many versions will have come by the time a group is leased.


async def ahead(store: Store, version: int, groups_per_version: int = 2) -> int:
    return await store.delivery.count_versions_ahead(version, groups_per_version)


async def begins(store: Store, group_id: str, session_id: str, version: int, most_behind: int) -> bool:
    fresh = Freshness(version, most_behind, 2)
    return (await store.delivery.admit(group_id, session_id, 0, ALL, 1.0, fresh)).granted


async def lease_at(store: Store, version: int, groups: int = 2) -> LeaseRecord:
    return await lease(store, version=version, max_groups=groups)


async def test_with_no_staleness_a_version_is_trained_before_the_next_is_begun(store: Store) -> None:
    assert await begins(store, "g0", "a", 0, 0)
    assert await begins(store, "g1", "b", 0, 0)
    assert not await begins(store, "g2", "c", 0, 0)
    assert await begins(store, "g1", "d", 0, 0), "its group is there"
    await fill(store, "g0", member("a"))
    await fill(store, "g1", member("b"), member("d"))
    lease = await lease_at(store, 0)
    assert not await begins(store, "g2", "c", 0, 0)
    await store.delivery.ack(lease.lease_id, 11.0)
    assert not await begins(store, "g2", "c", 0, 0), "it is trained on, and the new weights are not there"
    assert await begins(store, "g2", "c", 1, 0)


async def test_groups_that_are_waiting_training_or_open_count(store: Store) -> None:
    await ready(store, "a", "b", "c", "d", "e")
    assert [await ahead(store, 0), await ahead(store, 0, 1), await ahead(store, 0, 5), await ahead(store, 0, 6)] == [2, 5, 1, 0]
    lease = await lease_at(store, 0)
    assert await ahead(store, 0, 1) == 5
    await store.delivery.ack(lease.lease_id, 11.0)
    assert [await ahead(store, 0, 1), await ahead(store, 1, 1)] == [5, 3]


async def test_a_group_given_back_counts_once(store: Store) -> None:
    await ready(store, "a", "b")
    lease = await lease_at(store, 3)
    await store.delivery.nack(lease.lease_id, 11.0)
    assert await ahead(store, 3, 1) == 2
    await store.delivery.ack((await lease_at(store, 3)).lease_id, 11.0)
    assert await ahead(store, 3, 1) == 2
    assert await ahead(store, 4, 1) == 0


async def test_a_group_given_back_under_newer_weights_counts_once(store: Store) -> None:
    await ready(store, "a", "b", "c")
    old = await lease_at(store, 3, 1)
    await store.delivery.ack((await lease_at(store, 4, 1)).lease_id, 11.0)
    await store.delivery.nack(old.lease_id, 11.0)
    assert await ahead(store, 4, 1) == 3, "two are ready, one is trained on"


async def test_a_group_that_cannot_be_delivered_does_not_count(store: Store) -> None:
    await ready(store, "a", "b")
    lease = await lease_at(store, 0)
    await store.delivery.bury(lease.lease_id, lease.groups[0].reference, "broken", 11.0)
    assert await ahead(store, 0, 1) == 1


async def test_a_trainer_that_fetches_ahead_keeps_what_it_holds_in_the_count(store: Store) -> None:
    await ready(store, "a", "b", "c", "d")
    first, _ = await lease_at(store, 0), await lease_at(store, 0)
    await store.delivery.ack(first.lease_id, 11.0)
    assert await ahead(store, 1) == 1, "the second batch is trained on under version 1"


async def test_versions_of_any_size_are_told_apart(store: Store) -> None:
    await ready(store, "a", "b")
    version = 2**52 + 1
    await store.delivery.ack((await lease_at(store, version)).lease_id, 11.0)
    assert [await ahead(store, version, 1), await ahead(store, version + 1, 1)] == [2, 0]


async def test_leases_that_say_no_version_are_not_counted_as_trained(store: Store) -> None:
    await ready(store, "a")
    taken = await lease(store)
    assert await ahead(store, 0, 1) == 1
    await store.delivery.ack(taken.lease_id, 11.0)
    assert await ahead(store, 0, 1) == 0


async def test_a_session_that_was_let_in_is_looked_for_until_it_is_there_or_known_not_to_be(store: Store) -> None:
    """Three of one group, let in at 1, 2 and 3: the first is there, the second is not, the third is asked for again at 9."""
    for number in (1, 2, 3):
        assert (await store.delivery.admit("g", f"s{number}", 1, ALL, float(number))).noted
    assert await store.delivery.find_unconfirmed(2.0) == ["s1", "s2"]
    assert await store.delivery.find_unconfirmed(3.0, limit=1) == ["s1"]
    await store.delivery.confirm("s1")
    await store.delivery.dismiss("s2")
    assert not (await store.delivery.admit("g", "s3", 1, ALL, 9.0)).noted
    assert await store.delivery.find_unconfirmed(8.0) == []
    assert await store.delivery.find_unconfirmed(9.0) == ["s3"]
    await store.delivery.dismiss("s3")
    assert (await store.delivery.admit("h", "s4", 1, ALL, 9.0)).undelivered == 1, "s1 still holds the group's place"
    await fill(store, "g", member("s1"))
    assert await store.delivery.find_unconfirmed(99.0) == []


async def test_a_group_that_ends_opening_is_not_looked_for(store: Store) -> None:
    for session_id in ("s1", "s2"):
        await store.delivery.admit("g", session_id, 1, ALL, 1.0)
    await fill(store, "g", member("s1"), size=2)
    assert await store.delivery.find_unconfirmed(99.0) == []


async def test_a_refusal_is_counted_once_however_often_it_is_asked_again(store: Store) -> None:
    await ready(store, "a", "b")
    for again in (False, True, True):
        admission = await store.delivery.admit("h", "s", 0, ALL, 1.0, Freshness(0, 0, 2), again=again)
        assert (admission.granted, admission.versions_ahead, admission.undelivered) == (False, 1, 2)
    assert (await store.delivery.load_totals())["refused_stale"] == 1


async def test_totals_count_what_befell_groups(store: Store) -> None:
    await ready(store, "g")
    first = await lease(store, 10.0)
    await store.delivery.nack(first.lease_id, 11.0)
    await ask(store, "t", 12.0)
    second = await lease(store, 72.0)
    await store.delivery.ack(second.lease_id, 73.0)
    assert await store.delivery.load_totals() == {"ready": 3, "leased": 3, "nacked": 1, "expired": 1, "acked": 1}


# Groups that say themselves what becomes of them.


async def test_what_a_group_says_itself_holds_over_the_services_rule(store: Store) -> None:
    partial, strict = GroupRule(group_policy="allow_partial", group_minimum=1), GroupRule(group_policy="require_all")
    for rule, defaults, outcome in (
        (partial, ALL, "ready"),
        (strict, PARTIAL, "filling"),
        (GroupRule(group_minimum=1), PARTIAL, "ready"),
    ):
        group = f"{rule}"
        await store.delivery.fill(group, 2, member(f"{group}-well"), defaults, 1.0, rule)
        assert await store.delivery.fill(group, 2, failed(f"{group}-ill"), defaults, 1.0) == outcome


async def test_what_a_group_says_of_equal_rewards_holds_for_it_alone(store: Store) -> None:
    keep, drop = GroupDefaults(zero_variance="keep"), GroupRule(zero_variance="drop")
    for each in ("a1", "a2"):
        told = await store.delivery.fill("a", 2, member(each), keep, 1.0, drop)
    assert told == "dropped"
    assert await fill(store, "b", member("b1"), member("b2"), defaults=keep) == "ready"


async def test_a_group_that_nobody_completes_is_given_up_by_its_own_rule(store: Store) -> None:
    await store.delivery.fill("own", 2, member("own"), ALL, 1.0, GroupRule(group_policy="allow_partial", group_minimum=1))
    await fill(store, "others", member("others"), size=2)
    assert await store.delivery.tend(ALL, 10.0, 100.0) == 2
    assert await counted(store) == {"ready": 1, "dead": 1}
    assert await given(store, "trainer", 101.0) == ["own"]


# Groups in which nobody takes the place of a failed member.


async def test_a_group_without_replacements_is_given_up_with_its_last_member(store: Store) -> None:
    rule = GroupRule(group_replacements=False)
    members = [member("a"), failed("b"), member("c")]
    states = [await store.delivery.fill("g", 3, each, ALL, 7.0, rule) for each in members]
    assert states == ["filling", "filling", "dead"]
    assert await store.delivery.fill("g", 3, members[1], ALL, 8.0, rule) == "dead", "repeating changes nothing"
    ((letter,), _) = await store.delivery.dead_letters()
    assert letter.reason == "incomplete: 2 of 3 members usable, 1 failed, and they are not replaced"
    assert (letter.session_ids, letter.died_at) == (["a", "b", "c"], 7.0)
    assert await counted(store) == {"dead": 1}
    assert await store.delivery.retry_dead(["g"], ALL, 9.0) == ["1:g"]
    assert await store.delivery.fill("g", 3, member("d"), ALL, 10.0, rule) == "ready"
    assert await given(store, "t") == ["g"]


async def test_a_group_without_replacements_that_is_whole_is_ready(store: Store) -> None:
    rule = GroupRule(group_replacements=False)
    assert [await store.delivery.fill("g", 2, each, ALL, 7.0, rule) for each in (member("a"), member("b"))] == [
        "filling",
        "ready",
    ]
    partial = GroupRule(group_policy="allow_partial", group_minimum=1, group_replacements=False)
    assert await store.delivery.fill("p", 2, failed("x"), ALL, 7.0, partial) == "filling"
    assert await store.delivery.fill("p", 2, member("y"), ALL, 7.0, partial) == "ready"
