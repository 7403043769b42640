"""Weights sent from the trainer's GPU to the engines' over NCCL, with vLLM's own weight-transfer engine.

    publisher = client.nccl(model, master_address="10.0.0.5", master_port=29600)
    publisher.publish(version)                          # repeat for every version

The trainer needs `vllm`, torch and its own GPU. It is rank 0 of one NCCL group; the workers of all replicas of the model are the
other ranks, which join at the first publish and again whenever the engines have changed. The service pauses every replica, reports
when all are ready to receive, and makes the version current as a published checkpoint does.

A broadcast needs all its members. Everything that can be checked is checked before anything is paused, but an engine that dies while
it receives leaves the others and the trainer waiting inside NCCL: those engines must be restarted. A replica that is added later gets
the checkpoint at `path` if the last push named one; otherwise it serves from the next push on.
Checked against vLLM 0.32 and 0.33 (`vllm/distributed/weight_transfer/nccl_engine.py`); another version is refused before anything is sent.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Mapping
from typing import Any, Literal, Protocol

from contract.client import ONCE, ServiceClient
from contract.errors import ServiceError
from trainer_client.errors import UnpublishableWeights, VersionConflict
from trainer_client.publish import ReplicaFailed, WeightPush, decode_push, explain_failure
from trainer_client.wire import decode_body

OTHER_VLLM = (
    "nccl speaks to the engines as vLLM {checked} does, and the trainer has vLLM {version}: install one of these in the trainer, "
    "or publish a checkpoint"
)
NO_VLLM = "nccl needs vllm in the trainer's environment (pip install vllm); without it publish a checkpoint"
CHECKED = ("0.32", "0.33")
"""The first two numbers of the versions of vLLM whose sender is used."""
NO_GPU = "nccl needs a GPU in the trainer, and torch sees none; without one publish a checkpoint"


class Sender(Protocol):
    """The part of vLLM's `TrainerWeightTransferEngine` used here. `source.metadata`, a method in vLLM 0.32 and a property since, has the
    name, dtype and shape of every parameter in order."""

    source: Any

    def send_weights(self) -> None: ...

    def shutdown(self) -> None: ...


OpenSender = Callable[[dict[str, Any], "NcclSync", Any], Sender]
"""Opens the trainer's end of the group from NCCLTrainerInitInfo's fields; called on every rank of the trainer."""


class NcclPublisher:
    """Returned by `TrainerClient.nccl`. In a distributed trainer every rank has one and publishes at the same time; rank 0 sends."""

    def __init__(
        self,
        service: ServiceClient,
        weights: Any,
        where: Mapping[str, Any],
        *,
        model: str = "",
        rank: int = 0,
        push_seconds: float = 3600.0,
        open_sender: OpenSender | None = None,
    ) -> None:
        self._control = NcclSync(service, model, push_seconds)
        self._weights = weights
        self._where = dict(where)
        self._rank = rank
        self._open = open_sender or _open_vllm
        self._sender: Sender | None = None

    def publish(
        self, version: int, *, mode: Literal["keep", "wait", "abort"] = "keep", path: str | None = None
    ) -> WeightPush | None:
        """Send the weights to every replica, all of which then serve `version`. None on ranks other than 0.

        `path`: a checkpoint of the same weights, for replicas that are added later.
        Raises: VersionConflict, UnpublishableWeights (no GPU, no vLLM), ReplicaFailed, ServiceError, NoAnswer.
        """
        sender = self._connect()
        if self._rank != 0:
            sender.send_weights()
            return None
        metadata = sender.source.metadata
        self._control.announce(version, mode, path, metadata() if callable(metadata) else metadata)
        try:
            sender.send_weights()
            return self._control.result()
        except ReplicaFailed:
            # A restarted engine is in no group but looks unchanged: at the next try all of them join again.
            self.close()
            raise

    def close(self) -> None:
        """Leave the group."""
        if self._sender is not None:
            self._sender.shutdown()
            self._sender = None

    def _connect(self) -> Sender:
        if self._sender is None or (self._rank == 0 and self._control.have_engines_changed()):
            self.close()
            world_size = self._control.world_size() if self._rank == 0 else 0
            init = {**self._where, "world_size": world_size, "rank": self._rank}
            self._sender = self._open(init, self._control, self._weights)
        return self._sender


class NcclSync:
    """Implements vLLM's `VLLMWeightSyncClient` with requests to the service."""

    def __init__(self, service: ServiceClient, model: str, push_seconds: float) -> None:
        self._service = service
        self._model = model
        self._push_seconds = push_seconds
        self._group: dict[str, Any] = {}
        """Empty until the engines have joined."""
        self._body: dict[str, Any] = {}
        self._described: dict[str, Any] = {}
        """The parameters as the last transfer of this group described them."""
        self._lines: Generator[str, None, None]
        self._result: dict[str, Any] | None = None

    def world_size(self) -> int:
        """The current number of members, the trainer included."""
        return int(self._plan()["world_size"])

    def have_engines_changed(self) -> bool:
        """Whether the engines differ from those that joined."""
        return not self._group or any(self._plan()[name] != self._group[name] for name in ("world_size", "replicas"))

    def announce(self, version: int, mode: str, path: str | None, metadata: Any) -> None:
        """Set what the next `send_weights` sends; `metadata` has the name, dtype and shape of every parameter in order."""
        transfer = {
            "group": self._group["group"],
            "world_size": self._group["world_size"],
            "names": [entry.name for entry in metadata],
            "dtype_names": [str(entry.dtype).removeprefix("torch.") for entry in metadata],
            "shapes": [list(entry.shape) for entry in metadata],
        }
        self._body = {"version": version, "kind": "nccl", "mode": mode, "model": self._model, "transfer": transfer}
        if path is not None:
            self._body["path"] = path
        self._result = None

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Make the engines join; the service assigns their ranks after the trainer's."""
        body = {name: value for name, value in init_info.items() if name != "rank_offset"} | {"model": self._model}
        response = self._service.request("POST", "/weights/group", body=body, answer_seconds=self._push_seconds, retry=ONCE)
        self._group, self._described = decode_body(response), {}

    def start_weight_update(self) -> None:
        """Return when every replica is paused and about to receive, so that the broadcast may start."""
        silence_seconds = self._service.timeout_seconds + self._push_seconds
        self._lines = self._service.stream(
            "POST", "/weights", body=self._body, accept="application/x-ndjson", silence_seconds=silence_seconds
        )
        for line in map(json.loads, self._lines):
            if line.get("step") == "receiving":
                return
            self._take(line)
        self.result()
        raise ReplicaFailed("the push ended before anything was sent", push=self._decode_result())

    def update_weights(self, update_info: Any) -> None:
        """Return when the push has ended. Runs in parallel with the broadcast."""
        announced = {name: self._body["transfer"][name] for name in ("names", "dtype_names", "shapes")}
        sent = {name: update_info[name] for name in announced}
        # Since 0.33 nothing is described that was described before.
        if (sent if any(sent.values()) else self._described) != announced:
            raise UnpublishableWeights("the trainer's parameters changed between their announcement and the transfer")
        for line in map(json.loads, self._lines):
            self._take(line)
        self._described = announced

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Does nothing: the service sets the version of each replica that has received everything."""

    def result(self) -> WeightPush:
        """Raises ReplicaFailed, also if the service never reported the result."""
        push = self._decode_result()
        if push.failed or not push.applied:
            raise ReplicaFailed(explain_failure(push), push=push)
        return push

    def _decode_result(self) -> WeightPush:
        ended = self._result or {"applied": False, "seconds": 0.0, "replicas": {}}
        return decode_push(ended, self._body["version"], self._body.get("path", ""))

    def _take(self, line: dict[str, Any]) -> None:
        if "result" in line:
            self._result = line["result"]
        elif "status" in line:
            self._lines.close()
            kind = VersionConflict if line["status"] == 409 else ServiceError
            raise kind(line["error"]["message"], status=line["status"], code=line["error"]["code"])

    def _plan(self) -> dict[str, Any]:
        where = f"/weights/group?model={self._model}" if self._model else "/weights/group"
        return dict(decode_body(self._service.request("GET", where)))


def _open_vllm(init: dict[str, Any], control: NcclSync, weights: Any) -> Sender:
    """vLLM's sender of a torch module or of a vLLM `WeightSource`. Raises UnpublishableWeights."""
    try:
        from vllm import __version__

        if ".".join(__version__.split(".")[:2]) not in CHECKED:
            raise UnpublishableWeights(OTHER_VLLM.format(checked=" and ".join(CHECKED), version=__version__))
        from vllm.distributed.weight_transfer.base import ModuleSource
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo, NCCLTrainerWeightTransferEngine
    except ImportError as error:
        raise UnpublishableWeights(f"{NO_VLLM}: {error}") from error
    import torch

    if not torch.cuda.is_available():
        raise UnpublishableWeights(NO_GPU)
    source = ModuleSource(weights) if isinstance(weights, torch.nn.Module) else weights
    sender: Sender = NCCLTrainerWeightTransferEngine.trainer_init(NCCLTrainerInitInfo(**init), client=control, source=source)
    return sender
