"""The share of an engine's time that scoring takes while harnesses have calls there.

A request to score is one prefill, which vLLM computes in steps of `--max-num-batched-tokens` beside the streams of its calls: each of
those steps is a gap in every stream. How long a step is only the engine decides; this decides how many there are. After a request that
took t seconds beside calls, the next one to its policy waits t * (1 / share - 1) seconds, divided among the policy's engines. An engine
without calls is scored without a pause.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from proxy.engine.replica import Replica


class Pace:
    """Of one process, which knows its own calls alone."""

    def __init__(self, share: float) -> None:
        self._rest = 1 / share - 1
        self._free_at: dict[str, float] = {}
        self._asking: Counter[Replica] = Counter()

    async def wait(self, policy: str) -> None:
        """Returns once the policy's engines may be asked again."""
        await asyncio.sleep(max(0.0, self._free_at.get(policy, 0.0) - time.monotonic()))

    @contextmanager
    def asking(self, policy: str, replica: Replica, engines: int) -> Iterator[None]:
        """Around a request to score, to one of so many engines of the policy."""
        host, began = replica.host, time.monotonic()
        self._asking[host] += 1
        beside_calls = self._has_calls(host)
        try:
            yield
        finally:
            beside_calls = beside_calls or self._has_calls(host)
            self._asking[host] -= 1
            if beside_calls:
                now = time.monotonic()
                rest = (now - began) * self._rest / engines
                self._free_at[policy] = max(now, self._free_at.get(policy, now)) + rest

    def _has_calls(self, host: Replica) -> bool:
        return sum(each.in_flight for each in host.engine) > self._asking[host]
