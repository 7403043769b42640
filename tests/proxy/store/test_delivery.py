"""The contract of the delivery store, on a real Redis, plain and cluster. Time is a number here: `now` is always given."""

from __future__ import annotations

from dataclasses import replace

import pytest

from proxy.errors import Conflict, NotFound
from proxy.store.delivery import Announced, CloseRequest
from proxy.store.groups import GroupDefaults
from tests.support.service.redis_server import Store
from tests.support.sessions.filled_groups import ALL, DROP, counted, failed, fill, given, lease, member, partial

VARIED = GroupDefaults("require_all", zero_variance="drop")


async def test_a_group_is_ready_when_its_size_is_reached_and_is_leased_whole(store: Store) -> None:
    assert await fill(store, "g", member("a", oldest=3), size=2) == "filling"
    assert await given(store) == []
    assert await fill(store, "g", member("b", oldest=2), size=2) == "ready"
    taken = await lease(store)
    assert taken.expires_at == 70.0
    (group,) = taken.groups
    assert (group.group_id, list(group.session_ids), group.deliveries, group.oldest_version) == ("g", ["a", "b"], 1, 2)
    assert await given(store) == []
    assert await counted(store) == {"leased": 1}


@pytest.mark.case(46)
async def test_an_expired_lease_is_redelivered_and_its_late_acknowledgement_refused(store: Store) -> None:
    await fill(store, "g", member("a"))
    first = await lease(store, now=10.0)
    assert await given(store, now=69.9) == []
    second = await lease(store, now=70.0)
    assert [(group.group_id, group.deliveries) for group in second.groups] == [("g", 2)]
    with pytest.raises(Conflict, match="has expired"):
        await store.delivery.ack(first.lease_id, 71.0)
    assert await store.delivery.ack(second.lease_id, 72.0) == ["g"]


async def test_an_acknowledgement_after_the_deadline_is_refused_even_if_nobody_took_the_group(store: Store) -> None:
    await fill(store, "g", member("a"))
    first = await lease(store, now=10.0)
    with pytest.raises(Conflict, match="has expired"):
        await store.delivery.ack(first.lease_id, 70.0)
    assert await given(store, now=71.0) == ["g"]


@pytest.mark.case(46)
async def test_an_acknowledged_group_is_never_delivered_again(store: Store) -> None:
    await fill(store, "g", member("a"))
    taken = await lease(store)
    assert await store.delivery.ack(taken.lease_id, 11.0) == ["g"]
    assert await store.delivery.ack(taken.lease_id, 12.0) == ["g"], "a repeated acknowledgement is a no-op"
    assert await given(store, now=1e9) == []
    assert await fill(store, "g", member("a")) == "acked", "nor when its session is filled in again"
    assert await given(store, now=2e9) == []
    assert await counted(store) == {"acked": 1}


async def test_a_group_given_back_is_first_in_line_again(store: Store) -> None:
    await fill(store, "g1", member("a"))
    await fill(store, "g2", member("b"))
    taken = await lease(store)
    assert await store.delivery.nack(taken.lease_id, 11.0) == ["g1"]
    assert await store.delivery.nack(taken.lease_id, 11.0) == ["g1"]
    with pytest.raises(Conflict, match="was given back"):
        await store.delivery.ack(taken.lease_id, 12.0)
    assert await given(store, max_groups=2) == ["g1", "g2"]


async def test_an_extended_lease_lasts_until_its_new_deadline(store: Store) -> None:
    await fill(store, "g", member("a"))
    taken = await lease(store, now=10.0)
    assert await store.delivery.extend(taken.lease_id, 100.0, 60.0) == 160.0
    assert await given(store, now=159.0) == []
    assert await store.delivery.ack(taken.lease_id, 159.5) == ["g"]
    with pytest.raises(Conflict, match="was acknowledged"):
        await store.delivery.extend(taken.lease_id, 100.0, 160.0)


