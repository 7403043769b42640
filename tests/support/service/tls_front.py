"""TLS before a redis-server whose own build lacks it, as a proxy in front of one has it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HANDSHAKE = b"\x16"
"""What a client that speaks TLS begins with."""


class TlsFront:
    """Listens where it is told to, and carries each connection on to another port of this machine.

    Who speaks no TLS is carried on as it is, for servers of Redis know each other by the same port, and is counted.
    """

    def __init__(self, port: int, behind: int, certificate: Path, key: Path) -> None:
        self._behind = behind
        self._context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self._context.load_cert_chain(certificate, key)
        self._listener = socket.create_server(("127.0.0.1", port))
        self._listener.setblocking(False)
        self.encrypted, self.plain, self.refused = 0, 0, 0

    async def serve(self) -> None:
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as connections:
            while True:
                accepted, _ = await loop.sock_accept(self._listener)
                connections.create_task(self._carry(accepted))

    def close(self) -> None:
        self._listener.close()

    async def _carry(self, accepted: socket.socket) -> None:
        is_encrypted = await self._first_byte(accepted) == HANDSHAKE
        loop, reader = asyncio.get_running_loop(), asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(reader)
        try:
            context = self._context if is_encrypted else None
            transport, _ = await loop.connect_accepted_socket(lambda: protocol, accepted, ssl=context)
        except OSError:
            # The client did not trust the certificate.
            self.refused += 1
            return
        self.encrypted, self.plain = self.encrypted + is_encrypted, self.plain + (not is_encrypted)
        writer = asyncio.StreamWriter(transport, protocol, reader, loop)
        their_reader, their_writer = await asyncio.open_connection("127.0.0.1", self._behind)
        try:
            await asyncio.gather(_copy(reader, their_writer), _copy(their_reader, writer))
        finally:
            for each in (writer, their_writer):
                each.transport.abort()

    @staticmethod
    async def _first_byte(accepted: socket.socket) -> bytes:
        """Left where it is."""
        loop, readable = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(accepted, readable.set)
        try:
            await readable.wait()
        finally:
            loop.remove_reader(accepted)
        with contextlib.suppress(OSError):
            return accepted.recv(1, socket.MSG_PEEK)
        return b""


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    writer.transport.abort()


@contextmanager
def tls_front(port: int, behind: int, certificate: Path, key: Path) -> Iterator[TlsFront]:
    """In a thread of its own."""
    front = TlsFront(port, behind, certificate, key)
    loop = asyncio.new_event_loop()
    task = loop.create_task(front.serve())

    def run() -> None:
        with contextlib.suppress(asyncio.CancelledError):
            loop.run_until_complete(task)
        # What a transport has to say when it was aborted.
        loop.run_until_complete(asyncio.sleep(0.05))
        loop.close()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield front
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join(30)
        front.close()
