"""The store of rollouts as a node's work: the packages of the two never import each other."""

from __future__ import annotations

from typing import Any

from proxy.errors import StoreUnavailable
from proxy.store.connection import Argument
from proxy.store.tasks.work import WorkStore
from rollout.work import WorkUnavailable


class StoredWork(WorkStore):
    """Raises `WorkUnavailable` for every failure of Redis."""

    async def now(self) -> float:
        try:
            return await super().now()
        except StoreUnavailable as error:
            raise WorkUnavailable(error.message) from error

    async def wait(self, seconds: float) -> None:
        try:
            await super().wait(seconds)
        except StoreUnavailable as error:
            raise WorkUnavailable(error.message) from error

    async def _run(self, script: str, *args: Argument, durable: bool = False) -> Any:
        try:
            return await super()._run(script, *args, durable=durable)
        except StoreUnavailable as error:
            raise WorkUnavailable(error.message) from error
