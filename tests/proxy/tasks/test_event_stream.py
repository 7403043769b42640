"""Server-sent events of readers that are slow, or go away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from proxy.tasks.router import MAX_QUEUED_EVENTS, stream_events

SECONDS = 120.0


async def test_a_reader_that_goes_away_while_much_is_left_to_tell_leaves_nothing_behind() -> None:
    ahead = asyncio.Event()

    async def events() -> AsyncIterator[tuple[str, str, str]]:
        for number in range(2 * MAX_QUEUED_EVENTS):
            if number == MAX_QUEUED_EVENTS + 1:
                ahead.set()
            yield str(number), "kind", "{}"

    before = asyncio.all_tasks()
    stream = stream_events(events(), SECONDS, asyncio.Event())
    assert (await anext(stream)).startswith(b"id: 0\n")
    await ahead.wait()
    await asyncio.wait_for(stream.aclose(), SECONDS)  # type: ignore[attr-defined]
    assert asyncio.all_tasks() == before


async def test_a_stream_whose_events_cannot_be_read_ends() -> None:
    async def events() -> AsyncIterator[tuple[str, str, str]]:
        yield "1", "kind", "{}"
        raise ValueError("a stored event cannot be read")

    assert [line async for line in stream_events(events(), SECONDS, asyncio.Event())] == [b"id: 1\nevent: kind\ndata: {}\n\n"]


async def test_without_keep_alives_a_stream_has_its_events_alone() -> None:
    """It was a keep-alive in every turn of the event loop, as fast as a core makes them."""

    async def events() -> AsyncIterator[tuple[str, str, str]]:
        await asyncio.sleep(0.05)
        yield "1", "kind", "{}"

    assert [line async for line in stream_events(events(), 0, asyncio.Event())] == [b"id: 1\nevent: kind\ndata: {}\n\n"]
