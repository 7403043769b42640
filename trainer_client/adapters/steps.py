"""Whole steps for trainers that request data but never report that they have trained on it.

slime's rollout function and SkyRL's generator are called once per step, need a fixed number of groups, and do not learn of the training
that follows. The request for another step is the only sign that an earlier one is done, and the checkpoint they save after a step the only
place where its weights are.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from contract.errors import ClientClosed, ClientError
from trainer_client.batch import Batch
from trainer_client.client import TrainerClient
from trainer_client.errors import InvalidAnswer


class Steps:
    """Batches of exactly `groups` groups, from as many leases as needed. Not thread-safe.

    `behind` is how many steps may be outstanding. 1: a step is acked when the next is requested, for a trainer that trains between
    requests. 2: when the one after that is requested, for a trainer that requests one step ahead. `lease` goes to
    `TrainerClient.batches` (max_staleness, lease_seconds, …). Leases are extended until acked or given back.
    """

    def __init__(self, client: TrainerClient, groups: int, *, behind: int = 1, **lease: Any) -> None:
        self._client, self._groups, self._behind, self._lease = client, groups, behind, lease
        self._out: deque[list[Batch]] = deque()

    def take(self, checkpoint: str | os.PathLike[str] | None = None) -> Batch:
        """Wait for the next step: a batch without its own lease, with the newest version of its parts.

        `checkpoint`: safetensors saved after the step that is acked now; they are published first, as the version after the served one.

        Raises what `TrainerClient.publish` raises, LeaseLost if the lease of a finished step was lost, ServiceUnavailable
        if it could not be acked (in each case its rows may be trained on twice), ClientClosed, and what `TrainerClient.lease` raises;
        the groups leased for the new step are then given back.
        """
        if checkpoint is not None:
            self._client.publish(checkpoint, int(self._client.weights()["current"]["version"]) + 1)
        while len(self._out) >= self._behind:
            _end(self._out.popleft(), Batch.ack)
        parts: list[Batch] = []
        with ExitStack() as opened:
            while missing := self._groups - sum(len(part.groups) for part in parts):
                parts.append(opened.enter_context(self._next(missing)))
            opened.pop_all()
        self._out.append(parts)
        return Batch.join(parts)

    def finish(self) -> None:
        """Ack every outstanding step after a successful end. Raises LeaseLost, ServiceUnavailable."""
        while self._out:
            _end(self._out.popleft(), Batch.ack)

    def give_back(self) -> None:
        """Nack every outstanding step, which was not trained on. Raises LeaseLost, ServiceUnavailable."""
        while self._out:
            _end(self._out.popleft(), Batch.nack)

    def _next(self, groups: int) -> Batch:
        batch = next(self._client.batches(max_groups=groups, **self._lease), None)
        if batch is None:
            raise ClientClosed("the client was closed while waiting for a step")
        if len(batch.groups) > groups:
            batch.nack()
            raise InvalidAnswer(f"a lease of at most {groups} groups has {len(batch.groups)}")
        return batch


def _end(parts: list[Batch], action: Callable[[Batch], None]) -> None:
    # End every lease even if one fails: otherwise the rest would be extended forever.
    failed: list[ClientError] = []
    for part in parts:
        try:
            with ExitStack() as opened:
                opened.push(part)
                action(part)
        except ClientError as error:
            failed.append(error)
    if failed:
        raise failed[0]
