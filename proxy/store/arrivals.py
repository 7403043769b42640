"""Groups that become ready, watched by whoever waits for one."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

from proxy.errors import StoreUnavailable
from proxy.store.connection import StoreConnection

log = logging.getLogger(__name__)

BLOCK_SECONDS = 5.0
PAUSE_SECONDS = 1.0
"""After a failed read."""


class Arrivals:
    """What arrives while watched, read from the stream `key` by one blocking read for all watchers in this process.

    The stream has one entry, replaced whenever groups become ready. Reading resumes at the last entry read, so nothing is missed
    between two reads or while there is no watcher. A failed read is retried after a pause; consumers also poll now and then.
    `mark` grows with every arrival; take it before asking for groups.
    """

    def __init__(self, connection: StoreConnection, key: str) -> None:
        self.mark = 0
        self._redis = connection
        self._key = key
        self._last: str | None = None
        self._watchers = 0
        self._changed = asyncio.Condition()
        self._turn = asyncio.Lock()
        self._reader: asyncio.Task[None] | None = None

    @contextlib.asynccontextmanager
    async def watch(self) -> AsyncIterator[Arrivals]:
        """Reads while any watcher is in the context. Raises `StoreUnavailable` when the first read cannot start."""
        self._watchers += 1
        try:
            await self._start()
            yield self
        finally:
            self._watchers -= 1
            if not self._watchers:
                await self._stop()

    async def wait(self, mark: int, seconds: float) -> None:
        """Returns when something has arrived since `mark`, after `seconds` at the latest."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds), self._changed:
                await self._changed.wait_for(lambda: self.mark != mark)

    async def _start(self) -> None:
        async with self._turn:
            if self._last is None:
                self._last = await self._read_newest()
            if self._reader is None or self._reader.done():
                self._reader = asyncio.create_task(self._read())

    async def _stop(self) -> None:
        """Waits for the reader: a blocked read would hold its connection when the store is closed."""
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.cancel()
            await asyncio.wait([reader])

    async def _read_newest(self) -> str:
        entries = await self._redis.execute("XREVRANGE", self._key, "+", "-", "COUNT", 1)
        return entries[0][0].decode() if entries else "0-0"

    async def _read(self) -> None:
        while True:
            try:
                await self._read_once()
            except StoreUnavailable as error:
                log.warning("cannot watch for ready groups, waiting consumers poll: %s", error.message)
                await asyncio.sleep(PAUSE_SECONDS)

    async def _read_once(self) -> None:
        block = max(1, int(min(BLOCK_SECONDS, self._redis.timeout_seconds / 2) * 1000))
        read = await self._redis.execute("XREAD", "BLOCK", block, "STREAMS", self._key, self._last or "0-0", key=self._key)
        if not read:
            return
        ((_, entries),) = read
        self._last = entries[-1][0].decode()
        self.mark += 1
        async with self._changed:
            self._changed.notify_all()
