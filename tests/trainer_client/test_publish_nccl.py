"""A trainer that sends its weights over NCCL: the steps, in their order, on both sides; without a GPU nothing is broadcast.

vLLM's own sender runs where vLLM is installed, with its broadcast replaced: NCCL itself needs two GPUs (end_to_end/test_nccl_on_gpu.py).
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch

from tests.support.engine.forked_vllm import run_beside_vllm
from tests.support.engine.scripted_engine import ScriptedEngine
from tests.support.engine.vllm_server import require_vllm
from tests.support.service.running_service import TRAINER, RunningService
from tests.support.service.verbatim_process import environment
from trainer_client.client import TrainerClient
from trainer_client.errors import UnpublishableWeights, VersionConflict
from trainer_client.publish import ReplicaFailed
from trainer_client.publish_nccl import NcclPublisher, NcclSync

WHERE = {"master_address": "127.0.0.1", "master_port": 29600, "packed": True}


@pytest.fixture
def engines() -> Iterator[list[ScriptedEngine]]:
    with ScriptedEngine() as first, ScriptedEngine() as second:
        first.weights.workers = 2
        yield [first, second]


@pytest.fixture
def service(engines: list[ScriptedEngine], redis_url: str) -> Iterator[RunningService]:
    with RunningService([engine.url for engine in engines], redis_url) as running:
        yield running


class Network:
    """Where NCCL would be: what was broadcast, and in what state the engines were when it began. No engine has received the first
    weights before they were broadcast."""

    def __init__(self, engines: list[ScriptedEngine]) -> None:
        self._engines = engines
        self._receiving = [engine.weights.hold("update", done=False) for engine in engines]
        self.sent: list[list[str]] = []
        self.all_paused: list[bool] = []
        self.opened: list[dict[str, Any]] = []
        self.shaped: list[ShapedSender] = []

    def open(self, init: dict[str, Any], control: NcclSync, weights: Any) -> Any:
        """vLLM's sender, joined to nobody."""
        require_vllm()
        from vllm.distributed.weight_transfer.base import ModuleSource
        from vllm.distributed.weight_transfer.nccl_common import worker_init_payload
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerWeightTransferEngine, NCCLWeightTransferInitInfo

        network = self

        class Sender(NCCLTrainerWeightTransferEngine):
            def _broadcast(self, source: Any, meta: Any) -> None:
                network.receive([name for name, _ in self._checked_iter(source, meta)])

        fields = {name: value for name, value in init.items() if name != "rank"}
        control.init_weight_transfer_engine(worker_init_payload(NCCLWeightTransferInitInfo(rank_offset=1, **fields)))
        self.opened.append(init)
        return Sender(client=control, source=ModuleSource(weights))

    def open_shaped(self, init: dict[str, Any], control: NcclSync, weights: Any) -> ShapedSender:
        control.init_weight_transfer_engine({name: value for name, value in init.items() if name != "rank"})
        self.shaped.append(ShapedSender(self, control, weights))
        return self.shaped[-1]

    def receive(self, names: list[str]) -> None:
        self.all_paused.append(all(engine.weights.paused for engine in self._engines))
        self.sent.append(names)
        for received in self._receiving:
            received.released.set()


class Described(NamedTuple):
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class ShapedSender:
    """A sender in the shapes of vLLM 0.33, of whatever version is installed: its source has the metadata as a property, and what was
    described in the last transfer is not described again."""

    class Source:
        def __init__(self, module: torch.nn.Module) -> None:
            self._module = module

        @property
        def metadata(self) -> list[Described]:
            return [Described(name, each.dtype, tuple(each.shape)) for name, each in self._module.named_parameters()]

    def __init__(self, network: Network, client: NcclSync, weights: torch.nn.Module) -> None:
        self.source = self.Source(weights)
        self._network = network
        self._client = client
        self._sent: list[Described] | None = None
        self.described: list[dict[str, Any]] = []

    def send_weights(self) -> None:
        found = self.source.metadata
        told = [] if found == self._sent else found
        self.described.append(
            {
                "names": [each.name for each in told],
                "dtype_names": [str(each.dtype).split(".")[-1] for each in told],
                "shapes": [list(each.shape) for each in told],
            }
        )
        self._client.start_weight_update()
        self._network.receive([each.name for each in found])
        self._client.update_weights(self.described[-1])
        self._client.finish_weight_update()
        self._sent = found

    def shutdown(self) -> None:
        """Nothing is open."""


