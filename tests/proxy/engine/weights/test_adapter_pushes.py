"""Pushes of LoRA adapters: each version is loaded beside the others, and the engine's own list says which it holds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from proxy.engine.replica import Replica
from proxy.engine.weights.adapters import find_loaded, list_adapters, name_version, parse_loaded
from proxy.errors import NotFound, RequestError
from proxy.store.service import WeightState, WeightStore
from tests.support.engine.scripted_engine import Drop, ScriptedEngine
from tests.support.engine.weight_fixtures import Service, serving, until

pytestmark = pytest.mark.usefixtures("often_visited")


@pytest.fixture
def engine() -> Iterator[ScriptedEngine]:
    with ScriptedEngine(adapters=["a", "b"]) as engine:
        yield engine


@pytest.fixture
def folder(tmp_path: Path) -> Callable[[str], str]:
    """The path of a folder, which is there."""

    def made(name: str) -> str:
        (tmp_path / name).mkdir(exist_ok=True)
        return str(tmp_path / name)

    return made


def replica_of(service: Service, policy: str) -> Replica:
    (replica,) = service.pool.of(policy)
    return replica


def root_of(engine: ScriptedEngine, replica: Replica) -> str:
    """The folder behind what calls to the replica name."""
    return engine.weights.adapters[replica.served.name]


@pytest.mark.parametrize("adapter", ["a", "qwen@v2.5", "org/a=b,c", "x@v1.2.00000000", " @v"])
def test_a_version_is_named_so_that_any_adapter_is_told_from_it(adapter: str) -> None:
    loaded = name_version(adapter, 5, 17, "1f3a9c2e77")
    assert loaded.name == f"{adapter}@v5.17.1f3a9c2e"
    assert parse_loaded(loaded.name) == loaded
    assert list_adapters({adapter: "/0", loaded.name: "/5"})[-1] == adapter
    assert [each.version for each in find_loaded({adapter: "/0", loaded.name: "/5"}, adapter)] == [5]


async def test_the_base_model_and_each_adapter_have_a_version_line_of_their_own(
    engine: ScriptedEngine, weights: WeightStore, folder: Callable[[str], str]
) -> None:
    async with serving(weights, engine.url) as service:
        assert [(each.policy, each.weight_version, each.healthy) for each in service.pool.replicas] == [
            ("", 0, True),
            ("a", 0, True),
            ("b", 0, True),
        ]
        assert (await service.updater.push(3, folder("a3"), kind="lora", policy="a"))["applied"]
        assert (await service.updater.push(7, folder("b7"), kind="lora", policy="b"))["applied"]
        assert (await service.updater.push(1, folder("full")))["applied"]
        assert [each.weight_version for each in service.pool.replicas] == [1, 3, 7]
        assert [root_of(engine, replica_of(service, policy)) for policy in "ab"] == [folder("a3"), folder("b7")]
        assert engine.weights.label == "1"
        status = await service.updater.status()
        lines = {"": status, **status["models"]}
        assert {name: line["current"]["version"] for name, line in lines.items()} == {"": 1, "a": 3, "b": 7}


async def test_a_push_of_an_adapter_stops_nothing(
    engine: ScriptedEngine, weights: WeightStore, folder: Callable[[str], str]
) -> None:
    """Neither the base model's calls nor another adapter's: the engine does not pause, and its label stays."""
    async with serving(weights, engine.url) as service:
        engine.received.clear()
        assert (await service.updater.push(1, folder("one"), kind="lora", policy="a"))["applied"]
        assert not {"/pause", "/resume", "/abort_requests", "/update_weight_version"} & {*engine.paths()}
        assert engine.weights.label == "0"


async def test_an_adapter_that_is_refused_leaves_the_old_one_serving(
    engine: ScriptedEngine, weights: WeightStore, folder: Callable[[str], str]
) -> None:
    async with serving(weights, engine.url) as service:
        assert (await service.updater.push(1, folder("one"), kind="lora", policy="a"))["applied"]
        refused = await service.updater.push(2, "/nowhere", kind="lora", policy="a")
        assert (refused["applied"], "/nowhere does not exist" in refused["error"]) == (False, True)
        replica = replica_of(service, "a")
        assert (replica.healthy, replica.weight_version, root_of(engine, replica)) == (True, 1, folder("one"))
        assert (await service.updater.push(2, folder("two"), kind="lora", policy="a"))["applied"]


async def test_an_adapter_that_was_loaded_without_an_answer_serves_nobody(
    engine: ScriptedEngine, weights: WeightStore, folder: Callable[[str], str]
) -> None:
    """Nobody heard that the engine took it: the push has failed, and so it stays, until it is repeated from another folder."""
    async with serving(weights, engine.url, weights_timeout_seconds=2.0) as service:
        hold = engine.weights.hold("adapter", done=True)
        push = asyncio.create_task(service.updater.push(1, folder("lost"), kind="lora", policy="a"))
        await until(hold.reached.is_set, engine.paths)
        assert not (await push)["applied"]
        hold.released.set()
        assert folder("lost") in engine.weights.adapters.values()
        async with serving(weights, engine.url) as other:
            assert (replica_of(other, "a").weight_version, root_of(engine, replica_of(other, "a"))) == (0, "/adapters/a")
        assert (await service.updater.push(1, folder("one"), kind="lora", policy="a"))["applied"]
        assert root_of(engine, replica_of(service, "a")) == folder("one")
        assert folder("lost") not in engine.weights.adapters.values(), "the next push takes it away"


async def test_an_engine_keeps_the_version_that_serves_and_the_one_before(
    engine: ScriptedEngine, weights: WeightStore, folder: Callable[[str], str]
) -> None:
    """A process that has not looked since still names the one before."""
    async with serving(weights, engine.url) as service:
        for version in range(1, 5):
            assert (await service.updater.push(version, folder(f"v{version}"), kind="lora", policy="a"))["applied"]
        loaded = find_loaded(engine.weights.adapters, "a")
        assert [(each.version, each.root) for each in loaded] == [(3, folder("v3")), (4, folder("v4"))]


async def test_an_engine_that_restarted_is_given_its_adapters_versions_again(
    engine: ScriptedEngine, weights: WeightStore, folder: Callable[[str], str]
) -> None:
    async with serving(weights, engine.url) as service:
        await service.updater.push(4, folder("four"), kind="lora", policy="a")
        before = replica_of(service, "a").served.name
        engine.weights.adapters = {"a": "/adapters/a", "b": "/adapters/b"}
        replica = replica_of(service, "a")
        await until(lambda: replica.healthy and replica.served.name != before, lambda: replica.reason)
        assert (replica.weight_version, root_of(engine, replica)) == (4, folder("four"))
        assert replica_of(service, "b").weight_version == 0


async def test_an_engine_whose_adapter_cannot_be_brought_up_serves_the_rest(
    engine: ScriptedEngine, weights: WeightStore
) -> None:
    await weights.advance(WeightState(4, "/nowhere", "lora"), "a")
    async with serving(weights, engine.url) as service:
        replica = replica_of(service, "a")
        assert not replica.healthy
        assert "it lacks weights 4" in replica.reason and "/nowhere does not exist" in replica.reason
        assert [each.healthy for each in service.pool.replicas] == [True, False, True]


async def test_a_version_from_another_store_is_taken_over(
    engine: ScriptedEngine, weights: WeightStore, folder: Callable[[str], str]
) -> None:
    """The engine outlived the store, or a service beside this one pushed: versions only grow."""
    engine.weights.adapters["a@v5.1.00000000"] = folder("five")
    async with serving(weights, engine.url) as service:
        assert (await weights.current("a")).version == 5
        assert (replica_of(service, "a").weight_version, replica_of(service, "b").weight_version) == (5, 0)
        assert root_of(engine, replica_of(service, "a")) == folder("five")


async def test_adapters_are_found_and_missed_on_the_next_visit(
    engine: ScriptedEngine, weights: WeightStore, folder: Callable[[str], str]
) -> None:
    async with serving(weights, engine.url) as service:
        engine.weights.adapters["c"] = "/adapters/c"
        await until(lambda: bool(service.pool.of("c")), lambda: service.pool.replicas)
        added = replica_of(service, "c")
        await until(lambda: added.healthy, lambda: added.reason)
        assert (await service.updater.push(2, folder("two"), kind="lora", policy="c"))["applied"]
        for name in list(engine.weights.adapters):
            if name.startswith("c"):
                del engine.weights.adapters[name]
        await until(lambda: "no longer has the adapter 'c'" in added.reason, lambda: added.reason)
        assert service.pool.find_policy("c") == "c", "its calls are not answered by another model"
        with pytest.raises(NotFound, match=r"there is no model 'c'; base models: the default one \(''\); adapters: 'a', 'b'"):
            await service.updater.push(3, folder("three"), kind="lora", policy="c")


async def test_an_adapter_that_somebody_else_replaced_is_not_trained_until_it_is_pushed(
    engine: ScriptedEngine, weights: WeightStore, folder: Callable[[str], str]
) -> None:
    async with serving(weights, engine.url) as service:
        replica = replica_of(service, "a")
        engine.weights.adapters["a"] = folder("other")
        await until(lambda: replica.weight_version is None, lambda: replica.notes)
        assert "had its adapter 'a' replaced" in replica.notes["replaced"]
        assert (await service.updater.push(1, folder("other"), kind="lora", policy="a"))["applied"]
        await until(lambda: not replica.notes, lambda: replica.notes)
        assert replica.weight_version == 1


async def test_what_is_pushed_where_it_cannot_go_is_refused_with_what_there_is(
    engine: ScriptedEngine, weights: WeightStore, folder: Callable[[str], str]
) -> None:
    async with serving(weights, engine.url) as service:
        with pytest.raises(NotFound, match=r"there is no model 'd'; base models: .*; adapters: 'a', 'b'"):
            await service.updater.push(1, folder("one"), kind="lora", policy="d")
        with pytest.raises(RequestError, match=r"kind lora needs the model of an adapter, not ''; .*; adapters: 'a', 'b'"):
            await service.updater.push(1, folder("one"), kind="lora")
        with pytest.raises(RequestError, match="the model 'a' is a LoRA adapter: it takes kind lora, not full"):
            await service.updater.push(1, folder("one"), policy="a")
        with pytest.raises(RequestError, match="the model 'a' is a LoRA adapter, which is pushed by path"):
            await service.updater.plan_group("a")
    with ScriptedEngine() as plain:
        async with serving(weights, plain.url) as service:
            with pytest.raises(RequestError, match="adapters: none; start vLLM with --enable-lora"):
                await service.updater.push(1, folder("one"), kind="lora")


async def test_an_engine_that_loads_no_adapters_says_how_it_would(
    engine: ScriptedEngine, weights: WeightStore, folder: Callable[[str], str]
) -> None:
    del engine.weights.routes["POST", "/v1/load_lora_adapter"], engine._routes["POST", "/v1/load_lora_adapter"]
    async with serving(weights, engine.url) as service:
        assert [each.healthy for each in service.pool.replicas] == [True, True, True]
        answer = await service.updater.push(1, folder("one"), kind="lora", policy="a")
        assert not answer["applied"]
        assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, which it refuses with several API servers" in answer["error"]


async def test_weights_under_adapters_hold_back_the_calls_of_all(
    engine: ScriptedEngine, weights: WeightStore, folder: Callable[[str], str]
) -> None:
    """The engine pauses as a whole; an adapter's version stays."""
    async with serving(weights, engine.url) as service:
        hold = engine.weights.hold("update", done=False)
        push = asyncio.create_task(service.updater.push(1, folder("full")))
        await until(hold.reached.is_set, engine.paths)
        waiting = [asyncio.create_task(service.pool.wait_for_gate(policy)) for policy in ("", "a", "b")]
        await asyncio.sleep(0)
        assert not any(each.done() for each in waiting)
        hold.released.set()
        assert (await push)["applied"]
        await asyncio.gather(*waiting)
        assert [each.weight_version for each in service.pool.replicas] == [1, 0, 0]


async def test_an_adapter_serves_only_while_the_base_model_under_it_does(
    engine: ScriptedEngine, weights: WeightStore, folder: Callable[[str], str]
) -> None:
    async with serving(weights, engine.url) as service:
        assert (await service.updater.push(1, folder("full")))["applied"]
        engine.fault("/finish_weight_update", Drop())
        assert not (await service.updater.push(2, folder("next")))["applied"]
        assert [each.healthy for each in service.pool.replicas] == [False, False, False]
        await until(lambda: all(each.healthy for each in service.pool.replicas), lambda: service.pool.replicas)
