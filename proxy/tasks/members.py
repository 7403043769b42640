"""The sessions of a task's rollouts, which are the members of its group: opened, closed with a verdict, deleted. Each may be repeated."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

import msgspec
from pydantic import ValidationError

from contract.attempts import Verdict
from contract.sessions import NewSession
from contract.tasks import Task
from proxy.api import closing
from proxy.api.requests import describe, read_adapter
from proxy.api.sessions import open_new
from proxy.errors import Conflict, NotFound, RequestError
from proxy.services import Services
from reconstruct.roles import RoleRule, encode_rule

log = logging.getLogger(__name__)

ERROR_CHARACTERS = 65_536


async def stays() -> bool:
    """The caller, which is this process, never hangs up."""
    return False


async def open_member(
    services: Services,
    task: Task,
    index: int,
    session_id: str,
    roles: Sequence[RoleRule] = (),
    hung_up: Callable[[], Awaitable[bool]] = stays,
) -> str:
    """The key of a new session in the task's group, with the `roles` of the harness's definition. Raises as `open_new` does, `Backpressure`
    while new sessions are held back, and RequestError for a task that makes no session."""
    fields = {
        **task.session_fields(index),
        "session_id": session_id,
        "role_rules": [encode_rule(rule) for rule in roles],
    }
    try:
        body: NewSession = read_adapter(NewSession).validate_json(msgspec.json.encode(fields))
    except ValidationError as error:
        raise RequestError(describe(error)) from error
    return (await open_new(services, body, hung_up))[1]


async def close_member(
    services: Services, task: Task, index: int, session_id: str, verdict: Verdict, *, rewarded: bool = False
) -> None:
    """Close the session with the verdict, unless that is refused for good. `rewarded`: it has the verdict's reward. Raises `Unavailable`.

    A rollout that failed before it had a session gets an empty one, so that its group does not wait for it. The session of a successful
    rollout can only be missing because someone deleted it."""
    try:
        try:
            if not rewarded:
                await post_reward(services, session_id, verdict)
            await _close(services, session_id, verdict)
        except NotFound:
            if not verdict.usable and verdict.status != "completed":
                # Nothing runs in it, and what it would replay may be gone.
                await open_member(services, replace(task, fork=None), index, session_id)
                await _close(services, session_id, verdict)
    except Conflict as error:
        # Closed by someone else, as idle or by hand, which decided what a trainer gets.
        log.warning("session %s keeps its own status: %s", session_id, error)
    except RequestError as error:
        # Every caller would be refused.
        log.error("session %s cannot be closed and is left as it is: %s", session_id, error)


async def close_ended(services: Services, task: Task, index: int, session_id: str, verdict: Verdict) -> None:
    """Close the session of a rollout that was ended from outside, which has the last word about how. Raises `Unavailable`."""
    try:
        await closing.close_session(services, session_id, verdict.status, None, _describe_failure(verdict))
    except NotFound:
        # Its group must not wait for a member that never started.
        await close_member(services, task, index, session_id, verdict)
    except Conflict:
        # Its node closed it with another status. An empty session takes its place, or the group would wait for it.
        if await delete_member(services, session_id):
            await close_member(services, task, index, session_id, verdict)


async def delete_member(services: Services, session_id: str) -> bool:
    """Whether the session is gone."""
    try:
        await closing.delete_session(services, session_id)
    except NotFound:
        return True
    except Conflict as error:
        log.warning("session %s is kept, as a trainer has it already: %s", session_id, error)
        return False
    return True


async def post_reward(services: Services, session_id: str, verdict: Verdict) -> None:
    """Post what closing the session does not take: all but the bare reward."""
    if verdict.reward is not None and (verdict.per_call or verdict.per_branch or verdict.feedback or verdict.metadata):
        metadata = {**verdict.metadata, **({"feedback": verdict.feedback} if verdict.feedback else {})}
        await closing.reward_session(services, session_id, verdict.reward, verdict.per_call, verdict.per_branch, metadata)


async def _close(services: Services, session_id: str, verdict: Verdict) -> None:
    await closing.close_session(services, session_id, verdict.status, verdict.reward, _describe_failure(verdict))


def _describe_failure(verdict: Verdict) -> str | None:
    failure = verdict.failure
    return None if failure is None else f"{failure.failure}: {failure.message}"[:ERROR_CHARACTERS]
