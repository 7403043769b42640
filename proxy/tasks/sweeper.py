"""The sweeper: what every server does in the background.

It closes sessions of rollouts that were ended from outside, deletes sessions of abandoned attempts, finishes the rollouts of lost nodes,
delivers callbacks, forgets old tasks, marks rollouts that no node can take, and refreshes metrics. The work is listed in the store, which
gives each item to one server at a time; each part may be repeated.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from contract.attempts import AttemptId, Superseded, TakenRollout, Verdict
from proxy.errors import StoreUnavailable, VerbatimError
from proxy.services import Services
from proxy.store.tasks.tasks import CLAIM_SECONDS, TaskStore
from proxy.store.tasks.values import TaskState
from proxy.store.tasks.work import WorkStore
from proxy.tasks.members import close_ended, close_member, delete_member
from proxy.tasks.metrics import RolloutNumbers
from proxy.tasks.views import render_summary

log = logging.getLogger(__name__)

AT_ONCE = 32
MOST_ROUNDS = 100
"""Of one part before it pauses."""
SWEEP_SECONDS = 2.0
"""Between two looks: a look that finds nothing is one command for each part."""
LOST_NODE_SECONDS = 300.0
"""Silence of a node after which a server ends or finishes what it can of the node's rollouts itself: long after other nodes had time to
take them, where there are any that may."""
DAY_SECONDS = 86400.0


class Sweeper:
    """`name` is unique among servers and nodes. `may_recover` says whether a node that was silent for so many seconds is lost."""

    def __init__(
        self,
        name: str,
        store: TaskStore,
        work: WorkStore,
        services: Services,
        callbacks: Callbacks,
        numbers: RolloutNumbers,
        settings: RolloutSettings,
        may_recover: Callable[[float], bool] = lambda seconds: True,
    ) -> None:
        self._name = name
        self._store = store
        self._work = work
        self._services = services
        self._callbacks = callbacks
        self._numbers = numbers
        self._settings = settings
        self._may_recover = may_recover
        self._waiting: set[str] = set()
        """Parts that are waiting for the store."""

    async def run(self) -> None:
        """Never returns."""
        async with asyncio.TaskGroup() as parts:
            # In parallel: an unanswered callback must not delay the closing of sessions.
            for part in (
                self.close_ended,
                self.delete_abandoned,
                self.finish_lost,
                self._callbacks.deliver,
                self.forget_old,
                self.mark_stranded,
                self._numbers.refresh,
            ):
                parts.create_task(self._repeat(part))

    async def close_ended(self) -> int:
        """How many rollouts were handled that were ended from outside."""
        ended = await self._store.claim_unclosed(AT_ONCE, await self._store.now())
        for task, state in ended:
            session_id = AttemptId(task.task_id, state.index, state.attempt).session_id
            verdict = state.verdict or Verdict("cancelled")
            if await self._try(close_ended(self._services, task, state.index, session_id, verdict), session_id):
                await self._store.mark_closed(task.task_id, state.index)
        return len(ended)

    async def delete_abandoned(self) -> int:
        """How many sessions were handled of attempts that lost their node, or whose task was cancelled before its group had begun."""
        attempts = await self._store.claim_abandoned(AT_ONCE, await self._store.now())
        for attempt in attempts:
            if await self._try(delete_member(self._services, attempt.session_id), attempt.session_id):
                await self._store.drop_abandoned(attempt)
        return len(attempts)

    async def finish_lost(self) -> int:
        """1 if a lost node's rollout was finished, whose verdict was stored; otherwise 0."""
        if not self._may_recover(0.0):
            return 0
        taken = await self._work.recover(self._name, LOST_NODE_SECONDS, await self._store.now())
        if taken is None:
            return 0
        await self._try(self._finish(taken), taken.attempt.session_id)
        return 1

    async def forget_old(self) -> int:
        """How many tasks were deleted."""
        if not self._settings.task_retain_days:
            return 0
        return await self._store.forget(await self._store.now() - self._settings.task_retain_days * DAY_SECONDS, AT_ONCE)

    async def mark_stranded(self) -> int:
        """Always 0: there is no need to look again at once."""
        await self._store.note_stranded(await self._store.now())
        return 0

    async def _finish(self, taken: TakenRollout) -> None:
        attempt, verdict = taken.attempt, taken.state.verdict
        if verdict is None:
            raise ValueError(f"rollout {attempt.session_id} is concluding without a verdict")
        await close_member(self._services, taken.task, attempt.index, attempt.session_id, verdict)
        await self._work.finish(attempt, await self._store.now())

    async def _repeat(self, part: Callable[[], Awaitable[int]]) -> None:
        name = part.__qualname__
        while True:
            try:
                for _ in range(MOST_ROUNDS):
                    if not await part():
                        break
                self._waiting.discard(name)
            except StoreUnavailable as error:
                # Warn once: all parts meet the same outage.
                if not self._waiting:
                    log.warning("the sweep of tasks waits: %s", error)
                self._waiting.add(name)
            except Exception:
                # Otherwise it would stop for good, and sessions would stay open unnoticed.
                log.exception("the sweep of tasks failed and is tried again")
            await asyncio.sleep(SWEEP_SECONDS)

    async def _try(self, act: Awaitable[object], what: str) -> bool:
        """Whether it worked. If not, it is due again once this server's claim on it expires."""
        try:
            async with asyncio.timeout(CLAIM_SECONDS / 2):
                await act
        except StoreUnavailable:
            raise
        except (VerbatimError, TimeoutError) as error:
            log.warning("rollout %s: its session is left as it is for now: %s", what, error or "no answer in time")
            return False
        except Superseded:
            pass
        except Exception:
            # Otherwise it would keep those behind it waiting for ever.
            log.exception("rollout %s: its session is left as it is for now", what)
            return False
        return True


