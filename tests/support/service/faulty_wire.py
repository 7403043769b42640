"""A TCP proxy that misbehaves when it is told to: between the service and its Redis, or the service and its engine.

with FaultyWire(port) as wire:
    wire.latency(0.05)      every piece comes so much later, in both directions
    wire.black_hole()       nothing passes; what was sent meanwhile arrives after heal()
    wire.half_open()        open connections hang for good; new ones are accepted and never answered
    wire.reset()            open connections are reset, and new ones as soon as they are there
    wire.reset_after(100)   connections are reset when so many more bytes of answers have passed
    wire.stop_after(b"x")   the next request that contains these words passes, and nothing after it: not even its answer
    wire.stopped            set when that has happened
    wire.heal()             from now on all is well again; what hung for good stays so
    wire.resets             how many connections it has reset so far, new ones included
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Callable
from typing import Self

from tests.support.service.prompt_server import accept_no_more

CHUNK = 65536


class FaultyWire:
    """Listens on `port` of loopback and passes everything on to `target_port`."""

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.resets = 0
        self._loop = asyncio.new_event_loop()
        self._flows = asyncio.Event()
        self._delay_seconds = 0.0
        self._mode = "well"
        self._left: int | None = None
        self._last_words = b""
        self.stopped = threading.Event()
        self._pairs: set[_Pair] = set()
        self._thread = threading.Thread(target=self._run, name="faulty wire")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def redis_url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._listener.close()

    def latency(self, seconds: float) -> None:
        self._tell(lambda: setattr(self, "_delay_seconds", seconds))

    def black_hole(self) -> None:
        self._tell(self._flows.clear)

    def half_open(self) -> None:
        def hang() -> None:
            self._mode = "half open"
            for pair in self._pairs:
                pair.lost = True

        self._tell(hang)

    def reset(self) -> None:
        def cut() -> None:
            self._mode = "reset"
            self._reset_all()

        self._tell(cut)

    def reset_after(self, size: int) -> None:
        self._tell(lambda: setattr(self, "_left", size))

    def stop_after(self, words: bytes) -> None:
        self.stopped.clear()
        self._tell(lambda: setattr(self, "_last_words", words))

    def heal(self) -> None:
        def mend() -> None:
            self._mode, self._delay_seconds, self._left, self._last_words = "well", 0.0, None, b""
            self._flows.set()

        self._tell(mend)

    def _tell(self, act: Callable[[], None]) -> None:
        """Returns when the wire does as it is told."""
        done = threading.Event()

        def run() -> None:
            act()
            done.set()

        self._loop.call_soon_threadsafe(run)
        assert done.wait(120), "the wire does not react"

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._flows.set()
        server = self._loop.run_until_complete(asyncio.start_server(self._serve, sock=self._listener))
        self._loop.run_forever()
        self._loop.run_until_complete(accept_no_more([server]))
        server.close()
        self._reset_all()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._mode == "reset":
            self.resets += 1
            _reset(writer)
            return
        # asyncio would do so only for a listener that names its protocol; without it small pieces wait 40 ms for an ACK.
        writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        pair = _Pair(reader, writer)
        self._pairs.add(pair)
        try:
            if self._mode == "half open":
                pair.lost = True
                await asyncio.Event().wait()
            await self._connect(pair)
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            pair.reset()
            self._pairs.discard(pair)

    async def _connect(self, pair: _Pair) -> None:
        answers, there = await asyncio.open_connection("127.0.0.1", self._target_port)
        pair.there = there
        pumps = [
            asyncio.create_task(self._pump(pair, pair.reader, there, answers=False)),
            asyncio.create_task(self._pump(pair, answers, pair.writer, answers=True)),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)

    async def _pump(self, pair: _Pair, source: asyncio.StreamReader, sink: asyncio.StreamWriter, *, answers: bool) -> None:
        while piece := await source.read(CHUNK):
            if self._delay_seconds:
                await asyncio.sleep(self._delay_seconds)
            await self._flows.wait()
            if pair.lost:
                await asyncio.Event().wait()
            if answers and self._left is not None:
                if len(piece) > self._left:
                    sink.write(piece[: self._left])
                    await sink.drain()
                    self._left = 0
                    self._reset_all()
                    return
                self._left -= len(piece)
            if not answers and self._last_words and self._last_words in piece:
                self._flows.clear()
                self.stopped.set()
            sink.write(piece)
            await sink.drain()
        sink.close()

    def _reset_all(self) -> None:
        self.resets += len(self._pairs)
        for pair in self._pairs:
            pair.reset()


class _Pair:
    """Both ends of one connection. `lost`: it hangs for good."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.there: asyncio.StreamWriter | None = None
        self.lost = False

    def reset(self) -> None:
        _reset(self.writer)
        if self.there is not None:
            _reset(self.there)


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close with RST: whoever reads or writes at the other end gets an error instead of an end."""
    with contextlib.suppress(OSError):
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
