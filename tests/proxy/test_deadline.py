"""A deadline ends what takes too long, and nothing else."""

from __future__ import annotations

import asyncio

import pytest

from proxy.timeline import Deadline


async def test_what_takes_longer_ends_in_a_timeout_and_leaves_the_task_as_it_was() -> None:
    with pytest.raises(TimeoutError):
        async with Deadline(0.01):
            await asyncio.Event().wait()
    task = asyncio.current_task()
    assert task is not None and task.cancelling() == 0
    await asyncio.sleep(0)


@pytest.mark.parametrize("seconds", [60.0, 0.0, None])
async def test_a_cancellation_by_somebody_else_stays_one(seconds: float | None) -> None:
    entered = asyncio.Event()

    async def wait() -> None:
        async with Deadline(seconds):
            entered.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(wait())
    await entered.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_of_two_deadlines_the_one_that_is_over_says_so() -> None:
    said = []
    async with Deadline(60.0):
        try:
            async with Deadline(0.01):
                await asyncio.Event().wait()
        except TimeoutError:
            said.append("inner")
    with pytest.raises(TimeoutError):
        async with Deadline(0.01), Deadline(60.0):
            await asyncio.Event().wait()
    assert said == ["inner"]
