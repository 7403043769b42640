"""One Redis server: its connections, the pipe that scripts share, and the URLs that name it.

The sockets have no timeouts; the caller sets the deadline (`proxy.store.connection`). Scripts, which record calls, share one
connection (`Pipe`); every other command takes one from redis-py's pool.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import ssl
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol
from urllib.parse import SplitResult, parse_qs, quote, unquote, urlsplit

import hiredis
import redis.asyncio as redis
import redis.exceptions as broken
from redis._parsers.base import BaseParser
from redis.asyncio.connection import SSLConnection, parse_url
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import ConstantBackoff

if TYPE_CHECKING:
    from redis.asyncio import ConnectionPool


Argument = bytes | str | int | float
Command = Sequence[Argument]

SENTINEL_SECONDS = 2.0
"""How long one Sentinel may take to answer."""

SURVEY: Sequence[Command] = (("INFO",), ("PING",))
"""INFO is always answered; PING is refused while the server loads its file, and while its disk takes no writes."""
_ASKING: Command = ("ASKING",)
_SCRIPTS = ("EVALSHA", "EVAL")
_CLOSED = "handler is closed"
"""uvloop raises a RuntimeError with these words for a connection that the server has reset; redis-py does not translate it."""


def goes_through_pipe(commands: Sequence[Command]) -> bool:
    """Whether they take no connection of the pool, but share one. A command behind a script (WAIT) would block the others there."""
    return len(commands) == 1 and commands[0][0] in _SCRIPTS


@dataclass(frozen=True, slots=True)
class CommandGroup:
    """A server that holds keys: what INFO says, or the `error` for which it takes no commands. `name` is empty for the only one, `slots`
    how many of a cluster's slots it holds."""

    name: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)
    error: Exception | None = None
    slots: int = 0


class Link(Protocol):
    """The way to the server that holds a key: `StoreServer` or `proxy.store.cluster.StoreCluster`. Raises redis-py's errors."""

    async def send(self, key: str | None, commands: Sequence[Command]) -> list[Any]:
        """The answers, all from one connection to the server of `key`; None: to any server."""
        ...

    async def survey(self, seconds: float) -> list[CommandGroup]:
        """Every server that holds keys. A part of a cluster that does not answer within `seconds` is away; where there is one server, its
        error is raised."""
        ...

    def distrust(self) -> None:
        """Replace idle connections and the table of slots before the next command: something hung or was demoted."""
        ...

    async def close(self) -> None: ...


