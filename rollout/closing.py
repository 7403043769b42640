"""A verdict into its session: what a trainer gets of a rollout, and how its group learns of one that gives nothing."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from reconstruct.roles import RoleRule
from rollout.attempts import Verdict
from rollout.session_failures import NoSession, SessionConflict, SessionRefused
from rollout.sessions import OpenSession, Sessions
from rollout.task import Task

log = logging.getLogger(__name__)


async def open_member(
    sessions: Sessions, task: Task, index: int, session_id: str, roles: Sequence[RoleRule] = ()
) -> OpenSession:
    """A new session that is a member of the task's group; `roles` are those of its harness's definition. Waits while the service holds
    new sessions back. Raises `SessionFailed`."""
    return await sessions.create(
        session_id,
        task_id=task.task_id,
        group_id=task.task_id,
        group_size=task.num_samples,
        metadata={**task.metadata, "rollout": index, "harness": task.harness.name},
        sampling=task.sampling or None,
        group=task.group,
        replacements=False,
        echo_policy=task.echo_policy,
        budgets=task.budgets.of_session,
        roles=roles,
    )


async def close_member(sessions: Sessions, task: Task, index: int, session_id: str, verdict: Verdict) -> None:
    """Returns when the session is closed with the verdict, or the service will never take that; it may be repeated. Raises
    `SessionFailed`.

    A rollout that failed before it had a session gets an empty one: its group must not wait for it. A session of a rollout that did
    well is gone only because somebody deleted it."""
    try:
        await _close_or_open(sessions, task, index, session_id, verdict)
    except SessionRefused as error:
        # It would be refused for ever, whoever asked.
        log.error("session %s cannot be closed and is left as it is: %s", session_id, error)


async def post_reward(sessions: Sessions, session_id: str, verdict: Verdict) -> None:
    """What of the verdict goes beyond the one number that closing takes; it may be repeated. Raises `SessionFailed`."""
    if verdict.reward is not None and (verdict.per_call or verdict.per_branch or verdict.feedback or verdict.metadata):
        metadata = {**verdict.metadata, **({"feedback": verdict.feedback} if verdict.feedback else {})}
        await sessions.reward(
            session_id, verdict.reward, per_call=verdict.per_call, per_branch=verdict.per_branch, metadata=metadata
        )


async def _close_or_open(sessions: Sessions, task: Task, index: int, session_id: str, verdict: Verdict) -> None:
    try:
        await _close(sessions, session_id, verdict)
    except SessionConflict as error:
        # Closed by somebody else, as an idle one or by hand: what a trainer gets of it was decided there.
        log.warning("session %s keeps its own status: %s", session_id, error)
    except NoSession:
        if verdict.usable or verdict.status == "completed":
            return
        await open_member(sessions, task, index, session_id)
        await _close(sessions, session_id, verdict)


async def _close(sessions: Sessions, session_id: str, verdict: Verdict) -> None:
    await post_reward(sessions, session_id, verdict)
    error = None if verdict.failure is None else f"{verdict.failure.failure}: {verdict.failure.message}"
    await sessions.close_session(session_id, verdict.status, reward=verdict.reward, error=error)
