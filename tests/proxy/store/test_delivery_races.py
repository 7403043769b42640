"""Several proxies and several trainers on one Redis at the same time: every group is acknowledged once, none is lost."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest

from proxy.errors import Conflict
from proxy.store.delivery import LeaseQuery
from proxy.store.groups import GroupMember, LeaseRecord
from tests.support.service.redis_server import RedisKind, Store
from tests.support.service.running_service import RunningService
from tests.support.sessions.filled_groups import ALL
from tests.support.sessions.recorded_calls import record
from trainer_client import TrainerClient
from trainer_client.errors import LeaseLost

NO_ENGINE = "http://127.0.0.1:9"
LEASE_SECONDS = 0.2
PATIENCE_SECONDS = 120.0

# What a consumer does with a lease, by a number from 0 to 1: less than this.
CRASHED, TOO_LATE, GIVEN_BACK = 0.2, 0.3, 0.45


@dataclass
class Tally:
    """What the consumers of a test did, from all their threads."""

    groups: int
    acknowledged: Counter[str] = field(default_factory=Counter)
    delivered: Counter[str] = field(default_factory=Counter)
    sessions: dict[str, set[tuple[str, ...]]] = field(default_factory=dict)
    late: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def done(self) -> bool:
        return len(self.acknowledged) == self.groups

    def saw(self, group_id: str, members: tuple[str, ...]) -> None:
        with self.lock:
            self.delivered[group_id] += 1
            self.sessions.setdefault(group_id, set()).add(members)

    def acked(self, group_ids: list[str]) -> None:
        with self.lock:
            self.acknowledged.update(group_ids)

    def check(self) -> None:
        assert sorted(self.acknowledged) == sorted(f"g{number}" for number in range(self.groups)), "none lost"
        assert set(self.acknowledged.values()) == {1}, "none twice"
        assert all(len(seen) == 1 for seen in self.sessions.values()), "redelivered with the same members"
        assert sum(self.delivered.values()) > self.groups, "something was delivered again, or nothing was tested"


def in_threads(*work: Callable[[], None]) -> None:
    with ThreadPoolExecutor(len(work)) as pool:
        for future in [pool.submit(each) for each in work]:
            future.result(PATIENCE_SECONDS + 30)


def shuffled_members(groups: int, size: int, seed: int) -> list[tuple[str, str]]:
    members = [(f"g{group}", f"g{group}-s{number}") for group in range(groups) for number in range(size)]
    random.Random(seed).shuffle(members)
    return members


@pytest.mark.case(46)
def test_every_group_is_acknowledged_exactly_once(redis_kind: RedisKind) -> None:
    """At the store, by threads with connections of their own; one in five consumers forgets its lease, or comes too late."""
    redis_kind.flushall()
    groups, size, fillers, consumers, seed = 60, 3, 3, 4, 1
    members, tally = shuffled_members(groups, size, seed), Tally(groups)

    async def fill(number: int) -> None:
        store, rng = Store.at(redis_kind.url), random.Random(seed * 100 + number)
        for group_id, session_id in members[number::fillers]:
            for _ in range(rng.choice((1, 1, 2))):  # a close may be repeated
                await store.delivery.fill(group_id, size, GroupMember(session_id, True, 1.0, 1, 0), ALL, time.time())
            await asyncio.sleep(rng.random() / 100)
        await store.connection.close()

    async def consume(number: int) -> None:
        store, rng = Store.at(redis_kind.url), random.Random(seed * 1000 + number)
        deadline = time.monotonic() + PATIENCE_SECONDS
        choice = TOO_LATE - 0.01
        async with store.delivery.watch() as arrivals:
            while not tally.done:
                assert time.monotonic() < deadline, f"{len(tally.acknowledged)} of {groups} acknowledged"
                mark = arrivals.mark
                taken = await store.delivery.lease(
                    LeaseQuery(
                        consumer=f"t{number}",
                        max_groups=rng.randint(1, 6),
                        max_trajectories=None,
                        oldest_version=None,
                        lease_seconds=LEASE_SECONDS,
                        max_deliveries=1000,
                        now=time.time(),
                        waits=rng.random() < 0.8,
                    )
                )
                if not isinstance(taken, LeaseRecord):
                    await arrivals.wait(mark, 0.1)
                    continue
                await use(store, choice, taken)
                choice = rng.random()
        await store.connection.close()

    async def use(store: Store, choice: float, taken: LeaseRecord) -> None:
        for group in taken.groups:
            tally.saw(group.group_id, tuple(sorted(group.session_ids)))
        if choice < CRASHED:
            return
        if choice < TOO_LATE:
            await asyncio.sleep(LEASE_SECONDS + 0.1)
        try:
            if choice < GIVEN_BACK:
                await store.delivery.nack(taken.lease_id, time.time())
                return
            done = list(await store.delivery.ack(taken.lease_id, time.time()))
            assert list(await store.delivery.ack(taken.lease_id, time.time())) == done
            tally.acked(done)
        except Conflict:
            tally.late += 1

    def running(work: Callable[[], object]) -> Callable[[], None]:
        return lambda: asyncio.run(work())  # type: ignore[arg-type]

    jobs = [running(lambda n=n: fill(n)) for n in range(fillers)]  # type: ignore[misc]
    jobs += [running(lambda n=n: consume(n)) for n in range(consumers)]  # type: ignore[misc]
    in_threads(*jobs)
    tally.check()
    assert tally.late > 0


async def write_call(url: str, session_ids: list[str]) -> None:
    store = Store.at(url)
    for session_id in session_ids:
        call_id = f"{session_id}-c"
        made = record(call_id, session_id, prompt=[1, 2], sampled=[7, 8])
        await store.sessions.commit(session_id, call_id, {call_id: made})
    await store.connection.close()


def test_two_proxies_and_three_trainers_deliver_every_group_exactly_once(redis_url: str) -> None:
    """Over HTTP, with the trainer's own client; sessions are closed at either proxy while trainers train, crash and give up."""
    groups, size = 16, 2
    members, tally = shuffled_members(groups, size, 3), Tally(groups)
    settings: dict[str, Any] = {"group": {"policy": "require_all", "max_deliveries": 1000}}
    with RunningService(NO_ENGINE, redis_url, **settings) as one, RunningService(NO_ENGINE, redis_url, **settings) as two:
        for group_id, session_id in members:
            fields = {"session_id": session_id, "group_id": group_id, "group_size": size}
            assert one.request("POST", "/sessions", json=fields).status_code == 201
        asyncio.run(write_call(redis_url, [session_id for _, session_id in members]))

        def close(number: int) -> None:
            rng = random.Random(number)
            for _, session_id in members[number::2]:
                body = {"status": "completed", "reward": rng.random()}
                closed = rng.choice((one, two)).request("POST", f"/sessions/{session_id}/close", json=body)
                assert closed.status_code == 200, closed.text

        def train(number: int) -> None:
            rng, deadline = random.Random(100 + number), time.monotonic() + PATIENCE_SECONDS
            with TrainerClient(rng.choice((one, two)).url, "trainer-of-the-test", consumer=f"t{number}") as client:
                choice = 0.0
                while not tally.done:
                    assert time.monotonic() < deadline, f"{len(tally.acknowledged)} of {groups} acknowledged"
                    batch = client.lease(max_groups=rng.randint(1, 4), wait_seconds=0.2, lease_seconds=LEASE_SECONDS)
                    if batch is None:
                        continue
                    for group in batch.groups:
                        tally.saw(group.group_id, tuple(sorted(row.trajectory_id for row in group.trajectories)))
                    mood, choice = choice, rng.random()
                    if mood < CRASHED:
                        continue
                    try:
                        if mood < GIVEN_BACK:
                            batch.nack()
                            continue
                        batch.ack()
                        tally.acked([group.group_id for group in batch.groups])
                    except LeaseLost:
                        tally.late += 1

        in_threads(*(lambda n=n: close(n) for n in range(2)), *(lambda n=n: train(n) for n in range(3)))
        counts = one.request("GET", "/batches").json()["groups"]
    tally.check()
    assert {state: number for state, number in counts.items() if number} == {"acked": groups}
