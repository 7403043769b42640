"""What the metrics of tasks say of nodes."""

from __future__ import annotations

import time
from collections.abc import Mapping

from contract.attempts import NodeState
from proxy.tasks.metrics import RolloutNumbers
from tests.support.runtimes.rollout_stores import Stores


def state(name: str, busy: Mapping[str, int], *, age_seconds: float = 0.0, draining: bool = False) -> NodeState:
    now = time.time()
    return NodeState(
        name=name,
        labels={},
        runtimes=["local"],
        cpus=4.0,
        memory_mb=4096,
        slots={"prepare": 2, "ready": 2, "run": 4, "evaluate": 2},
        busy=busy,
        free_cpus=1.0,
        free_memory_mb=1024,
        draining=draining,
        started_at=now,
        seen_at=now - age_seconds,
        lease_seconds=30.0,
    )


async def test_what_runs_is_that_of_nodes_that_live_and_go_on(stores: Stores) -> None:
    """Nodes are scaled by it: what a draining node has will want no slot of another one."""
    states = (
        state("a", {"prepare": 1, "ready": 2, "run": 4, "evaluate": 1}),
        state("b", {"prepare": 0, "ready": 0, "run": 3, "evaluate": 0}),
        state("draining", {"prepare": 0, "ready": 0, "run": 4, "evaluate": 0}, draining=True),
        state("gone", {"prepare": 2, "ready": 2, "run": 4, "evaluate": 2}, age_seconds=90.0),
    )
    for each in states:
        await stores.node(each.name).work.beat(each, [], time.time())
    numbers = RolloutNumbers(stores.tasks)
    await numbers.refresh()
    metrics = {metric.name: metric.samples for metric in numbers.collect()}
    shown = {sample.labels["stage"]: sample.value for sample in metrics["verbatim_rollouts_running"]}
    assert shown == {"prepare": 1, "ready": 2, "run": 7, "evaluate": 1}
    assert metrics["verbatim_nodes"][0].value == 3
