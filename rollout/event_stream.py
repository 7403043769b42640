"""Server-sent events: what is told, as text, with a comment while nothing is, so that no one on the way takes the line for dead."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

from rollout.store.base import NoSuchTask, StoreUnavailable

log = logging.getLogger(__name__)

KEEPALIVE = b": nothing new\n\n"
TOLD_AT_ONCE = 256
"""Events that are read ahead of a slow reader."""

Told = tuple[str, str, str]
"""Id, kind, data of one line."""


async def told(events: AsyncIterator[Told], keepalive_seconds: float, stopping: asyncio.Event) -> AsyncIterator[bytes]:
    """Ends with `events`, when the store cannot be read, and when the process stops: a reader comes back with the id of the last
    event that it got."""
    queue: asyncio.Queue[Told | None] = asyncio.Queue(TOLD_AT_ONCE)
    sources = [asyncio.create_task(_read(events, queue)), asyncio.create_task(_end(stopping, queue))]
    try:
        while True:
            try:
                async with asyncio.timeout(keepalive_seconds):
                    event = await queue.get()
            except TimeoutError:
                yield KEEPALIVE
                continue
            if event is None:
                return
            yield _line(*event)
    finally:
        for source in sources:
            source.cancel()
        await asyncio.wait(sources)


async def _read(events: AsyncIterator[Told], queue: asyncio.Queue[Told | None]) -> None:
    try:
        async for event in events:
            await queue.put(event)
    except NoSuchTask:
        # Deleted meanwhile by retention.
        pass
    except StoreUnavailable as error:
        log.warning("a stream of events ends early: %s", error)
    except Exception:
        log.exception("a stream of events ends early")
    # Not when it is cancelled: of a reader that has gone away nobody empties the queue.
    await queue.put(None)


async def _end(stopping: asyncio.Event, queue: asyncio.Queue[Told | None]) -> None:
    await stopping.wait()
    await queue.put(None)


def _line(id_: str, kind: str, data: str) -> bytes:
    return f"id: {id_}\nevent: {kind}\ndata: {data}\n\n".encode()
