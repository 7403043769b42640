"""The one connection to Redis: pooled, with deadlines, plain or cluster, and with one error for all that can go wrong.

Nothing is opened before the first command, so a service starts while its Redis is still down. Commands that were lost with a
connection are sent once more: every script here may be repeated. A command that timed out is not, for a Redis that hangs
would be asked three times.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any
from urllib.parse import urlsplit

import redis.asyncio as redis
import redis.exceptions as broken
from redis.asyncio.retry import Retry
from redis.backoff import ConstantBackoff

from proxy.errors import StoreUnavailable

log = logging.getLogger(__name__)

Argument = bytes | str | int | float
REFUSALS = (
    "OOM",
    "LOADING",
    "READONLY",
    "MISCONF",
    "MASTERDOWN",
    "NOREPLICAS",
    "CLUSTERDOWN",
    "TRYAGAIN",
    "BUSY",
    "NOPERM",
    "NOAUTH",
)
"""Redis error codes that say "not now" or "not for you". Any other error reply is a fault in this program and propagates."""
CODED = (broken.OutOfMemoryError, broken.ReadOnlyError, broken.NoPermissionError, broken.TryAgainError)
"""The same, where redis-py made a class of the code and took it out of the message."""


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
    """`run` and `execute` raise `StoreUnavailable` and nothing else that is Redis's doing."""

    def __init__(self, url: str, *, max_connections: int = 64, timeout_seconds: float = 10.0) -> None:
        self.place = _place(url)
        self._url = url
        self._max_connections = max_connections
        self._options: dict[str, Any] = {
            "socket_timeout": timeout_seconds,
            "socket_connect_timeout": min(2.0, timeout_seconds),
            "protocol": 2,
            "retry": Retry(ConstantBackoff(0.02), 1, supported_errors=(broken.ConnectionError,)),
        }
        self._timeout_seconds = timeout_seconds
        self._client: Any = None
        self._opening = asyncio.Lock()
        # The pools of redis-py refuse or poll when they are exhausted; here commands wait in line for a connection.
        self._free = asyncio.Semaphore(max_connections)

    async def run(self, script: Script, keys: Sequence[str], args: Sequence[Argument] = ()) -> Any:
        """The script's answer. Sends its text only to a server that does not hold it yet."""
        try:
            return await self.execute("EVALSHA", script.sha, len(keys), *keys, *args)
        except broken.NoScriptError:
            return await self.execute("EVAL", script.source, len(keys), *keys, *args)

    async def execute(self, *command: Argument) -> Any:
        try:
            async with asyncio.timeout(self._timeout_seconds):
                await self._free.acquire()
        except TimeoutError as error:
            raise StoreUnavailable(f"the Redis at {self.place} is busy: no connection came free in time") from error
        try:
            client = self._client or await self._open()
            return await _cancellable(client.execute_command(*command))
        except broken.NoScriptError:
            raise
        except (broken.ConnectionError, broken.TimeoutError, broken.ClusterError, broken.RedisClusterException) as error:
            raise self._unavailable(error) from error
        except (OSError, TimeoutError) as error:
            raise self._unavailable(error) from error
        except broken.ResponseError as error:
            if not _refused(error):
                raise
            raise self._unavailable(error) from error
        finally:
            self._free.release()

    async def ping(self) -> None:
        await self.execute("PING")

    async def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    async def _open(self) -> Any:
        async with self._opening:
            if self._client is None:
                self._client = await self._connect()
        return self._client

    async def _connect(self) -> Any:
        client = redis.Redis.from_url(self._url, max_connections=self._max_connections, **self._options)
        try:
            facts = await client.info()
            self._check(facts)
        except BaseException:
            await client.aclose()
            raise
        if not facts.get("cluster_enabled"):
            return client
        await client.aclose()
        return redis.RedisCluster.from_url(self._url, max_connections=self._max_connections, **self._options)

    def _check(self, facts: dict[str, Any]) -> None:
        version = str(facts.get("redis_version", "0"))
        if tuple(int(part) for part in version.split(".")[:2]) < (6, 2):
            raise StoreUnavailable(f"the Redis at {self.place} is version {version}; 6.2 or newer is needed")
        if not facts.get("aof_enabled"):
            log.warning("the Redis at %s keeps no append-only file: what it holds is lost when it dies", self.place)

    def _unavailable(self, error: Exception) -> StoreUnavailable:
        return StoreUnavailable(f"the Redis at {self.place} did not take the command: {type(error).__name__}: {error}")


def _refused(error: broken.ResponseError) -> bool:
    """Whether an error reply, also one quoted from inside a script, carries one of the codes of `REFUSALS`."""
    words = str(error).replace("-", " ").replace(":", " ").split()
    return isinstance(error, CODED) or any(code in words for code in REFUSALS)


def _place(url: str) -> str:
    """The URL without its credentials."""
    parts = urlsplit(url)
    return parts.path if parts.scheme == "unix" else parts.netloc.rpartition("@")[2] or url


async def _cancellable(command: Awaitable[Any]) -> Any:
    """The command's answer. redis-py sends with asyncio.wait_for, which before Python 3.12 swallows a cancellation that comes
    while it sends: it is raised here after all, so that a task told to end does."""
    task = asyncio.current_task()
    before = task.cancelling() if task else 0
    answer = await command
    if task is not None and task.cancelling() > before:
        raise asyncio.CancelledError
    return answer