async def test_an_unknown_lease_is_not_found(store: Store) -> None:
    for act in (store.delivery.ack("x", 1.0), store.delivery.nack("x", 1.0), store.delivery.extend("x", 1.0, 1.0)):
        with pytest.raises(NotFound):
            await act


async def test_an_ended_lease_is_forgotten_after_a_day(store: Store) -> None:
    await fill(store, "g", member("a"))
    taken = await lease(store, now=10.0)
    await store.delivery.ack(taken.lease_id, 11.0)
    assert await given(store, now=11.0 + 86401.0) == []
    with pytest.raises(NotFound):
        await store.delivery.ack(taken.lease_id, 11.0 + 86402.0)


async def test_after_its_last_delivery_a_group_becomes_a_dead_letter_with_its_reason(store: Store) -> None:
    await fill(store, "bad", member("a"))
    await fill(store, "good", member("b"))
    first = await lease(store, now=10.0, max_deliveries=2)
    await store.delivery.nack(first.lease_id, 11.0)
    await lease(store, now=12.0, max_deliveries=2, consumer="trainer-7")
    assert await given(store, now=100.0, max_deliveries=2) == ["good"]
    ((letter,), _) = await store.delivery.dead_letters()
    assert (letter.group_id, list(letter.session_ids), letter.died_at) == ("bad", ["a"], 100.0)
    assert letter.reason == "delivered 2 times, never acknowledged; at last: lease expired by trainer-7"
    assert await counted(store) == {"dead": 1, "leased": 1}


async def test_require_all_waits_for_a_replacement_of_a_failed_member(store: Store) -> None:
    assert await fill(store, "g", member("a"), failed("b"), size=2) == "filling"
    assert await given(store) == []
    assert await fill(store, "g", member("c"), size=2) == "ready"
    assert list((await lease(store)).groups[0].session_ids) == ["a", "c"]


@pytest.mark.case(47)
async def test_allow_partial_delivers_the_usable_members_once_all_have_closed(store: Store) -> None:
    assert await fill(store, "g", failed("a"), member("b"), size=3, defaults=partial(2)) == "filling"
    assert await fill(store, "g", member("c"), size=3, defaults=partial(2)) == "ready"
    assert list((await lease(store)).groups[0].session_ids) == ["b", "c"]


async def test_allow_partial_drops_a_group_with_fewer_than_its_minimum(store: Store) -> None:
    assert await fill(store, "g", failed("a"), failed("b"), member("c"), defaults=partial(2)) == "dropped"
    assert await given(store) == []
    assert await counted(store) == {"dropped": 1}


async def test_allow_partial_never_delivers_a_group_without_a_usable_member(store: Store) -> None:
    assert await fill(store, "g", failed("a"), defaults=partial(0)) == "dropped"


@pytest.mark.case(47)
async def test_drop_drops_a_group_at_its_first_failed_member(store: Store) -> None:
    assert await fill(store, "g", member("a"), failed("b"), size=3, defaults=DROP) == "dropped"
    assert await fill(store, "g", member("c"), size=3, defaults=DROP) == "dropped"
    assert await given(store) == []


async def test_a_group_whose_rewards_are_all_equal_is_kept_or_dropped_as_set(store: Store) -> None:
    equal = (member("a", 0.5), member("b", 0.5))
    assert await fill(store, "kept", *equal, defaults=ALL) == "ready"
    assert await fill(store, "dropped", *(replace(m, session_id=m.session_id * 2) for m in equal), defaults=VARIED) == "dropped"
    assert await fill(store, "varied", member("c", 0.0), member("d", 0.5), defaults=VARIED) == "ready"
    assert await fill(store, "single", member("e", 0.5), defaults=VARIED) == "ready", "one alone has no variance to lack"


