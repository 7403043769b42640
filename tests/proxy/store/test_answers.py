"""What became of replies reaches the store with the session's next write, soon, or when it is asked for. Two processes: own and other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from proxy.errors import Conflict, StoreUnavailable
from proxy.store import keys
from proxy.store.connection import StoreConnection
from proxy.store.sessions import SessionStore
from proxy.store.states import Intent, SessionInfo
from tests.support.service.redis_server import RedisKind, running_redis

Write = Callable[[SessionStore], Awaitable[object]]


@pytest.fixture(autouse=True)
def in_an_hour(monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits is not written by the clock."""
    monkeypatch.setattr("proxy.store.outcomes.CARRIED_WITHIN_SECONDS", 3600.0)


@pytest.fixture
async def own(redis_kind: RedisKind) -> AsyncIterator[SessionStore]:
    redis_kind.flushall()
    connection = StoreConnection(redis_kind.url, timeout_seconds=60.0)
    own = SessionStore(connection, "own")
    await own.create(SessionInfo("s", b"hash", 1.0))
    yield own
    await connection.close()


@pytest.fixture
async def other(redis_kind: RedisKind) -> AsyncIterator[SessionStore]:
    connection = StoreConnection(redis_kind.url, timeout_seconds=60.0)
    yield SessionStore(connection, "other")
    await connection.close()


def intent(call_id: str) -> Intent:
    return Intent(call_id, None, b"digest", "replica", 1.0)


async def call(store: SessionStore, known: int, *call_ids: str) -> None:
    """Begin and commit one call with so many choices."""
    assert (await store.begin("s", known, intent(call_ids[0]))).accepted
    await store.commit("s", call_ids[0], {call_id: call_id.encode() for call_id in call_ids})


async def test_a_process_holds_a_session_until_it_has_told_what_became_of_its_replies(
    own: SessionStore, other: SessionStore
) -> None:
    await call(own, 0, "c0", "c0-1")
    await call(own, 2, "c1")
    assert await other.find_holders("s") == {"own"}
    own.note_answered("s", ["c0", "c0-1"], delivered=True)
    own.note_answered("s", ["c1"], delivered=False)
    assert await other.find_holders("s") == {"own"}
    await own.abandon_intents(())
    assert await other.find_holders("s") == set()
    assert await other.load_delivered("s") == {"c0", "c0-1"}


@pytest.mark.parametrize(
    "write",
    [
        lambda own: own.begin("s", 1, intent("c1")),
        lambda own: own.commit("s", "c1", {"c1": b"one"}),
        lambda own: own.close("s", "completed", 1.0, None, 2.0),
    ],
    ids=["begin", "commit", "close"],
)
async def test_the_next_write_of_the_session_carries_what_waits(own: SessionStore, other: SessionStore, write: Write) -> None:
    await call(own, 0, "c0")
    own.note_answered("s", ["c0"], delivered=True)
    assert await own.load_delivered("s") == {"c0"}, "the process itself knows at once"
    assert await other.load_delivered("s") == set()
    await write(own)
    assert await other.load_delivered("s") == {"c0"}
    assert own._answers.encode("s") == []


async def test_a_write_that_was_refused_has_carried_nothing(own: SessionStore, other: SessionStore) -> None:
    await call(own, 0, "c0")
    await call(other, 1, "c1")
    own.note_answered("s", ["c0"], delivered=True)
    assert not (await own.begin("s", 1, intent("c2"))).accepted, "it does not know of c1"
    with pytest.raises(Conflict):
        await own.commit("s", "c2", {"c1": b"something else"})
    assert await other.load_delivered("s") == set()
    await own.begin("s", 2, intent("c2"))
    assert await other.load_delivered("s") == {"c0"}


async def test_without_another_write_what_waits_is_written_soon(
    own: SessionStore, other: SessionStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("proxy.store.outcomes.CARRIED_WITHIN_SECONDS", 0.01)
    for number in range(2):
        await call(own, number, f"c{number}")
        own.note_answered("s", [f"c{number}"], delivered=True)
        while await other.load_delivered("s") != {f"c{before}" for before in range(number + 1)}:
            await asyncio.sleep(0.01)


async def test_what_the_store_could_not_be_told_waits_on() -> None:
    with running_redis() as server, server.client() as client:
        connection = StoreConnection(server.url)
        own = SessionStore(connection, "own")
        await own.create(SessionInfo("s", b"hash", 1.0))
        await call(own, 0, "c0")
        own.note_answered("s", ["c0"], delivered=True)
        client.config_set("maxmemory", 1)
        with pytest.raises(StoreUnavailable):
            await own.begin("s", 1, intent("c1"))
        client.config_set("maxmemory", 0)
        assert client.smembers(keys.delivered("s")) == set()
        await own.abandon_intents(())
        assert client.smembers(keys.delivered("s")) == {b"c0"}
        await connection.close()


async def test_nothing_of_a_reply_that_comes_after_the_close_counts(own: SessionStore, other: SessionStore) -> None:
    await call(own, 0, "c0")
    await other.close("s", "completed", 1.0, None, 2.0)
    own.note_answered("s", ["c0"], delivered=True)
    await own.abandon_intents(())
    assert await other.load_delivered("s") == set()
    assert await own.load_delivered("s") == set()


async def test_a_reply_on_its_way_counts_as_not_delivered_once_its_session_is_settled(
    own: SessionStore, other: SessionStore
) -> None:
    await call(own, 0, "c0")
    await call(own, 1, "c1")
    own.note_answered("s", ["c0"], delivered=True)
    await own.settle_answers("s")
    assert await other.find_holders("s") == set()
    own.note_answered("s", ["c1"], delivered=True)
    await own.abandon_intents(())
    assert await other.load_delivered("s") == {"c0"}


async def test_an_outcome_says_nothing_of_a_later_session_of_the_same_id(
    own: SessionStore, other: SessionStore, redis_kind: RedisKind
) -> None:
    await call(own, 0, "c0")
    own.note_answered("s", ["c0"], delivered=True)
    await other.delete("s")
    await own.abandon_intents(())
    assert keys.delivered("s").encode() not in redis_kind.all_keys()
    await other.create(SessionInfo("s", b"hash", 2.0))
    assert await own.load_delivered("s") == set()


async def test_of_a_call_that_was_never_recorded_nothing_is_noted(own: SessionStore) -> None:
    await own.begin("s", 0, intent("c0"))
    await own.drop_intent("s", "c0")
    own.note_answered("s", ["c0"], delivered=True)
    assert own._answers.encode("s") == []
