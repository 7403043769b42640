"""What the flow of sessions asks of scoring, which itself stands above it (`proxy.scoring.scoring`)."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import Protocol

from proxy.store.score_jobs import ScoreJob
from proxy.store.states import SessionInfo, SessionState
from reconstruct.accounting import Settled


class AwaitedScores(Protocol):
    def running(self) -> AbstractAsyncContextManager[None]: ...

    async def ask(self, info: SessionInfo, name: str, *, again: bool = False) -> None: ...

    async def find_job(self, session_id: str, name: str) -> ScoreJob | None: ...

    async def hold_back(self, state: SessionState) -> bool: ...

    async def find_failed(self, state: SessionState, settled: Settled) -> str: ...
