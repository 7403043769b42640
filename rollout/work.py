"""The work of a node: what it asks of the store of rollouts, and the one error of a store that does not answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from contract.attempts import AttemptId, FailureRecord, NodeState, Room, Status, TakenRollout, Verdict


class WorkUnavailable(Exception):
    """The store of rollouts did not answer. The message says why."""


class Work(Protocol):
    """Every method may raise `WorkUnavailable`; those that name an attempt raise `Superseded` when it is no longer the rollout's."""

    async def now(self) -> float:
        """Epoch seconds, by the only clock of leases and deadlines."""

    async def take(self, node: str, room: Room, lease_seconds: float, now: float) -> TakenRollout | None:
        """A rollout that the node has room for; None when there is none."""

    async def wait(self, seconds: float) -> None:
        """Returns when there may be a rollout to take, after `seconds` at the latest."""

    async def beat(self, state: NodeState, held: Sequence[AttemptId], now: float) -> list[AttemptId]:
        """Renews the leases. Returns those of `held` that the node no longer has and must stop."""

    async def advance(self, attempt: AttemptId, status: Status, now: float, fields: Mapping[str, Any]) -> None:
        """The rollout reached `status`."""

    async def conclude(self, attempt: AttemptId, verdict: Verdict, now: float) -> None:
        """Fixes the verdict."""

    async def finish(self, attempt: AttemptId, now: float) -> None:
        """The session is closed with the verdict: the rollout ends."""

    async def give_up(
        self, attempt: AttemptId, failure: FailureRecord, now: float, *, retry: bool, spared: bool = False
    ) -> bool:
        """The attempt failed. True: the rollout is queued again. False: conclude it as failed."""

    async def put_back(self, attempt: AttemptId, now: float) -> None:
        """Queued again, without using up an attempt."""

    async def give_way(self, attempt: AttemptId, now: float) -> bool:
        """True: another rollout waits for the place, so this one is queued again, without using up an attempt."""

    async def leave(self, node: str) -> None:
        """The node has ended and holds nothing."""
