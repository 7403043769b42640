"""The master that Redis Sentinels name: asked for again when it is gone, or no master any more."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

import redis.exceptions as broken

from proxy.store.address import Place
from proxy.store.node import Command, Node

log = logging.getLogger(__name__)

ASK_SECONDS = 2.0
"""How long one Sentinel may take to answer."""


class Watched:
    """Implements `proxy.store.node.Link`. `open_master` makes the server at a place."""

    def __init__(self, service: str, sentinels: Sequence[Node], open_master: Callable[[Place], Node]) -> None:
        self._service = service
        self._sentinels = tuple(sentinels)
        self._open_master = open_master
        self._masters: dict[Place, Node] = {}
        self._place: Place | None = None

    async def send(self, key: str | None, commands: Sequence[Command]) -> list[Any]:
        place = self._place or await self._find()
        try:
            return await self._masters[place].send(key, commands)
        except (broken.ConnectionError, broken.TimeoutError, broken.ReadOnlyError):
            successor = await self._find()
            if successor == place:
                raise
            return await self._masters[successor].send(key, commands)

    async def ping(self) -> None:
        await self.send(None, [("PING",)])

    async def facts(self) -> list[dict[str, Any]]:
        return await self.send(None, [("INFO",)])

    def distrust(self) -> None:
        self._place = None
        for node in (*self._sentinels, *self._masters.values()):
            node.distrust()

    async def close(self) -> None:
        await asyncio.gather(*(node.close() for node in (*self._sentinels, *self._masters.values())))

    async def _find(self) -> Place:
        """Where the master is. Raises redis's ConnectionError when no Sentinel knows."""
        for sentinel in self._sentinels:
            try:
                async with asyncio.timeout(ASK_SECONDS):
                    (found,) = await sentinel.send(None, [("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._service)])
            except (broken.RedisError, OSError, TimeoutError) as error:
                log.warning("a Sentinel does not answer: %s", error)
                continue
            if found:
                self._place = place = (found[0].decode(), int(found[1]))
                if place not in self._masters:
                    self._masters[place] = self._open_master(place)
                return place
        raise broken.ConnectionError(f"no Sentinel names a master of {self._service}")
