"""WeightStore: the current weight version of every policy and its history, as the rest of the service sees them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

KEPT_WEIGHTS = 1000
"""How many versions of a policy its history goes back."""


@dataclass(frozen=True, slots=True)
class WeightState:
    version: int = 0
    path: str | None = None
    kind: str = "full"
    updated_at: float = 0.0


class WeightStore(Protocol):
    """Every policy has a version line and a push lock of its own; "" is the default one."""

    async def current(self, policy: str = "") -> WeightState: ...

    async def history(self, policy: str = "", limit: int = 100) -> list[WeightState]:
        """Newest first."""
        ...

    async def advance(self, state: WeightState, policy: str = "", fence: int | None = None) -> None:
        """Make `state` current. Raises `Conflict` unless its version is greater than the current one, and when the push lock was
        given to another owner since it was taken with `fence`."""
        ...

    async def lock(self, owner: str, seconds: float, policy: str = "", fence: int = 0) -> int:
        """Take the push lock: a fencing token greater than every one before, or 0 while another owner holds it.

        With the `fence` that the owner was given, renew it: that fence, or 0 once another owner has had the lock."""
        ...

    async def unlock(self, owner: str, policy: str = "") -> None: ...

    async def identity(self) -> str:
        """What this store is called, the same for good and for every process: tells its services from those of other stores."""
        ...
