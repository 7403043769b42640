"""A Redis Cluster: every key goes to the primary of its slot, also while slots move and primaries are replaced.

While a slot moves, Redis refuses scripts whose keys are on both sides or do not exist yet (TRYAGAIN): calls of its sessions cannot
begin in that time, and those that end are recorded when it is over.

Of its own making, since redis-py's asyncio cluster sends ASKING and the command it is for over different connections, and cannot
put WAIT behind a command on the same one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

import redis.exceptions as broken
from redis.crc import key_slot

from proxy.store.node import Command, Node, Place

log = logging.getLogger(__name__)

SLOTS = 16384
REDIRECTS = 16
"""How often one command follows redirections."""
TRY_AGAIN_SECONDS = 0.05
"""Pause while the keys of a slot are on two servers."""
MAP_SECONDS = 2.0
"""How long one server may take to say who holds what."""


class Cluster:
    """Implements `proxy.store.node.Link`. `seeds` are any of its servers; `open_node` makes the one at a place."""

    def __init__(self, seeds: Sequence[Place], open_node: Callable[[Place], Node]) -> None:
        self._seeds = tuple(seeds)
        self._open_node = open_node
        self._nodes: dict[Place, Node] = {}
        self._holders: list[Place | None] = []
        self._known = 0
        """How often the map was read: tells whether somebody else read it meanwhile."""
        self._reading = asyncio.Lock()

    async def send(self, key: str | None, commands: Sequence[Command]) -> list[Any]:
        place, asking = await self._holder(key), False
        redirected: Exception | None = None
        for _ in range(REDIRECTS):
            known = self._known
            try:
                return await self._node(place).send(key, commands, asking=asking)
            except broken.MovedError as moved:
                place, asking = _target(moved, place), False
                if self._holders:
                    self._holders[moved.slot_id] = place
            except broken.AskError as ask:
                place, asking = _target(ask, place), True
            except broken.TryAgainError as error:
                redirected = error
                await asyncio.sleep(TRY_AGAIN_SECONDS)
                place, asking = await self._holder(key), False
            except (broken.ConnectionError, broken.TimeoutError, broken.ReadOnlyError):
                await self._read_map(known, but=place)
                successor = await self._holder(key)
                if successor == place:
                    raise
                place, asking = successor, False
        raise redirected or broken.ClusterError(f"the cluster redirected a command more than {REDIRECTS} times")

    async def ping(self) -> None:
        known = self._known
        try:
            await self._ask_all(("PING",))
        except (broken.ConnectionError, broken.TimeoutError):
            await self._read_map(known)
            await self._ask_all(("PING",))

    async def facts(self) -> list[dict[str, Any]]:
        return await self._ask_all(("INFO",))

    def distrust(self) -> None:
        self._holders = []
        for node in self._nodes.values():
            node.distrust()

    async def close(self) -> None:
        await asyncio.gather(*(node.close() for node in self._nodes.values()))

    async def _ask_all(self, command: Command) -> list[Any]:
        """One answer of every primary."""
        await self._holder(None)
        primaries = dict.fromkeys(place for place in self._holders if place is not None)
        answers = await asyncio.gather(*(self._node(place).send(None, [command]) for place in primaries))
        return [answer for (answer,) in answers]

    async def _holder(self, key: str | None) -> Place:
        """Where the key is. Raises ClusterDownError when no server says it holds its slot."""
        if not self._holders:
            await self._read_map(self._known)
        slot = None if key is None else key_slot(key.encode())
        place = next(filter(None, self._holders), None) if slot is None else self._holders[slot]
        if place is None:
            self._holders = []
            raise broken.ClusterDownError(f"no server of the cluster holds slot {slot}")
        return place

    def _node(self, place: Place) -> Node:
        node = self._nodes.get(place)
        if node is None:
            node = self._nodes[place] = self._open_node(place)
        return node

    async def _read_map(self, known: int, but: Place | None = None) -> None:
        """Ask who holds what, unless that was done since `known`; the server `but` last. Raises redis's ConnectionError."""
        async with self._reading:
            if self._known != known and self._holders:
                return
            candidates = dict.fromkeys((*self._seeds, *self._nodes))
            for place in sorted(candidates, key=lambda place: place == but):
                try:
                    async with asyncio.timeout(MAP_SECONDS):
                        (ranges,) = await self._node(place).send(None, [("CLUSTER", "SLOTS")])
                except (broken.ConnectionError, broken.TimeoutError, OSError, TimeoutError) as error:
                    log.warning("the cluster node at %s:%d does not answer: %s", *place, error)
                    continue
                self._holders = _holders(ranges, place[0])
                self._known += 1
                return
        raise broken.ConnectionError("no node of the cluster answers")


def _holders(ranges: Any, asked_host: str) -> list[Place | None]:
    """The primary of every slot, from the answer to CLUSTER SLOTS: [[first, last, [host, port, …], replicas…], …]."""
    holders: list[Place | None] = [None] * SLOTS
    for first, last, primary, *_ in ranges:
        host = (primary[0] or b"").decode()
        place = (host if host not in ("", "?") else asked_host, int(primary[1]))
        holders[first : last + 1] = [place] * (last + 1 - first)
    return holders


def _target(error: broken.AskError, asked: Place) -> Place:
    return error.host or asked[0], error.port


# The master that Redis Sentinels name: asked for again when it is gone, or no master any more.


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
