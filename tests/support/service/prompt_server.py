"""uvicorn's server for a thread of a test, which ends as soon as it is told to. uvicorn's own checks for that every tenth of a second,
and waits another tenth for its connections, however few they are."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterable

import uvicorn

FORCED_SECONDS = 0.1
"""How long a forced end waits for requests to notice that their connections are broken."""


async def accept_no_more(servers: Iterable[asyncio.Server]) -> None:
    """To be called before a server is closed: asyncio (3.11) loses a connection that it has accepted, but not yet given a transport,
    when its listener is closed. Its socket stays open until it is collected, and the warning about it fails whichever test runs then."""
    loop = asyncio.get_running_loop()
    for listener in (listener for server in servers for listener in server.sockets):
        loop.remove_reader(listener.fileno())
    # One turn starts the task that makes the transport, the next one runs it.
    await asyncio.sleep(0)
    await asyncio.sleep(0)


class PromptServer(uvicorn.Server):
    """`end()` from any thread, instead of `should_exit`."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ending = asyncio.Event()

    def end(self, *, force: bool = False) -> None:
        """`force`: without waiting for answers to be complete, and without the application's shutdown."""
        self.should_exit = True
        self.force_exit = self.force_exit or force
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._ending.set)

    async def main_loop(self) -> None:
        # Before the first look at `should_exit`, so that no end is missed.
        self._loop = asyncio.get_running_loop()
        ticking = asyncio.create_task(super().main_loop())
        ended = asyncio.create_task(self._ending.wait())
        await asyncio.wait([ticking, ended], return_when=asyncio.FIRST_COMPLETED)
        ticking.cancel()
        ended.cancel()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await accept_no_more(self.servers)
        for listening in (*self.servers, *(sockets or ())):
            listening.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        try:
            async with asyncio.timeout(FORCED_SECONDS if self.force_exit else self.config.timeout_graceful_shutdown):
                while self.server_state.connections or self.server_state.tasks:
                    await asyncio.sleep(0.005)
        except TimeoutError:
            for task in self.server_state.tasks:
                task.cancel()
        if not self.force_exit:
            await self.lifespan.shutdown()
