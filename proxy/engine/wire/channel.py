"""Channel: one connection to an engine, that carries one request after another.

Of HTTP it does what a call needs and no more: a POST or GET, and its answer whole or as it comes. A general client spends several
times as long on a request in Python, and three of them stand in the way of every call.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable

import httptools

_BUFFERED_BYTES = 1 << 20
"""What may lie unread of an answer before the engine is made to wait."""

_REST_SECONDS = 1.0
"""How long the rest of an answer may take that nobody reads."""


Before = Callable[[], Awaitable[None]]
"""What must have happened when the engine gets the end of a request."""


class ChannelError(Exception):
    """A request that was not answered whole."""


class CannotConnect(ChannelError):
    """No connection could be made: the request was not sent."""


class ConnectTimeout(ChannelError):
    """Nobody took the connection in time."""


class NotAsked(ChannelError):
    """The engine closed the connection before it had the whole request: it may be asked again, over another one."""


class Unanswered(ChannelError):
    """The engine closed the connection before it answered anything."""


class BrokenOff(ChannelError):
    """The answer ended before its end, or is no HTTP."""


class Channel(asyncio.Protocol):
    """The other end of one connection. `idle` is called when it may carry another request; `read_seconds`: how long the engine may
    send nothing (0: for ever)."""

    def __init__(self, idle: Callable[[Channel], None], read_seconds: float) -> None:
        self.lost = False
        self.idle_since = 0.0
        self._idle = idle
        self._read_seconds = read_seconds
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._answer: Answer | None = None
        self._in_request = False
        """Whether a request's end has not gone out yet."""

    async def ask(self, head: bytes, body: bytes, before: Before | None = None) -> Answer:
        """The answer, as soon as its status and headers are there. Raises ChannelError, and TimeoutError when the engine says nothing.

        With `before`, the last byte of the body goes out once that has returned, and all others meanwhile; raises as it, and NotAsked:
        then the engine never had a request."""
        assert self._transport is not None and self._answer is None
        answer = self._answer = Answer(self, self._read_seconds)
        try:
            if before is None:
                self._transport.write(head + body)
            else:
                self._in_request = True
                self._transport.write(head + body[:-1])
                await before()
                if not self.lost and not self._transport.is_closing():
                    self._transport.write(body[-1:])
                    self._in_request = False
                elif not answer.status:
                    raise NotAsked("the engine closed the connection before it had the request")
            await answer.begun()
        except BaseException:
            self.close()
            raise
        return answer

    def pause(self) -> None:
        if self._transport is not None and not self.lost:
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._transport is not None and not self.lost:
            self._transport.resume_reading()

    @property
    def _unsent(self) -> bool:
        """Whether some of the request still lies here."""
        return self._transport is not None and self._transport.get_write_buffer_size() > 0

    def close(self) -> None:
        """Hang up."""
        self.lost = True
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            if self._answer is not None:
                self._answer.fail(BrokenOff(f"the engine answered something else than HTTP: {error}"))
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        if self._answer is not None:
            self._answer.connection_lost(exc)
            self._answer = None

    def on_message_begin(self) -> None:
        if self._answer is None:
            # Nobody asked: whose answer comes next cannot be known.
            self.close()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._answer is not None:
            self._answer.header(name.lower(), value)

    def on_headers_complete(self) -> None:
        if self._answer is not None:
            self._answer.headed(self._parser.get_status_code())

    def on_body(self, body: bytes) -> None:
        if self._answer is not None:
            self._answer.body(body)

    def on_message_complete(self) -> None:
        answer = self._answer
        # 100 and its like come before the answer.
        if answer is None or not answer.status:
            return
        self._answer = None
        answer.complete()
        # An engine may refuse a request that it knows but in part; another one cannot come behind that.
        if self._parser.should_keep_alive() and not self.lost and not self._in_request and not self._unsent:
            self.idle_since = self._loop.time()
            self._idle(self)
        else:
            self.close()


