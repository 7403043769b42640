"""The service's connection to Redis, handed to the rollout service, which knows nothing of the proxy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from proxy import errors
from proxy.store import connection as wire
from rollout.store.base import StoreUnavailable
from rollout.store.connection import Argument, Script


class RolloutConnection:
    """Implements `rollout.store.connection.Connection`. The connection stays its owner's, who closes it."""

    def __init__(self, connection: wire.StoreConnection) -> None:
        self._redis = connection
        self.timeout_seconds = connection.timeout_seconds

    async def run(self, script: Script, keys: Sequence[str], args: Sequence[Argument], *, durable: bool) -> Any:
        try:
            return await self._redis.run(wire.Script(script.source, script.sha), keys, args, durable=durable, patient=durable)
        except errors.StoreUnavailable as error:
            raise StoreUnavailable(error.message) from error

    async def execute(self, *command: Argument, key: str) -> Any:
        try:
            return await self._redis.execute(*command, key=key)
        except errors.StoreUnavailable as error:
            raise StoreUnavailable(error.message) from error
