"""The kinds of runtimes that a node offers now: one that failed is left out until it works again.

Otherwise a node whose container daemon is restarted, or whose disk is full, would take one rollout after another, fail each within
milliseconds, and use up the attempts of all that wait. A runtime that cannot be made on a machine where the kind works, such as one of an
image that does not exist, is its task's own fault and keeps the node from nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping

from rollout.runtimes.base import RuntimeKind

log = logging.getLogger(__name__)

SHORTEST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 1.0, 60.0


class WorkingKinds:
    """`kinds` are those of this node by name. `on_change` is called when what `choose` gives may have changed. `close` it."""

    def __init__(self, kinds: Mapping[str, RuntimeKind], on_change: Callable[[], None] = lambda: None) -> None:
        self._kinds = kinds
        self._on_change = on_change
        self._failures = Counter[str]()
        """Of each kind, in a row."""
        self._lacking: set[str] = set()
        """Kinds that did not work when last probed."""
        self._probing = Counter[str]()
        self._returning: dict[str, asyncio.Task[None]] = {}
        """Kinds that are left out -> what offers them again."""

    @property
    def working(self) -> frozenset[str]:
        return frozenset(self._kinds) - self._lacking

    def choose(self, preparing: Collection[str]) -> frozenset[str]:
        """The kinds of which the node may take a rollout while it prepares some of `preparing`: of one that failed last, one at a time."""
        doubted = {name for name in preparing if self._failures[name]}
        return frozenset(self._kinds) - doubted - set(self._returning) - set(+self._probing)

    async def doubt(self, name: str, *, node_failed: bool) -> bool:
        """An attempt failed on that kind, for what the runtime or, if `node_failed`, the node did. Whether the kind does not work here
        now, so that the attempt failed by no fault of its own."""
        lack = await self._probe(name)
        if lack is not None or node_failed:
            self._failures[name] += 1
            if name not in self._returning:
                log.warning("no rollouts with runtimes of kind %s are taken for now: %s", name, lack or "the node failed")
                self._returning[name] = asyncio.create_task(self._offer_again(name))
            self._on_change()
        return lack is not None

    def trust(self, name: str) -> None:
        """An attempt got as far as its harness with that kind."""
        del self._failures[name]
        self._lacking.discard(name)
        if (returning := self._returning.pop(name, None)) is not None:
            returning.cancel()
        self._on_change()

    async def close(self) -> None:
        for returning in self._returning.values():
            returning.cancel()
        if self._returning:
            await asyncio.wait(self._returning.values())

    async def _offer_again(self, name: str) -> None:
        """Returns once the kind works, after a pause that grows with the failures in a row and with every probe."""
        pause = min(LONGEST_PAUSE_SECONDS, SHORTEST_PAUSE_SECONDS * 2 ** min(self._failures[name] - 1, 10))
        await asyncio.sleep(pause)
        while await self._probe(name) is not None:
            pause = min(LONGEST_PAUSE_SECONDS, 2 * pause)
            await asyncio.sleep(pause)
        del self._returning[name]
        self._on_change()
        log.info("rollouts with runtimes of kind %s are taken again", name)

    async def _probe(self, name: str) -> str | None:
        """What the machine lacks for the kind, or None."""
        self._probing[name] += 1
        try:
            lack = await self._kinds[name].probe()
        except Exception as error:
            lack = f"{type(error).__name__}: {error}"
        finally:
            self._probing[name] -= 1
            self._on_change()
        (self._lacking.discard if lack is None else self._lacking.add)(name)
        return lack
