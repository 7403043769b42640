"""The pool over engines that come and go: who serves, why not, which replica a session gets, what a failed update leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from examples.vllm_server import free_port
from proxy.engine.pool.pool import EnginePool
from proxy.engine.replica import Replica
from proxy.errors import Conflict, EngineUnavailable, RequestError
from proxy.settings import Settings
from proxy.store.service import WeightState, WeightStore
from tests.support.engine.scripted_engine import ScriptedEngine
from tests.support.engine.strict_server import StrictServer
from tests.support.engine.weight_fixtures import generate, serving, until

pytestmark = pytest.mark.usefixtures("often_visited")


@pytest.fixture
def plain() -> Iterator[ScriptedEngine]:
    """It takes no weights."""
    with ScriptedEngine(updatable=False) as engine:
        yield engine


@pytest.fixture
def engine() -> Iterator[ScriptedEngine]:
    with ScriptedEngine() as engine:
        yield engine


@pytest.fixture
def path(tmp_path: Path) -> str:
    """A checkpoint's folder, which is there."""
    return str(tmp_path)


async def test_an_engine_may_come_late_die_and_return(weights: WeightStore) -> None:
    engine = ScriptedEngine().start()
    engine.stop()
    async with serving(weights, engine.url) as service:
        ready, reason = service.pool.ready()
        assert not ready
        assert str(engine.port) in reason
        with pytest.raises(EngineUnavailable, match="no engine can take the call"):
            service.pool.pick("s")
        for _ in range(2):
            engine.start(engine.port)
            await until(lambda: service.pool.ready() == (True, ""), service.pool.ready)
            assert service.pool.pick("s").url == engine.url
            assert list(service.pool.catalogue()) == ["policy"]
            engine.stop()
            await until(lambda: not service.pool.ready()[0], service.pool.ready)
            assert list(service.pool.catalogue()) == []


async def test_a_pool_without_engines_says_so(weights: WeightStore) -> None:
    async with serving(weights) as service:
        assert service.pool.ready() == (False, "no engine is configured")


async def test_a_failed_call_takes_the_replica_out_until_it_answers_again(engine: ScriptedEngine, weights: WeightStore) -> None:
    async with serving(weights, engine.url) as service:
        service.pool.mark_failed(service.pool.pick("s"), "it broke off")
        assert service.pool.ready() == (False, f"127.0.0.1:{engine.port}: it broke off")
        await until(lambda: service.pool.ready()[0], service.pool.ready)


async def test_a_refused_key_is_named(weights: WeightStore) -> None:
    with StrictServer() as server:
        async with serving(weights, server.url) as service:
            assert "refuses the engine API key (HTTP 401)" in service.pool.ready()[1]


@pytest.mark.engine
async def test_a_real_engine_is_known_by_its_models_and_window(vllm_url: str, weights: WeightStore) -> None:
    async with serving(weights, f"{vllm_url}/v1/") as service:
        replica = service.pool.pick("s")
        assert (replica.url, replica.api, replica.models, replica.max_model_len) == (vllm_url, "token", ("policy",), 8192)
        assert replica.updatable
        assert replica.weight_version == (await weights.current()).version


async def test_a_session_stays_and_only_those_of_a_dead_replica_move(
    engines: list[ScriptedEngine], plain: ScriptedEngine, weights: WeightStore
) -> None:
    async with serving(weights, *(engine.url for engine in (*engines, plain))) as service:
        sessions = [f"session-{number}" for number in range(300)]
        before = {session: service.pool.pick(session) for session in sessions}
        counts = [list(before.values()).count(replica) for replica in service.pool.replicas]
        assert min(counts) > 60
        dead = service.pool.replicas[1]
        engines[1].stop()
        service.pool.mark_failed(dead, "gone")
        for session, replica in before.items():
            after = service.pool.pick(session)
            assert after is not dead
            assert replica is dead or after is replica