@pytest.fixture
def network(engines: list[ScriptedEngine]) -> Network:
    return Network(engines)


@pytest.fixture
def publisher(service: RunningService, network: Network) -> Iterator[NcclPublisher]:
    with TrainerClient(service.url, TRAINER, retry_seconds=5) as client:
        made = NcclPublisher(client._service, torch.nn.Linear(2, 3), WHERE, open_sender=network.open)
        yield made
        made.close()


def test_weights_are_sent_when_every_replica_is_ready_and_become_current(
    service: RunningService, engines: list[ScriptedEngine], network: Network, publisher: NcclPublisher
) -> None:
    push = publisher.publish(1)
    assert (push.applied, push.failed) == (True, {})
    assert network.sent == [["weight", "bias"]]
    assert network.all_paused == [True]
    places = [(info["rank_offset"], info["world_size"]) for engine in engines for info in engine.weights.joined]
    assert places == [(1, 4), (3, 4)], "the first engine has two workers"
    for engine in engines:
        assert (engine.weights.label, engine.weights.paused, engine.weights.broken) == ("1", False, [])
        updates = [request.body["update_info"] for request in engine.received if request.path == "/update_weights"]
        assert updates[0]["transfer"]["names"] == ["weight", "bias"]
        assert updates[0]["transfer"]["shapes"] == [[3, 2], [3]]
        assert updates[0]["transfer"]["dtype_names"] == ["float32", "float32"]
    current = service.request("GET", "/weights").json()["current"]
    assert (current["version"], current["kind"], current["path"]) == (1, "nccl", None)
    assert publisher.publish(2, mode="wait") is not None
    assert len(network.opened) == 1, "the group is kept"


def test_parameters_vllm_does_not_list_are_unchanged(
    service: RunningService, engines: list[ScriptedEngine], network: Network
) -> None:
    """They were taken for a change, and the error came beside the broadcast, with the engines waiting in NCCL. The engines are told all of
    them each time."""
    with TrainerClient(service.url, TRAINER, retry_seconds=5) as client:
        publisher = NcclPublisher(client._service, torch.nn.Linear(2, 3), WHERE, open_sender=network.open_shaped)
        for version in (1, 2):
            push = publisher.publish(version)
            assert push.applied
        engines[1].weights.workers = 3
        publisher.publish(3)
        publisher.close()
    named = [[told["names"] for told in sender.described] for sender in network.shaped]
    assert named == [[["weight", "bias"], []], [["weight", "bias"]]], "a group that is joined anew is told all"
    assert network.all_paused == [True] * 3
    for engine in engines:
        updates = [request.body["update_info"]["transfer"] for request in engine.received if request.path == "/update_weights"]
        assert [update["names"] for update in updates] == [["weight", "bias"]] * 3
        assert [update["shapes"] for update in updates] == [[[3, 2], [3]]] * 3


