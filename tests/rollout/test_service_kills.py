"""Services, Redis and nodes that are killed while rollouts run over HTTP: each rollout is finished once, none is lost, none doubled.

Real processes; what must hold afterwards is in tests/support/crashes/nodes.py.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from proxy.store.tasks import keys
from tests.support.crashes.nodes import LEASE_SECONDS, SECONDS, NodeCrashes, NodeRounds
from tests.support.service.redis_server import IN_MEMORY
from tests.support.service.verbatim_process import wait_until

SEED = 41
TAKEN = b'"runtimes": ["local"]'
"""In the request for a rollout, and in none that the services send Redis by themselves."""


@pytest.fixture
def folder() -> Iterator[Path]:
    """In memory where there is room: Redis syncs every write, and processes are killed, not machines."""
    with tempfile.TemporaryDirectory(prefix="kills-", dir=IN_MEMORY) as name:
        yield Path(name)


def load(crashes: NodeCrashes, script: str) -> bytes:
    """The digest of the script, by which Redis has it now."""
    assert crashes.redis.server is not None
    with crashes.redis.server.client() as client:
        return str(client.script_load(keys.read_script(script).source)).encode()


def test_a_rollout_whose_node_was_never_told_is_handed_to_it_again(folder: Path) -> None:
    """The service is killed when Redis has given the node a rollout and before the node has the answer."""
    with NodeCrashes(folder) as crashes:
        task_id = crashes.submit()
        load(crashes, "take")
        crashes.wire.stop_after(TAKEN)
        crashes.nodes[0].start()
        assert crashes.wire.stopped.wait(SECONDS)
        crashes.kill(crashes.services[0])
        crashes.wire.heal()
        crashes.services[0].start()
        crashes.services[0].await_ready()
        crashes.await_status(task_id, "completed")
        (rollout,) = crashes.check()
    assert (rollout["attempt"], rollout["failures"]) == (1, [])


@pytest.mark.parametrize("node_dies", [False, True], ids=["its node asks again", "another node finishes it"])
def test_a_verdict_that_was_fixed_by_a_service_that_died_closes_its_session(folder: Path, node_dies: bool) -> None:
    """The service is killed when Redis has the verdict, and before it has closed the session."""
    with NodeCrashes(folder, nodes=2) as crashes:
        task_id = crashes.submit()
        crashes.wire.stop_after(load(crashes, "conclude"))
        crashes.nodes[0].start()
        assert crashes.wire.stopped.wait(SECONDS)
        crashes.kill(crashes.services[0])
        if node_dies:
            crashes.kill(crashes.nodes[0])
            crashes.nodes[1].start()
        crashes.wire.heal()
        crashes.services[0].start()
        crashes.services[0].await_ready()
        crashes.await_status(task_id, "completed")
        (rollout,) = crashes.check()
    assert (rollout["attempt"], rollout["failures"]) == (1, [])
    assert rollout["node"] == crashes.nodes[node_dies].name


@pytest.mark.parametrize("away", ["services", "redis"])
def test_what_is_away_for_two_leases_robs_no_node_and_loses_nothing(folder: Path, away: str) -> None:
    """All nodes were silent for it; the first that took robbed the others."""
    with NodeCrashes(folder, services=2, nodes=2) as crashes:
        task_id = crashes.submit(samples=4, gated=True)
        for node in crashes.nodes:
            node.start()
        wait_until(lambda: len(crashes.begun()) == 4, SECONDS, "all run")
        victims = crashes.services if away == "services" else [crashes.redis]
        for victim in victims:
            crashes.kill(victim)
        time.sleep(2 * LEASE_SECONDS)
        for victim in victims:
            victim.start()
        for service in crashes.services:
            service.await_ready()
        crashes.gate.touch()
        crashes.await_status(task_id, "completed")
        rollouts = crashes.check()
    assert [(each["attempt"], each["failures"]) for each in rollouts] == [(1, [])] * 4


def test_each_rollout_is_finished_once_whatever_is_killed(folder: Path) -> None:
    """Redis, both services and both nodes, each once."""
    with NodeCrashes(folder, services=2, nodes=2) as crashes:
        NodeRounds(SEED, crashes).run(5)
        crashes.check()
    assert crashes.kills == {"redis": 1, "service-0": 1, "service-1": 1, "node-0": 1, "node-1": 1}