# Callbacks: one POST when a task ends, repeated until it is accepted. The store lists those due and gives each to one server for
# `CLAIM_SECONDS`; if that server dies, another delivers it, so a receiver may get it twice and knows it by the task's id.


TIMEOUT_SECONDS = CLAIM_SECONDS / 2
"""Of one try: it ends before another server may try."""
CALLBACKS_AT_ONCE = 16
MOST_TRIES = 24
LONGEST_PAUSE_SECONDS = 3600.0
SHOWN = 500
"""Characters of an error that are stored."""


Post = Callable[[str, bytes, Mapping[str, str]], Awaitable[tuple[int, bytes]]]
"""POSTs a body with headers to a URL: the status and the body of the answer, within TIMEOUT_SECONDS. Raises OSError."""


class Callbacks:
    def __init__(self, store: TaskStore, post: Post) -> None:
        self._store = store
        self._post_body = post

    async def deliver(self) -> int:
        """How many were tried. Raises `StoreUnavailable`."""
        due = await self._store.claim_callbacks(CALLBACKS_AT_ONCE, await self._store.now())
        await asyncio.gather(*(self._deliver(state) for state in due))
        return len(due)

    async def _deliver(self, state: TaskState) -> None:
        callback, task_id = state.callback, state.task.task_id
        if callback is None:
            return
        error = await self._post(callback.url, state)
        now = await self._store.now()
        if error is None:
            await self._store.record_callback(task_id, now)
            return
        tries = callback.tries + 1
        again = now + draw_pause_seconds(tries) if tries < MOST_TRIES else None
        log.warning("task %s: its callback failed (try %d of %d): %s", task_id, tries, MOST_TRIES, error)
        await self._store.record_callback(task_id, now, error=error[:SHOWN], next_try_at=again)

    async def _post(self, url: str, state: TaskState) -> str | None:
        """The error, or None."""
        body = json.dumps(render_summary(state)).encode()
        headers = {"content-type": "application/json", "idempotency-key": state.task.task_id}
        try:
            status, _ = await self._post_body(url, body, headers)
        except OSError as error:
            return str(error)
        return None if 200 <= status < 300 else f"it answered {status}"


def draw_pause_seconds(tries: int) -> float:
    """Doubles from one second after each try, up to an hour, with jitter."""
    return min(LONGEST_PAUSE_SECONDS, float(2 ** min(tries - 1, 20))) * random.uniform(0.8, 1.2)


class RolloutSettings(BaseSettings):
    """Settings of the rollout service in a server, from the environment: each field is `VERBATIM_<NAME>`."""

    model_config = SettingsConfigDict(env_prefix="VERBATIM_", extra="ignore", use_attribute_docstrings=True)

    task_retain_days: Annotated[float, Field(ge=0)] = 30.0
    """How long an ended task is kept in the store; 0: for ever. Its sessions are kept by rules of their own."""