async def test_calls_that_arrive_wait_while_the_gate_is_held() -> None:
    pool = EnginePool(Settings(engine=[]))
    await asyncio.wait_for(pool.wait_for_gate(), 30)
    with pool.hold():
        waiting = asyncio.create_task(pool.wait_for_gate())
        with pool.hold():
            await asyncio.sleep(0.01)
        assert not waiting.done()
    await asyncio.wait_for(waiting, 30)


async def test_an_engine_that_takes_no_weights_is_version_0_until_others_were_pushed(
    plain: ScriptedEngine, engine: ScriptedEngine, path: str, weights: WeightStore
) -> None:
    """Its tokens are versioned, by what it was started with; it never serves as if it had followed a push."""
    async with serving(weights, plain.url, engine.url) as service:
        first, second = service.pool.replicas
        assert (first.weight_version, first.version_of(None), first.version_of("default")) == (0, 0, 0)
        assert (second.weight_version, second.version_of("7"), second.version_of("default")) == (0, 7, None)
        answer = await service.updater.push(1, path)
        assert answer["applied"]
        assert answer["replicas"][second.name]["ok"]
        assert "the engine has no routes for weights" in answer["replicas"][first.name]["error"]
        assert (first.healthy, second.healthy, second.weight_version) == (False, True, 1)
        await until(lambda: "weights 1 were pushed and it cannot take them" in first.reason, service.pool.ready)


