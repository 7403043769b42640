"""The contract of the store of scoring jobs, on a real Redis, plain and cluster."""

from __future__ import annotations

import asyncio

from proxy.store.score_jobs import ScoreJob, ScoreJobStore, TakenJob
from tests.support.service.redis_server import Store

JOB = ScoreJob("s1", 100.0, "teacher")


async def test_a_job_is_taken_by_one_process_until_its_time_is_over_and_gone_once_it_is_settled(store: Store) -> None:
    jobs = ScoreJobStore(store.connection)
    await jobs.add(JOB)
    assert await jobs.find_queued("s1", ("teacher", "raw")) == {"teacher"}
    first = await jobs.take(60)
    assert first is not None and (first.job, first.number) == (JOB, 1)
    assert await jobs.take(60) is None
    assert await jobs.put_off(first, 0.0)
    second = await jobs.take(60)
    assert second is not None and second.number == 2
    # The first one was only slow: it settles nothing that another has taken.
    assert not await jobs.settle(first) and not await jobs.keep(first, 0.0)
    assert await jobs.settle(second)
    assert await jobs.count() == 0 and await jobs.find_queued("s1", ("teacher",)) == set()


async def test_a_job_that_is_asked_for_while_it_is_worked_at_is_due_again(store: Store) -> None:
    jobs = ScoreJobStore(store.connection)
    await jobs.add(JOB)
    taken = await jobs.take(60)
    assert taken is not None
    again = ScoreJob("s1", 100.0, "teacher", again=True)
    await jobs.add(again)
    await jobs.settle(taken)
    taken = await jobs.take(60)
    assert taken is not None and taken.job == again and taken.age == 0


async def test_the_age_of_a_job_counts_from_its_first_taking_and_anew_when_it_gets_on(store: Store) -> None:
    """It counted from when the job was stored: behind a long queue the first failure was the last."""
    jobs = ScoreJobStore(store.connection)
    await jobs.add(JOB)
    await asyncio.sleep(0.01)
    taken = await jobs.take(60)
    assert taken is not None and taken.age == 0
    await asyncio.sleep(0.01)
    await jobs.put_off(taken, 0.0)
    taken = await jobs.take(60)
    assert taken is not None and taken.age >= 0.01
    await jobs.put_off(taken, 0.0, got_on=True)
    taken = await jobs.take(60)
    assert taken is not None and taken.age == 0


async def test_whoever_vanishes_with_a_job_is_counted_until_one_puts_it_off_or_settles_it(store: Store) -> None:
    jobs = ScoreJobStore(store.connection)

    async def take() -> TakenJob:
        taken = await jobs.take(0.0)
        assert taken is not None
        return taken

    await jobs.add(JOB)
    assert [(await take()).lost for _ in range(3)] == [0, 1, 2]
    taken = await take()
    await jobs.keep(taken, 0.0)
    taken = await take()
    assert taken.lost == 4
    await jobs.put_off(taken, 0.0)
    assert (await take()).lost == 0
    taken = await take()
    assert taken.lost == 1
    await jobs.settle(taken)
    await jobs.add(JOB)
    assert (await take()).lost == 0
