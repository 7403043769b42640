"""The trainer's side of the service: lease batches, ack or nack them, publish new weights.

with TrainerClient("http://127.0.0.1:8700", token) as client:
    for batch in client.batches(max_groups=8, max_staleness=2):
        with batch:
            data = batch.padded(framework="torch", advantages=batch.advantages(grpo))
            ...                                     # one step of training
        client.publish(model.state_dict(), version := version + 1, directory="/shared/weights", keep_last=3)
"""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TypedDict, Unpack
from urllib.parse import quote

from contract.client import NEVER_STARTED, ServiceClient
from contract.errors import NoAnswer, ResourceConflict, ServiceUnavailable
from trainer_client.batch import Batch
from trainer_client.errors import InvalidAnswer, UnpublishableWeights, VersionConflict
from trainer_client.lease import Lease
from trainer_client.media import MediaFiles
from trainer_client.publish import (
    ReplicaFailed,
    WeightPush,
    check_tensors,
    checkpoints_in_use,
    decode_push,
    explain_failure,
    prune_versions,
    target_folder,
    write_tensors,
)
from trainer_client.publish_deltas import DeltaWriter
from trainer_client.publish_nccl import NcclPublisher
from trainer_client.wire import ACCEPT, LeaseReader, decode_body, decode_versions

if TYPE_CHECKING:
    import torch

Kind = Literal["full", "delta", "lora"]
Mode = Literal["keep", "wait", "abort"]


class LeaseTerms(TypedDict, total=False):
    """What a lease may ask for. Terms that are None or left out are the service's defaults."""

    max_groups: int | None
    """At most this many groups. Without either maximum: one group."""
    max_trajectories: int | None
    """As many groups as fit into this many rows, at least one."""
    max_staleness: int | None
    """No group with a token sampled more than this many versions of its model ago, unless the service marks such groups
    (`group.stale`)."""
    model: str | None
    """Only rows of this model, "" being the default one. None: of every model."""
    roles: Sequence[str] | None
    """Only rows of these roles. None: of all that are trained. A group with no such row arrives without rows; whatever is left out is
    never delivered once the batch is acknowledged."""
    run: str | None
    """Only groups of this run. None: of every run."""
    logprob_modes: Sequence[str] | None
    """Only tokens whose logprobs have these modes, of raw, processed, masked and unknown. None: all that the service trains. The others are
    in quarantine in `group.sessions`, and never delivered once the batch is acknowledged."""
    builder: str | None
    """How sessions become rows: merged or per_call. None: as the service is set."""
    complete_only: bool
    """Only groups all of whose sessions are complete (`group.sessions`)."""
    lease_seconds: float
    """How long the lease lasts unless it is extended. Default: 600."""


