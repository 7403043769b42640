"""The store's connection to Redis: pooled, with a deadline per command, and one error, `StoreUnavailable`, for every failure.

It connects with the first command, so a service starts while its Redis is down. A command whose connection broke is sent once more,
and redirections and failovers are followed, so every script must be repeatable. A command that hung is not repeated: each
repetition would hang for another deadline.

A script may be run `patient`: while Redis restarts or fails over it is retried for `patience_seconds`. And `durable`: it returns once
as many replicas and disks as the settings ask for hold the write (WAIT, WAITAOF). Redis waits for the connection's last write, so a
durable script must write something even when it finds its work done.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import shutil
import ssl
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import redis.exceptions as broken

from proxy.errors import StoreUnavailable
from proxy.store.cluster import SLOTS, StoreCluster
from proxy.store.node import (
    Address,
    Argument,
    Command,
    CommandGroup,
    HostPort,
    Link,
    StoreServer,
    answers_plainly,
    goes_through_pipe,
    speaks_tls,
)
from proxy.timeline import STORE, TIMELINE, Deadline

if TYPE_CHECKING:
    from proxy.settings import Settings

__all__ = ["Argument", "Script", "StoreConnection"]

log = logging.getLogger(__name__)

REFUSALS = {
    "OOM": "is full (OOM: maxmemory): raise maxmemory or shorten retention",
    "MISCONF": "cannot write to its disk (MISCONF): make room there, or see its log",
    "NOPERM": "forbids its user a command that the service needs (NOPERM)",
    "NOAUTH": "refuses the login (NOAUTH): correct user and password in its URL",
    "WAITAOF": "cannot say what is on its disk: it refuses WAITAOF, which redis_wait needs",
    "LOADING": "is loading its file (LOADING)",
    "READONLY": "is a replica now (READONLY)",
    "MASTERDOWN": "has lost its master (MASTERDOWN)",
    "NOREPLICAS": "has too few replicas to take a write (NOREPLICAS)",
    "CLUSTERDOWN": "is down as a cluster: a part of its slots has no server (CLUSTERDOWN)",
    "TRYAGAIN": "is moving the session's slot (TRYAGAIN)",
    "MOVED": "is moving the session's slot (MOVED)",
    "ASK": "is moving the session's slot (ASK)",
    "BUSY": "is busy with a script (BUSY)",
}
"""What an error code means. Any other error reply is a bug in this program and propagates."""
LASTING = ("OOM", "MISCONF", "NOPERM", "NOAUTH", "WAITAOF")
"""Those that last until an operator acts. WAITAOF is no code, but the first word of the error that refuses it."""
CLASSES = {
    broken.OutOfMemoryError: "OOM",
    broken.NoPermissionError: "NOPERM",
    broken.AuthenticationError: "NOAUTH",
    broken.ReadOnlyError: "READONLY",
    broken.TryAgainError: "TRYAGAIN",
    broken.MasterDownError: "MASTERDOWN",
    broken.ClusterDownError: "CLUSTERDOWN",
    broken.AskError: "ASK",
    broken.BusyLoadingError: "LOADING",
}
"""The same where redis-py raises a class of their own, whose message lacks the code."""
FAILED = {
    "aof_last_bgrewrite_status": "could not rewrite its append-only file, which grows until it can: see its log, and the room on its disk",
    "rdb_last_bgsave_status": "could not write its last snapshot: see its log, and the room on its disk",
}
"""Facts of INFO that say `err` of a server that still takes records."""
GONE = (broken.ConnectionError, broken.TimeoutError, broken.ClusterError, OSError)

LOW_BYTES = 2**30
"""Less room than this on the store's disk is said before there is none."""
PART_SECONDS = 2.0
"""How long one server of a cluster may take to say how it is."""
CONNECT_SECONDS = 2.0
REPLY_SECONDS = 10.0
"""For a reply, including a new connection. The slowest script takes well under a second; a disk that stalls under `appendfsync always`
takes several."""
PAUSES = (0.05, 0.1, 0.2, 0.4)
"""Pauses between the tries of a patient script, in seconds; the last one repeats."""


