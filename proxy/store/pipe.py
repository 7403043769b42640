"""Pipe: one connection to a Redis server that many commands share.

A command goes out at the end of the event loop's turn in which it is asked, together with all others of that turn, and is answered
in its turn: a write of its own would be the most that a command costs. redis-py opens the connection (address, TLS, name and
password, database) and then stands aside: what it does in Python for each command costs more than all the rest of a small call.
Nothing that blocks the connection (WAIT, BLOCK) may be sent here.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any

import hiredis
import redis.exceptions as broken
from redis._parsers.base import BaseParser

if TYPE_CHECKING:
    from redis.asyncio import ConnectionPool

    from proxy.store.node import Command

_INCOMPLETE = object()


class Pipe(asyncio.Protocol):
    """`open` makes one. `lost` says that it takes no more commands."""

    def __init__(self, connection: Any, transport: asyncio.Transport) -> None:
        # Kept, for redis-py closes a connection that nobody holds.
        self._connection = connection
        self._transport = transport
        self._waiting: deque[asyncio.Future[Any]] = deque()
        self._unsent: list[bytes] = []
        self._loop = asyncio.get_running_loop()
        self._answers = hiredis.Reader(
            protocolError=broken.InvalidResponse, replyError=BaseParser.parse_error, notEnoughData=_INCOMPLETE
        )
        self._retired = False
        self.lost = False

    @classmethod
    async def open(cls, pool: ConnectionPool) -> Pipe:
        """A connection as the pool makes them, beside those that it counts. Raises redis-py's errors."""
        connection = pool.make_connection()  # type: ignore[no-untyped-call]
        try:
            await connection.connect()
        except BaseException:
            await connection.disconnect(nowait=True)
            raise
        transport = connection._writer.transport
        pipe = cls(connection, transport)
        transport.set_protocol(pipe)
        return pipe

    async def send(self, command: Command) -> Any:
        """The answer. Raises redis-py's error that the server answered with, and its ConnectionError when the connection breaks."""
        if self.lost:
            raise broken.ConnectionError("the connection was lost")
        # First of all: what cannot be written has no answer, and who waited for one would take the next one's.
        packed = hiredis.pack_command(tuple(command))  # type: ignore[arg-type]
        answer: asyncio.Future[Any] = self._loop.create_future()
        self._waiting.append(answer)
        if not self._unsent:
            self._loop.call_soon(self._write)
        self._unsent.append(packed)
        try:
            return await answer
        finally:
            self._close_if_done()

    def retire(self) -> None:
        """Close it as soon as nobody waits for an answer any more."""
        self._retired = True
        self._close_if_done()

    def close(self) -> None:
        """What was not answered breaks off."""
        self.lost = True
        self._transport.abort()

    def data_received(self, data: bytes) -> None:
        self._answers.feed(data)
        try:
            while (answer := self._answers.gets()) is not _INCOMPLETE:
                self._answer(answer)
        except (broken.InvalidResponse, IndexError):
            # Not Redis, or it answers what nobody asked: whose the next answer is cannot be known.
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        # redis-py must not speak of a connection that was left open.
        self._connection._writer = self._connection._reader = None
        while self._waiting:
            answer = self._waiting.popleft()
            if not answer.done():
                answer.set_exception(broken.ConnectionError(f"the connection broke: {exc or 'closed by the server'}"))

    def _write(self) -> None:
        unsent, self._unsent = self._unsent, []
        # Of a connection that was lost meanwhile the answers are known already.
        if self.lost:
            return
        try:
            self._transport.write(b"".join(unsent))
        except RuntimeError as error:
            # uvloop's, for a connection that the server has reset.
            self.connection_lost(error)

    def _close_if_done(self) -> None:
        if self._retired and not self.lost and all(answer.done() for answer in self._waiting):
            self.close()

    def _answer(self, answer: Any) -> None:
        waiting = self._waiting.popleft()
        # Whoever asked may have gone away meanwhile.
        if waiting.done():
            return
        if isinstance(answer, Exception):
            waiting.set_exception(answer)
        else:
            waiting.set_result(answer)
