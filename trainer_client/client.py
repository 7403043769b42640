"""The trainer's side of the service: lease batches, give them back or acknowledge them, push new weights.

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
from typing import Any, Literal, Self

import httpx

from trainer_client.batch import Batch
from trainer_client.errors import (
    ConnectionFailed,
    InvalidAnswer,
    ServiceError,
    Unavailable,
    UnpublishableWeights,
    VersionConflict,
)
from trainer_client.lease import Lease
from trainer_client.publish import ReplicaFailed, WeightPush, prune_versions, push_of, what_failed, write_weights
from trainer_client.publish_nccl import NcclPublisher
from trainer_client.transport import Transport, never_started
from trainer_client.wire import ACCEPT, body_of, groups_of, versions_of

Kind = Literal["full", "lora"]
Mode = Literal["keep", "wait", "abort"]


class TrainerClient:
    """Thread-safe. `consumer` names this trainer to the service (default: host:pid). `timeout_seconds` is the longest silence
    of the service beyond the time it was asked to take; `retry_seconds` how long errors that may pass are retried."""

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
        self._transport = Transport(url, token, timeout_seconds=timeout_seconds, retry_seconds=retry_seconds)

    def batches(
        self,
        *,
        max_groups: int | None = None,
        max_trajectories: int | None = None,
        max_staleness: int | None = None,
        policy: str | None = None,
        roles: Sequence[str] | None = None,
        builder: str | None = None,
        complete_only: bool = False,
        wait_seconds: float = 30.0,
        lease_seconds: float = 600.0,
        keep: bool = True,
        stop: Callable[[], bool] | None = None,
    ) -> Iterator[Batch]:
        """Leased batches for ever, waiting while there are none; use each one in a `with` block.

        Ends once `stop()` is true or the client is closed. Both are looked at between requests, each of which waits for at
        most `wait_seconds`; a batch that arrives after that is given back. Arguments and errors as for `lease`.
        """
        wanted = self._wanted(
            wait_seconds,
            lease_seconds,
            max_groups=max_groups,
            max_trajectories=max_trajectories,
            max_staleness=max_staleness,
            policy=policy,
            roles=None if roles is None else list(roles),
            builder=builder,
            complete_only=complete_only or None,
        )

        def ended() -> bool:
            return self._transport.closing.is_set() or bool(stop and stop())

        while not ended():
            with self._transport.in_use():
                try:
                    batch = self._lease(wanted, keep, until=ended)
                except (ConnectionFailed, Unavailable):
                    if ended():
                        return
                    raise
                if batch and ended():
                    batch.nack()
                    return
            if batch:
                yield batch

    def lease(
        self,
        *,
        max_groups: int | None = None,
        max_trajectories: int | None = None,
        max_staleness: int | None = None,
        policy: str | None = None,
        roles: Sequence[str] | None = None,
        builder: str | None = None,
        complete_only: bool = False,
        wait_seconds: float = 0.0,
        lease_seconds: float = 600.0,
        keep: bool = True,
    ) -> Batch | None:
        """One batch, or None when none came within `wait_seconds`.

        Whole groups only: at most `max_groups` of them, or as many as fit into `max_trajectories` (one at least), or one without
        either, and no more than this consumer's share while others wait; none with a token sampled more than `max_staleness`
        versions of its policy ago, unless the service is set to mark such groups (`group.stale`). `policy`: rows of that model
        alone, "" being the default one; None: of all. `roles`: only rows of these, else of all that are trained; a group without any
        comes without rows, and what is left out is nobody's once the batch is acknowledged. `builder`: how sessions are made into rows;
        None: as the service is set. `complete_only`: only groups all of whose sessions are complete (`group.sessions`). With `keep`, its
        `with` block extends the lease. When the answer is lost on the way, the request is repeated and what was leased first comes back
        when that lease expires.
        Raises: InvalidAnswer (the batch is given back first), Unauthorized, Unavailable, ConnectionFailed, ClientClosed.
        """
        wanted = self._wanted(
            wait_seconds,
            lease_seconds,
            max_groups=max_groups,
            max_trajectories=max_trajectories,
            max_staleness=max_staleness,
            policy=policy,
            roles=None if roles is None else list(roles),
            builder=builder,
            complete_only=complete_only or None,
        )
        return self._lease(wanted, keep, until=self._transport.closing.is_set)

    def held(self, lease_id: str, *, lease_seconds: float = 600.0) -> Lease:
        """A lease by its id, to be ended or extended by one who does not hold its batch, in another process perhaps.

        Its `expires_at` is not a number until it is extended, by `lease_seconds` unless told otherwise."""
        return Lease(self._transport, lease_id, math.nan, lease_seconds=lease_seconds, keep=False)

    def publish(
        self,
        weights: Mapping[str, Any] | str | os.PathLike[str],
        version: int,
        *,
        kind: Kind = "full",
        mode: Mode = "keep",
        directory: str | os.PathLike[str] | None = None,
        keep_last: int | None = None,
        shard_bytes: int = 5 * 10**9,
        push_seconds: float = 3600.0,
        model: str = "",
    ) -> WeightPush:
        """The result of every replica of `model` ("": the default one), all of which now serve `weights` as `version`.

        `weights` is a state dict of torch tensors, written to `directory/version-<version>` first, or a path the engines can
        read. `mode` is what becomes of calls in flight: keep (they go on under the new weights), wait or abort. `keep_last`
        removes all but the newest so many version folders afterwards. `push_seconds` is the longest a push may take.
        Raises: VersionConflict, UnpublishableWeights, ReplicaFailed, and ConnectionFailed: then `weights()` tells whether
        the push happened, because it is not repeated once it may have begun.
        """
        path = self._path_of(weights, version, kind, directory, shard_bytes, model)
        body = {"version": version, "path": path, "kind": kind, "mode": mode}
        push = self._push(body | ({"model": model} if model else {}), push_seconds)
        if push.failed or not push.applied:
            raise ReplicaFailed(what_failed(push), push=push)
        if keep_last is not None and directory is not None:
            prune_versions(directory, version, keep_last)
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
        """Publishes `weights`, a torch module, from its GPU to the engines' without a file: see `publish_nccl`. The engines connect
        to `master_address:master_port`, where this trainer's rank 0 listens."""
        where = {"master_address": master_address, "master_port": master_port, "packed": packed}
        return NcclPublisher(self._transport, weights, where, model=model, rank=rank, push_seconds=push_seconds)

    def weights(self) -> dict[str, Any]:
        """What the service serves: `{current: {version, path, kind, updated_at}, history, updating, frozen, replicas}` of the default
        model, and under `models` the same of each other one."""
        answer = body_of(self._transport.request("GET", "/weights"))
        try:
            int(answer["current"]["version"])
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidAnswer(f"the answer to GET /weights names no current version: {error!r}") from error
        return dict(answer)

    def close(self) -> None:
        """Ends `batches` and, once requests in flight and open batches are done, the connections. Callable from any thread."""
        self._transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    def _wanted(self, wait_seconds: float, lease_seconds: float, **terms: Any) -> dict[str, Any]:
        """What is asked for; a term that is None is left out."""
        wanted = {"wait_seconds": wait_seconds, "lease_seconds": lease_seconds, "consumer": self.consumer}
        return wanted | {name: limit for name, limit in terms.items() if limit is not None}

    def _lease(self, wanted: Mapping[str, Any], keep: bool, *, until: Callable[[], bool]) -> Batch | None:
        response = self._transport.request(
            "POST", "/batches/lease", body=wanted, accept=ACCEPT, answer_seconds=wanted["wait_seconds"], until=until
        )
        return None if response.status_code == 204 else self._batch(response, wanted["lease_seconds"], keep)

    def _batch(self, response: httpx.Response, lease_seconds: float, keep: bool) -> Batch:
        body = body_of(response)
        try:
            lease = Lease(
                self._transport, str(body["lease_id"]), float(body["expires_at"]), lease_seconds=lease_seconds, keep=keep
            )
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidAnswer(f"the answer to a lease is incomplete: {error!r}") from error
        try:
            return _batch_of(body, lease)
        except InvalidAnswer as error:
            lease.give_back_after(error)
            raise

    def _path_of(
        self,
        weights: Mapping[str, Any] | str | os.PathLike[str],
        version: int,
        kind: Kind,
        directory: str | os.PathLike[str] | None,
        shard_bytes: int,
        model: str,
    ) -> str:
        if not isinstance(weights, Mapping):
            return str(Path(weights).absolute())
        if directory is None:
            raise UnpublishableWeights("a state dict needs a `directory` that the engines can read")
        if kind == "lora":
            raise UnpublishableWeights("an adapter needs its adapter_config.json: save it whole and publish its path")
        # Asked before writing: a folder of a version that is being served must not be replaced by other values.
        served = self.weights()
        lines = {"": served, **served.get("models", {})}
        if model not in lines:
            others = ", ".join(name for name in lines if name) or "none but the default one"
            raise UnpublishableWeights(f"the service has no model {model!r}: it has {others}")
        current = int(lines[model]["current"]["version"])
        if version <= current:
            raise VersionConflict(f"version {version} is not greater than {current}, which is being served", status=409)
        return str(write_weights(weights, directory, version, shard_bytes=shard_bytes))

    def _push(self, body: Mapping[str, Any], push_seconds: float) -> WeightPush:
        try:
            response = self._transport.request("POST", "/weights", body=body, answer_seconds=push_seconds, retry=never_started)
        except ServiceError as error:
            if error.status == 409:
                raise VersionConflict(str(error), status=409, code=error.code) from error
            raise
        except ConnectionFailed as error:
            error.add_note("The push may have happened: weights() tells the version that is served.")
            raise
        return push_of(body_of(response), body["version"], body["path"])


def _batch_of(body: Mapping[str, Any], lease: Lease) -> Batch:
    groups = groups_of(body)
    try:
        versions = versions_of(body)
        return Batch(groups, versions[""], lease, weight_versions=versions)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InvalidAnswer(f"the answer to a lease does not say how old its rows are: {error!r}") from error
