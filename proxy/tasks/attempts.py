"""What the service does for a node with an attempt. Each step is the holder's alone and may be repeated.

A step names the attempt and its node. The store refuses it (`Superseded`) once the rollout was cancelled, queued again or given to another
node; whatever opens or closes sessions looks there first.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from typing import Any

from contract.attempts import ENDED, AttemptId, FailureRecord, RolloutState, Status, Superseded, Verdict
from contract.tasks import Task
from proxy.errors import Conflict, NotFound, VerbatimError
from proxy.services import Services
from proxy.store.connection import StoreConnection
from proxy.store.tasks.tasks import TaskStore
from proxy.store.tasks.work import WorkStore
from proxy.tasks.members import close_member, delete_member, open_member, post_reward
from reconstruct.roles import RoleRule

log = logging.getLogger(__name__)


class HeldAttempt:
    """An attempt as the node says that has it."""

    def __init__(self, services: Services, connection: StoreConnection, attempt: AttemptId, work: WorkStore) -> None:
        self._services = services
        self._tasks = TaskStore(connection)
        self._work = work
        self.attempt = attempt
        self.node = work.node

    async def check(self, gone: Collection[Status] = ("queued", *ENDED)) -> RolloutState:
        """The rollout. Raises `Superseded` if the node does not have it in this attempt, or if its status is one of `gone`."""
        attempt = self.attempt
        state = await self._tasks.load_rollout(attempt.task_id, attempt.index)
        held = state is not None and (state.attempt, state.node) == (attempt.attempt, self.node)
        if state is None or not held or state.status in gone:
            raise Superseded(f"attempt {attempt.attempt} of rollout {attempt.index} of task {attempt.task_id} was superseded")
        return state

    async def load_task(self) -> Task:
        """The whole task. Raises `Superseded`."""
        await self.check()
        return (await self._tasks.load(self.attempt.task_id)).task

    async def advance(self, status: Status, fields: dict[str, Any]) -> None:
        """Raises `Superseded`."""
        await self._work.advance(self.attempt, status, await self._work.now(), fields)

    async def open(self, roles: Sequence[RoleRule], logs: str, hung_up: Callable[[], Awaitable[bool]]) -> str:
        """Open the session and mark the rollout as running: the session's key. A session whose key was lost with an answer is replaced.
        Raises `Superseded`, `Conflict` for a session that was used already, and as `open_member` does."""
        await self.check()
        attempt, services = self.attempt, self._services
        for number in range(1, attempt.attempt):
            await delete_member(services, AttemptId(attempt.task_id, attempt.index, number).session_id)
        task = await self._load_outline()
        try:
            key = await open_member(services, task, attempt.index, attempt.session_id, roles, hung_up)
        except Conflict:
            state = await services.sessions.load(attempt.session_id)
            if state is None or state.calls or await hung_up():
                raise
            await delete_member(services, attempt.session_id)
            key = await open_member(services, task, attempt.index, attempt.session_id, roles, hung_up)
        try:
            await self.advance("running", {"session_id": attempt.session_id, "logs": logs})
        except Superseded:
            # Its new owner looked for the session before it existed.
            await self._drop_session()
            raise
        return key

    async def finish(self, verdict: Verdict) -> None:
        """Fix the verdict, close the session with it and end the rollout. If this process dies in between, the node repeats it, or the
        sweeper finishes it. Raises `Superseded`, and RequestError, nothing done, for a reward that is refused."""
        state = await self.check(gone=("queued", "cancelled"))
        attempt = self.attempt
        if state.status in ENDED:
            # The answer to the step that ended it was lost.
            return
        rewarded = False
        if state.status != "concluding":
            with suppress(NotFound, Conflict):
                # Deleted or closed by someone else, which is handled when it is to be closed.
                await post_reward(self._services, attempt.session_id, verdict)
                rewarded = True
            await self._work.conclude(attempt, verdict, await self._work.now())
        # The first verdict stands: the session may already be closing with it.
        verdict = state.verdict or verdict
        task = await self._load_outline()
        await close_member(self._services, task, attempt.index, attempt.session_id, verdict, rewarded=rewarded)
        await self._work.finish(attempt, await self._work.now())

    async def put_back(self) -> None:
        """Raises `Superseded`."""
        await self._work.put_back(self.attempt, await self._work.now())
        await self._drop_session()

    async def give_way(self) -> bool:
        """Whether the rollout is queued again. Raises `Superseded`."""
        return await self._work.give_way(self.attempt, await self._work.now())

    async def give_up(self, failure: FailureRecord, *, spared: bool) -> bool:
        """Whether the rollout is queued again. Raises `Superseded`."""
        queued = await self._work.give_up(self.attempt, failure, await self._work.now(), retry=True, spared=spared)
        if queued:
            await self._drop_session()
        return queued

    async def _drop_session(self) -> None:
        try:
            await delete_member(self._services, self.attempt.session_id)
        except VerbatimError as error:
            # The next attempt deletes it.
            log.warning("session %s is left as it is for now: %s", self.attempt.session_id, error)

    async def _load_outline(self) -> Task:
        state = await self._tasks.load_outline(self.attempt.task_id)
        if state is None:
            raise Superseded(f"there is no task {self.attempt.task_id} any more")
        return state.task