class StoreServer:
    """One server, or with `service` whichever master `sentinels` (their URLs) name for it; then the host in `url` is ignored."""

    def __init__(
        self, url: str, *, max_connections: int, connect_seconds: float, service: str = "", sentinels: Sequence[str] = ()
    ) -> None:
        timeouts: dict[str, Any] = {
            "socket_connect_timeout": connect_seconds,
            "protocol": 2,
            "retry": _OnceMore(connect_seconds),
        }
        options: dict[str, Any] = {**timeouts, "max_connections": max_connections, "socket_timeout": None}
        self._sentinels = [redis.Redis.from_url(each, **timeouts, socket_timeout=SENTINEL_SECONDS) for each in sentinels]
        if service:
            self._client = _open_master(self._sentinels, service, url, options)
        else:
            self._client = redis.Redis.from_url(url, **options)
        self._distrusted = False
        self._pipe: Pipe | None = None
        self._opening = asyncio.Lock()
        self._closed = False

    async def send(self, key: str | None, commands: Sequence[Command], *, asking: bool = False) -> list[Any]:
        self._refuse_if_closed()
        try:
            if not asking and goes_through_pipe(commands):
                return [await self._send_script(commands[0])]
            return await self._send_again_if_reset(commands, asking)
        finally:
            if self._closed:
                # It was closed while a connection was being opened here.
                await self._close_clients()

    async def survey(self, seconds: float) -> list[CommandGroup]:
        return [CommandGroup(facts=(await self.send(None, SURVEY))[0])]

    def distrust(self) -> None:
        self._distrusted = True
        if self._pipe is not None:
            self._pipe.retire()
            self._pipe = None

    async def close(self) -> None:
        """For good: nothing is opened afterwards."""
        self._closed = True
        if self._pipe is not None:
            self._pipe.close()
        await self._close_clients()

    async def _send_again_if_reset(self, commands: Sequence[Command], asking: bool) -> list[Any]:
        try:
            return await self._exchange(commands, asking)
        except RuntimeError as error:
            if _CLOSED not in str(error):
                raise
            # The server reset it while it was idle, and probably the other connections too.
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
            return (await self._send_pipeline([_ASKING, *commands]))[1:]
        if len(commands) > 1:
            return await self._send_pipeline(commands)
        return [await self._client.execute_command(*commands[0])]  # type: ignore[no-untyped-call]

    async def _send_script(self, command: Command) -> Any:
        """The answer over the pipe. Sent once more over a new pipe when this one breaks, or leads to a master that was demoted."""
        try:
            pipe = await self._open_pipe()
            return await pipe.send(command)
        except broken.ReadOnlyError:
            # A demoted master keeps its connections; only a new one leads to its successor.
            if self._pipe is pipe:
                self.distrust()
        except broken.ConnectionError:
            pass
        return await (await self._open_pipe()).send(command)

    async def _open_pipe(self) -> Pipe:
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

    async def _send_pipeline(self, commands: Sequence[Command]) -> list[Any]:
        pipeline = self._client.pipeline(transaction=False)
        for command in commands:
            pipeline.execute_command(*command)
        answers: list[Any] = await pipeline.execute(raise_on_error=False)
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return answers

    async def _close_clients(self) -> None:
        for client in (self._client, *self._sentinels):
            await client.aclose()


