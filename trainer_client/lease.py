"""A lease: acked or nacked once, and extended while its batch is in use."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote

import httpx

from contract.client import ONCE, TRANSIENT, RetryRule, ServiceClient
from contract.errors import ClientError, ServiceError
from trainer_client.errors import LeaseLost
from trainer_client.wire import decode_body


class Lease:
    """`state` is held, acked, nacked or lost. `expires_at` is in epoch seconds of the service's clock."""

    def __init__(self, service: ServiceClient, lease_id: str, expires_at: float, *, lease_seconds: float, keep: bool) -> None:
        self.lease_id = lease_id
        self.expires_at = expires_at
        self.state = "held"
        self._service = service
        self._lease_seconds = lease_seconds
        self._renewed_at = time.monotonic()
        self._keep = keep
        self._loss: LeaseLost | None = None
        self._lock = threading.Lock()
        self._open = ExitStack()

    def ack(self) -> None:
        """End the lease; its groups are never delivered again. Repeating it is a no-op. Raises LeaseLost."""
        self._end("ack", "acked")

    def nack(self) -> None:
        """End the lease; its groups are delivered again. Repeating it is a no-op. Raises LeaseLost."""
        self._end("nack", "nacked")

    def extend(self, lease_seconds: float | None = None) -> float:
        """Extend the lease to `lease_seconds` from now (default: its last length). The new `expires_at`. Raises LeaseLost."""
        return self._extend(lease_seconds, retry=TRANSIENT)

    def due_seconds(self) -> float:
        """Seconds until half of the lease has passed and it should be extended; at least 0."""
        return max(0.0, self._renewed_at + self._lease_seconds / 2 - time.monotonic())

    def renew(self) -> None:
        """Try once to extend it by its last length. Raises LeaseLost and other ServiceErrors."""
        self._extend(None, retry=ONCE)

    def retry_seconds(self) -> float:
        """The delay after a failed attempt: a tenth of the lease leaves five tries before it expires."""
        return self._lease_seconds / 10

    def give_back_after(self, error: BaseException) -> None:
        """`nack` while `error` propagates; a failed nack only adds a note to it."""
        try:
            self.nack()
        except ClientError as failure:
            error.add_note(f"The batch could not be given back and will expire: {failure}")

    def __enter__(self) -> Self:
        self._open.enter_context(self._service.keep_open())
        if self._keep:
            self._open.enter_context(Keeper(self))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        with self._open.pop_all():
            if self.state in ("acked", "nacked"):
                return
            if error is None:
                self.ack()
            else:
                self.give_back_after(error)

    def _end(self, action: str, state: str) -> None:
        if self.state == state:
            return
        if self.state != "held":
            why = f" ({self._loss})" if self._loss else ""
            raise LeaseLost(f"lease {self.lease_id!r} is {self.state}{why}: it can no longer be {state}", status=409)
        self._post(action, {}, retry=TRANSIENT)
        self._settle(state)

    def _extend(self, lease_seconds: float | None, *, retry: RetryRule) -> float:
        asked_at = time.monotonic()
        seconds = self._lease_seconds if lease_seconds is None else lease_seconds
        answer = decode_body(self._post("extend", {"lease_seconds": seconds}, retry=retry))
        self._renewed_at, self._lease_seconds = asked_at, seconds
        self.expires_at = float(answer["expires_at"])
        return self.expires_at

    def _post(self, action: str, body: dict[str, Any], *, retry: RetryRule) -> httpx.Response:
        path = f"/batches/{quote(self.lease_id, safe='')}/{action}"
        try:
            return self._service.request("POST", path, body=body, retry=retry)
        except ServiceError as error:
            if error.status not in (404, 409):
                raise
            self._loss = self._lost(error)
            self._settle("lost")
            raise self._loss from error

    def _settle(self, state: str) -> None:
        # The keeper's last extension may be refused because the block has just acked: that is not a loss.
        with self._lock:
            if self.state == "held" or state != "lost":
                self.state = state

    def _lost(self, error: ServiceError) -> LeaseLost:
        doubt = "; an earlier attempt got no answer and may have succeeded" if error.attempts > 1 else ""
        return LeaseLost(f"{error}{doubt}", status=error.status, code=error.code, attempts=error.attempts)


class Keeper(threading.Thread):
    """Extends a lease whenever half of it has passed, until its block ends or the lease is lost.

    The `ack` at the end of the block reports a lost lease."""

    def __init__(self, lease: Lease) -> None:
        super().__init__(name=f"lease-keeper-{lease.lease_id}", daemon=True)
        self._lease = lease
        self._finished = threading.Event()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._finished.set()
        self.join()

    def run(self) -> None:
        wait = self._lease.due_seconds()
        while not self._finished.wait(wait):
            try:
                self._lease.renew()
                wait = self._lease.due_seconds()
            except LeaseLost:
                return
            except ClientError:
                wait = self._lease.retry_seconds()
