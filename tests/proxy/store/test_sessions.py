"""The contract of the session store, on a real Redis, plain and cluster. Records are any bytes here."""

from __future__ import annotations

import asyncio

import pytest

from contract.sessions import Fork
from proxy.errors import Conflict, NotFound
from proxy.store.sessions import OPENING_SECONDS, digest, refer
from proxy.store.states import Intent, SessionInfo
from tests.support.service.redis_server import RedisKind, Store


def session(session_id: str = "s1", created_at: float = 100.0, **fields: object) -> SessionInfo:
    return SessionInfo(session_id, b"hash", created_at, **fields)  # type: ignore[arg-type]


def intent(call_id: str = "c1", started_at: float = 1.0) -> Intent:
    return Intent(call_id, None, b"digest", "replica", started_at)


async def test_a_session_reads_back_as_it_was_created(store: Store) -> None:
    info = session(task_id="t", group_id="g", group_size=4, metadata={"a": [1, None, {"b": 2.5}]}, sampling={"seed": 7})
    assert await store.sessions.create(info)
    state = await store.sessions.load("s1")
    assert state is not None
    assert state.info == info
    assert (state.status, state.calls, state.reward, state.closed_at) == ("open", 0, None, None)


async def test_creating_the_same_session_again_is_a_no_op_and_another_of_its_id_is_refused(store: Store) -> None:
    assert await store.sessions.create(session())
    assert await store.sessions.create(session())
    assert not await store.sessions.create(session(created_at=200.0))
    assert not await store.sessions.create(session(task_id="other"))
    states, _ = await store.sessions.listing.load_page(status=None, group_id=None, limit=10, cursor=None)
    assert [state.info.created_at for state in states] == [100.0]


async def test_an_unknown_session_is_none_missing_or_not_found(store: Store) -> None:
    assert await store.sessions.load("s1") is None
    assert (await store.sessions.begin("s1", 0, intent())).status == "missing"
    assert await store.sessions.mark_leased("s1") is None
    assert not await store.sessions.delete("s1")
    for act in (
        store.sessions.begin_close("s1"),
        store.sessions.close("s1", "completed", None, None, 1.0),
        store.sessions.set_reward("s1", 1.0, {}, {}, {}),
    ):
        with pytest.raises(NotFound):
            await act


async def test_begin_writes_the_intent_and_commit_replaces_it_by_the_records(store: Store) -> None:
    await store.sessions.create(session())
    begun = await store.sessions.begin("s1", 0, intent())
    assert (begun.status, begun.accepted, list(begun.records)) == ("open", True, [])
    assert await store.sessions.load_intents("s1") == [intent()]
    assert await store.sessions.commit("s1", "c1", {"c1": b"one", "c1-1": b"two"}) == 2
    assert await store.sessions.load_intents("s1") == []
    assert await store.sessions.load_records("s1") == [b"one", b"two"]
    assert await store.sessions.load_records("s1", 1) == [b"two"]


async def test_nothing_of_a_deleted_session_is_written_into_a_later_one_of_its_id(store: Store) -> None:
    """A process that had the first one in memory wrote an intent that nobody ever settled, or a call that was trained in the second."""
    await store.sessions.create(session(created_at=200.0))
    assert (await store.sessions.begin("s1", 0, intent(), created_at=100.0)).status == "missing"
    assert (await store.sessions.replay("s1", 0, {"c1": (digest(b"one"), b"one")}, 1.0, created_at=100.0)).status == "missing"
    with pytest.raises(Conflict, match="deleted before"):
        await store.sessions.commit("s1", "c1", {"c1": b"one"}, created_at=100.0)
    assert await store.sessions.load_intents("s1") == [] and await store.sessions.load_records("s1") == []
    assert (await store.sessions.begin("s1", 0, intent(), created_at=200.0)).accepted
    assert await store.sessions.commit("s1", "c1", {"c1": b"one"}, created_at=200.0) == 1