async def speaks_tls(place: HostPort) -> bool:
    """Whether a server there answers a TLS handshake."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        async with asyncio.timeout(SENTINEL_SECONDS):
            _, writer = await asyncio.open_connection(*place, ssl=context)
        writer.close()
        return True
    except ssl.SSLError as error:
        return error.reason not in ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE")
    except (OSError, TimeoutError):
        return False


async def answers_plainly(place: HostPort) -> bool:
    """Whether a server there answers a command of Redis that is not encrypted, be it with a refusal."""
    try:
        async with asyncio.timeout(SENTINEL_SECONDS):
            reader, writer = await asyncio.open_connection(*place)
            try:
                writer.write(b"PING\r\n")
                return await reader.read(1) in (b"+", b"-")
            finally:
                writer.transport.abort()
    except (OSError, TimeoutError):
        return False


class _OnceMore(Retry):
    """Connects and sends once more after a ConnectionError: every command of this store may be repeated.

    Also after a connect timeout that was reported late: then the event loop had stalled, and the server may have answered in time.
    """

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


def _open_master(sentinels: list[redis.Redis], service: str, url: str, options: dict[str, Any]) -> redis.Redis:
    """A client that asks the Sentinels for the master each time it connects."""
    reached: dict[str, Any] = {**parse_url(url), **options}
    for named in ("host", "port"):
        reached.pop(named, None)
    tls = reached.pop("connection_class", None) is SSLConnection
    watch = Sentinel([])  # type: ignore[no-untyped-call]
    watch.sentinels = sentinels
    client: redis.Redis = watch.master_for(service, ssl=tls, **reached)
    return client


# redis-py opens the pipe's connection (address, TLS, login, database) and then stands aside: the Python that it runs per command costs
# more than the rest of a small call. Measured on one server, a call's two scripts take 39 us of CPU here and 148 us over redis-py's
# own connections when 32 sessions call at once, 58 and 132 us when one does.

_INCOMPLETE = object()


class Pipe(asyncio.Protocol):
    """One connection to a Redis server that many commands share.

    The commands of one turn of the event loop go out in one write, at its end: a write each would be most of a command's cost.
    Never send what blocks the connection (WAIT, BLOCK). `lost`: it takes no more commands.
    """

    def __init__(self, connection: Any, transport: asyncio.Transport) -> None:
        # Kept, because redis-py closes a connection that nothing references.
        self._connection = connection
        self._transport = transport
        self._waiting: deque[asyncio.Future[Any]] = deque()
        self._unsent: list[bytes] = []
        self._loop = asyncio.get_running_loop()
        self._replies = hiredis.Reader(
            protocolError=broken.InvalidResponse, replyError=BaseParser.parse_error, notEnoughData=_INCOMPLETE
        )
        self._retired = self.lost = False

    @classmethod
    async def open(cls, pool: ConnectionPool) -> Pipe:
        """A connection made as the pool makes them, but not counted by it. Raises redis-py's errors."""
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

    def send(self, command: Command) -> asyncio.Future[Any]:
        """The answer to come. It raises the error reply as redis-py's error, and its ConnectionError when the connection breaks."""
        if self.lost or self._retired:
            raise broken.ConnectionError("the connection was lost")
        # Pack first: a command that cannot be packed must not wait for an answer, or it would take the next one's.
        packed = hiredis.pack_command(tuple(command))  # type: ignore[arg-type]
        answer: asyncio.Future[Any] = self._loop.create_future()
        self._waiting.append(answer)
        if not self._unsent:
            self._loop.call_soon(self._write)
        self._unsent.append(packed)
        return answer

    def retire(self) -> None:
        """Take no more commands, and close once no answer is awaited any more."""
        self._retired = True
        for answer in self._waiting:
            answer.add_done_callback(self._close_if_done)
        self._close_if_done()

    def close(self) -> None:
        """Commands that wait for an answer fail with ConnectionError."""
        self.lost = True
        self._transport.abort()

    def data_received(self, data: bytes) -> None:
        self._replies.feed(data)
        try:
            while (reply := self._replies.gets()) is not _INCOMPLETE:
                self._answer(reply)
        except (broken.InvalidResponse, IndexError):
            # Not Redis, or a reply without a command: the next reply could belong to any command.
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        # Otherwise redis-py warns of a connection that was left open.
        self._connection._writer = self._connection._reader = None
        while self._waiting:
            answer = self._waiting.popleft()
            if not answer.done():
                answer.set_exception(broken.ConnectionError(f"the connection broke: {exc or 'closed by the server'}"))

    def _write(self) -> None:
        unsent, self._unsent = self._unsent, []
        # A connection that was lost meanwhile has failed these commands already.
        if self.lost:
            return
        try:
            self._transport.write(b"".join(unsent))
        except RuntimeError as error:
            # uvloop's, for a connection that the server has reset.
            self.connection_lost(error)

    def _close_if_done(self, _: asyncio.Future[Any] | None = None) -> None:
        if not self.lost and all(answer.done() for answer in self._waiting):
            self.close()

    def _answer(self, reply: Any) -> None:
        answer = self._waiting.popleft()
        # The caller may have been cancelled.
        if answer.done():
            return
        if isinstance(reply, Exception):
            answer.set_exception(reply)
        else:
            answer.set_result(reply)


# The URL of a store:
#
#     redis://[user:password@]host:port/db              one server (or any node of a cluster, which is detected)
#     redis+cluster://host:port[,host:port…]            a cluster, found through any of its nodes
#     redis+sentinel://host:port[,…]/service[/db]       the master of that service, as the Sentinels name it
#     unix:///path, unix://folder/path                  one server on a Unix socket; the second is relative to the working directory
#
# `rediss` instead of `redis` is TLS. Options after `?` (for example `ssl_ca_certs=/path`) apply to every connection; user and password
# are those of the Redis servers.

Kind = Literal["single", "cluster", "sentinel"]
HostPort = tuple[str, int]
"""Host and port."""

_PORTS = {"single": 6379, "cluster": 6379, "sentinel": 26379}


