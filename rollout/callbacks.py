"""The one request that tells the outside of a task's end: POSTed to its callback URL until somebody takes it.

What is due stands in the store, so that whichever server lives delivers it; while one tries, no other does. A server that dies in the
middle leaves it to another after `CLAIM_SECONDS`, so a receiver may be told twice, and knows that by the task's id.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random

import httpx

from rollout.store.base import TaskState
from rollout.store.tasks import CLAIM_SECONDS, RedisTaskStore
from rollout.views import summary_as_wire

log = logging.getLogger(__name__)

TIMEOUT_SECONDS = CLAIM_SECONDS / 2
"""Of one try in all: it ends before another server may try."""
AT_ONCE = 16
MOST_TRIES = 24
LONGEST_PAUSE_SECONDS = 3600.0
SHOWN = 500
"""Characters of an error that are kept."""


class Callbacks:
    def __init__(self, store: RedisTaskStore) -> None:
        self._store = store
        self._http = httpx.AsyncClient(timeout=TIMEOUT_SECONDS, follow_redirects=False)

    async def deliver(self) -> int:
        """How many were due and were tried. Raises `StoreUnavailable`."""
        due = await self._store.callbacks(AT_ONCE, await self._store.now())
        await asyncio.gather(*(self._deliver(state) for state in due))
        return len(due)

    async def close(self) -> None:
        await self._http.aclose()

    async def _deliver(self, state: TaskState) -> None:
        callback, task_id = state.callback, state.task.task_id
        if callback is None:
            return
        error = await self._post(callback.url, state)
        now = await self._store.now()
        if error is None:
            await self._store.called_back(task_id, now)
            return
        tries = callback.tries + 1
        again = now + pause_seconds(tries) if tries < MOST_TRIES else None
        log.warning("task %s: its callback failed (try %d of %d): %s", task_id, tries, MOST_TRIES, error)
        await self._store.called_back(task_id, now, error=error[:SHOWN], next_try_at=again)

    async def _post(self, url: str, state: TaskState) -> str | None:
        """What went wrong."""
        body = json.dumps(summary_as_wire(state)).encode()
        headers = {"content-type": "application/json", "idempotency-key": state.task.task_id}
        try:
            async with asyncio.timeout(TIMEOUT_SECONDS):
                response = await self._http.post(url, content=body, headers=headers)
        except TimeoutError:
            return f"no answer within {TIMEOUT_SECONDS:g} s"
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            return f"{type(error).__name__}: {error}"
        return None if response.is_success else f"it answered {response.status_code}"


def pause_seconds(tries: int) -> float:
    """From one second on twice as long after each try, up to an hour; some of it by chance, so that many do not come at once."""
    return min(LONGEST_PAUSE_SECONDS, float(2 ** min(tries - 1, 20))) * random.uniform(0.8, 1.2)
