"""A wire between agent and service that breaks once, in the middle of an answer."""

from __future__ import annotations

import asyncio
import struct
import threading
from contextlib import suppress
from pathlib import Path
from socket import SO_LINGER, SOL_SOCKET
from typing import Self
from urllib.parse import urlsplit

from tests.support.service.prompt_server import accept_no_more


class BreakingWire:
    """Forwards bytes to the server at `target`; the first answer that has `mark` in it goes no further than that. Used in a
    `with` block; `url` is the near end, `broke` whether it has happened."""

    def __init__(self, target: str, mark: bytes) -> None:
        parts = urlsplit(target)
        self._target = (parts.hostname or "", parts.port or 0)
        self._mark = mark
        self.url = ""
        self.broke = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="wire")
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def __enter__(self) -> Self:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(10)
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _stop(self) -> None:
        assert self._server is not None
        await accept_no_more([self._server])
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, near_in: asyncio.StreamReader, near_out: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        far_in, far_out = await asyncio.open_connection(*self._target)
        asking = asyncio.create_task(_forward(near_in, far_out))
        try:
            await self._answer(far_in, near_out)
        except (OSError, asyncio.CancelledError):
            pass  # one of the ends has gone, which ends the other
        finally:
            asking.cancel()
            for end in (near_out, far_out):
                end.transport.abort()
            self._tasks.discard(task)

    async def _answer(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        """Pass on what the server says, up to the mark; the agent then sees its connection reset."""
        tail = b""
        while piece := await source.read(65536):
            tail = tail[-len(self._mark) :] + piece
            if not self.broke and self._mark in tail:
                self.broke = True
                sink.write(piece[: piece.find(self._mark) if self._mark in piece else 0])
                await sink.drain()
                await _until_read(sink)
                sink.get_extra_info("socket").setsockopt(SOL_SOCKET, SO_LINGER, struct.pack("ii", 1, 0))
                return
            sink.write(piece)
            await sink.drain()


async def _until_read(sink: asyncio.StreamWriter) -> None:
    """Until the agent has read what it was sent: data and a reset that arrive together look like a proper end to Node.js (libuv's
    `uv__stream_io`), after which some agents do not try again."""
    near = sink.get_extra_info("socket")
    async with asyncio.timeout(60):
        while sink.transport.get_write_buffer_size() or _count_unread(near.getpeername()[1], near.getsockname()[1]):
            await asyncio.sleep(0.02)


def _count_unread(local: int, remote: int) -> int:
    """Bytes that wait in the socket at port `local` that is connected to port `remote` (proc_net_tcp in Linux's documentation)."""
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, *ends, _, queues = line.split()[:5]
        if [int(end.rpartition(":")[2], 16) for end in ends] == [local, remote]:
            return int(queues.partition(":")[2], 16)
    return 0


async def _forward(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while piece := await source.read(65536):
            sink.write(piece)
            await sink.drain()
