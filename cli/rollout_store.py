"""The rollout package's store runs over the connection of the service: the two packages never import each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from proxy import errors
from proxy.store import connection as wire
from proxy.store.connection import StoreConnection
from rollout.store.base import StoreUnavailable
from rollout.store.keys import Argument, Script


class RolloutConnection:
    """The service's Redis connection as the rollout package's `Connection`. Its owner closes it."""

    def __init__(self, connection: StoreConnection) -> None:
        self._redis = connection
        self.timeout_seconds = connection.timeout_seconds

    async def run(self, script: Script, keys: Sequence[str], args: Sequence[Argument], *, durable: bool) -> Any:
        try:
            return await self._redis.run(wire.Script(script.source, script.sha), keys, args, durable=durable, patient=durable)
        except errors.StoreUnavailable as error:
            raise StoreUnavailable(error.message) from error

    async def execute(self, *command: Argument, key: str | None = None) -> Any:
        try:
            return await self._redis.execute(*command, key=key)
        except errors.StoreUnavailable as error:
            raise StoreUnavailable(error.message) from error
