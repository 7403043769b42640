"""One Redis server and the connections to it.

Deadlines are not set on its sockets but by whoever sends: redis-py's own would start a task for every command, and swallow
cancellations while they are at it (asyncio.wait_for, before Python 3.12).

Scripts, which is what calls are recorded with, share one connection; see `proxy.store.pipe`. Everything else takes one of redis-py's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

import redis.asyncio as redis
import redis.exceptions as broken
from redis.asyncio.retry import Retry
from redis.backoff import ConstantBackoff

from proxy.store.pipe import Pipe

Argument = bytes | str | int | float
Command = Sequence[Argument]

_ASKING: Command = ("ASKING",)
_SCRIPTS = ("EVALSHA", "EVAL")
_CLOSED = "handler is closed"
"""uvloop's word, in a RuntimeError that redis-py lets pass, for a connection that the server has reset."""


class Link(Protocol):
    """The way to the server that holds a key. Errors are redis-py's."""

    async def send(self, key: str | None, commands: Sequence[Command]) -> list[Any]:
        """The answers, all from one connection to the server of `key`; None means any server."""
        ...

    async def ping(self) -> None:
        """Returns when every server that holds keys answers."""
        ...

    async def facts(self) -> list[dict[str, Any]]:
        """INFO of every server that holds keys."""
        ...

    def distrust(self) -> None:
        """Something hung: idle connections, and what is known of who holds what, may be dead."""
        ...

    async def close(self) -> None: ...


class _OnceMore(Retry):
    """A connection that the server closed meanwhile is opened once more: what is sent here may be repeated. So is one that was not open
    after `connect_seconds` because the event loop stood still: who has not looked cannot say that no answer came."""

    def __init__(self, connect_seconds: float) -> None:
        super().__init__(ConstantBackoff(0.02), 1, supported_errors=(broken.ConnectionError,))
        self._late_seconds = connect_seconds + 0.05

    async def call_with_retry(self, do: Callable[[], Awaitable[Any]], *more: Any, **named: Any) -> Any:
        loop = asyncio.get_running_loop()
        started = loop.time()
        try:
            return await super().call_with_retry(do, *more, **named)
        except broken.TimeoutError:
            if loop.time() - started < self._late_seconds:
                raise
        return await super().call_with_retry(do, *more, **named)


class Node:
    """A server. By itself it is the link to a store of one server."""

    def __init__(self, url: str, *, max_connections: int, connect_seconds: float) -> None:
        self._client = redis.Redis.from_url(
            url,
            max_connections=max_connections,
            socket_timeout=None,
            socket_connect_timeout=connect_seconds,
            protocol=2,
            retry=_OnceMore(connect_seconds),
        )
        self._distrusted = False
        self._pipe: Pipe | None = None
        self._opening = asyncio.Lock()
        self._closed = False

    async def send(self, key: str | None, commands: Sequence[Command], *, asking: bool = False) -> list[Any]:
        self._refuse_if_closed()
        try:
            return await self._sent(commands, asking)
        finally:
            if self._closed:
                # It was closed while a connection was being opened here.
                await self._client.aclose()

    async def _sent(self, commands: Sequence[Command], asking: bool) -> list[Any]:
        try:
            return await self._exchange(commands, asking)
        except RuntimeError as error:
            if _CLOSED not in str(error):
                raise
            # It was reset while it lay idle, and probably the others too.
            self.distrust()
        try:
            return await self._exchange(commands, asking)
        except RuntimeError as error:
            raise broken.ConnectionError(str(error)) from error

    async def _exchange(self, commands: Sequence[Command], asking: bool) -> list[Any]:
        if self._distrusted:
            self._distrusted = False
            await self._client.connection_pool.disconnect(inuse_connections=False)
        if asking:
            return (await self._pipelined([_ASKING, *commands]))[1:]
        if len(commands) > 1:
            return await self._pipelined(commands)
        if commands[0][0] in _SCRIPTS:
            return [await self._piped(commands[0])]
        return [await self._client.execute_command(*commands[0])]  # type: ignore[no-untyped-call]

    async def ping(self) -> None:
        await self.send(None, [("PING",)])

    async def facts(self) -> list[dict[str, Any]]:
        return await self.send(None, [("INFO",)])

    def distrust(self) -> None:
        self._distrusted = True
        if self._pipe is not None:
            self._pipe.retire()
            self._pipe = None

    async def close(self) -> None:
        """For good: nothing is opened after it."""
        self._closed = True
        if self._pipe is not None:
            self._pipe.close()
        await self._client.aclose()

    async def _piped(self, command: Command) -> Any:
        """The answer over the shared connection; a second one is opened when the first breaks."""
        try:
            return await (await self._shared()).send(command)
        except broken.ConnectionError:
            return await (await self._shared()).send(command)

    async def _shared(self) -> Pipe:
        pipe = self._pipe
        if pipe is not None and not pipe.lost:
            return pipe
        async with self._opening:
            if self._pipe is None or self._pipe.lost:
                self._refuse_if_closed()
                self._pipe = await Pipe.open(self._client.connection_pool)
            if self._closed:
                self._pipe.close()
            return self._pipe

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise broken.ConnectionError("the store was closed")

    async def _pipelined(self, commands: Sequence[Command]) -> list[Any]:
        pipeline = self._client.pipeline(transaction=False)
        for command in commands:
            pipeline.execute_command(*command)
        answers: list[Any] = await pipeline.execute(raise_on_error=False)
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return answers
