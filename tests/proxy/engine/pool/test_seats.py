"""Seats and its queue: who gets a replica when there is no room, in which order, and who stops waiting."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.engine.pool.membership import replica_at
from proxy.engine.pool.seats import Caller, FairQueue, Seats, WaitingCall, rank_replicas
from proxy.engine.replica import Replica
from proxy.errors import Conflict, EngineUnavailable
from proxy.metrics import Metrics


async def nobody_closes() -> None:
    pass


def caller(session_id: str) -> Caller:
    return Caller(session_id, nobody_closes)


class Observed(Metrics):
    def __init__(self) -> None:
        super().__init__()
        self.waits: list[float] = []

    def observe_wait(self, policy: str, seconds: float) -> None:
        self.waits.append(seconds)

    def count_retry(self, policy: str) -> None:
        raise AssertionError("seats try nothing again")

    def count_ejection(self, policy: str) -> None:
        raise AssertionError("seats take no replica out")


class Pool:
    """Two replicas of the default policy with room for `room` calls each, and what is waited for."""

    def __init__(self, room: int, count: int = 2, queue_seconds: float = 0.0) -> None:
        self.replicas = [replica_at(f"http://10.0.0.{number}:8000") for number in range(count)]
        for replica in self.replicas:
            replica.max_calls, replica.healthy = room, True
        self.observed = Observed()
        self.seats = Seats(self._of, queue_seconds, self.observed)

    def _of(self, policy: str) -> Sequence[Replica]:
        return [replica for replica in self.replicas if replica.policy == policy]

    async def take(self, session_id: str, *tried: Replica) -> Replica:
        return await self.seats.acquire("", caller(session_id), set(tried))

    def waiting(self, session_id: str) -> asyncio.Task[Replica]:
        return asyncio.create_task(self.seats.acquire("", caller(session_id), set()))


async def settled() -> None:
    """Everything that can go on without time passing has."""
    for _ in range(10):
        await asyncio.sleep(0)


@given(calls=st.lists(st.sampled_from("abcd"), max_size=40))
def test_turns_go_round_the_sessions_and_each_sessions_calls_keep_their_order(calls: list[str]) -> None:
    """Calls a1 a2 b1 a3 c1 are served a1 b1 c1 a2 a3."""

    async def served() -> list[tuple[str, int]]:
        queue, replica = FairQueue(), replica_at("http://e:1")
        names = [(session, calls[:place].count(session)) for place, session in enumerate(calls)]
        waiting = {name: WaitingCall(name[0], set()) for name in names}
        for call in waiting.values():
            queue.join(call)
        order: list[tuple[str, int]] = []
        while queue.assign_next(lambda call: replica):
            order += [name for name, call in waiting.items() if call.assigned.done() and name not in order]
        assert len(queue) == 0 and replica.in_flight == len(calls)
        return order

    rounds = max(map(calls.count, calls), default=0)
    sessions = list(dict.fromkeys(calls))
    expected = [(session, turn) for turn in range(rounds) for session in sessions if calls.count(session) > turn]
    assert asyncio.run(served()) == expected


async def test_a_session_whose_replica_is_full_overflows_to_its_second_choice() -> None:
    pool = Pool(room=1, count=3)
    wanted = rank_replicas("s", pool.replicas)
    assert [await pool.take("s") for _ in range(3)] == wanted
    pool.seats.release(wanted[0])
    assert await pool.take("s") is wanted[0]


async def test_a_seat_that_is_freed_goes_to_the_session_whose_turn_it_is() -> None:
    """Session a has three calls waiting and b, which came last, one: b's is second."""
    pool = Pool(room=1, count=1)
    await pool.take("x")
    calls = {name: pool.waiting(name[0]) for name in ("a1", "a2", "a3", "b1")}
    await settled()
    assert pool.seats.depths() == {"": 4}
    order = []
    for _ in range(4):
        pool.seats.release(pool.replicas[0])
        await settled()
        (name,) = [name for name, call in calls.items() if call.done()]
        order.append(name)
        del calls[name]
    assert order == ["a1", "b1", "a2", "a3"]
    assert (pool.replicas[0].in_flight, pool.seats.depths(), len(pool.observed.waits)) == (1, {"": 0}, 5)


async def test_who_comes_while_others_wait_does_not_get_before_them() -> None:
    pool = Pool(room=1, count=1)
    await pool.take("x")
    first = pool.waiting("a")
    await settled()
    late = pool.waiting("b")
    pool.seats.release(pool.replicas[0])
    await settled()
    assert first.done() and not late.done()
    pool.seats.release(pool.replicas[0])
    await late


async def test_a_replica_that_returns_serves_those_who_wait() -> None:
    pool = Pool(room=1)
    first, second = pool.replicas
    second.healthy = False
    assert await pool.take("x") is first
    call = pool.waiting("a")
    await settled()
    assert not call.done()
    second.healthy = True
    pool.seats.dispatch("")
    assert await call is second


async def test_a_policys_calls_wait_for_its_own_replicas_only() -> None:
    pool = Pool(room=1)
    judge, plain = pool.replicas
    judge.policy = "judge"
    await pool.take("x")
    call = pool.waiting("a")
    await settled()
    assert not call.done() and judge.has_room
    assert await pool.seats.acquire("judge", caller("b"), set()) is judge
    assert not call.done()
    pool.seats.release(plain)
    await call


async def test_a_replica_that_was_tried_is_not_given_again_while_another_one_serves() -> None:
    pool = Pool(room=1)
    wanted = rank_replicas("s", pool.replicas)
    assert await pool.take("s", wanted[0]) is wanted[1]
    waits = asyncio.create_task(pool.seats.acquire("", caller("s"), {wanted[0]}))
    await settled()
    assert not waits.done() and wanted[0].has_room
    wanted[1].healthy = False
    pool.seats.dispatch("")
    assert await waits is wanted[0]


async def test_a_call_that_is_cut_leaves_the_queue() -> None:
    pool = Pool(room=1, count=1)
    await pool.take("x")
    call = pool.waiting("a")
    await settled()
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    assert pool.seats.depths() == {"": 0}
    pool.seats.release(pool.replicas[0])
    assert pool.replicas[0].in_flight == 0


async def test_a_call_that_is_cut_in_the_moment_it_gets_its_seat_gives_it_back() -> None:
    pool = Pool(room=1, count=1)
    await pool.take("x")
    call = pool.waiting("a")
    await settled()
    pool.seats.release(pool.replicas[0])
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert pool.replicas[0].in_flight == 0


async def test_a_call_that_waited_too_long_is_told_to_come_back() -> None:
    pool = Pool(room=1, count=1, queue_seconds=0.01)
    await pool.take("x")
    with pytest.raises(EngineUnavailable, match=r"no engine had room for the call within 0.01 seconds; waiting: 1") as late:
        await pool.take("a")
    assert (late.value.status, late.value.retry_after_seconds) == (503, 5.0)
    assert pool.seats.depths() == {"": 0}


async def test_a_call_whose_session_was_closed_elsewhere_stops_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proxy.engine.pool.seats.LOOK_SECONDS", 0.01)
    pool = Pool(room=1, count=1)
    await pool.take("x")

    async def closed() -> None:
        raise Conflict("session 'a' is completed; it takes no more calls")

    with pytest.raises(Conflict):
        await pool.seats.acquire("", Caller("a", closed), set())
    assert pool.seats.depths() == {"": 0}