async def test_a_corrected_reward_decides_anew_until_the_group_is_leased(store: Store) -> None:
    assert await fill(store, "g", member("a", 1.0), member("b", 1.0), defaults=VARIED) == "dropped"
    assert await fill(store, "g", member("b", 0.0), size=2, defaults=VARIED) == "ready"
    assert await counted(store) == {"ready": 1}
    await lease(store)
    assert await fill(store, "g", member("b", 1.0), size=2, defaults=VARIED) == "leased"


async def test_filling_is_idempotent_by_session(store: Store) -> None:
    for _ in range(3):
        assert await fill(store, "g", member("a"), size=2) == "filling"
    assert await fill(store, "g", member("b"), size=2) == "ready"
    for _ in range(3):
        assert await fill(store, "g", member("b"), size=2) == "ready"
    assert await counted(store) == {"ready": 1}


async def test_a_group_id_used_again_starts_a_round_of_its_own(store: Store) -> None:
    """An epoch later the same task makes a group of the same id: nobody's rows are lost or mixed in."""
    await fill(store, "g", member("a"), member("b"))
    await fill(store, "g", member("c"), member("d"))
    taken = await lease(store, max_groups=5)
    assert [(group.group_id, list(group.session_ids)) for group in taken.groups] == [("g", ["a", "b"]), ("g", ["c", "d"])]
    await store.delivery.ack(taken.lease_id, 11.0)
    assert await fill(store, "g", member("e"), size=2) == "filling"
    assert await fill(store, "g", member("a"), size=2) == "acked", "a session stays in its round"


async def test_members_that_disagree_on_the_size_wait_for_the_greater(store: Store) -> None:
    assert await fill(store, "g", member("a"), size=3) == "filling"
    assert await fill(store, "g", member("b"), size=2) == "filling"
    assert await fill(store, "g", member("c"), size=2) == "ready"


async def test_groups_come_oldest_first_and_no_more_than_asked_for(store: Store) -> None:
    for i in range(5):
        await fill(store, f"g{i}", member(f"s{i}"))
    assert await given(store) == ["g0"], "no limit means one group"
    assert await given(store, max_groups=2) == ["g1", "g2"]
    assert await given(store, max_groups=9) == ["g3", "g4"]


async def test_max_trajectories_takes_whole_groups_and_at_least_one(store: Store) -> None:
    for i, rows in enumerate((5, 2, 2, 1)):
        await fill(store, f"g{i}", member(f"s{i}", rows=rows))
    assert await given(store, max_trajectories=4) == ["g0"], "a group larger than the limit is not starved"
    assert await given(store, max_trajectories=4) == ["g1", "g2"]
    assert await given(store, max_trajectories=4) == ["g3"]


async def test_stale_groups_are_passed_over_counted_and_kept_for_who_takes_them(store: Store) -> None:
    for version in (1, 5, 2):
        await fill(store, f"v{version}", member(f"s{version}", oldest=version))
    assert await given(store, oldest_version=3, max_groups=9) == ["v5"]
    assert await counted(store) == {"leased": 1, "stale": 2}
    assert await given(store, oldest_version=3) == []
    assert await counted(store) == {"leased": 1, "stale": 2}
    assert await given(store, oldest_version=2, max_groups=9) == ["v2"]
    assert await given(store, max_groups=9) == ["v1"]
    assert await counted(store) == {"leased": 3}


async def test_the_oldest_span_of_all_members_decides_the_staleness(store: Store) -> None:
    await fill(store, "g", member("a", oldest=9), member("b", oldest=1))
    assert await given(store, oldest_version=2) == []
    unusable = replace(failed("c"), oldest_version=0)
    await fill(store, "h", unusable, member("d", oldest=4), defaults=partial(1))
    assert await given(store, oldest_version=4) == ["h"]


async def test_a_withdrawn_session_frees_its_place(store: Store) -> None:
    await fill(store, "g", member("a"), member("b"))
    await store.delivery.withdraw("a", ALL)
    assert await given(store) == []
    assert await counted(store) == {"filling": 1}
    assert await fill(store, "g", member("c"), size=2) == "ready"
    assert list((await lease(store)).groups[0].session_ids) == ["b", "c"]


