"""Leases without their batches: extended together by one thread, each acked or nacked once.

For rows that move on, perhaps into other processes, while the lease stays here. Another process may ack a lease; the next extension
notices.
"""

from __future__ import annotations

import logging
import threading
from typing import Self

from contract.errors import ClientError
from trainer_client.client import TrainerClient
from trainer_client.errors import LeaseLost
from trainer_client.lease import Lease

log = logging.getLogger(__name__)


class HeldLeases:
    """Thread-safe. From the first `hold` to `close` a thread extends each lease whenever half of it has passed."""

    def __init__(self, client: TrainerClient, lease_seconds: float) -> None:
        self._client = client
        self._lease_seconds = lease_seconds
        self._leases: dict[str, Lease] = {}
        self._changed = threading.Condition()
        self._closed = False
        self._keeper: threading.Thread | None = None

    def hold(self, lease_id: str) -> None:
        """Start to extend the lease."""
        with self._changed:
            self._leases[lease_id] = self._client.attach(lease_id, lease_seconds=self._lease_seconds)
            if self._keeper is None:
                self._keeper = threading.Thread(target=self._extend, name="lease-keeper", daemon=True)
                self._keeper.start()
            self._changed.notify_all()

    def ack(self, lease_id: str) -> None:
        """Ack the lease, even if another process holds it. Raises LeaseLost."""
        with self._changed:
            lease = self._leases.pop(lease_id, None)
        (lease or self._client.attach(lease_id, lease_seconds=self._lease_seconds)).ack()

    def give_back(self) -> None:
        """Nack every lease still held. Those that cannot be nacked expire."""
        with self._changed:
            leases, self._leases = self._leases, {}
        for lease in leases.values():
            try:
                lease.nack()
            except LeaseLost:
                continue
            except ClientError as error:
                log.warning("up to %d leases could not be given back and will expire: %s", len(leases), error)
                return

    def close(self) -> None:
        """Nack every lease still held and stop the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._keeper:
            self._keeper.join()
        self.give_back()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _extend(self) -> None:
        while True:
            with self._changed:
                # `close` may have been called before this thread waits.
                if not self._closed:
                    self._changed.wait(self._pause_seconds())
                if self._closed:
                    return
                due = [lease for lease in self._leases.values() if not lease.due_seconds()]
            for lease in due:
                self._renew(lease)

    def _pause_seconds(self) -> float | None:
        pauses = [lease.due_seconds() or lease.retry_seconds() for lease in self._leases.values()]
        return min(pauses, default=None)

    def _renew(self, lease: Lease) -> None:
        try:
            lease.renew()
        except LeaseLost:
            with self._changed:
                self._leases.pop(lease.lease_id, None)
        except ClientError as error:
            log.info("lease %s could not be extended yet: %s", lease.lease_id, error)
