"""Whole steps for trainers that ask for data and never say when they are done with it.

slime's rollout function and SkyRL's generator are called once per step, want a fixed number of groups, and hear nothing of the
training that follows. That they ask for another step is the only sign that an earlier one is over.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from trainer_client.batch import Batch
from trainer_client.client import TrainerClient
from trainer_client.errors import ClientClosed, InvalidAnswer, TrainerClientError


class Steps:
    """Batches of exactly `groups` groups, from as many leases as it takes; not thread-safe.

    `behind` is how many steps may be out at once. 1: a step is acknowledged when the next is asked for, right for a trainer
    that trains between its requests. 2: when the one after that is asked for, right for one that asks one step ahead. `lease`
    goes to `TrainerClient.batches` (max_staleness, lease_seconds, …). Leases are extended until they end.
    """

    def __init__(self, client: TrainerClient, groups: int, *, behind: int = 1, **lease: Any) -> None:
        self._client, self._groups, self._behind, self._lease = client, groups, behind, lease
        self._out: deque[list[Batch]] = deque()

    def take(self) -> Batch:
        """The next step, waiting for it: a batch without a lease of its own, whose version is the newest of its parts.

        Raises LeaseLost when a step that is now over was not this trainer's any more (it may be learnt twice), ConnectionFailed
        or Unavailable when it could not be acknowledged (likewise), ClientClosed when the client was closed, and what
        `TrainerClient.lease` raises; groups leased for the new step are given back then.
        """
        while len(self._out) >= self._behind:
            _acknowledge(self._out.popleft())
        parts: list[Batch] = []
        with ExitStack() as opened:
            while missing := self._groups - sum(len(part.groups) for part in parts):
                parts.append(opened.enter_context(self._next(missing)))
            opened.pop_all()
        self._out.append(parts)
        return Batch.joined(parts)

    def finish(self) -> None:
        """Acknowledges all that is out: the trainer has ended well. Raises LeaseLost, ConnectionFailed or Unavailable."""
        while self._out:
            _acknowledge(self._out.popleft())

    def give_back(self) -> None:
        """Gives back all that is out: the trainer stops before it has learnt from it. Raises LeaseLost, ConnectionFailed or Unavailable."""
        while self._out:
            _end(self._out.popleft(), Batch.nack)

    def _next(self, groups: int) -> Batch:
        batch = next(self._client.batches(max_groups=groups, **self._lease), None)
        if batch is None:
            raise ClientClosed("the client was closed while a step was waited for")
        if len(batch.groups) > groups:
            batch.nack()
            raise InvalidAnswer(f"a lease of at most {groups} groups has {len(batch.groups)}")
        return batch


def _acknowledge(parts: list[Batch]) -> None:
    _end(parts, Batch.ack)


def _end(parts: list[Batch], action: Callable[[Batch], None]) -> None:
    # One that fails must not keep the others from being ended: nobody would see them again, and they go on being extended.
    failed: list[TrainerClientError] = []
    for part in parts:
        try:
            with ExitStack() as opened:
                opened.push(part)
                action(part)
        except TrainerClientError as error:
            failed.append(error)
    if failed:
        raise failed[0]