@pytest.mark.parametrize("updatable", [False, True])
def test_a_label_that_is_no_number_is_no_version_and_is_told_once(updatable: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Whoever loads other weights into an engine labels them; by what they call them nobody knows which are newer."""
    replica = Replica("r", "http://r", updatable=updatable, weight_version=0)
    labels = ("step-120", "step-120", "4", "step-121", "-1", "")
    assert [replica.version_of(label) for label in labels] == [None, None, 4, None, None, None]
    told = [record.getMessage() for record in caplog.records]
    assert [message.split("weights ")[1].split(",")[0] for message in told] == ["'step-120'", "'step-121'", "'-1'", "''"]


async def test_when_no_engine_takes_the_weights_nothing_changes(plain: ScriptedEngine, path: str, weights: WeightStore) -> None:
    async with serving(weights, plain.url) as service:
        answer = await service.updater.push(1, path)
        assert not answer["applied"]
        assert "start vLLM with VLLM_SERVER_DEV_MODE=1" in answer["error"]
        assert (await weights.current()).version == 0
        assert service.pool.ready() == (True, "")


async def test_a_version_that_is_taken_is_refused_before_any_engine_hears_of_it(
    engine: ScriptedEngine, path: str, weights: WeightStore
) -> None:
    async with serving(weights, engine.url) as service:
        assert (await service.updater.push(2, path))["applied"]
        for version in (1, 2):
            with pytest.raises(Conflict, match=f"version {version} is not greater than the current 2"):
                await service.updater.push(version, path)
        assert engine.paths().count("/pause") == 1
        assert (engine.weights.label, engine.weights.paused, service.pool.ready()) == ("2", False, (True, ""))


async def test_a_push_without_any_engine_is_refused(path: str, weights: WeightStore) -> None:
    async with serving(weights, f"http://127.0.0.1:{free_port()}") as service:
        with pytest.raises(EngineUnavailable, match="no engine can take the weights"):
            await service.updater.push(1, path)


async def test_torn_weights_serve_no_one_until_a_whole_update(
    engines: list[ScriptedEngine], path: str, weights: WeightStore
) -> None:
    """Its calls in flight are cut rather than left waiting, it stays paused, and the next good push brings it back."""
    first, second = engines
    torn = first.weights
    torn.tears = "reading broke off, the weights are torn"
    async with serving(weights, first.url, second.url) as service:
        answer = await service.updater.push(1, path)
        assert answer["applied"]
        failed = service.pool.replicas[0]
        assert answer["replicas"][failed.name]["error"] == torn.tears
        assert torn.paused
        assert [each.body for each in first.received if each.path == "/abort_requests"] == [{}]
        assert {service.pool.pick(f"s{number}").url for number in range(50)} == {second.url}
        torn.tears = ""
        answer = await service.updater.push(2, path)
        assert answer["replicas"][failed.name]["ok"]
        assert (torn.paused, torn.label, failed.healthy, failed.weight_version) == (False, "2", True, 2)


async def test_a_replica_that_refused_goes_on_alone_but_not_beside_one_that_took_the_weights(
    engines: list[ScriptedEngine], path: str, weights: WeightStore
) -> None:
    first, second = engines
    first.weights.refuses = f"{path} does not exist on the engine's machine"
    async with serving(weights, first.url) as service:
        assert not (await service.updater.push(1, path))["applied"]
        assert service.pool.ready() == (True, "")
        assert "/pause" not in first.paths(), "a refused checkpoint costs no pause"
    async with serving(weights, first.url, second.url) as service:
        assert (await service.updater.push(1, path))["applied"]
        late = service.pool.replicas[0]
        assert not late.healthy
        await until(lambda: late.reason.startswith("it lacks weights 1, and loading them failed"), lambda: late.reason)
        assert first.weights.label == "0"


async def test_an_engine_that_joins_late_gets_the_current_weights_first(
    engine: ScriptedEngine, path: str, weights: WeightStore
) -> None:
    await weights.advance(WeightState(3, path))
    async with serving(weights, engine.url) as service:
        await until(lambda: service.pool.ready()[0], service.pool.ready)
        assert (engine.weights.loaded["path"], engine.weights.label, engine.weights.paused) == (path, "3", False)


async def test_an_engine_that_outlived_the_store_keeps_its_version(engine: ScriptedEngine, weights: WeightStore) -> None:
    engine.sampler.version = "7"
    async with serving(weights, engine.url) as service:
        assert service.pool.pick("s").weight_version == 7
        assert (await weights.current()).version == 7


async def test_a_push_is_seen_by_the_other_processes(engine: ScriptedEngine, path: str, weights: WeightStore) -> None:
    async with serving(weights, engine.url) as one, serving(weights, engine.url) as other:
        assert (await one.updater.push(1, path))["applied"]
        await until(lambda: other.pool.replicas[0].weight_version == 1, other.pool.ready)
        assert other.pool.ready() == (True, "")


@pytest.mark.parametrize(
    ("push", "says"),
    [
        ({"version": 0, "path": "/w"}, "version is 0, must be 1 or more"),
        ({"version": 1, "path": "w"}, "must be absolute"),
        ({"version": 1, "path": "/w", "kind": "diff"}, "kind is 'diff', must be one of full, delta, lora"),
        ({"version": 1, "path": "/w", "mode": "later"}, "mode is 'later', must be one of keep, wait, abort"),
    ],
)
async def test_a_push_that_makes_no_sense_is_refused(push: dict[str, Any], says: str, weights: WeightStore) -> None:
    async with serving(weights) as service:
        with pytest.raises(RequestError, match=says):
            await service.updater.push(**push)


@pytest.mark.engine
async def test_a_plain_server_beside_a_real_one_leaves_the_pool_at_the_first_push(
    vllm_url: str, tiny_model: Path, plain: ScriptedEngine, weights: WeightStore
) -> None:
    async with serving(weights, vllm_url) as service:
        version = await service.next_version()
        assert (await service.updater.push(version, str(tiny_model)))["applied"]
    async with serving(weights, vllm_url, plain.url) as service:
        assert service.pool.pick("s").url == vllm_url
        assert "cannot take them" in service.pool.replicas[1].reason
        said = await generate(vllm_url, [20, 21, 22], 4)
        assert said.spans == [(str(version), 0, 4)]
