"""Engines whose workers lack the methods or the backend that keep claims and take checkpoints: they take adapters all the same."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from proxy.store.service import WeightStore
from tests.support.engine.forked_vllm import run_beside_vllm
from tests.support.engine.scripted_engine import Fail, ScriptedEngine
from tests.support.engine.vllm_server import require_vllm
from tests.support.engine.weight_fixtures import serving
from tests.support.service.redis_server import Store


@pytest.fixture
async def weights(redis_url: str) -> AsyncIterator[WeightStore]:
    store = Store.at(redis_url)
    yield store.weights
    await store.connection.close()


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(("extended", "backend"), [(False, False), (True, False), (True, True)])
async def test_an_adapter_goes_into_an_engine_whatever_its_workers_know(
    workers: int, extended: bool, backend: bool, weights: WeightStore, tmp_path: Path
) -> None:
    """Two workers that are asked for a method they lack would answer later questions with the answers to this one."""
    with ScriptedEngine(adapters=["learner"]) as engine:
        engine.weights.workers, engine.weights.extended, engine.weights.backend = workers, extended, backend
        async with serving(weights, engine.url) as service:
            answer = await service.updater.push(1, str(tmp_path), kind="lora", policy="learner")
            assert answer["applied"], answer
            (replica,) = service.pool.of("learner")
            assert (engine.weights.adapters[replica.served.name], replica.weight_version) == (str(tmp_path), 1)
            assert engine.weights.broken == []
            assert service.pool.ready() == (True, "")


@pytest.mark.parametrize(
    ("extended", "says"), [(False, "its workers were started without --worker-extension-cls"), (True, "the backend")]
)
async def test_a_checkpoint_is_refused_by_such_an_engine_before_it_is_asked_to_load_it(
    extended: bool, says: str, weights: WeightStore, tmp_path: Path
) -> None:
    with ScriptedEngine() as engine:
        engine.weights.workers, engine.weights.extended, engine.weights.backend = 2, extended, False
        async with serving(weights, engine.url) as service:
            answer = await service.updater.push(1, str(tmp_path))
            assert not answer["applied"] and says in answer["error"]
            assert "/pause" not in engine.paths() and engine.weights.broken == []
            assert service.pool.ready() == (True, ""), "it serves as it was started"


async def test_an_engine_that_does_not_say_how_its_workers_were_started_is_asked(weights: WeightStore, tmp_path: Path) -> None:
    with ScriptedEngine() as engine:
        engine.weights.workers = 2
        engine.fault("/server_info", *[Fail(404, "Not Found")] * 50)
        async with serving(weights, engine.url) as service:
            assert (await service.updater.push(1, str(tmp_path)))["applied"]


ASKED = """
from types import SimpleNamespace

from proxy.engine.in_vllm.backend import VerbatimWorker

class Worker(VerbatimWorker):
    vllm_config = SimpleNamespace(model_config=SimpleNamespace(logprobs_mode="raw_logprobs"))
    weight_transfer_engine = None

worker = Worker()
print("answers:", worker.verbatim_weights(), worker.verbatim_claim("owner", 1, 9.0))
print("answers:", worker.verbatim_prepare("ticket", "/weights", "full"), worker.verbatim_check_transfer({}))
"""


def answers(program: str, *arguments: str) -> list[str]:
    """The answers that a program prints which imports vLLM. It is a process of its own, because that import warns."""
    require_vllm()
    done = run_beside_vllm("-c", program, *arguments)
    assert done.returncode == 0, done.stderr
    return [line for line in done.stdout.splitlines() if line.startswith("answers:")]


@pytest.mark.engine
def test_a_worker_without_the_backend_says_so_and_does_not_raise() -> None:
    said = answers(ASKED)
    assert [line.count("{'no_backend': 'start vLLM with --weight-transfer-config") for line in said] == [2, 2], said


UNREADABLE = """
import json
import sys
from pathlib import Path
from types import SimpleNamespace

from contract.tensor_files import INDEX
from proxy.engine.in_vllm.backend import Claims, VerbatimEngine, VerbatimUpdate, VerbatimWorker

engine = VerbatimEngine.__new__(VerbatimEngine)
engine.claims, engine._tied, engine.parallel_config = Claims(), {}, SimpleNamespace(world_size=2)
engine.state = {"whole": True, "updates": 0, "error": None}
engine._mirror = engine._preparation = None

class Worker(VerbatimWorker):
    weight_transfer_engine = engine

Path(sys.argv[1], INDEX).write_text(json.dumps({"weight_map": ["model.safetensors"]}))
for path in ("/" + 300 * "x", sys.argv[1]):
    engine.receive_weights(VerbatimUpdate(path=path, version=1))
    while not (answer := Worker().verbatim_prepare(path, path, "full"))["done"]:
        pass
    print("answers:", answer["error"], engine.state)
print("answers:", Worker().verbatim_check_transfer({"group": "g"})["error"])
"""


@pytest.mark.engine
def test_a_worker_beside_others_does_not_raise_whatever_keeps_it_from_reading(tmp_path: Path) -> None:
    """A name that is too long stands for every path at which the system refuses to look, such as one in a folder that the engine's user
    may not enter."""
    long, listed, transfer = answers(UNREADABLE, str(tmp_path))
    for line, told in ((long, "File name too long"), (listed, "is not a safetensors index")):
        assert line.count(told) == 2 and "'whole': True, 'updates': 0" in line, line
    assert transfer != "answers: None"