@dataclass(frozen=True, slots=True)
class Address:
    """A store's URL, parsed. `name` has no credentials: it is for messages."""

    kind: Kind
    url: str
    name: str
    places: tuple[HostPort, ...] = ()
    service: str = ""
    db: str = ""

    @classmethod
    def parse(cls, url: str) -> Address:
        """Raises ValueError with the rule that `url` breaks."""
        parts = urlsplit(url)
        scheme, _, kind = parts.scheme.partition("+")
        if kind not in ("", "cluster", "sentinel") or scheme not in ("redis", "rediss", "unix") or (kind and scheme == "unix"):
            raise ValueError("it begins with redis://, rediss://, redis+cluster://, redis+sentinel:// or unix://")
        _check_options(parts)
        if not kind:
            if scheme == "unix":
                return _parse_socket(parts)
            return cls("single", url, _strip_login(parts), _parse_places(parts, "single"))
        if kind == "cluster":
            _require(parts.path in ("", "/", "/0"), "a cluster has only database 0")
            return cls("cluster", url, _strip_login(parts), _parse_places(parts, "cluster"))
        service, _, db = parts.path.strip("/").partition("/")
        _require(bool(service), "redis+sentinel:// ends in the name of the service: redis+sentinel://host:26379/mymaster")
        return cls("sentinel", url, f"{_strip_login(parts)}/{service}", _parse_places(parts, "sentinel"), service, db)

    def server(self, place: HostPort) -> str:
        """The redis:// URL of the Redis server at `place`."""
        parts = urlsplit(self.url)
        login, at, _ = parts.netloc.rpartition("@")
        return _join(parts, f"{login}{at}{_netloc(place)}", f"/{self.db}" if self.db else "")

    def check_files(self) -> None:
        """Raises ValueError for a file of TLS that is not there."""
        for name, (path, *_) in parse_qs(urlsplit(self.url).query).items():
            named = name in ("ssl_ca_certs", "ssl_ca_path", "ssl_certfile", "ssl_keyfile")
            _require(not named or os.path.exists(path), f"{name} names {path}, which is not there")

    def sentinel(self, place: HostPort) -> str:
        """The redis:// URL of the Sentinel at `place`, which has neither users nor databases."""
        return _join(urlsplit(self.url), _netloc(place), "")


def _check_options(parts: SplitResult) -> None:
    """Raises ValueError for an option that no connection takes."""
    scheme = parts.scheme.partition("+")[0]
    kind = {"redis": redis.Connection, "rediss": SSLConnection, "unix": redis.UnixDomainSocketConnection}[scheme]
    try:
        given = parse_url(SplitResult(scheme, "", "/0" if scheme != "unix" else "/", parts.query, "").geturl())
    except ValueError as error:
        raise ValueError(f"what follows ? is wrong: {error}") from error
    options = given.keys() & parse_qs(parts.query)
    known = {name for each in kind.__mro__ for name in inspect.signature(each).parameters} - {"self", "args", "kwargs"}
    for name in options:
        near = "; those of TLS need rediss://" if name.startswith("ssl_") and scheme != "rediss" else ""
        _require(name in known, f"{name!r} is not an option of a connection{near}")


def _parse_socket(parts: SplitResult) -> Address:
    """The part before the first slash is a folder here; a socket has no host."""
    login, at, folder = parts.netloc.rpartition("@")
    _require(bool(folder + parts.path), "unix:// is followed by the path of a socket")
    path = os.path.abspath(unquote(folder + parts.path))
    query = f"?{parts.query}" if parts.query else ""
    return Address("single", f"unix://{login}{at}{quote(path)}{query}", path)


def _join(parts: SplitResult, netloc: str, path: str) -> str:
    return SplitResult(parts.scheme.partition("+")[0], netloc, path, parts.query, "").geturl()


def _netloc(place: HostPort) -> str:
    host, port = place
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _strip_login(parts: SplitResult) -> str:
    return parts.netloc.rpartition("@")[2]


def _parse_places(parts: SplitResult, kind: Kind) -> tuple[HostPort, ...]:
    hosts = [urlsplit(f"//{host}") for host in _strip_login(parts).split(",")]
    _require(all(host.hostname for host in hosts), "its nodes are host:port, separated by commas")
    return tuple((host.hostname or "", host.port or _PORTS[kind]) for host in hosts)


def _require(holds: bool, rule: str) -> None:
    if not holds:
        raise ValueError(rule)
