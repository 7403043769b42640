"""Scores that are stored with the calls of a session of a running service."""

from __future__ import annotations

import asyncio

import numpy as np

from proxy.store.connection import StoreConnection
from proxy.store.scores import ScoreStore
from reconstruct.scores import Score
from tests.support.service.running_service import RunningService


def scored(service: RunningService, session_id: str, scorer: str, *, top_k: int, nats: float = 1.0) -> None:
    """Every call of the session has a score: of the sampled token i the logprob -i times `nats`, and as best ids i, i + 1, …"""

    async def keep() -> None:
        store = StoreConnection(str(service.settings.redis))
        by_call = {}
        for call in service.request("GET", f"/sessions/{session_id}/calls?limit=1000").json()["calls"]:
            count = len(call["completion_ids"])
            best = np.arange(count)[:, None] + np.arange(top_k)
            numbers = -nats * np.arange(count).astype(np.float32)
            by_call[call["call_id"]] = Score(scorer, "raw", numbers, best.astype(np.int32), -best.astype(np.float32))
        await ScoreStore(store).keep(session_id, scorer, by_call)
        await store.close()

    asyncio.run(keep())