class TrainerClient:
    """Thread-safe. `consumer` names this trainer to the service (default: host:pid). `timeout_seconds` is how long the service may stay
    silent beyond the time a request asks it to wait; `retry_seconds` is how long transient errors are retried, from the first one. Raises
    ValueError for a `token` that cannot be sent."""

    def __init__(
        self,
        url: str,
        token: str,
        *,
        consumer: str | None = None,
        timeout_seconds: float = 30.0,
        retry_seconds: float = 120.0,
    ) -> None:
        self.consumer = consumer or f"{socket.gethostname()}:{os.getpid()}"
        self._service = ServiceClient(url, token, timeout_seconds=timeout_seconds, retry_seconds=retry_seconds)
        self._writers: dict[str, DeltaWriter] = {}

    def batches(
        self,
        *,
        wait_seconds: float = 30.0,
        keep: bool = True,
        stop: Callable[[], bool] | None = None,
        **terms: Unpack[LeaseTerms],
    ) -> Iterator[Batch]:
        """Leased batches without end; waits while there are none. Use each in a `with` block.

        Ends once `stop()` is true or the client is closed. Both are checked between requests, each of which waits for at
        most `wait_seconds`; a batch that arrives later is given back. Terms and errors as for `lease`.
        """
        body = self._lease_body(wait_seconds, terms)

        def has_ended() -> bool:
            return self._service.closing.is_set() or bool(stop and stop())

        while not has_ended():
            with self._service.keep_open():
                try:
                    batch = self._lease(body, keep, until=has_ended)
                except ServiceUnavailable:
                    if has_ended():
                        return
                    raise
                if batch and has_ended():
                    batch.nack()
                    return
            if batch:
                yield batch

    def lease(self, *, wait_seconds: float = 0.0, keep: bool = True, **terms: Unpack[LeaseTerms]) -> Batch | None:
        """One batch of whole groups on these `LeaseTerms`, or None when none came within `wait_seconds`.

        While other trainers wait, it holds no more than this consumer's share. With `keep`, its `with` block extends the lease. If the
        answer is lost, the request is repeated, and the groups of the first lease are delivered again when that lease expires.
        Raises: InvalidAnswer (the batch is given back first), ServiceError, ClientClosed.
        """
        return self._lease(self._lease_body(wait_seconds, terms), keep, until=self._service.closing.is_set)

    def attach(self, lease_id: str, *, lease_seconds: float = 600.0) -> Lease:
        """The lease with this id, to end or extend it without holding its batch, for example in another process.

        `expires_at` is NaN until it is extended, by `lease_seconds` unless `extend` is given another length."""
        return Lease(self._service, lease_id, math.nan, lease_seconds=lease_seconds, keep=False)

    def publish(
        self,
        weights: Mapping[str, Any] | str | os.PathLike[str],
        version: int,
        *,
        kind: Kind = "full",
        mode: Mode = "keep",
        directory: str | os.PathLike[str] | None = None,
        config: Any = None,
        dtype: torch.dtype | None = None,
        delta: bool = False,
        anchor_every: int = 20,
        keep_last: int | None = None,
        shard_bytes: int = 5 * 10**9,
        push_seconds: float = 3600.0,
        model: str = "",
    ) -> WeightPush:
        """Push `weights` to every replica of `model` ("": the default one), all of which then serve `version`.

        `weights` is a state dict of torch tensors, which is first written to `directory/version-<version>`, or a path the engines
        can read. `config`, the model's (`model.config`) or the folder it was loaded from, makes the version's folder a whole checkpoint
        that `from_pretrained` loads; engines need none. Calls in flight continue under the new weights (`mode` keep), finish first
        (wait) or are cut (abort). `keep_last`: afterwards remove all but this many version folders, those that an engine of any
        model may still be given, and those on which one of them is built.
        `dtype`: what floats are cast to first. `delta`: write what changed since the version before, where the engines hold just that, it
        pays, and fewer than `anchor_every` versions have passed since a whole one. Publish in the dtype that the engines serve: float32
        weights change in nearly every element. The client keeps a copy of the last version in memory.
        `push_seconds` is the longest a push may take.
        Raises: VersionConflict, UnpublishableWeights, ReplicaFailed, NoAnswer. A push that may have started is not
        retried: after NoAnswer, `weights()` tells whether it happened.
        """
        writer = self._writers.setdefault(model, DeltaWriter()) if delta else None
        if isinstance(weights, Mapping):
            options = {"config": config, "shard_bytes": shard_bytes}
            folder, kind = self._write(weights, version, kind, directory, model, dtype, writer, anchor_every, options)
        elif config is not None or delta or dtype is not None:
            option = "config" if config is not None else "delta" if delta else "dtype"
            raise UnpublishableWeights(f"`{option}` goes with a state dict: a path is published as it is")
        else:
            folder = Path(weights).absolute()
        body = {"version": version, "path": str(folder), "kind": kind, "mode": mode}
        push = self._push(body | ({"model": model} if model else {}), push_seconds)
        if push.applied and writer is not None:
            writer.confirm()
        if push.failed or not push.applied:
            raise ReplicaFailed(explain_failure(push), push=push)
        if keep_last is not None and directory is not None:
            prune_versions(directory, version, keep_last, in_use=checkpoints_in_use(self.weights()))
        return push

    def nccl(
        self,
        weights: Any,
        *,
        master_address: str,
        master_port: int,
        packed: bool = True,
        model: str = "",
        rank: int = 0,
        push_seconds: float = 3600.0,
    ) -> NcclPublisher:
        """A publisher that sends `weights`, a torch module, from its GPU to the engines' without a file: see `publish_nccl`. The engines
        connect to `master_address:master_port`, where this trainer's rank 0 listens."""
        where = {"master_address": master_address, "master_port": master_port, "packed": packed}
        return NcclPublisher(self._service, weights, where, model=model, rank=rank, push_seconds=push_seconds)

    def weights(self) -> dict[str, Any]:
        """The weights being served: `{current: {version, path, kind, updated_at}, history, updating, frozen, replicas}` of the default
        model, and under `models` the same for every other one."""
        answer = decode_body(self._service.request("GET", "/weights"))
        try:
            int(answer["current"]["version"])
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidAnswer(f"the answer to GET /weights names no current version: {error!r}") from error
        return dict(answer)

    def close(self) -> None:
        """End `batches`, and close the connections once requests in flight and open batches are done. Callable from any thread."""
        self._service.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    def _lease_body(self, wait_seconds: float, terms: LeaseTerms) -> dict[str, Any]:
        body: dict[str, Any] = {"wait_seconds": wait_seconds, "lease_seconds": 600.0, "consumer": self.consumer, **terms}
        if unknown := terms.keys() - LeaseTerms.__annotations__.keys():
            raise TypeError(f"a lease has no terms {', '.join(sorted(unknown))}")
        # The HTTP contract calls the model of a row its policy.
        body["policy"] = body.pop("model", None)
        body["complete_only"] = body.get("complete_only") or None
        return {name: value for name, value in body.items() if value is not None}

    def _lease(self, body: Mapping[str, Any], keep: bool, *, until: Callable[[], bool]) -> Batch | None:
        arriving = LeaseReader()
        try:
            response = self._service.request(
                "POST",
                "/batches/lease",
                body=body,
                accept=ACCEPT,
                answer_seconds=body["wait_seconds"],
                until=until,
                consume=arriving.read,
            )
            return None if response.status_code == 204 else self._make_batch(arriving, body["lease_seconds"], keep)
        except InvalidAnswer as error:
            if "lease_id" in arriving.head:
                self.attach(str(arriving.head["lease_id"])).give_back_after(error)
            raise

    def _make_batch(self, arrived: LeaseReader, lease_seconds: float, keep: bool) -> Batch:
        head = arrived.head
        try:
            lease = Lease(
                self._service, str(head["lease_id"]), float(head["expires_at"]), lease_seconds=lease_seconds, keep=keep
            )
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidAnswer(f"the answer to a lease is incomplete: {error!r}") from error
        media = MediaFiles.of((row for group in arrived.groups for row in group.trajectories), self._fetch_image)
        try:
            versions = decode_versions(head)
            return Batch(arrived.groups, versions[""], lease, weight_versions=versions, media=media)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise InvalidAnswer(f"the answer to a lease does not say how old its rows are: {error!r}") from error

    def _fetch_image(self, session_id: str, digest: str) -> bytes:
        path = f"/sessions/{quote(session_id, safe='')}/media/{quote(digest, safe='')}"
        return self._service.request("GET", path, accept="image/*").content

    def _write(
        self,
        weights: Mapping[str, Any],
        version: int,
        kind: Kind,
        directory: str | os.PathLike[str] | None,
        model: str,
        dtype: torch.dtype | None,
        writer: DeltaWriter | None,
        anchor_every: int,
        options: Mapping[str, Any],
    ) -> tuple[Path, Kind]:
        """The folder of the version and its kind."""
        if directory is None:
            raise UnpublishableWeights("a state dict needs a `directory` that the engines can read")
        served_root = self._check_target(version, kind, directory, model)
        tensors = check_tensors(weights, dtype)
        if writer is None:
            return write_tensors(tensors, directory, version, **options), kind
        return writer.write(tensors, directory, version, served_root=served_root, anchor_every=anchor_every, **options)

    def _check_target(self, version: int, kind: Kind, directory: str | os.PathLike[str], model: str) -> str | None:
        """The root of the weights that are served. Raises UnpublishableWeights or VersionConflict if the version must not be written."""
        if kind == "delta":
            raise UnpublishableWeights("kind delta goes with a path: of a state dict, publish(..., delta=True) writes one")
        if kind == "lora":
            raise UnpublishableWeights("an adapter needs its adapter_config.json: save it whole and publish its path")
        # Checked before writing: the folder of a version that is being served must not be overwritten.
        served = self.weights()
        lines = {"": served, **served.get("models", {})}
        if model not in lines:
            others = ", ".join(name for name in lines if name) or "only the default one"
            raise UnpublishableWeights(f"the service has no model {model!r}: known: {others}")
        current = int(lines[model]["current"]["version"])
        if version <= current:
            raise VersionConflict(f"version {version} is not greater than {current}, the served one", status=409)
        if (folder := target_folder(directory, version)) in (in_use := checkpoints_in_use(served)):
            owner = f"the model {in_use[folder]!r}" if in_use[folder] else "the default model"
            raise UnpublishableWeights(f"{folder} holds weights of {owner} that are in use: give each model its own directory")
        if folder.exists() and any(line.get("updating") for line in lines.values()):
            # A trainer that was killed in a push begins again at its number while engines still read the folder.
            raise VersionConflict(f"{folder} may be what a push that is running reads: wait until it has ended", status=409)
        root = lines[model]["current"].get("root")
        return None if root is None else str(root)

    def _push(self, body: Mapping[str, Any], push_seconds: float) -> WeightPush:
        try:
            response = self._service.request("POST", "/weights", body=body, answer_seconds=push_seconds, retry=NEVER_STARTED)
        except ResourceConflict as error:
            raise VersionConflict(str(error), status=409, code=error.code) from error
        except NoAnswer as error:
            error.add_note("The push may have happened: weights() returns the served version.")
            raise
        return decode_push(decode_body(response), body["version"], body["path"])
