"""Policies and their weights: a version line each, pushes that do not wait for each other, models that take none; and the numbers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from contract.deltas import write_digests
from proxy.engine.pool.pool import EnginePool
from proxy.engine.weights.keeper import WeightMetrics
from proxy.engine.weights.push import WeightUpdater
from proxy.errors import Conflict, NotFound, RequestError
from proxy.settings import Settings
from proxy.store.service import WeightState, WeightStore
from tests.support.engine.delta_versions import write_chain
from tests.support.engine.scripted_engine import ScriptedEngine
from tests.support.engine.scripted_sampling import Fail
from tests.support.engine.weight_fixtures import Service, until

pytestmark = pytest.mark.usefixtures("often_visited")


@asynccontextmanager
async def serving_policies(
    weights: WeightStore, engines: list[ScriptedEngine], policies: list[str], **settings: Any
) -> AsyncIterator[tuple[Service, CollectorRegistry]]:
    """Engine i belongs to policy i."""
    urls = [f"{policy}={engine.url}" if policy else engine.url for engine, policy in zip(engines, policies, strict=True)]
    options, registry = Settings(engine=urls, **settings), CollectorRegistry()
    pool = EnginePool(options)
    updater = WeightUpdater(pool, weights, options, WeightMetrics(registry, lambda: pool.replicas))
    await pool.start()
    try:
        yield Service(pool, updater, weights), registry
    finally:
        await updater.stop()
        await pool.stop()


async def test_a_push_goes_to_the_replicas_of_its_policy_alone(
    engines: list[ScriptedEngine], weights: WeightStore, tmp_path: Path
) -> None:
    async with serving_policies(weights, engines, ["", "critic"]) as (service, _):
        answer = await service.updater.push(4, str(tmp_path), policy="critic")
        assert (answer["applied"], list(answer["replicas"])) == (True, [service.pool.replicas[1].name])
        assert [engine.weights.label for engine in engines] == ["0", "4"]
        await service.updater.push(1, str(tmp_path))
        status = await service.updater.status()
        assert (status["current"]["version"], list(status["replicas"])) == (1, [service.pool.replicas[0].name])
        critic = status["models"]["critic"]
        assert [state["version"] for state in critic["history"]] == [critic["current"]["version"]] == [4]
        assert set(status["models"]) == {"critic"}
        with pytest.raises(NotFound, match="there is no model 'other'"):
            await service.updater.push(9, str(tmp_path), policy="other")


async def test_pushes_to_two_policies_do_not_wait_for_each_other(
    engines: list[ScriptedEngine], weights: WeightStore, tmp_path: Path
) -> None:
    """The first is held in its middle until the second has ended; a third, to the first one's policy, waits."""
    async with serving_policies(weights, engines, ["", "critic"]) as (service, _):
        hold = engines[0].weights.hold("update", done=False)
        first = asyncio.create_task(service.updater.push(1, str(tmp_path)))
        await until(hold.reached.is_set, lambda: "the first push is under way")
        third = asyncio.create_task(service.updater.push(2, str(tmp_path)))
        assert (await service.updater.push(1, str(tmp_path), policy="critic"))["applied"]
        status = await service.updater.status()
        assert (status["updating"], status["models"]["critic"]["updating"]) == (True, False)
        assert engines[0].paths().count("/pause") == 1
        assert not first.done()
        hold.released.set()
        assert (await first)["applied"]
        assert (await third)["applied"]
        assert engines[0].weights.label == "2"
        assert engines[0].weights.broken == []


@pytest.mark.parametrize(("policy", "frozen"), [("judge", "judge"), ("", "policy")], ids=["by its name", "as it is served"])
async def test_a_frozen_model_takes_no_weights(
    policy: str, frozen: str, engines: list[ScriptedEngine], weights: WeightStore, tmp_path: Path
) -> None:
    async with serving_policies(weights, engines[:1], [policy], frozen_models=[frozen]) as (service, _):
        with pytest.raises(Conflict, match=f"model '{frozen}' is frozen: its weights never change"):
            await service.updater.push(1, str(tmp_path), policy=policy)
        assert "/pause" not in engines[0].paths()
        status = await service.updater.status()
        assert (status["models"][policy] if policy else status)["frozen"]
        assert service.pool.ready() == (True, "")


async def test_a_restarted_replica_is_given_the_weights_of_its_own_policy(
    engines: list[ScriptedEngine], weights: WeightStore, tmp_path: Path
) -> None:
    await weights.advance(WeightState(3, str(tmp_path / "default")))
    await weights.advance(WeightState(8, str(tmp_path)), "critic")
    async with serving_policies(weights, engines[:1], ["critic"]) as (service, registry):
        await until(lambda: service.pool.replicas[0].healthy, lambda: "it was repaired")
        assert engines[0].weights.loaded["path"] == str(tmp_path)
        assert engines[0].weights.label == "8"
        assert 'verbatim_weight_repairs_total{outcome="done",policy="critic"} 1.0' in shown(registry)


