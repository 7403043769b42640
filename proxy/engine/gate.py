"""Gate: holds calls back while weights change, those of one policy or all."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager


class Gate:
    def __init__(self) -> None:
        self._holds: Counter[str | None] = Counter()
        self._opened = asyncio.Event()

    def is_open(self, policy: str) -> bool:
        return not self._holds[policy] and not self._holds[None]

    async def passed(self, policy: str) -> None:
        """Returns when nothing holds the policy's calls."""
        while not self.is_open(policy):
            await self._opened.wait()

    @contextmanager
    def hold(self, policy: str | None = None) -> Iterator[None]:
        """Inside, calls of the policy wait in `passed`, None: those of every policy."""
        self._holds[policy] += 1
        try:
            yield
        finally:
            self._holds[policy] -= 1
            # Whoever waits looks again; later comers wait for the next change.
            self._opened.set()
            self._opened = asyncio.Event()