def test_a_trainer_with_another_vllm_is_refused_before_anything_begins(
    service: RunningService, engines: list[ScriptedEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    other: Any = ModuleType("vllm")
    other.__version__ = "0.34.1"
    monkeypatch.setitem(sys.modules, "vllm", other)
    with TrainerClient(service.url, TRAINER) as client:
        publisher = NcclPublisher(client._service, torch.nn.Linear(2, 3), WHERE)
        with pytest.raises(
            UnpublishableWeights, match=r"as vLLM 0\.32 and 0\.33 does, and the trainer has vLLM 0\.34\.1: install one"
        ):
            publisher.publish(1)
    assert not {"/init_weight_transfer_engine", "/pause"} & {path for engine in engines for path in engine.paths()}


def test_nothing_is_sent_and_nothing_changes_when_one_replica_cannot_receive(
    engines: list[ScriptedEngine], network: Network, publisher: NcclPublisher
) -> None:
    publisher.publish(1)
    engines[1].weights.refuse_check = "the model has no place for bias"
    with pytest.raises(ReplicaFailed, match="no replica serves it; nothing has changed") as error:
        publisher.publish(2)
    assert sorted(error.value.push.failed.values())[1] == "the model has no place for bias"
    assert len(network.sent) == 1
    assert [(engine.weights.label, engine.weights.paused) for engine in engines] == [("1", False), ("1", False)]
    assert publisher.publish(2) is not None


def test_the_group_is_joined_again_for_changed_engines(
    engines: list[ScriptedEngine], network: Network, publisher: NcclPublisher
) -> None:
    publisher.publish(1)
    engines[1].weights.workers = 3
    publisher.publish(2)
    assert [opened["world_size"] for opened in network.opened] == [4, 6]


def test_a_restarted_engine_joins_the_group_next_time(
    engines: list[ScriptedEngine], network: Network, publisher: NcclPublisher
) -> None:
    """It has the name and the workers that it had, and is in no group."""
    publisher.publish(1)
    engines[0].weights.loaded = {key: value for key, value in engines[0].weights.loaded.items() if key != "group"}
    with pytest.raises(ReplicaFailed, match="is not in the group"):
        publisher.publish(2)
    assert len(network.sent) == 1
    assert publisher.publish(2) is not None
    assert len(network.opened) == 2


def test_a_taken_version_is_refused_before_any_pause(
    engines: list[ScriptedEngine], network: Network, publisher: NcclPublisher
) -> None:
    publisher.publish(3)
    with pytest.raises(VersionConflict, match="version 3 is not greater than the current 3"):
        publisher.publish(3)
    assert engines[0].paths().count("/pause") == 1
    assert len(network.sent) == 1


def test_other_ranks_of_the_trainer_only_take_part_in_the_gathering(service: RunningService) -> None:
    gathered = threading.Event()

    class Gathering:
        source = None

        def send_weights(self) -> None:
            gathered.set()

        def shutdown(self) -> None:
            """Nothing is open."""

    with TrainerClient(service.url, TRAINER) as client:
        publisher = NcclPublisher(client._service, None, WHERE, rank=1, open_sender=lambda *_: Gathering())
        assert publisher.publish(1) is None
    assert gathered.is_set()


def test_a_copy_of_the_weights_lets_a_replica_that_comes_later_catch_up(
    service: RunningService, engines: list[ScriptedEngine], publisher: NcclPublisher, tmp_path: Path
) -> None:
    publisher.publish(1, path=str(tmp_path))
    engines[0].sampler.version = "default"
    engines[0].weights.loaded = {"whole": True, "path": None, "version": None, "updates": 0, "error": None}
    engines[0].wait_for(lambda: engines[0].weights.label == "1", 30)
    assert engines[0].weights.loaded["path"] == str(tmp_path)


@pytest.mark.engine
def test_a_trainer_without_a_gpu_is_told_so() -> None:
    """In a process that sees none, whatever this machine has."""
    require_vllm()
    program = """
from trainer_client.client import TrainerClient
from trainer_client.errors import UnpublishableWeights
from trainer_client.publish_nccl import _open_vllm
try:
    _open_vllm({}, None, None)
except UnpublishableWeights as error:
    print(error)
"""
    done = run_beside_vllm("-c", program, env=environment(CUDA_VISIBLE_DEVICES=""))
    assert "nccl needs a GPU in the trainer, and torch sees none; without one publish a checkpoint" in done.stdout, done.stderr
