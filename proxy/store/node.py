"""One Redis server and the connections to it.

Deadlines are not set on its sockets but by whoever sends: redis-py's own would start a task for every command, and swallow
cancellations while they are at it (asyncio.wait_for, before Python 3.12).

Scripts, which is what calls are recorded with, share one connection; see `proxy.store.node`. Everything else takes one of redis-py's.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol
from urllib.parse import SplitResult, quote, unquote, urlsplit

import hiredis
import redis.asyncio as redis
import redis.exceptions as broken
from redis._parsers.base import BaseParser
from redis.asyncio.retry import Retry
from redis.backoff import ConstantBackoff

if TYPE_CHECKING:
    from redis.asyncio import ConnectionPool


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


# Pipe: one connection to a Redis server that many commands share.
#
# A command goes out at the end of the event loop's turn in which it is asked, together with all others of that turn, and is answered
# in its turn: a write of its own would be the most that a command costs. redis-py opens the connection (address, TLS, name and
# password, database) and then stands aside: what it does in Python for each command costs more than all the rest of a small call.
# Nothing that blocks the connection (WAIT, BLOCK) may be sent here.


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


# Where the store is: one URL for a single Redis, a Redis Cluster, or a Redis that Sentinels watch.
#
#     redis://[user:password@]host:port/db              one server (or any node of a cluster, which is noticed)
#     redis+cluster://host:port[,host:port…]            a cluster, found through any of its nodes
#     redis+sentinel://host:port[,…]/service[/db]       the master of that service, as the Sentinels name it
#     unix:///path, unix://folder/path                  one server on a Unix socket; the second is relative to the working directory
#
# `rediss` instead of `redis` is TLS. What stands after `?` (for example `ssl_ca_certs=/path`) goes to every connection; a user and
# password are those of the Redis servers.


Kind = Literal["single", "cluster", "sentinel"]
Place = tuple[str, int]
"""Host and port."""

_PORTS = {"single": 6379, "cluster": 6379, "sentinel": 26379}


@dataclass(frozen=True, slots=True)
class Address:
    """`name` is the address without credentials, for messages."""

    kind: Kind
    url: str
    name: str
    places: tuple[Place, ...] = ()
    service: str = ""
    db: str = ""

    @classmethod
    def parse(cls, url: str) -> Address:
        """Raises ValueError for what is no such URL."""
        parts = urlsplit(url)
        scheme, _, kind = parts.scheme.partition("+")
        if kind not in ("", "cluster", "sentinel") or scheme not in ("redis", "rediss", "unix") or (kind and scheme == "unix"):
            raise ValueError("it begins with redis://, rediss://, redis+cluster://, redis+sentinel:// or unix://")
        if not kind:
            if scheme == "unix":
                return _socket(parts)
            return cls("single", url, _bare(parts), _places(parts, "single"))
        if kind == "cluster":
            _require(parts.path in ("", "/", "/0"), "a cluster has the one database 0")
            return cls("cluster", url, _bare(parts), _places(parts, "cluster"))
        service, _, db = parts.path.strip("/").partition("/")
        _require(bool(service), "redis+sentinel:// ends in the name of the service: redis+sentinel://host:26379/mymaster")
        return cls("sentinel", url, f"{_bare(parts)}/{service}", _places(parts, "sentinel"), service, db)

    def server(self, place: Place) -> str:
        """The redis:// URL of one Redis server that is reached as this address says."""
        parts = urlsplit(self.url)
        login, at, _ = parts.netloc.rpartition("@")
        return _joined(parts, f"{login}{at}{_netloc(place)}", f"/{self.db}" if self.db else "")

    def sentinel(self, place: Place) -> str:
        """The same of a Sentinel, which has neither users nor databases."""
        return _joined(urlsplit(self.url), _netloc(place), "")


def _socket(parts: SplitResult) -> Address:
    """What stands before the first slash is a folder: elsewhere it would be a host, which a socket has none of."""
    login, at, folder = parts.netloc.rpartition("@")
    _require(bool(folder + parts.path), "unix:// is followed by the path of a socket")
    path = os.path.abspath(unquote(folder + parts.path))
    query = f"?{parts.query}" if parts.query else ""
    return Address("single", f"unix://{login}{at}{quote(path)}{query}", path)


def _joined(parts: SplitResult, netloc: str, path: str) -> str:
    return SplitResult(parts.scheme.partition("+")[0], netloc, path, parts.query, "").geturl()


def _netloc(place: Place) -> str:
    host, port = place
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _bare(parts: SplitResult) -> str:
    return parts.netloc.rpartition("@")[2]


def _places(parts: SplitResult, kind: Kind) -> tuple[Place, ...]:
    hosts = [urlsplit(f"//{host}") for host in _bare(parts).split(",")]
    _require(all(host.hostname for host in hosts), "each of its nodes is host:port, with commas between them")
    return tuple((host.hostname or "", host.port or _PORTS[kind]) for host in hosts)


def _require(holds: bool, rule: str) -> None:
    if not holds:
        raise ValueError(rule)
