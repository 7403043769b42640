"""Pushes of LoRA adapters, which no worker reports: the label alone says which one is loaded, and that it is loaded at all."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from proxy.store.service import WeightState, WeightStore
from tests.support.engine.scripted_engine import Drop, ScriptedEngine
from tests.support.engine.weight_fixtures import Service, serving, until

pytestmark = pytest.mark.usefixtures("often_visited")


@pytest.fixture
def engine() -> Iterator[ScriptedEngine]:
    with ScriptedEngine(adapter="learner") as engine:
        yield engine


@pytest.fixture
def folder(tmp_path: Path) -> Callable[[str], str]:
    """The path of a folder, which is there."""

    def made(name: str) -> str:
        (tmp_path / name).mkdir(exist_ok=True)
        return str(tmp_path / name)

    return made


async def push_without_an_answer(service: Service, engine: ScriptedEngine, version: int, path: str) -> None:
    """The engine takes the adapter, and nobody hears that it did."""
    hold = engine.weights.hold("adapter", done=True)
    push = asyncio.create_task(service.updater.push(version, path, kind="lora"))
    await until(hold.reached.is_set, engine.paths)
    assert not (await push)["applied"]
    hold.released.set()


async def test_an_adapter_that_was_loaded_and_not_labelled_is_replaced_before_the_engine_serves(
    engine: ScriptedEngine, weights: WeightStore, folder: Callable[[str], str]
) -> None:
    """Resumed under the old label, it would have sampled the new adapter's tokens as the old one's."""
    async with serving(weights, engine.url, weights_timeout_seconds=2.0) as service:
        assert (await service.updater.push(1, folder("one"), kind="lora"))["applied"]
        await push_without_an_answer(service, engine, 2, folder("two"))
        (replica,) = service.pool.replicas
        await until(lambda: replica.healthy, lambda: replica.reason)
        assert (engine.weights.adapter, engine.weights.label, engine.weights.paused) == (folder("one"), "1", False)
        assert (await service.updater.push(2, folder("two"), kind="lora"))["applied"]
        assert (engine.weights.adapter, engine.weights.label) == (folder("two"), "2")


async def test_an_adapter_that_nothing_can_replace_keeps_the_engine_out_until_one_is_pushed(
    engine: ScriptedEngine, weights: WeightStore, folder: Callable[[str], str]
) -> None:
    async with serving(weights, engine.url, weights_timeout_seconds=2.0) as service:
        assert (await service.updater.push(1, folder("full")))["applied"]
        await push_without_an_answer(service, engine, 2, folder("two"))
        (replica,) = service.pool.replicas
        await until(lambda: "its adapter is torn" in replica.reason, lambda: replica.reason)
        assert engine.weights.paused
        refused = await service.updater.push(2, folder("full"))
        assert not refused["applied"]
        assert "'torn-1'" in refused["error"]
        assert engine.weights.paused
        assert (await service.updater.push(2, folder("two"), kind="lora"))["applied"]
        assert (engine.weights.label, engine.weights.paused) == ("2", False)
        assert service.pool.ready() == (True, "")


@pytest.mark.parametrize(("mode", "pause"), [("keep", "abort"), ("wait", "wait"), ("abort", "abort")])
async def test_no_call_goes_on_that_names_the_old_adapters_folder(
    mode: str, pause: str, engine: ScriptedEngine, weights: WeightStore, folder: Callable[[str], str]
) -> None:
    """vLLM reads the folder that a call names at every step: one frozen in the push, or queued in it, would bring the old adapter
    back under the new label."""
    async with serving(weights, engine.url) as service:
        engine.received.clear()
        assert (await service.updater.push(1, folder("one"), kind="lora", mode=mode))["applied"]
        assert [request.query["mode"] for request in engine.received if request.path == "/pause"] == [pause]
        steps = [path for path in engine.paths() if path in ("/v1/load_lora_adapter", "/abort_requests", "/resume")]
        assert steps == ["/v1/load_lora_adapter", "/abort_requests", "/resume"]


async def test_an_engine_with_an_adapter_that_was_left_paused_is_resumed_without_its_queue(
    engine: ScriptedEngine, weights: WeightStore, folder: Callable[[str], str]
) -> None:
    async with serving(weights, engine.url) as service:
        engine.received.clear()
        engine.fault("/resume", Drop())
        await service.updater.push(1, folder("one"), kind="lora")
        (replica,) = service.pool.replicas
        await until(lambda: replica.healthy, lambda: replica.reason)
        steps = [path for path in engine.paths() if path in ("/abort_requests", "/resume")]
        pushed, left, taken_over = ["/abort_requests", "/resume"], ["/abort_requests"], ["/abort_requests", "/resume"]
        assert steps == pushed + left + taken_over


async def test_an_adapter_that_is_refused_leaves_the_old_one_serving(
    engine: ScriptedEngine, weights: WeightStore, folder: Callable[[str], str]
) -> None:
    async with serving(weights, engine.url) as service:
        assert (await service.updater.push(1, folder("one"), kind="lora"))["applied"]
        refused = await service.updater.push(2, "/nowhere", kind="lora")
        assert (refused["applied"], "/nowhere does not exist" in refused["error"]) == (False, True)
        assert (engine.weights.adapter, engine.weights.label, engine.weights.paused) == (folder("one"), "1", False)
        assert service.pool.ready() == (True, "")


async def test_half_of_a_version_goes_only_where_the_other_half_is_current(
    engine: ScriptedEngine, weights: WeightStore, folder: Callable[[str], str]
) -> None:
    """An engine that just restarted, not yet put right, would run the new adapter over the weights that it was started with."""
    await weights.advance(WeightState(1, folder("full")))
    engine.fault("/update_weights", Drop())
    async with serving(weights, engine.url) as service:
        (replica,) = service.pool.replicas
        assert not replica.healthy
        refused = await service.updater.push(2, folder("two"), kind="lora")
        assert not refused["applied"]
        assert "not 1" in refused["error"]
        assert engine.weights.adapter is None


async def test_a_replica_is_not_resumed_between_the_two_halves_of_its_weights(
    engine: ScriptedEngine, weights: WeightStore, folder: Callable[[str], str]
) -> None:
    await weights.advance(WeightState(1, folder("one"), "lora"))
    await weights.advance(WeightState(2, folder("full")))
    async with serving(weights, engine.url) as service:
        (replica,) = service.pool.replicas
        await until(lambda: replica.healthy, lambda: replica.reason)
        steps = [path for path in engine.paths() if path in ("/v1/load_lora_adapter", "/update_weights", "/resume")]
        assert steps == ["/v1/load_lora_adapter", "/update_weights", "/resume"]
        assert (engine.weights.label, engine.weights.adapter) == ("2", folder("one"))


async def test_a_half_that_fails_after_the_other_leaves_the_replica_paused(
    engine: ScriptedEngine, weights: WeightStore, folder: Callable[[str], str]
) -> None:
    await weights.advance(WeightState(1, "/nowhere", "lora"))
    await weights.advance(WeightState(2, folder("full")))
    async with serving(weights, engine.url) as service:
        (replica,) = service.pool.replicas
        await until(lambda: "/nowhere does not exist" in replica.reason, lambda: replica.reason)
        assert engine.weights.paused


@pytest.mark.parametrize("base", [None, 4], ids=["as it was started", "after full weights"])
async def test_what_an_engine_was_given_before_the_store_forgot_is_taken_over_by_halves(
    base: int | None, engine: ScriptedEngine, weights: WeightStore, folder: Callable[[str], str]
) -> None:
    """Its label is its adapter's: were that taken for full weights, a later adapter could be put on no engine that restarts."""
    if base is not None:
        engine.weights.loaded |= {"path": folder("full"), "version": base, "updates": 1}
    engine.sampler.version = "5"
    async with serving(weights, engine.url) as service:
        assert service.pool.ready() == (True, "")
        states = [(state.version, state.kind, state.path) for state in await weights.history()]
        assert states == [(5, "lora", None)] + ([(4, "full", folder("full"))] if base else [])
        assert (await service.updater.push(6, folder("six"), kind="lora"))["applied"]
        engine.sampler.version = "default"
        await until(lambda: engine.weights.label == "6" and service.pool.replicas[0].healthy, engine.paths)
        assert engine.weights.loaded["version"] == base
