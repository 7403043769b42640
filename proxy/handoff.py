"""Handoff: things from one task to another, in their order: `asyncio.Queue` for one reader, in a third of its instructions."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Handoff(Generic[T]):
    """Any number of things may wait; `put` never does."""

    __slots__ = ("_reader", "_things")

    def __init__(self) -> None:
        self._things: deque[T] = deque()
        self._reader: asyncio.Future[None] | None = None

    def __len__(self) -> int:
        return len(self._things)

    def put(self, thing: T) -> None:
        self._things.append(thing)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def get(self) -> T:
        """The next thing. Nothing is lost when whoever waits is cancelled."""
        while not self._things:
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        return self._things.popleft()
