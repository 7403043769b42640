"""The one connection to Redis: pooled, with deadlines, and with one error for all that can go wrong.

Nothing is opened before the first command, so a service starts while its Redis is still down. Commands that were lost with a
connection are sent once more, and what a failover moved is followed: every script here may be repeated. A command that hung is
not, for a Redis that hangs would be asked three times.

Two things can be asked for a script. `patient`: while Redis restarts or fails over it is tried again for `patience_seconds`.
`durable`: the answer comes when as many replicas and disks hold the write as the settings want (WAIT, WAITAOF). Redis waits for
the last write of the connection, so a durable script must write something also when it finds its work done.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import redis.exceptions as broken

from proxy.errors import StoreUnavailable
from proxy.store.cluster import Cluster, Watched
from proxy.store.node import Address, Argument, Command, Link, Node, Place
from proxy.timeline import Deadline

if TYPE_CHECKING:
    from proxy.settings import Settings

__all__ = ["Argument", "Script", "StoreConnection"]

log = logging.getLogger(__name__)

LASTING = ("OOM", "MISCONF", "NOPERM", "NOAUTH", "WAITAOF")
"""Redis error codes that mean "not until somebody does something". WAITAOF is no code, but the first word of its own refusal."""
PASSING = ("LOADING", "READONLY", "MASTERDOWN", "NOREPLICAS", "CLUSTERDOWN", "TRYAGAIN", "MOVED", "ASK", "BUSY")
"""Redis error codes that mean "not now". Any other error reply is a fault in this program and propagates."""
LASTING_ERRORS = (broken.OutOfMemoryError, broken.NoPermissionError, broken.AuthenticationError)
PASSING_ERRORS = (broken.ReadOnlyError, broken.TryAgainError, broken.ClusterDownError, broken.AskError)
"""The same, where redis-py made a class of the code and took it out of the message."""
GONE = (broken.ConnectionError, broken.TimeoutError, broken.ClusterError, OSError)

CONNECT_SECONDS = 2.0
PAUSES = (0.05, 0.1, 0.2, 0.4)
"""Between the tries of a patient script, in seconds; the last one stays."""


class Lasting(StoreUnavailable):
    """Redis will not take the command until somebody does something: it is full, too old or does not know us."""


@dataclass(frozen=True, slots=True)
class Script:
    source: bytes
    sha: str

    @classmethod
    def read(cls, name: str, *preludes: str) -> Script:
        """The script `scripts/<name>.lua`, after the named preludes, which only define functions."""
        folder = files("proxy.store") / "scripts"
        source = b"\n".join((folder / f"{part}.lua").read_bytes() for part in (*preludes, name))
        return cls(source, hashlib.sha1(source, usedforsecurity=False).hexdigest())


class StoreConnection:
    """`run` and `execute` raise `StoreUnavailable` and nothing else that is Redis's doing. Raises ValueError for a URL that is
    none; see `proxy.store.node`."""

    def __init__(
        self,
        url: str,
        *,
        max_connections: int = 64,
        timeout_seconds: float = 10.0,
        patience_seconds: float = 0.0,
        wait_replicas: int = 0,
        wait_aof: bool = False,
    ) -> None:
        self._address = Address.parse(url)
        self.place = self._address.name
        self._max_connections = max_connections
        self.timeout_seconds = timeout_seconds
        self._patience_seconds = patience_seconds
        self._wait_replicas = wait_replicas
        self._wait_aof = wait_aof
        self._seal = _seal(wait_replicas, wait_aof, int(timeout_seconds * 500))
        self._link: Link | None = None
        self._closed = False
        self._opening = asyncio.Lock()
        # The pools of redis-py refuse or poll when they are exhausted; here commands wait in line for a connection.
        self._free = asyncio.Semaphore(max_connections)

    @classmethod
    def to(cls, settings: Settings, url: str) -> StoreConnection:
        """As the settings want it, to the store at `url`."""
        return cls(
            url,
            timeout_seconds=settings.redis_timeout_seconds,
            patience_seconds=settings.redis_retry_seconds,
            wait_replicas=settings.redis_wait_replicas,
            wait_aof=settings.redis_wait_aof,
        )

    async def run(
        self,
        script: Script,
        keys: Sequence[str],
        args: Sequence[Argument] = (),
        *,
        durable: bool = False,
        patient: bool = False,
    ) -> Any:
        """The script's answer. Sends its text only to a server that does not hold it yet."""
        attempt = partial(self._run, script, keys, args, self._seal if durable else ())
        return await (self._patiently(attempt) if patient else attempt())

    async def execute(self, *command: Argument, key: str | None = None) -> Any:
        """The command's answer. `key` says where it belongs; None: to the key that is its first argument, if there is one."""
        if key is None and len(command) > 1:
            key = str(command[1])
        return (await self._send(key, (command,)))[0]

    async def ping(self, *, patient: bool = False) -> None:
        """Returns when every server that holds keys answers."""
        attempt = partial(self._guarded, lambda link: link.ping())
        await (self._patiently(attempt) if patient else attempt())

    async def check_room(self) -> None:
        """Returns when every server that holds keys answers and takes writes that need memory; raises `Lasting` where one is full."""
        for facts in await self._guarded(lambda link: link.facts()):
            most, used = int(facts.get("maxmemory", 0)), int(facts.get("used_memory", 0))
            # As Redis itself calculates it, see INFO.
            if most and used - int(facts.get("mem_not_counted_for_evict", 0)) > most:
                raise Lasting(
                    f"the Redis at {self.place} is full: it uses {used} bytes of memory, of at most {most} (maxmemory); raise that, or "
                    "shorten retention"
                )

    async def close(self) -> None:
        """For good: whoever still asks gets `Lasting`, and no connection is opened that nobody would close."""
        self._closed = True
        link, self._link = self._link, None
        if link is not None:
            await link.close()

    async def _run(self, script: Script, keys: Sequence[str], args: Sequence[Argument], seal: Sequence[Command]) -> Any:
        key, rest = (keys[0] if keys else None), (len(keys), *keys, *args)
        try:
            answers = await self._send(key, (("EVALSHA", script.sha, *rest), *seal))
        except broken.NoScriptError:
            answers = await self._send(key, (("EVAL", script.source, *rest), *seal))
        if seal:
            self._check_seal(answers[1])
        return answers[0]

    async def _patiently(self, attempt: Callable[[], Awaitable[Any]]) -> Any:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._patience_seconds
        tries = 0
        while True:
            pause = PAUSES[min(tries, len(PAUSES) - 1)]
            try:
                return await attempt()
            except Lasting:
                raise
            except StoreUnavailable:
                if loop.time() + pause > deadline:
                    raise
            tries += 1
            await asyncio.sleep(pause)

    async def _send(self, key: str | None, commands: Sequence[Command]) -> list[Any]:
        answers: list[Any] = await self._guarded(lambda link: link.send(key, commands))
        return answers

    async def _guarded(self, act: Callable[[Link], Awaitable[Any]]) -> Any:
        """What `act` gives, within the deadline; everything that Redis can do wrong as `StoreUnavailable`."""
        waiting = True
        try:
            async with Deadline(self.timeout_seconds), self._free:
                waiting = False
                return await act(self._link or await self._open())
        except broken.NoScriptError:
            raise
        except TimeoutError as error:
            raise self._late(waiting) from error
        except LASTING_ERRORS as error:
            raise self._unavailable(error, Lasting) from error
        except (*GONE, *PASSING_ERRORS) as error:
            self._distrust_demoted(error)
            raise self._unavailable(error, StoreUnavailable) from error
        except broken.ResponseError as error:
            kind = _kind(error)
            if kind is None:
                raise
            self._distrust_demoted(error)
            raise self._unavailable(error, kind) from error

    async def _open(self) -> Link:
        async with self._opening:
            if self._link is None:
                link = await self._connect()
                if self._closed:
                    await link.close()
                    raise self._was_closed()
                self._link = link
            return self._link

    def _was_closed(self) -> Lasting:
        return Lasting(f"the Redis at {self.place} is not asked any more: the store was closed")

    async def _connect(self) -> Link:
        link = self._unopened()
        try:
            facts = await link.facts()
            if facts[0].get("cluster_enabled") and isinstance(link, Node):
                await link.close()
                link = Cluster(self._address.places, self._node)
                facts = await link.facts()
            for each in facts:
                self._check(each)
        except BaseException:
            # Cancelled too: nobody has the link yet, and its sockets would stay open.
            await link.close()
            raise
        return link

    def _unopened(self) -> Link:
        address = self._address
        if address.kind == "cluster":
            return Cluster(address.places, self._node)
        if address.kind == "sentinel":
            sentinels = [self._node_at(address.sentinel(place)) for place in address.places]
            return Watched(address.service, sentinels, self._node)
        return self._node_at(address.url)

    def _node(self, place: Place) -> Node:
        return self._node_at(self._address.server(place))

    def _node_at(self, url: str) -> Node:
        """Raises `Lasting` when the store was closed: nobody would close the node."""
        if self._closed:
            raise self._was_closed()
        connect_seconds = min(CONNECT_SECONDS, self.timeout_seconds)
        # Twice as many as are used at a time: redis-py loses one when a cancellation meets it giving a connection back.
        return Node(url, max_connections=2 * self._max_connections, connect_seconds=connect_seconds)

    def _check(self, facts: Mapping[str, Any]) -> None:
        version = str(facts.get("redis_version", "0"))
        number = tuple(int(part) for part in version.split(".")[:2])
        if number < (6, 2):
            raise Lasting(f"the Redis at {self.place} is version {version}; 6.2 or newer is needed")
        if self._wait_aof and number < (7, 2):
            raise Lasting(
                f"the Redis at {self.place} is version {version} and knows no WAITAOF, which redis_wait_aof needs (7.2 or "
                "newer); without it use appendfsync always"
            )
        if self._wait_aof and not facts.get("aof_enabled"):
            raise Lasting(f"the Redis at {self.place} keeps no append-only file, which redis_wait_aof waits for")
        if int(facts.get("connected_slaves", 0)) < self._wait_replicas:
            raise StoreUnavailable(
                f"the Redis at {self.place} has {facts.get('connected_slaves', 0)} replicas; redis_wait_replicas asks for "
                f"{self._wait_replicas}"
            )
        if not facts.get("aof_enabled"):
            log.warning("the Redis at %s keeps no append-only file: what it holds is lost when it dies", self.place)

    def _check_seal(self, answer: Any) -> None:
        """WAIT answers with the replicas that have the write, WAITAOF with the local and the remote files that have it."""
        synced, replicas = answer if isinstance(answer, list) else (1, answer)
        if synced < 1 or replicas < self._wait_replicas:
            raise StoreUnavailable(
                f"the Redis at {self.place} took the record, but only {replicas} of {self._wait_replicas} replicas"
                + (" have it in time" if synced else " and not its own disk have it in time")
            )

    def _distrust_demoted(self, error: Exception) -> None:
        """A master that became a replica keeps its connections: its successor is at the other end of new ones only."""
        if self._link is not None and (isinstance(error, broken.ReadOnlyError) or "READONLY" in str(error)):
            self._link.distrust()

    def _late(self, waiting: bool) -> StoreUnavailable:
        if waiting:
            return StoreUnavailable(f"the Redis at {self.place} is busy: no connection came free in time")
        if self._link is not None:
            self._link.distrust()
        return StoreUnavailable(f"the Redis at {self.place} did not answer within {self.timeout_seconds:g} s")

    def _unavailable(self, error: Exception, kind: type[StoreUnavailable]) -> StoreUnavailable:
        return kind(f"the Redis at {self.place} did not take the command: {type(error).__name__}: {error}")


def _seal(replicas: int, aof: bool, milliseconds: int) -> Sequence[Command]:
    """What is sent behind a durable script."""
    if aof:
        return (("WAITAOF", 1, replicas, milliseconds),)
    return (("WAIT", replicas, milliseconds),) if replicas else ()


def _kind(error: broken.ResponseError) -> type[StoreUnavailable] | None:
    """What an error reply means, also one quoted from inside a script; None for a fault of this program."""
    words = str(error).replace("-", " ").replace(":", " ").split()
    if any(code in words for code in LASTING):
        return Lasting
    return StoreUnavailable if any(code in words for code in PASSING) else None
