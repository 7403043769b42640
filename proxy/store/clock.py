"""The one clock of leases, deadlines and retention: Redis's.

Services on several machines have clocks of their own, and one that is two hours ahead would take what another's trainer has leased.
A cluster has several servers; the clock is that of the one which holds the groups and leases.
"""

from __future__ import annotations

from proxy.store.connection import StoreConnection
from proxy.store.keys import DELIVERY


class RedisClock:
    def __init__(self, connection: StoreConnection) -> None:
        self._redis = connection

    async def now(self) -> float:
        """Epoch seconds. Raises StoreUnavailable."""
        seconds, microseconds = await self._redis.execute("TIME", key=DELIVERY[0])
        return int(seconds) + int(microseconds) / 1e6
