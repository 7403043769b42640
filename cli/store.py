"""The Redis of a service: somebody else's, asked whether it is there, or an embedded one of our own."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from cli.refusal import Refusal
from proxy.errors import StoreUnavailable
from proxy.store.connection import StoreConnection
from proxy.store.embedded import EmbeddedRedis, StoreStartError

if TYPE_CHECKING:
    from proxy.settings import Settings

log = logging.getLogger(__name__)


@contextmanager
def opened(settings: Settings) -> Iterator[tuple[str, Callable[[], None]]]:
    """The URL of a Redis that answers, and what stops it at once when it is ours. Ours stops when the block ends.

    Raises `Refusal` when there is none, or when the data directory is not ours to use.
    """
    if settings.redis:
        if settings.fsync == "always":
            raise Refusal("--fsync is the embedded Redis's: a Redis of your own has `appendfsync always`", exit_code=2)
        _ask(settings, settings.redis)
        yield settings.redis, _leave_alone
        return
    if settings.redis_wait_replicas or settings.redis_wait_aof:
        raise Refusal(
            "the embedded Redis has no replicas and no WAITAOF: leave VERBATIM_REDIS_WAIT_REPLICAS and VERBATIM_REDIS_WAIT_AOF "
            "out; --fsync always answers nothing that is not on its disk",
            exit_code=2,
        )
    embedded = EmbeddedRedis(settings.data_dir, settings.fsync)
    try:
        try:
            url = embedded.start()
        except StoreStartError as error:
            raise Refusal(error.message) from error
        yield url, embedded.stop
    finally:
        embedded.stop()


def _ask(settings: Settings, url: str) -> None:
    async def ping() -> None:
        connection = StoreConnection.to(settings, url)
        try:
            try:
                await connection.ping()
            except StoreUnavailable as error:
                # Started beside its Redis, a service may be the first of the two.
                if settings.redis_retry_seconds:
                    log.warning("%s; waiting up to %g s for it", error.message, settings.redis_retry_seconds)
                await connection.ping(patient=True)
        finally:
            await connection.close()

    try:
        asyncio.run(ping())
    except StoreUnavailable as error:
        raise Refusal(f"{error.message}; start it, correct --redis, or leave --redis out for an embedded one") from error
    except ValueError as error:
        raise Refusal(f"--redis is no Redis URL: {error}", exit_code=2) from error


def _leave_alone() -> None:
    """Another's Redis is not ours to stop."""