class Answer:
    """What an engine answers: `status`, where it redirects to, and the body, read once, whole or in pieces."""

    def __init__(self, channel: Channel, read_seconds: float) -> None:
        self.status = 0
        self.location = ""
        self._channel = channel
        self._loop = asyncio.get_running_loop()
        self._read_seconds = read_seconds
        self._heard = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._pieces: deque[bytes] = deque()
        self._unread = 0
        self._paused = False
        self._whole = False
        self._measured = False
        """Whether the answer says where it ends; otherwise that is where the connection ends."""
        self._error: Exception | None = None
        self._waiting: asyncio.Future[None] | None = None

    async def __aenter__(self) -> Answer:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.close()
        elif not self._whole:
            # The rest says nothing any more, and the connection is good again behind it.
            self._loop.call_later(_REST_SECONDS, self.close)

    def close(self) -> None:
        """Hang up: the engine sees a client that went away, a reader gets BrokenOff."""
        if not self._whole:
            self.fail(BrokenOff("the connection was closed"))
            self._channel.close()

    async def begun(self) -> None:
        """Returns when the status is there. The engine has the whole request, and its time to say something runs."""
        self._heard = self._loop.time()
        if self._read_seconds and not self._whole and self._error is None:
            self._timer = self._loop.call_later(self._read_seconds, self._quiet)
        while not self.status:
            await self._more()

    async def read(self) -> bytes:
        """The whole body. Raises as `piece`."""
        taken: list[bytes] = []
        while piece := await self.piece():
            taken.append(piece)
        return b"".join(taken)

    async def read_refusal(self) -> bytes:
        """As much of the body as comes: whoever refuses may hang up in the middle of it, and has refused all the same."""
        taken: list[bytes] = []
        with contextlib.suppress(BrokenOff, TimeoutError):
            while piece := await self.piece():
                taken.append(piece)
        return b"".join(taken)

    async def piece(self) -> bytes:
        """What of the body has come since the last piece, at least a byte; b"" at its end. Raises BrokenOff and TimeoutError."""
        while not self._pieces:
            if self._whole:
                return b""
            await self._more()
        piece, self._unread = b"".join(self._pieces), 0
        self._pieces.clear()
        self._go_on()
        return piece

    def _go_on(self) -> None:
        if self._paused:
            self._paused = False
            self._channel.resume()

    async def _more(self) -> None:
        """Returns when something came. Raises what ended the answer."""
        if self._error is not None:
            raise self._error
        self._waiting = self._loop.create_future()
        try:
            await self._waiting
        finally:
            self._waiting = None

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def fail(self, error: Exception) -> None:
        self._error = self._error or error
        self._stop_timer()
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(self._error)

    def connection_lost(self, exc: Exception | None) -> None:
        # An answer that was given up is not whole because its connection ends, too.
        if exc is None and self.status and not self._measured and self._error is None:
            self.complete()
            return
        reason = str(exc) if exc else "the engine closed the connection"
        self.fail(BrokenOff(reason) if self.status else Unanswered(reason))

    def header(self, name: bytes, value: bytes) -> None:
        """`name` in small letters."""
        if name == b"location":
            self.location = value.decode("latin-1")
        elif name in (b"content-length", b"transfer-encoding"):
            self._measured = True

    def headed(self, status: int) -> None:
        if status >= 200:
            self.status = status
            self._wake()

    def body(self, body: bytes) -> None:
        self._heard = self._loop.time()
        self._pieces.append(body)
        self._unread += len(body)
        if self._unread > _BUFFERED_BYTES and not self._paused:
            self._paused = True
            self._channel.pause()
        self._wake()

    def complete(self) -> None:
        self._whole = True
        self._stop_timer()
        self._go_on()
        self._wake()

    def _quiet(self) -> None:
        """The time is over in which something should have come, counted from the start: look how long it really was quiet."""
        left = self._heard + self._read_seconds - self._loop.time()
        if left > 0 or self._paused:
            self._timer = self._loop.call_later(max(left, 1.0), self._quiet)
            return
        self.fail(TimeoutError(f"the engine sent nothing for {self._read_seconds:g} seconds"))
        self._channel.close()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