async def test_begin_gives_what_others_recorded_instead_of_an_intent(store: Store) -> None:
    await store.sessions.create(session())
    await store.sessions.commit("s1", "c1", {"c1": b"one"})
    await store.sessions.commit("s1", "c2", {"c2": b"two"})
    begun = await store.sessions.begin("s1", 1, intent("c3"))
    assert (begun.accepted, list(begun.records)) == (False, [b"two"])
    assert await store.sessions.load_intents("s1") == []
    assert (await store.sessions.begin("s1", 2, intent("c3"))).accepted


async def test_a_cache_that_knows_more_calls_than_there_are_is_told_that_its_session_is_gone(store: Store) -> None:
    await store.sessions.create(session())
    assert (await store.sessions.begin("s1", 1, intent())).status == "missing"


@pytest.mark.case(44)
async def test_a_duplicate_commit_is_a_no_op_also_after_the_close(store: Store) -> None:
    await store.sessions.create(session())
    assert await store.sessions.commit("s1", "c1", {"c1": b"one"}) == 1
    assert await store.sessions.commit("s1", "c1", {"c1": b"one"}) == 1
    await store.sessions.close("s1", "completed", 1.0, None, 2.0)
    assert await store.sessions.commit("s1", "c1", {"c1": b"one"}) == 1
    assert await store.sessions.load_records("s1") == [b"one"]


@pytest.mark.case(44)
async def test_a_conflicting_commit_fails_closed_and_writes_nothing(store: Store) -> None:
    await store.sessions.create(session())
    await store.sessions.begin("s1", 0, intent("c1"))
    await store.sessions.commit("s1", "other", {"c1": b"one"})
    with pytest.raises(Conflict, match="c1"):
        await store.sessions.commit("s1", "c1", {"c2": b"new", "c1": b"different"})
    assert await store.sessions.load_records("s1") == [b"one"]
    assert await store.sessions.load_intents("s1") == [intent("c1")]


@pytest.mark.case(45)
async def test_a_late_writer_gets_a_conflict_once_the_session_is_frozen(store: Store) -> None:
    await store.sessions.create(session())
    await store.sessions.begin("s1", 0, intent("c1"))
    await store.sessions.begin("s1", 0, intent("c2"))
    await store.sessions.begin_close("s1")
    assert await store.sessions.commit("s1", "c1", {"c1": b"in flight at the close"}) == 1
    await store.sessions.close("s1", "completed", 1.0, None, 2.0)
    with pytest.raises(Conflict, match="closed as completed"):
        await store.sessions.commit("s1", "c2", {"c2": b"too late"})
    begun = await store.sessions.begin("s1", 1, intent("c3"))
    assert (begun.status, begun.accepted) == ("completed", False)
    assert await store.sessions.load_records("s1") == [b"in flight at the close"]
    assert await store.sessions.load_intents("s1") == [intent("c2")], "the call that never ended stays visible"


async def test_no_call_begins_while_the_session_is_closing(store: Store) -> None:
    await store.sessions.create(session())
    await store.sessions.begin_close("s1")
    begun = await store.sessions.begin("s1", 0, intent())
    assert (begun.status, begun.accepted) == ("closing", False)


async def test_a_commit_to_a_deleted_session_is_a_conflict_and_leaves_no_key(store: Store, redis_kind: RedisKind) -> None:
    await store.sessions.create(session(group_id="g"))
    await store.sessions.begin("s1", 0, intent())
    await store.sessions.commit("s1", "c0", {"c0": b"zero"})
    store.sessions.note_answered("s1", ["c0"], delivered=True)
    await store.sessions.abandon_intents(())
    assert await store.sessions.delete("s1")
    with pytest.raises(Conflict, match="deleted"):
        await store.sessions.commit("s1", "c1", {"c1": b"one"})
    store.sessions.note_answered("s1", ["c1"], delivered=True)
    await store.sessions.abandon_intents(())
    assert redis_kind.all_keys() == set()


async def test_a_dropped_intent_leaves_the_session_as_it_was(store: Store) -> None:
    await store.sessions.create(session())
    await store.sessions.begin("s1", 0, intent())
    await store.sessions.drop_intent("s1", "c1")
    assert await store.sessions.load_intents("s1") == []


