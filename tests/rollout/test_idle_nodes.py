"""What a node that holds nothing asks the service for, counted over an hour of a clock that skips every wait."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

from contract.attempts import AttemptId, NodeState, Room
from proxy.tasks.metrics import ALIVE_SECONDS
from rollout.node import NodeSettings, RolloutNode
from rollout.runtimes.base import ProxyAddress
from rollout.stages import Capacity, Slots, Stages
from rollout.steps import NodeContext

HOUR = 3600.0


class SkippingLoop(asyncio.SelectorEventLoop):
    """Where nothing can run before a timer does, it is that late at once."""

    now = 0.0

    def time(self) -> float:
        return self.now

    def _run_once(self) -> None:
        if not self._ready:  # type: ignore[attr-defined]
            timers = [each._when for each in self._scheduled if not each._cancelled]  # type: ignore[attr-defined]
            self.now = max(self.now, min(timers, default=self.now))
        super()._run_once()  # type: ignore[misc]


class EmptyService:
    """An `AttemptsClient` whose service has no rollout."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()

    async def take(self, room: Room, lease_seconds: float, token: str, wait_seconds: float) -> None:
        self.asked["take"] += 1
        await asyncio.sleep(wait_seconds)

    async def extend(self, state: NodeState, held: list[AttemptId]) -> tuple[list[AttemptId], float]:
        self.asked["extend"] += 1
        return [], 1.0

    async def leave(self) -> None:
        self.asked["leave"] += 1


class Kind:
    name = "local"

    async def sweep(self, prefix: str) -> int:
        return 0


def test_a_thousand_idle_nodes_send_sixty_requests_a_second(tmp_path: Path) -> None:
    service: Any = EmptyService()
    kinds: Any = {"local": Kind()}
    judge: Any = None
    stages = Stages(Slots(), Capacity(4.0, 4096))
    parts = NodeContext(
        name="n",
        prefix="vb-n-",
        url="http://service",
        proxy=ProxyAddress("service", 80),
        attempts=service,
        judge=judge,
        stages=stages,
        kinds=kinds,
        logs=tmp_path,
    )

    async def idle_for_an_hour() -> None:
        node = RolloutNode(parts, NodeSettings(cpus=4.0, memory_mb=4096, lease_seconds=30.0))
        running = asyncio.create_task(node.run())
        # It begins with work in a thread, which has a clock of its own.
        while not service.asked["extend"]:
            await asyncio.sleep(0.001)
        service.asked.clear()
        await asyncio.sleep(HOUR)
        # A last `take` asks whether it was given something meanwhile.
        node.drain()
        await running

    with asyncio.Runner(loop_factory=SkippingLoop) as runner:
        runner.run(idle_for_an_hour())
    assert service.asked["extend"] >= HOUR / ALIVE_SECONDS
    assert service.asked.total() <= 1 + HOUR * 60 / 1000 + 2, service.asked
