"""The leases one process works on at a time: extended together, each acknowledged or given back once.

A `Batch` in a `with` block keeps its own lease and its rows. Here rows go on their way, into other processes perhaps, and only
the leases stay; one of them may be acknowledged by another process, which the next extension notices.
"""

from __future__ import annotations

import logging
import threading
from typing import Self

from trainer_client.client import TrainerClient
from trainer_client.errors import LeaseLost, TrainerClientError
from trainer_client.lease import Lease

log = logging.getLogger(__name__)


class HeldLeases:
    """Thread-safe. One thread extends each lease once half of it has passed, from the first `hold` to `close`."""

    def __init__(self, client: TrainerClient, lease_seconds: float) -> None:
        self._client = client
        self._lease_seconds = lease_seconds
        self._leases: dict[str, Lease] = {}
        self._changed = threading.Condition()
        self._ended = False
        self._keeper: threading.Thread | None = None

    def hold(self, lease_id: str) -> None:
        """Extends it from now on."""
        with self._changed:
            self._leases[lease_id] = self._client.held(lease_id, lease_seconds=self._lease_seconds)
            if self._keeper is None:
                self._keeper = threading.Thread(target=self._extend, name="lease-keeper", daemon=True)
                self._keeper.start()
            self._changed.notify_all()

    def ack(self, lease_id: str) -> None:
        """Done with it, whichever process holds it. Raises LeaseLost."""
        with self._changed:
            lease = self._leases.pop(lease_id, None)
        (lease or self._client.held(lease_id, lease_seconds=self._lease_seconds)).ack()

    def give_back(self) -> None:
        """Gives back what is still held. What the service cannot be told expires."""
        with self._changed:
            leases, self._leases = self._leases, {}
        for lease in leases.values():
            try:
                lease.nack()
            except LeaseLost:
                continue
            except TrainerClientError as error:
                log.warning("up to %d leases could not be given back and will expire: %s", len(leases), error)
                return

    def close(self) -> None:
        """Gives back what is still held and ends the thread."""
        with self._changed:
            self._ended = True
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
                # It may have been ended before this thread came to wait.
                if not self._ended:
                    self._changed.wait(self._pause_seconds())
                if self._ended:
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
        except TrainerClientError as error:
            log.info("lease %s could not be extended yet: %s", lease.lease_id, error)
