"""What a node offers of its kinds of runtimes after one of them failed: real service, real Redis, and a kind that is away for a while."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from contract.tasks import RuntimeSpec
from rollout.offer import WorkingKinds
from rollout.runtimes.base import NoRoom, ProxyAddress, RuntimeFailed
from rollout.runtimes.local.runtime import LocalKind, LocalRuntime
from rollout.runtimes.settings import SYSTEM_PATH, RuntimeSettings
from tests.support.runtimes.rollout_nodes import World, a_task

SECONDS = 60.0


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout.offer.SHORTEST_PAUSE_SECONDS", 0.02)
    monkeypatch.setattr("rollout.offer.LONGEST_PAUSE_SECONDS", 0.1)


class Failing(LocalKind):
    """No runtime of it starts as long as `failure` is set; it lacks `lack`."""

    lack: str | None = None
    failure: RuntimeFailed | None = None
    probes = started = 0

    async def probe(self) -> str | None:
        self.probes += 1
        return self.lack

    def make(self, spec: RuntimeSpec, name: str, proxy: ProxyAddress) -> LocalRuntime:
        self.started += 1
        runtime = super().make(spec, name, proxy)
        if self.failure is not None:

            async def fail() -> None:
                raise self.failure or RuntimeFailed("too late")

            runtime.start = fail  # type: ignore[method-assign]
        return runtime


def failing(world: World, failure: RuntimeFailed) -> Failing:
    kind = Failing(RuntimeSettings(local_dir=world.folder / "runtimes", local_path=SYSTEM_PATH))
    kind.failure = failure
    return kind


async def test_a_kind_of_runtime_that_is_away_uses_up_no_attempt_and_is_offered_again_when_it_is_back(world: World) -> None:
    """A daemon that was restarted cost every waiting rollout its attempts within seconds."""
    kind = failing(world, RuntimeFailed("cannot connect to the daemon"))
    kind.lack = "the daemon does not answer"
    task = await world.submit(a_task(num_samples=6, max_attempts=1))
    async with world.node(kinds={"local": kind}):
        await world.until(lambda: kind.probes >= 5, "it is probed")
        statuses = {state.status for state in await world.tasks.load_rollouts("t")}
        assert "failed" not in statuses
        kind.failure = kind.lack = None
        states = await world.ended(task)
    assert [state.status for state in states] == ["completed"] * 6


async def test_a_node_without_room_pauses_before_the_next_rollout(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kind works as far as a probe can tell. All waiting rollouts lost their attempts within seconds."""
    monkeypatch.setattr("rollout.offer.LONGEST_PAUSE_SECONDS", 3600.0)
    monkeypatch.setattr("rollout.offer.SHORTEST_PAUSE_SECONDS", 3600.0)
    kind = failing(world, NoRoom("exceeded quota: pods"))
    await world.submit(a_task("first", max_attempts=2))
    async with world.node(kinds={"local": kind}) as node:

        async def tried() -> bool:
            return [len(state.failures) for state in await world.tasks.load_rollouts("first")] == [1]

        await world.until(tried, "it is queued again")
        kind.failure = None
        await world.submit(a_task("second"))
        assert not node._measure_room().runtimes and node._offer.working == {"local"}
        node._offer.trust("local")
        states = [*await world.ended(a_task("first")), *await world.ended(a_task("second"))]
    assert [state.status for state in states] == ["completed"] * 2


class Kind:
    lack: str | None = None

    async def probe(self) -> str | None:
        return self.lack


async def test_a_runtime_that_cannot_be_made_where_its_kind_works_keeps_the_node_from_nothing() -> None:
    """Its image may not exist."""
    kind: Any = Kind()
    offer = WorkingKinds({"local": kind})
    for _ in range(3):
        assert not await offer.doubt("local", node_failed=False)
    assert offer.choose(["local"]) == offer.working == {"local"}


async def test_a_kind_that_failed_is_left_out_then_tried_by_one_attempt_and_then_trusted() -> None:
    kind: Any = Kind()
    other: Any = Kind()
    offer = WorkingKinds({"local": kind, "docker": other})
    kind.lack = "bwrap is missing"
    assert await offer.doubt("local", node_failed=False)
    assert offer.choose([]) == offer.working == {"docker"}
    kind.lack = None
    async with asyncio.timeout(SECONDS):
        while "local" not in offer.choose([]):
            await asyncio.sleep(0.01)
    assert offer.choose(["local", "docker"]) == {"docker"}
    offer.trust("local")
    assert offer.choose(["local", "docker"]) == {"local", "docker"}
    await offer.close()


async def test_an_attempt_that_gets_further_ends_the_pause_of_its_kind() -> None:
    kind: Any = Kind()
    offer = WorkingKinds({"local": kind})
    assert not await offer.doubt("local", node_failed=True)
    assert offer.choose([]) == frozenset()
    offer.trust("local")
    assert offer.choose([]) == {"local"}
    await offer.close()
