"""Leased rows as a PyTorch dataset, for custom training loops.

    with LeasedRows(url, token, Padded(micro_rows=8), max_groups=4) as rows:
        for micro in rows.loader(num_workers=2):        # PaddedBatch or PackedBatch, tensors
            loss(model, micro).backward()
            optimizer.step()
            rows.ack()                                  # everything yielded so far has been trained on

Each DataLoader worker leases for itself and extends its leases until they are acknowledged. A lease is acknowledged once all its parts
are. Leases still unacknowledged when the `with` block ends, or when `loader` is called again, are given back and delivered again,
whole: rows are trained at least once. A `break` alone gives nothing back.
"""

from __future__ import annotations

import logging
import multiprocessing
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Self, Unpack

from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from contract.errors import ClientError
from trainer_client.adapters.microbatches import Cut, Microbatch
from trainer_client.advantages import grpo
from trainer_client.batch import Batch
from trainer_client.client import LeaseTerms, TrainerClient
from trainer_client.held_leases import HeldLeases

log = logging.getLogger(__name__)

AckWhen = Literal["call", "next"]
AdvantageFunction = Callable[[Batch], Any]
"""Computes the advantages of a whole batch, one per row. Spawned workers need a module-level function."""


def by_grpo(batch: Batch) -> Any:
    return batch.advantages(grpo)


@dataclass(frozen=True, slots=True)
class LeasePart:
    """One of the `parts` that the batch of a lease was cut into."""

    lease_id: str
    parts: int


@dataclass(frozen=True, slots=True)
class BatchShare:
    data: Microbatch
    share: LeasePart


@dataclass(frozen=True, slots=True)
class _Desk:
    """The client and the leases of one process."""

    client: TrainerClient
    leases: HeldLeases

    def close(self) -> None:
        self.leases.close()
        self.client.close()


class LeasedRows(IterableDataset[BatchShare]):
    """`cut` splits a leased batch into parts (Rows, Padded or Packed of `microbatches`); `advantages` are computed over the whole
    batch first, None: not at all. `terms` as for `TrainerClient.lease`, with `max_groups` 1 by default. `wait_seconds` is how long
    one request waits, and so how long a worker may take to notice that the loop has ended.

    Iterate over `loader`. Iterating over the dataset itself yields `BatchShare`s, for your own DataLoader with `batch_size=None`.
    Not thread-safe."""

    def __init__(
        self,
        url: str,
        token: str,
        cut: Cut,
        *,
        advantages: AdvantageFunction | None = by_grpo,
        wait_seconds: float = 2.0,
        consumer: str | None = None,
        retry_seconds: float = 120.0,
        **terms: Unpack[LeaseTerms],
    ) -> None:
        self._url, self._token, self._consumer, self._retry_seconds = url, token, consumer, retry_seconds
        self.cut, self.advantages = cut, advantages
        self._wait_seconds = wait_seconds
        self._terms: LeaseTerms = {"max_groups": 1, "lease_seconds": 600.0, **terms}
        self._desk: _Desk | None = None
        self._stop: Any = None
        self._loop: Iterator[Microbatch] | None = None
        self._yielded: list[LeasePart] = []
        self._acked: Counter[str] = Counter()

    def loader(self, num_workers: int = 0, *, ack: AckWhen = "call", **options: Any) -> Iterator[Microbatch]:
        """Microbatches without end, from `num_workers` processes or from this one; `options` are the DataLoader's.

        `ack="call"`: call `ack()` once what was yielded has been trained on, for example after the optimizer's step. `ack="next"`:
        requesting the next one acknowledges the one before. Raises what `TrainerClient.batches` raises.
        """
        self._end_loop()
        self._loop = self._microbatches(num_workers, ack, options)
        return self._loop

    def ack(self, *parts: BatchShare) -> None:
        """Mark these parts, or everything `loader` has yielded, as trained on, and acknowledge leases whose parts all are.

        Raises LeaseLost, after acknowledging the others: another trainer will train on those rows again."""
        shares, self._yielded = ([part.share for part in parts], self._yielded) if parts else (self._yielded, [])
        self._acked.update(share.lease_id for share in shares)
        failures = []
        for lease_id in {share.lease_id: None for share in shares if self._acked[share.lease_id] >= share.parts}:
            del self._acked[lease_id]
            try:
                self._own_desk().leases.ack(lease_id)
            except ClientError as error:
                failures.append(error)
        if failures:
            raise failures[0]

    def close(self) -> None:
        """End the loop; its workers and this process give back what was not acknowledged."""
        self._end_loop()
        if self._desk:
            self._desk.close()
            self._desk = None

    def __iter__(self) -> Iterator[BatchShare]:
        with self._leasing() as desk:
            for batch in desk.client.batches(wait_seconds=self._wait_seconds, keep=False, stop=self._is_stopped, **self._terms):
                yield from self._split(desk.leases, batch)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        # Sent to workers: connections, threads and acknowledgements belong to the process that made them.
        return self.__dict__ | {"_desk": None, "_loop": None, "_yielded": [], "_acked": Counter()}

    def _split(self, leases: HeldLeases, batch: Batch) -> Iterator[BatchShare]:
        lease_id = str(batch.lease_id)
        leases.hold(lease_id)
        parts = self.cut(batch, None if self.advantages is None else self.advantages(batch))
        if not parts:
            leases.ack(lease_id)
        for data in parts:
            if self._is_stopped():
                return
            yield BatchShare(data, LeasePart(lease_id, len(parts)))

    def _microbatches(self, num_workers: int, ack: AckWhen, options: dict[str, Any]) -> Iterator[Microbatch]:
        # An event of the spawn context can be sent to workers however they are started.
        self._stop = multiprocessing.get_context("spawn").Event() if num_workers else threading.Event()
        # In order, one worker without rows would hold up the rows of the others.
        parts = iter(
            DataLoader(self, **{"batch_size": None, "num_workers": num_workers, "in_order": not num_workers, **options})
        )
        try:
            for part in parts:
                self._yielded.append(part.share)
                yield part.data
                if ack == "next":
                    self.ack()
        finally:
            self._stop.set()
            self._yielded, self._acked = [], Counter()
            _drain(parts)
            self._stop = None

    @contextmanager
    def _leasing(self) -> Iterator[_Desk]:
        """The desk of this process. Whatever it still holds at the end is given back."""
        worker = get_worker_info()
        desk = self._own_desk() if worker is None else self._new_desk(f"/{worker.id}")
        try:
            yield desk
        finally:
            if worker is None:
                desk.leases.give_back()
            else:
                desk.close()

    def _own_desk(self) -> _Desk:
        if self._desk is None:
            self._desk = self._new_desk()
        return self._desk

    def _new_desk(self, suffix: str = "") -> _Desk:
        consumer = self._consumer and self._consumer + suffix
        client = TrainerClient(self._url, self._token, consumer=consumer, retry_seconds=self._retry_seconds)
        return _Desk(client, HeldLeases(client, self._terms["lease_seconds"]))

    def _is_stopped(self) -> bool:
        return self._stop is not None and bool(self._stop.is_set())

    def _end_loop(self) -> None:
        if self._loop is not None:
            self._loop.close()  # type: ignore[attr-defined]
            self._loop = None


def _drain(parts: Iterator[BatchShare]) -> None:
    """Wait until every worker has given back its leases: the DataLoader alone would terminate it after five seconds."""
    try:
        for _ in parts:
            pass
    except Exception as error:
        log.warning("a worker ended without giving back its leases, which will expire: %s", error)
