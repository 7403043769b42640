"""Handoff: what one task puts, another gets, in order and all of it."""

from __future__ import annotations

import asyncio

import pytest

from proxy.call.answer import Handoff


async def test_what_was_put_comes_in_its_order_whether_somebody_waits_or_not() -> None:
    things: Handoff[int] = Handoff()
    things.put(1)
    things.put(2)
    assert len(things) == 2
    assert [await things.get(), await things.get()] == [1, 2]
    waiting = asyncio.create_task(things.get())
    await asyncio.sleep(0)
    for thing in (3, 4):
        things.put(thing)
    assert [await waiting, await things.get()] == [3, 4]
    assert not things


async def test_nothing_is_lost_when_a_reader_is_cancelled_at_any_moment() -> None:
    things: Handoff[int] = Handoff()
    waiting = asyncio.create_task(things.get())
    await asyncio.sleep(0)
    waiting.cancel()
    things.put(1)
    with pytest.raises(asyncio.CancelledError):
        await waiting
    woken = asyncio.create_task(things.get())
    assert await woken == 1
    woken = asyncio.create_task(things.get())
    await asyncio.sleep(0)
    things.put(2)
    # Woken, and cancelled before it ran.
    woken.cancel()
    with pytest.raises(asyncio.CancelledError):
        await woken
    assert await things.get() == 2