async def test_a_reward_may_come_before_or_after_the_close_but_not_after_the_lease(store: Store) -> None:
    await store.sessions.create(session())
    state = await store.sessions.set_reward("s1", 0.1, {"c1": 0.5}, {"c2": -1.0}, {"judge": "x"})
    assert (state.reward, state.per_call, state.per_branch) == (0.1, {"c1": 0.5}, {"c2": -1.0})
    assert state.reward_metadata == {"judge": "x"}
    await store.sessions.close("s1", "completed", None, None, 2.0)
    assert (await store.sessions.set_reward("s1", 0.3, {}, {}, {})).reward == 0.3
    leased = await store.sessions.mark_leased("s1")
    assert leased is not None and leased.reward == 0.3
    with pytest.raises(Conflict, match="its reward is fixed"):
        await store.sessions.set_reward("s1", 0.4, {}, {}, {})


async def test_close_keeps_status_reward_and_error_and_may_be_repeated_but_not_changed(store: Store) -> None:
    await store.sessions.create(session())
    await store.sessions.set_reward("s1", 0.5, {}, {}, {})
    state = await store.sessions.close("s1", "failed", None, "it broke", 7.5)
    assert (state.status, state.reward, state.error, state.closed_at) == ("failed", 0.5, "it broke", 7.5)
    assert await store.sessions.close("s1", "failed", 9.0, "again", 8.5) == state
    assert await store.sessions.begin_close("s1") == state
    with pytest.raises(Conflict, match="closed as failed, not completed"):
        await store.sessions.close("s1", "completed", None, None, 9.5)


@pytest.mark.case(32)
async def test_concurrent_commits_of_one_session_are_all_recorded(store: Store) -> None:
    await store.sessions.create(session())
    counts = await asyncio.gather(*(store.sessions.commit("s1", f"c{i}", {f"c{i}": str(i).encode()}) for i in range(200)))
    assert sorted(counts) == list(range(1, 201))
    assert sorted(await store.sessions.load_records("s1"), key=int) == [str(i).encode() for i in range(200)]


async def test_the_listing_is_newest_first_in_pages_and_filters_by_status_and_group(store: Store) -> None:
    for i in range(70):
        await store.sessions.create(session(f"s{i}", created_at=100.0 + i, group_id="even" if i % 2 == 0 else None))
    await store.sessions.close("s10", "completed", None, None, 1.0)
    await store.sessions.close("s20", "completed", None, None, 1.0)

    first, cursor = await store.sessions.listing.load_page(status=None, group_id=None, limit=50, cursor=None)
    rest, end = await store.sessions.listing.load_page(status=None, group_id=None, limit=50, cursor=cursor)
    assert [state.info.session_id for state in (*first, *rest)] == [f"s{i}" for i in range(69, -1, -1)]
    assert end is None
    evens, _ = await store.sessions.listing.load_page(status=None, group_id="even", limit=100, cursor=None)
    assert len(evens) == 35
    closed, _ = await store.sessions.listing.load_page(status="completed", group_id=None, limit=100, cursor=None)
    assert [state.info.session_id for state in closed] == ["s20", "s10"]


