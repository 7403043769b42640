"""PeerStore: which processes live, and what they tell each other."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol


class PeerStore(Protocol):
    async def beat(self, process: str, seconds: float) -> None:
        """Say that the process lives, and will for `seconds`."""
        ...

    async def leave(self, process: str) -> None:
        """It has ended, with nothing under way."""
        ...

    async def alive(self, processes: Collection[str]) -> set[str]:
        """Those of the processes that live."""
        ...

    async def ask_to_cut(self, session_id: str) -> None:
        """Tell every process to end its calls of the session."""
        ...

    async def to_cut(self, after: str, wait_seconds: float) -> tuple[list[str], str]:
        """Sessions that processes were told to cut since the mark `after` ("" at first), and the next mark. Waits for the first
        one."""
        ...