async def test_a_leased_session_is_not_withdrawn(store: Store) -> None:
    await fill(store, "g", member("a"))
    taken = await lease(store)
    with pytest.raises(Conflict, match="leased"):
        await store.delivery.withdraw("a", ALL)
    await store.delivery.ack(taken.lease_id, 11.0)
    await store.delivery.withdraw("a", ALL)
    assert await counted(store) == {"acked": 1}


async def test_deleting_a_session_of_a_dropped_group_does_not_open_the_group_again(store: Store) -> None:
    """A group that was whole and dropped used to fill again, with members of two times in one baseline."""
    await fill(store, "g", member("a"), member("b"), member("c"), defaults=VARIED)
    await store.delivery.withdraw("a", VARIED)
    assert await counted(store) == {"dropped": 1}
    assert await fill(store, "g", member("d"), size=3, defaults=VARIED) == "filling"
    assert await counted(store) == {"dropped": 1, "filling": 1}
    assert await store.delivery.tend(VARIED, 5.0, 100.0) == 1, "only the newcomer's group is waited for"
    ((letter,), _) = await store.delivery.dead_letters()
    assert list(letter.session_ids) == ["d"]
    for session in ("b", "c", "d"):
        await store.delivery.withdraw(session, VARIED)
    assert await counted(store) == {"dropped": 1}


async def test_deleting_a_session_of_a_group_dropped_as_stale_does_not_make_it_ready_again(store: Store) -> None:
    some = partial(1)
    await fill(store, "g", member("a", oldest=1), member("b", oldest=5), size=3, defaults=some)
    assert await store.delivery.tend(some, 5.0, 10.0) == 1
    assert await given(store, oldest_version=3, stale_groups="drop") == []
    await store.delivery.withdraw("a", some)
    assert await counted(store) == {"dropped": 1}
    assert await given(store) == []


async def test_deleting_the_failed_member_of_a_dropped_group_that_is_not_whole_frees_its_place(store: Store) -> None:
    assert await fill(store, "g", failed("a"), member("b"), size=3, defaults=DROP) == "dropped"
    await store.delivery.withdraw("a", DROP)
    assert await fill(store, "g", member("c"), member("d"), size=3, defaults=DROP) == "ready"


async def test_withdrawing_the_last_member_leaves_nothing(store: Store) -> None:
    await fill(store, "g", member("a"), size=2)
    await store.delivery.withdraw("a", ALL)
    await store.delivery.withdraw("a", ALL)
    assert await counted(store) == {}


async def test_a_group_that_cannot_be_delivered_is_buried_and_the_rest_of_its_lease_stands(store: Store) -> None:
    await fill(store, "bad", member("a"))
    await fill(store, "good", member("b"))
    taken = await lease(store, max_groups=2)
    await store.delivery.bury(taken.lease_id, taken.groups[0].reference, "session a was deleted", 11.0)
    assert await store.delivery.ack(taken.lease_id, 12.0) == ["good"]
    ((letter,), _) = await store.delivery.dead_letters()
    assert letter.reason == "session a was deleted"
    assert await counted(store) == {"acked": 1, "dead": 1}


async def test_an_announced_session_stays_announced_until_it_is_filled_or_retracted(store: Store) -> None:
    request = CloseRequest("completed", 0.5, None)
    await store.delivery.announce("a", request, 1.0)
    await store.delivery.announce("b", None, 2.0)
    await store.delivery.announce("c", request, 9.0)
    assert await store.delivery.find_announced(5.0) == [Announced("a", 1.0, request), Announced("b", 2.0, None)]
    await fill(store, "g", member("a"))
    await store.delivery.retract("b")
    assert [each.session_id for each in await store.delivery.find_announced(100.0)] == ["c"]