async def test_a_page_of_a_rare_status_is_never_empty_before_the_end(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page ended after so many entries, found or not: whoever stops at an empty page saw nothing."""
    monkeypatch.setattr("proxy.store.listing.LOADED_AT_ONCE", 4)
    monkeypatch.setattr("proxy.store.listing.LOOKED_AT", 8)
    for i in range(60):
        await store.sessions.create(session(f"s{i}", created_at=100.0 + i, group_id="g"))
    for i in (3, 4, 50):
        await store.sessions.close(f"s{i}", "failed", None, None, 1.0)
    for group_id in (None, "g"):
        found: list[str] = []
        cursor, more = None, True
        while more:
            page, cursor = await store.sessions.listing.load_page(status="failed", group_id=group_id, limit=2, cursor=cursor)
            assert page or cursor is None
            found += [state.info.session_id for state in page]
            more = cursor is not None
        assert found == ["s50", "s4", "s3"]
    assert await store.sessions.listing.load_page(status="timeout", group_id=None, limit=2, cursor=None) == ([], None)


async def test_the_listing_skips_what_a_crash_left_behind(store: Store) -> None:
    await store.sessions.create(session("s1"))
    await store.sessions.listing.add(session("never-created", created_at=300.0))
    await store.sessions.listing.add(session("s1", created_at=50.0))
    states, cursor = await store.sessions.listing.load_page(status=None, group_id=None, limit=10, cursor=None)
    assert [state.info.session_id for state in states] == ["s1"]
    assert cursor is None


# Forks


def forked(session_id: str = "f1", origin: str = "s1", calls: int = 2) -> SessionInfo:
    return session(session_id, 300.0, replay=Fork(origin, 100.0, calls))


def stored(origin: str, number: int, record: bytes) -> tuple[bytes, bytes]:
    return digest(record), refer(origin, number)


async def test_a_fork_of_a_fork_refers_to_records_of_both(store: Store) -> None:
    for info in (session(), forked(), forked("f2", "f1")):
        await store.sessions.create(info)
    await store.sessions.commit("s1", "c1", {"c1": b"one", "c2": b"two"})
    one, two = stored("s1", 0, b"one"), stored("s1", 1, b"two")
    assert (await store.sessions.replay("f1", 0, {"c1": one, "c2": two}, 1000.0)).accepted
    await store.sessions.commit("f1", "c3", {"c3": b"three"})
    assert (await store.sessions.replay("f2", 0, {"c2": two, "c3": stored("f1", 2, b"three")}, 1000.0)).accepted
    assert await store.sessions.load_records("f1") == [b"one", b"two", b"three"]
    assert await store.sessions.load_records("f2") == [b"two", b"three"]
    # What another process has replayed is told as what it has sampled is.
    begun = await store.sessions.begin("f2", 1, intent("c9"))
    assert (begun.accepted, list(begun.records)) == (False, [b"three"])


async def test_of_two_processes_one_replays_a_call(store: Store) -> None:
    for info in (session(), forked()):
        await store.sessions.create(info)
    await store.sessions.commit("s1", "c1", {"c1": b"one"})
    calls = {"c1": stored("s1", 0, b"one")}
    first, second = await asyncio.gather(*(store.sessions.replay("f1", 0, calls, 1000.0) for _ in range(2)))
    assert sorted((first.accepted, second.accepted)) == [False, True]
    late = second if first.accepted else first
    assert list(late.records) == [b"one"]
    # Given again, to a retry, it is in the records once; a closed fork gives nothing.
    assert (await store.sessions.replay("f1", 1, calls, 1000.0)).accepted
    assert await store.sessions.load_records("f1") == [b"one"]
    await store.sessions.begin_close("f1")
    closing = await store.sessions.replay("f1", 1, calls, 1000.0)
    assert (closing.status, closing.accepted) == ("closing", False)


async def test_a_session_outlives_its_forks(store: Store) -> None:
    await store.sessions.create(session())
    fork = Fork("s1", 100.0, 0)
    assert not await store.sessions.pin("f1", Fork("s1", 99.0, 0), 1000.0)
    assert not await store.sessions.pin("f1", Fork("nobody", 100.0, 0), 1000.0)
    assert await store.sessions.pin("f1", fork, 1000.0)
    # It is being opened, for a while; then it is there, or it is forgotten.
    assert await store.sessions.find_forks("s1", 1000.0 + OPENING_SECONDS) == ["f1"]
    with pytest.raises(Conflict, match="delete them first"):
        await store.sessions.delete("s1")
    await store.sessions.create(forked())
    assert await store.sessions.find_forks("s1", 1001.0 + OPENING_SECONDS) == ["f1"]
    assert await store.sessions.delete("f1")
    assert await store.sessions.find_forks("s1", 1000.0) == []
    await store.sessions.pin("f2", fork, 1000.0)
    with pytest.raises(Conflict, match="delete them first"):
        await store.sessions.begin_delete("s1")
    assert await store.sessions.find_forks("s1", 1001.0 + OPENING_SECONDS) == []
    await store.sessions.begin_delete("s1")
    assert not await store.sessions.pin("f3", fork, 1000.0), "it is being deleted"
    await store.sessions.call_off_delete("s1")
    assert await store.sessions.pin("f3", fork, 1000.0)
    assert await store.sessions.find_forks("s1", 1001.0 + OPENING_SECONDS) == []
    assert await store.sessions.delete("s1")