class Lasting(StoreUnavailable):
    """Redis refuses the command until an operator acts: it is full, too old or rejects the login. Not worth a retry."""


@cache
def load_scripts(package: str = "proxy.store") -> Mapping[str, bytes]:
    """The files of the package's `scripts` by name. All at once: another install may take this one's place while the process runs."""
    return {file.name: file.read_bytes() for file in (files(package) / "scripts").iterdir()}


@dataclass(frozen=True, slots=True)
class Script:
    source: bytes
    sha: str

    @classmethod
    @cache
    def read(cls, name: str, *preludes: str, package: str = "proxy.store") -> Script:
        """`scripts/<name>.lua` of the package, with the named preludes, which only define functions, before it."""
        source = b"\n".join(load_scripts(package)[f"{part}.lua"] for part in (*preludes, name))
        return cls(source, hashlib.sha1(source, usedforsecurity=False).hexdigest())


class StoreConnection:
    """Every failure of Redis raises `StoreUnavailable`. `__init__` raises ValueError for an invalid URL; see `proxy.store.node`."""

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
        self._address.check_files()
        self.place = self._address.name
        self._max_connections = max_connections
        self.timeout_seconds = timeout_seconds
        self._patience_seconds = patience_seconds
        self._wait_replicas = wait_replicas
        self._wait_aof = wait_aof
        self._durability = _make_durability(wait_replicas, wait_aof, int(timeout_seconds * 500))
        self._link: Link | None = None
        self._folder: Path | None = None
        """Where the server keeps its files, once it has said so."""
        self._closed = False
        self._opening = asyncio.Lock()
        # redis-py's pools raise or poll when they are exhausted; here commands queue for a connection.
        self._free = asyncio.Semaphore(max_connections)

    @classmethod
    def to(cls, settings: Settings, url: str | None, timeout_seconds: float = REPLY_SECONDS) -> StoreConnection:
        """A connection to `url` with the deadlines and durability of the settings. Raises ValueError without a URL."""
        if url is None:
            raise ValueError("there is no Redis URL: start EmbeddedRedis first and set settings.redis to its URL")
        return cls(
            url,
            timeout_seconds=timeout_seconds,
            patience_seconds=settings.redis_retry_seconds,
            wait_replicas=settings.redis_wait.replicas,
            wait_aof=settings.redis_wait.aof,
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
        """The script's answer. Its source is sent only to a server that has not cached it."""
        since = time.perf_counter()
        attempt = partial(self._run, script, keys, args, self._durability if durable else ())
        try:
            return await (self._retry(attempt) if patient else attempt())
        finally:
            TIMELINE.get().end_wait(STORE, since)

    async def execute(self, *command: Argument, key: str | None = None, patient: bool = False) -> Any:
        """The command's answer. `key` selects the server of a cluster; None: the first argument, if there is one."""
        since = time.perf_counter()
        if key is None and len(command) > 1:
            key = str(command[1])
        attempt = partial(self._send, key, (command,))
        try:
            return (await (self._retry(attempt) if patient else attempt()))[0]
        finally:
            TIMELINE.get().end_wait(STORE, since)

    async def run_each(self, script: Script, groups: Sequence[Sequence[str]]) -> list[Any]:
        """The answers of a script that reads `groups` of keys and answers for each: one run for all of them, or in a cluster, where no
        script reads keys of several slots, one run for each."""
        if not groups:
            return []
        if self._link is None:
            await self.ping()
        if isinstance(self._link, StoreCluster):
            return [answer for (answer,) in await asyncio.gather(*(self.run(script, group) for group in groups))]
        found: list[Any] = await self.run(script, [key for group in groups for key in group])
        return found

    async def ping(self, *, patient: bool = False) -> None:
        """Returns when a server that holds keys answers."""
        await (self._retry(self.read_info) if patient else self.read_info())

    async def read_info(self) -> list[Mapping[str, Any]]:
        """INFO of every server that holds keys and answers, at least one."""
        parts = await self._survey()
        found = [part.facts for part in parts if part.error is None]
        if not found:
            raise self._judge(parts[0]) or StoreUnavailable(f"the Redis at {self.place} does not answer")
        return found

    async def check(self) -> list[str]:
        """What is wrong with a store that serves, a sentence each. Raises `StoreUnavailable` when it serves nothing: it does not answer,
        is full, or cannot write to its disk."""
        parts = await self._survey()
        judged = [(part, self._judge(part)) for part in parts]
        refused = [(part, why) for part, why in judged if why is not None]
        if len(refused) == len(parts):
            raise refused[0][1]
        notes = [
            f"a part of the store is away, {part.slots} of {SLOTS} slots ({part.name}), and calls of its sessions get 503: {why.message}"
            for part, why in refused
        ]
        for part in parts:
            notes += [
                f"the Redis at {part.name or self.place} {words}"
                for fact, words in FAILED.items()
                if part.facts.get(fact) == "err"
            ]
        free = await self.measure_free()
        if free is not None and free < LOW_BYTES:
            notes.append(
                f"less than {LOW_BYTES / 2**20:.0f} MiB is free where the Redis at {self.place} keeps its files: without room it takes no "
                "records, so make some"
            )
        return notes

    async def measure_free(self) -> int | None:
        """Bytes that are free where the server keeps its files; None where it is on another machine, or does not say."""
        if not self._address.url.startswith("unix:"):
            return None
        if self._folder is None:
            try:
                _, folder = await self.execute("CONFIG", "GET", "dir")
            except (StoreUnavailable, broken.ResponseError, ValueError):
                return None
            self._folder = Path(os.fsdecode(folder))
        try:
            return shutil.disk_usage(self._folder).free
        except OSError:
            return None

    async def _survey(self) -> list[CommandGroup]:
        seconds = min(PART_SECONDS, self.timeout_seconds / 3)
        waiting = True
        try:
            async with Deadline(self.timeout_seconds), self._free:
                waiting = False
                return await (self._link or await self._open()).survey(seconds)
        except Exception as error:
            explained = self._explain(error, waiting)
            if explained is None:
                raise
            raise explained from error

    def _judge(self, part: CommandGroup) -> StoreUnavailable | None:
        """Why the part takes no records."""
        if part.error is not None:
            return self._translate(part.error) or StoreUnavailable(f"the Redis at {part.name} refuses to answer: {part.error}")
        place, facts = part.name or self.place, part.facts
        if facts.get("aof_last_write_status") == "err":
            return Lasting(f"the Redis at {place} {REFUSALS['MISCONF']}")
        most, used = int(facts.get("maxmemory", 0)), int(facts.get("used_memory", 0))
        # Redis's own rule: mem_not_counted_for_evict in INFO.
        if most and used - int(facts.get("mem_not_counted_for_evict", 0)) > most:
            return Lasting(
                f"the Redis at {place} is full: it uses {used} of {most} bytes (maxmemory); raise maxmemory or shorten retention"
            )
        return None

    async def close(self) -> None:
        """For good: later commands raise `Lasting` and open no connection."""
        self._closed = True
        link, self._link = self._link, None
        if link is not None:
            await link.close()

    async def _run(self, script: Script, keys: Sequence[str], args: Sequence[Argument], durability: Sequence[Command]) -> Any:
        key, rest = (keys[0] if keys else None), (len(keys), *keys, *args)
        try:
            answers = await self._send(key, (("EVALSHA", script.sha, *rest), *durability))
        except broken.NoScriptError:
            answers = await self._send(key, (("EVAL", script.source, *rest), *durability))
        if durability:
            self._check_durability(answers[1])
        return answers[0]

    async def _retry(self, attempt: Callable[[], Awaitable[Any]]) -> Any:
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
        """The answers, within the deadline. Translates Redis's errors to `StoreUnavailable`, except NoScriptError."""
        # What goes through the pipe needs no connection of its own.
        waiting = not goes_through_pipe(commands)
        try:
            async with Deadline(self.timeout_seconds):
                if not waiting:
                    return await (self._link or await self._open()).send(key, commands)
                async with self._free:
                    waiting = False
                    return await (self._link or await self._open()).send(key, commands)
        except Exception as error:
            explained = self._explain(error, waiting)
            if explained is None:
                raise
            raise explained from error

    def _explain(self, error: Exception, waiting: bool) -> StoreUnavailable | None:
        """What the caller is told of a failure of Redis; None where it is told the error itself."""
        if isinstance(error, TimeoutError):
            return self._time_out(waiting)
        if isinstance(error, broken.NoScriptError) or not isinstance(error, (*GONE, broken.ResponseError)):
            return None
        unavailable = self._translate(error)
        if unavailable is not None:
            self._distrust_demoted(error)
        return unavailable

    def _translate(self, error: Exception) -> StoreUnavailable | None:
        """None for a bug in this program. The message says what the server refuses in words: a script's error quotes the script."""
        if code := _find_code(error):
            kind = Lasting if code in LASTING else StoreUnavailable
            return kind(f"the Redis at {self.place} {REFUSALS[code]}")
        if isinstance(error, GONE):
            return StoreUnavailable(f"the Redis at {self.place} does not answer: {_describe_lost(error)}")
        return None

    async def _open(self) -> Link:
        async with self._opening:
            if self._link is None:
                link = await self._connect()
                if self._closed:
                    await link.close()
                    raise self._refuse_closed()
                self._link = link
            return self._link

    def _refuse_closed(self) -> Lasting:
        return Lasting(f"the connection to the Redis at {self.place} was closed")

    async def _connect(self) -> Link:
        try:
            return await self._reach()
        except GONE as error:
            known = any(word in str(error).lower() for word in ("refused", "certificate"))
            if not known and (wrong := await self._find_wrong_scheme()):
                raise Lasting(wrong) from error
            raise

    async def _find_wrong_scheme(self) -> str:
        """What is wrong with the URL where servers speak TLS and it says that they do not, or the other way round; "" otherwise."""
        scheme, places = self._address.url.partition(":")[0], self._address.places
        encrypted = scheme.startswith("rediss")
        right = scheme.replace("rediss", "redis") if encrypted else scheme.replace("redis", "rediss")
        speak = await asyncio.gather(*map(speaks_tls, places))
        if not encrypted:
            return f"the Redis at {self.place} speaks TLS: its URL begins with {right}, not {scheme}" if any(speak) else ""
        if any(speak) or not any(await asyncio.gather(*map(answers_plainly, places))):
            return ""
        return f"the Redis at {self.place} does not speak TLS: its URL begins with {right}, not {scheme}"

    async def _reach(self) -> Link:
        link = self._make_link()
        try:
            parts = await link.survey(min(PART_SECONDS, self.timeout_seconds / 3))
            if parts[0].facts.get("cluster_enabled") and isinstance(link, StoreServer):
                await link.close()
                link = StoreCluster(self._address.places, self._node)
                parts = await link.survey(min(PART_SECONDS, self.timeout_seconds / 3))
            for part in parts:
                if part.error is None:
                    self._check(part.facts)
        except BaseException:
            # Cancellation too: nothing else could close its sockets.
            await link.close()
            raise
        return link

    def _make_link(self) -> Link:
        address = self._address
        if address.kind == "cluster":
            return StoreCluster(address.places, self._node)
        if address.kind == "sentinel":
            sentinels = [address.sentinel(place) for place in address.places]
            return self._node_at(address.server(("master", 0)), service=address.service, sentinels=sentinels)
        return self._node_at(address.url)

    def _node(self, place: HostPort) -> StoreServer:
        return self._node_at(self._address.server(place))

    def _node_at(self, url: str, **watched: Any) -> StoreServer:
        """Raises `Lasting` after `close`: nothing would close the node."""
        if self._closed:
            raise self._refuse_closed()
        connect_seconds = min(CONNECT_SECONDS, self.timeout_seconds)
        # Twice what is used at a time: redis-py loses a connection when a cancellation interrupts its release.
        return StoreServer(url, max_connections=2 * self._max_connections, connect_seconds=connect_seconds, **watched)

    def _check(self, facts: Mapping[str, Any]) -> None:
        version = str(facts.get("redis_version", "0"))
        number = tuple(int(part) for part in version.split(".")[:2])
        if number < (6, 2):
            raise Lasting(f"the Redis at {self.place} is version {version}; 6.2 or newer is needed")
        if self._wait_aof and number < (7, 2):
            raise Lasting(
                f"the Redis at {self.place} is version {version} and knows no WAITAOF (7.2 or newer), which redis_wait needs; "
                "use appendfsync always instead"
            )
        if self._wait_aof and not facts.get("aof_enabled"):
            raise Lasting(f"the Redis at {self.place} keeps no append-only file, which redis_wait needs")
        if int(facts.get("connected_slaves", 0)) < self._wait_replicas:
            raise StoreUnavailable(
                f"the Redis at {self.place} has {facts.get('connected_slaves', 0)} replicas; redis_wait asks for "
                f"{self._wait_replicas}"
            )
        if not facts.get("aof_enabled"):
            log.warning("the Redis at %s keeps no append-only file: its data is lost when it dies", self.place)

    def _check_durability(self, answer: Any) -> None:
        """WAIT answers the number of replicas that hold the write, WAITAOF [local files, replicas' files] that hold it."""
        synced, replicas = answer if isinstance(answer, list) else (1, answer)
        if synced < 1 or replicas < self._wait_replicas:
            raise StoreUnavailable(
                f"the Redis at {self.place} took the record, but only {replicas} of {self._wait_replicas} replicas"
                + (" have it in time" if synced else " and not its own disk have it in time")
            )

    def _distrust_demoted(self, error: Exception) -> None:
        """A demoted master keeps its connections; only new ones lead to its successor."""
        if self._link is not None and (isinstance(error, broken.ReadOnlyError) or "READONLY" in str(error)):
            self._link.distrust()

    def _time_out(self, waiting: bool) -> StoreUnavailable:
        if waiting:
            return StoreUnavailable(f"the Redis at {self.place} is busy: no connection became free in time")
        if self._link is not None:
            self._link.distrust()
        return StoreUnavailable(f"the Redis at {self.place} did not answer within {self.timeout_seconds:g} s")


def _describe_lost(error: BaseException) -> str:
    """What the system says of it where redis-py quotes that: "connection refused" instead of "Error 111 connecting to …"."""
    cause = error.__cause__ or error.__context__ or error
    # TLS errors have numbers of their own.
    if not isinstance(cause, OSError) or isinstance(cause, ssl.SSLError) or cause.errno is None:
        return str(error).rstrip(".")
    # A name that cannot be resolved has a number of its own, below 0.
    said = os.strerror(cause.errno) if cause.errno > 0 else str(cause.strerror)
    return said[:1].lower() + said[1:]


def _make_durability(replicas: int, aof: bool, milliseconds: int) -> Sequence[Command]:
    """The command sent behind a durable script, if the settings ask for one."""
    if aof:
        return (("WAITAOF", 1, replicas, milliseconds),)
    return (("WAIT", replicas, milliseconds),) if replicas else ()


def _find_code(error: Exception) -> str:
    """The error code of a reply, also one quoted from inside a script; empty: none that is known."""
    for kind, code in CLASSES.items():
        if isinstance(error, kind):
            return code
    if not isinstance(error, broken.ResponseError):
        return ""
    words = str(error).replace("-", " ").replace(":", " ").split()
    return next((code for code in REFUSALS if code in words), "")
