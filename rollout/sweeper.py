"""What servers do beside answering: sessions of rollouts that were ended from outside are closed, those of abandoned attempts deleted,
what lost nodes left is finished, callbacks are delivered, old tasks forgotten, said what no node can take, and counted what metrics
show.

Every server runs one. What is to be done stands in the store and is given to one at a time; each part may be repeated.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections.abc import Awaitable, Callable
from typing import Annotated

import httpx
from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from rollout.attempts import AttemptId, RolloutState, Superseded, Verdict
from rollout.course import close_member
from rollout.metrics import RolloutNumbers
from rollout.sessions import NoSession, SessionConflict, SessionFailed, Sessions
from rollout.store.base import StoreUnavailable, Taken, TaskState
from rollout.store.tasks import CLAIM_SECONDS, RedisTaskStore
from rollout.store.work import RedisWorkStore
from rollout.task import Task
from rollout.task_body import render_summary

log = logging.getLogger(__name__)

AT_ONCE = 32
MOST_ROUNDS = 100
"""Of one part before the next one has its turn."""
DAY_SECONDS = 86400.0


class Sweeper:
    """`name` tells this server from others and from nodes."""

    def __init__(
        self,
        name: str,
        store: RedisTaskStore,
        work: RedisWorkStore,
        sessions: Sessions,
        callbacks: Callbacks,
        numbers: RolloutNumbers,
        settings: RolloutSettings,
    ) -> None:
        self._name = name
        self._store = store
        self._work = work
        self._sessions = sessions
        self._callbacks = callbacks
        self._numbers = numbers
        self._settings = settings
        self._waiting: set[str] = set()
        """Parts that found the store away and have not yet found it back."""

    async def run(self) -> None:
        """For ever."""
        async with asyncio.TaskGroup() as parts:
            # Each by itself: a callback that nobody answers must not keep sessions from being closed.
            for part in (
                self.close_ended,
                self.delete_abandoned,
                self.finish_lost,
                self._callbacks.deliver,
                self.forget_old,
                self.tell_stranded,
                self._numbers.refresh,
            ):
                parts.create_task(self._repeat(part))

    async def close_ended(self) -> int:
        """How many rollouts that were ended from outside were looked at."""
        ended = await self._store.to_close(AT_ONCE, await self._store.now())
        for task, state in ended:
            if await self._done(_close(self._sessions, task, state), f"{task.task_id}.{state.index}"):
                await self._store.closed(task.task_id, state.index)
        return len(ended)

    async def delete_abandoned(self) -> int:
        """How many sessions of attempts that lost their node were looked at."""
        attempts = await self._store.abandoned(AT_ONCE, await self._store.now())
        for attempt in attempts:
            if await self._done(_delete(self._sessions, attempt.session_id), attempt.session_id):
                await self._store.deleted(attempt)
        return len(attempts)

    async def finish_lost(self) -> int:
        """1 when a rollout whose verdict stood was finished in place of its node."""
        taken = await self._work.recover(self._name, self._settings.lost_node_seconds, await self._store.now())
        if taken is None:
            return 0
        await self._done(self._finish(taken), taken.attempt.session_id)
        return 1

    async def forget_old(self) -> int:
        """How many tasks were deleted."""
        if not self._settings.task_retain_days:
            return 0
        return await self._store.forget(await self._store.now() - self._settings.task_retain_days * DAY_SECONDS, AT_ONCE)

    async def tell_stranded(self) -> int:
        """Always 0: the next look is as good as another one now."""
        await self._store.tell_stranded(await self._store.now())
        return 0

    async def _finish(self, taken: Taken) -> None:
        attempt, verdict = taken.attempt, taken.state.verdict
        assert verdict is not None, "it was concluded"
        await close_member(self._sessions, taken.task, attempt.index, attempt.session_id, verdict)
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
                # All parts meet the same outage, one after the other.
                if not self._waiting:
                    log.warning("the sweep of tasks waits: %s", error)
                self._waiting.add(name)
            except Exception:
                # It would end for good, and nobody would see that sessions stay open.
                log.exception("the sweep of tasks failed and is tried again")
            await asyncio.sleep(self._settings.task_sweep_seconds)

    async def _done(self, act: Awaitable[object], what: str) -> bool:
        """False: it is tried again once the time for which it was given out is over."""
        try:
            async with asyncio.timeout(CLAIM_SECONDS / 2):
                await act
        except (SessionFailed, TimeoutError) as error:
            log.warning("rollout %s: its session is left as it is for now: %s", what, error or "no answer in time")
            return False
        except Superseded:
            pass
        return True


async def _close(sessions: Sessions, task: Task, state: RolloutState) -> None:
    attempt = AttemptId(task.task_id, state.index, state.attempt)
    verdict = state.verdict or Verdict("cancelled")
    error = f"{verdict.failure.failure}: {verdict.failure.message}" if verdict.failure else None
    try:
        await sessions.close_session(attempt.session_id, verdict.status, error=error)
    except NoSession:
        # Its group must not wait for a member that never began.
        await close_member(sessions, task, state.index, attempt.session_id, verdict)
    except SessionConflict:
        # Its node was about to end it otherwise; whoever ended the rollout meanwhile has the last word. Its place in the group is
        # taken by an empty one, or the group would wait for it.
        if await _delete(sessions, attempt.session_id):
            await close_member(sessions, task, state.index, attempt.session_id, verdict)


async def _delete(sessions: Sessions, session_id: str) -> bool:
    """Whether it is gone."""
    try:
        await sessions.delete(session_id)
    except SessionConflict as error:
        log.warning("session %s stays as it is, as a trainer has it already: %s", session_id, error)
        return False
    return True


# The one request that tells the outside of a task's end: POSTed to its callback URL until somebody takes it.
#
# What is due stands in the store, so that whichever server lives delivers it; while one tries, no other does. A server that dies in the
# middle leaves it to another after `CLAIM_SECONDS`, so a receiver may be told twice, and knows that by the task's id.


TIMEOUT_SECONDS = CLAIM_SECONDS / 2
"""Of one try in all: it ends before another server may try."""
CALLBACKS_AT_ONCE = 16
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
        due = await self._store.callbacks(CALLBACKS_AT_ONCE, await self._store.now())
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
        again = now + draw_pause_seconds(tries) if tries < MOST_TRIES else None
        log.warning("task %s: its callback failed (try %d of %d): %s", task_id, tries, MOST_TRIES, error)
        await self._store.called_back(task_id, now, error=error[:SHOWN], next_try_at=again)

    async def _post(self, url: str, state: TaskState) -> str | None:
        """What went wrong."""
        body = json.dumps(render_summary(state)).encode()
        headers = {"content-type": "application/json", "idempotency-key": state.task.task_id}
        try:
            async with asyncio.timeout(TIMEOUT_SECONDS):
                response = await self._http.post(url, content=body, headers=headers)
        except TimeoutError:
            return f"no answer within {TIMEOUT_SECONDS:g} s"
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            return f"{type(error).__name__}: {error}"
        return None if response.is_success else f"it answered {response.status_code}"


def draw_pause_seconds(tries: int) -> float:
    """From one second on twice as long after each try, up to an hour; some of it by chance, so that many do not come at once."""
    return min(LONGEST_PAUSE_SECONDS, float(2 ** min(tries - 1, 20))) * random.uniform(0.8, 1.2)


# What a server is told of the rollout service; the environment is read here. Each field is `VERBATIM_<NAME>`.


class RolloutSettings(BaseSettings):
    model_config = SettingsConfigDict(env_prefix="VERBATIM_", extra="ignore", use_attribute_docstrings=True)

    task_retain_days: Annotated[float, Field(ge=0)] = 30.0
    """How long an ended task is kept in the store; 0: for ever. Its sessions are kept by rules of their own."""
    task_sweep_seconds: Annotated[float, Field(gt=0)] = 2.0
    """How often a server looks for sessions to close and callbacks to deliver."""
    lost_node_seconds: Annotated[float, Field(gt=0)] = 300.0
    """Silence of a node after which a server ends or finishes what it can of the node's rollouts itself. Other nodes take them long
    before that, where there are any that may."""