async def test_a_restarted_replica_is_given_the_bits_that_were_pushed_or_none(
    engines: list[ScriptedEngine], weights: WeightStore, tmp_path: Path
) -> None:
    """A trainer that begins again writes the number anew: another replica that holds it would sample under the same version."""
    anchor, delta = write_chain(tmp_path, 2)
    await weights.advance(WeightState(2, str(delta.folder), "delta", root=anchor.root))
    async with serving_policies(weights, engines[:1], [""]) as (service, _):
        says = "holds other weights by now than were pushed as version 2"
        await until(lambda: says in service.pool.replicas[0].reason, lambda: service.pool.replicas[0].reason)
        assert engines[0].weights.loaded["updates"] == 0 and not service.pool.replicas[0].healthy
        assert (await service.updater.push(3, str(delta.folder), "delta"))["applied"]
        assert (await weights.current()).root == delta.root


async def test_replicas_that_read_other_weights_at_the_same_path_do_not_serve_them_as_one_version(
    engines: list[ScriptedEngine], weights: WeightStore, tmp_path: Path
) -> None:
    """Their machines have folders of their own by that name, or it was written anew while the first one read it."""
    (anchor,) = write_chain(tmp_path, 1)
    async with serving_policies(weights, engines, ["", ""]) as (service, _):
        hold = engines[1].weights.hold("check", done=False)
        push = asyncio.create_task(service.updater.push(2, str(anchor.folder)))
        await until(lambda: engines[0].weights.label == "2" and hold.reached.is_set(), lambda: engines[0].weights.labels)
        write_digests(anchor.folder, {**anchor.stamps, "w": anchor.stamps["still"]}, 1)
        hold.released.set()
        answer = await push
        first, second = (replica.name for replica in service.pool.replicas)
        assert answer["applied"] and answer["replicas"][first]["ok"] and not answer["replicas"][second]["ok"]
        assert not service.pool.replicas[1].healthy and engines[1].weights.label != "2"


async def test_an_update_that_was_begun_before_is_not_begun_again(
    engines: list[ScriptedEngine], weights: WeightStore, tmp_path: Path
) -> None:
    """Begun twice it fails in every worker, and vLLM takes the first one's answer: the others' would come in place of later ones."""
    async with serving_policies(weights, engines[:1], [""]) as (service, _):
        engines[0].weights.updating = True
        assert (await service.updater.push(1, str(tmp_path)))["applied"]
        assert "/start_weight_update" not in engines[0].paths()
        assert (await service.updater.push(2, str(tmp_path)))["applied"]
        assert engines[0].paths().count("/start_weight_update") == 1


async def test_metrics_tell_versions_outcomes_and_time_paused(
    engines: list[ScriptedEngine], weights: WeightStore, tmp_path: Path
) -> None:
    async with serving_policies(weights, engines, ["", ""]) as (service, registry):
        first, second = (replica.name for replica in service.pool.replicas)
        await service.updater.push(1, str(tmp_path))
        engines[1].weights.refuse_update = "torn"
        await service.updater.push(2, str(tmp_path), mode="wait")
        for engine in engines:
            engine.weights.refuse_check = "it does not fit"
        await service.updater.push(3, str(tmp_path), mode="abort")
        with pytest.raises(Conflict):
            await service.updater.push(2, str(tmp_path))
        page = shown(registry)
        for line in (
            f'verbatim_weight_version{{policy="",replica="{first}"}} 2.0',
            'verbatim_weight_pushes_total{mode="keep",outcome="applied",policy=""} 1.0',
            'verbatim_weight_pushes_total{mode="wait",outcome="partial",policy=""} 1.0',
            'verbatim_weight_pushes_total{mode="abort",outcome="failed",policy=""} 1.0',
            'verbatim_weight_pushes_total{mode="keep",outcome="refused",policy=""} 1.0',
            'verbatim_weight_push_seconds_count{mode="keep",policy=""} 1.0',
        ):
            assert line in page
        assert registry.get_sample_value("verbatim_weight_paused_seconds_total", labels("keep", second)) > 0  # type: ignore[operator]


def labels(mode: str, replica: str) -> dict[str, str]:
    return {"policy": "", "mode": mode, "replica": replica}


def shown(registry: CollectorRegistry) -> str:
    return generate_latest(registry).decode()


async def test_one_who_watches_a_push_hears_every_step_of_every_replica(
    engines: list[ScriptedEngine], weights: WeightStore, tmp_path: Path
) -> None:
    async with serving_policies(weights, engines, ["", ""]) as (service, _):
        engines[1].fault("/update_weights", Fail(500, "out of memory"))
        events: list[dict[str, Any]] = []
        answer = await service.updater.push(1, str(tmp_path), watch=events.append)
        first, second = (replica.name for replica in service.pool.replicas)
        steps = {name: [event["step"] for event in events if event["replica"] == name] for name in (first, second)}
        assert steps[first] == ["checking", "pausing", "paused", "loading", "loaded", "resumed", "done"]
        assert steps[second] == ["checking", "pausing", "paused", "loading", "resumed", "failed"]
        assert events[-1].get("error") == answer["replicas"][second].get("error") or events[-1]["step"] == "done"
        assert answer["replicas"][second]["error"] == "out of memory"


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"path": None}, "kind full needs a path"),
        ({"path": None, "kind": "nccl"}, "a transfer belongs to kind nccl"),
    ],
)
async def test_a_push_that_lacks_what_its_kind_needs_is_refused(asked: dict[str, Any], says: str, weights: WeightStore) -> None:
    async with serving_policies(weights, [], []) as (service, _):
        with pytest.raises(RequestError, match=says):
            await service.updater.push(1, **asked)
