"""What the flow of sessions asks of scoring, which itself stands above it (`proxy.scoring.scoring`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from proxy.store.states import SessionInfo, SessionState
from reconstruct.accounting import Settled
from reconstruct.scores import Scores


class AwaitedScores(Protocol):
    def running(self) -> AbstractAsyncContextManager[None]: ...

    async def ask(self, info: SessionInfo, name: str, *, again: bool = False) -> None: ...

    async def find_queued(self, state: SessionState, names: Iterable[str]) -> set[str]: ...

    async def hold_back(self, state: SessionState, settled: Settled, scores: Mapping[str, Scores]) -> bool: ...

    def find_failed(self, state: SessionState, settled: Settled, scores: Mapping[str, Scores]) -> str: ...
