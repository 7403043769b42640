"""Leased rows as a PyTorch dataset, for training loops of one's own.

    with LeasedRows(url, token, Padded(micro_rows=8), max_groups=4) as rows:
        for micro in rows.loader(num_workers=2):        # PaddedBatch or PackedBatch, tensors
            loss(model, micro).backward()
            optimizer.step()
            rows.ack()                                  # all that was handed out has been learnt from

Each DataLoader worker leases for itself, and extends its leases until they are acknowledged. A lease is acknowledged once all
its parts are. What is not acknowledged when the `with` block ends or `loader` is called again is given back and will be delivered
again, whole: rows are trained at least once. A `break` alone gives nothing back.
"""

from __future__ import annotations

import logging
import multiprocessing
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Self

from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from trainer_client.adapters.microbatches import Cut, Microbatch
from trainer_client.advantages import grpo
from trainer_client.batch import Batch
from trainer_client.client import TrainerClient
from trainer_client.errors import TrainerClientError
from trainer_client.held_leases import HeldLeases

log = logging.getLogger(__name__)

AckWhen = Literal["call", "next"]
Scored = Callable[[Batch], Any]
"""The advantages of a whole batch, one per row. Workers that are spawned, not forked, need a function of a module."""


def by_grpo(batch: Batch) -> Any:
    """Each row's advantage within its group, by `advantages.grpo`."""
    return batch.advantages(grpo)


@dataclass(frozen=True, slots=True)
class Share:
    """One of the `parts` that the batch of a lease was cut into."""

    lease_id: str
    parts: int


@dataclass(frozen=True, slots=True)
class Part:
    data: Microbatch
    share: Share


@dataclass(frozen=True, slots=True)
class _Desk:
    """What one process needs to lease and to acknowledge."""

    client: TrainerClient
    leases: HeldLeases

    def close(self) -> None:
        self.leases.close()
        self.client.close()


class LeasedRows(IterableDataset[Part]):
    """`cut` makes parts of a leased batch (Rows, Padded or Packed of `microbatches`); `advantages` are computed over the whole
    batch before that, and are left out with None. The lease's own arguments are those of `TrainerClient.lease`; `wait_seconds`
    is how long one request waits, and so how long a worker may take to notice that the loop has ended.

    Iterating gives `Part`s, for a DataLoader of one's own with `batch_size=None`; `loader` is the loop that needs less care.
    Not thread-safe."""

    def __init__(
        self,
        url: str,
        token: str,
        cut: Cut,
        *,
        advantages: Scored | None = by_grpo,
        max_groups: int | None = 1,
        max_trajectories: int | None = None,
        max_staleness: int | None = None,
        policy: str | None = None,
        wait_seconds: float = 2.0,
        lease_seconds: float = 600.0,
        consumer: str | None = None,
        retry_seconds: float = 120.0,
    ) -> None:
        self._url, self._token, self._consumer, self._retry_seconds = url, token, consumer, retry_seconds
        self.cut, self.advantages = cut, advantages
        self._lease_seconds = lease_seconds
        self._wanted: dict[str, Any] = {
            "max_groups": max_groups,
            "max_trajectories": max_trajectories,
            "max_staleness": max_staleness,
            "policy": policy,
            "wait_seconds": wait_seconds,
            "lease_seconds": lease_seconds,
        }
        self._desk: _Desk | None = None
        self._stop: Any = None
        self._loop: Iterator[Microbatch] | None = None
        self._handed: list[Share] = []
        self._acked: Counter[str] = Counter()

    def loader(self, num_workers: int = 0, *, ack: AckWhen = "call", **options: Any) -> Iterator[Microbatch]:
        """Microbatches for ever, from `num_workers` processes or from this one; `options` are the DataLoader's.

        `ack="call"`: `ack()` says when what was handed out has been learnt from, after the optimizer's step say. `ack="next"`:
        asking for the next one says so. Raises what the loop's leases raise: see `TrainerClient.batches`.
        """
        self._end_loop()
        self._loop = self._microbatches(num_workers, ack, options)
        return self._loop

    def ack(self, *parts: Part) -> None:
        """These parts, or everything `loader` has handed out, has been learnt from: leases of which that was the last part are
        acknowledged. Raises LeaseLost, after the others were acknowledged: those rows are trained again by someone."""
        shares, self._handed = ([part.share for part in parts], self._handed) if parts else (self._handed, [])
        self._acked.update(share.lease_id for share in shares)
        failures = []
        for lease_id in {share.lease_id: None for share in shares if self._acked[share.lease_id] >= share.parts}:
            del self._acked[lease_id]
            try:
                self._own_desk().leases.ack(lease_id)
            except TrainerClientError as error:
                failures.append(error)
        if failures:
            raise failures[0]

    def close(self) -> None:
        """Ends the loop; its workers and this process give back what was not acknowledged."""
        self._end_loop()
        if self._desk:
            self._desk.close()
            self._desk = None

    def __iter__(self) -> Iterator[Part]:
        with self._leasing() as desk:
            for batch in desk.client.batches(**self._wanted, keep=False, stop=self._stopped):
                yield from self._parts(desk.leases, batch)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        # What a worker is sent: connections, threads and acknowledgements belong to the process that made them.
        return self.__dict__ | {"_desk": None, "_loop": None, "_handed": [], "_acked": Counter()}

    def _parts(self, leases: HeldLeases, batch: Batch) -> Iterator[Part]:
        lease_id = str(batch.lease_id)
        leases.hold(lease_id)
        parts = self.cut(batch, None if self.advantages is None else self.advantages(batch))
        if not parts:
            leases.ack(lease_id)
        for data in parts:
            if self._stopped():
                return
            yield Part(data, Share(lease_id, len(parts)))

    def _microbatches(self, num_workers: int, ack: AckWhen, options: dict[str, Any]) -> Iterator[Microbatch]:
        # An event of the spawn context can be sent to workers however they are started.
        self._stop = multiprocessing.get_context("spawn").Event() if num_workers else threading.Event()
        # In order, one worker without rows would hold up the rows of the others.
        parts = iter(
            DataLoader(self, **{"batch_size": None, "num_workers": num_workers, "in_order": not num_workers, **options})
        )
        try:
            for part in parts:
                self._handed.append(part.share)
                yield part.data
                if ack == "next":
                    self.ack()
        finally:
            self._stop.set()
            self._handed, self._acked = [], Counter()
            _run_out(parts)
            self._stop = None

    @contextmanager
    def _leasing(self) -> Iterator[_Desk]:
        """The desk of this process; in the end all it holds is given back."""
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
        return _Desk(client, HeldLeases(client, self._lease_seconds))

    def _stopped(self) -> bool:
        return self._stop is not None and bool(self._stop.is_set())

    def _end_loop(self) -> None:
        if self._loop is not None:
            self._loop.close()  # type: ignore[attr-defined]
            self._loop = None


def _run_out(parts: Iterator[Part]) -> None:
    """Waits until every worker has given back what it holds: the DataLoader alone would end them after five seconds."""
    try:
        for _ in parts:
            pass
    except Exception as error:
        log.warning("a worker has ended before it could give its leases back, which will expire: %s", error)
