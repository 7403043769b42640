"""A call can be ended at any moment, whatever its task is doing, and only while that may be ended."""

from __future__ import annotations

import asyncio

import pytest

from proxy.errors import EngineFailed
from proxy.timeline import CancelScope


class Closable:
    closed = False

    def close(self) -> None:
        self.closed = True


async def refuse(*, again: bool) -> bool:
    return False


def scope_cancelled_soon() -> CancelScope:
    scope = CancelScope("s", "c")
    asyncio.get_running_loop().call_soon(scope.cancel)
    return scope


async def test_a_wait_that_may_be_broken_off_ends_with_an_error_and_leaves_the_task_alone() -> None:
    scope = scope_cancelled_soon()
    with pytest.raises(EngineFailed), scope.interruptible():
        await asyncio.sleep(60)
    task = asyncio.current_task()
    assert task is not None and task.cancelling() == 0
    with pytest.raises(EngineFailed), scope.interruptible():
        raise AssertionError("a cancelled call begins nothing else that waits")


async def test_what_must_not_be_broken_off_is_not() -> None:
    scope = scope_cancelled_soon()
    await asyncio.sleep(0.01)
    assert scope.cancelled


async def test_a_cancellation_that_is_not_the_scope_s_stays_one() -> None:
    scope = CancelScope("s", "c")

    async def wait() -> None:
        with scope.interruptible():
            await asyncio.sleep(60)

    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_while_an_answer_arrives_hanging_up_closes_it_and_the_reader_goes_on() -> None:
    """Its reader gets what the closed answer raises, and so keeps what was sampled."""
    scope, answer = scope_cancelled_soon(), Closable()
    with scope.sampling(refuse):
        scope.attach(answer.close)
        async with asyncio.timeout(30):
            while not answer.closed:
                await asyncio.sleep(0)


async def test_a_request_that_is_sent_again_can_be_hung_up_on() -> None:
    scope, answer = scope_cancelled_soon(), Closable()
    with pytest.raises(EngineFailed), scope.sampling(refuse):
        scope.attach(answer.close)
        scope.redial()
        await asyncio.sleep(60)
    assert not answer.closed, "the answer that was refused is over"
    with pytest.raises(EngineFailed):
        scope.redial()


async def test_an_engine_is_asked_to_end_a_call_until_it_has() -> None:
    """Asked before it knew of the request, it would not have stopped."""
    scope, answer, times = CancelScope("s", "c"), Closable(), 0

    async def abort(*, again: bool) -> bool:
        nonlocal times
        assert again == (times > 0)
        times += 1
        if times == 2:
            scope.done.set()
        return True

    with scope.sampling(abort):
        scope.attach(answer.close)
        scope.cancel()
        scope.cancel()
        async with asyncio.timeout(30):
            await scope.done.wait()
    await asyncio.sleep(0)
    assert (times, answer.closed, scope.hung_up) == (2, False, False)


async def test_an_engine_that_does_not_end_a_call_in_time_is_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proxy.timeline.ABORT_SECONDS", 0.01)
    scope, answer = CancelScope("s", "c"), Closable()

    async def hang(*, again: bool) -> bool:
        await asyncio.sleep(60)
        return True

    with scope.sampling(hang):
        scope.attach(answer.close)
        scope.cancel()
        async with asyncio.timeout(30):
            while not answer.closed:
                await asyncio.sleep(0.01)
