"""From a frozen session to its place in a group, so that a crash at any step is made good.

A session and its group live in different slots of the store. The session is therefore *announced* among the groups first, with
what the close asked for; then it is frozen; then it is filled into its group, which takes the announcement away. A process that
dies in between leaves the announcement, and `sweep`, in whichever process, takes the remaining steps. Each can be repeated.
A delete is announced in the same way, and the announcement is taken away when the session is gone.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from proxy import rows
from proxy.errors import Conflict, NotFound, StoreUnavailable, VerbatimError
from proxy.services import Services
from proxy.settings import Settings
from proxy.store.delivery import Announced, CloseRequest
from proxy.store.groups import GroupPolicy, Member, PolicyRows
from proxy.store.keys import StoredValueError
from proxy.store.sessions import SessionInfo, SessionState
from reconstruct.accounting import lost_share
from reconstruct.errors import ReconstructError
from reconstruct.trajectory import Trajectory

log = logging.getLogger(__name__)

CLOSED = ("completed", "failed", "timeout", "cancelled")
RUN_ENDED = ("completed", "timeout")
"""Statuses with which a session that has a reward can be trained on: an agent whose own time ran out did what the policy made it do."""
DELETED = "deleted"
"""What a delete announces in place of a status."""
SWEEP_AGE_SECONDS = 30.0
"""An announcement this old belongs to a process that died or lost its store, not to one still at work."""


async def close_session(
    services: Services, session_id: str, status: str, reward: float | None, error: str | None
) -> SessionState:
    """The frozen session. Calls in flight, in whichever process, are cut and recorded first. Raises `NotFound`, or `Conflict` when
    it was closed with another status."""
    await _load(services, session_id)
    await services.delivery.announce(session_id, CloseRequest(status, reward, error), await services.clock.now())
    return await _finish_close(services, session_id, status, reward, error)


async def reward_session(
    services: Services,
    session_id: str,
    reward: float,
    per_call: Mapping[str, float],
    per_branch: Mapping[str, float],
    metadata: Mapping[str, Any],
) -> SessionState:
    """The session with its reward; one that was closed before goes into its group now. Raises as `set_reward` does."""
    if (await _load(services, session_id)).status in CLOSED:
        await services.delivery.announce(session_id, None, await services.clock.now())
    state = await services.sessions.set_reward(session_id, reward, per_call, per_branch, metadata)
    if state.status in CLOSED:
        await offer(services, state)
    return state


async def withdraw_session(services: Services, session_id: str) -> None:
    """Delete a session and free its place in its group. Raises `NotFound`, or `Conflict` while a trainer holds it."""
    created_at = (await _load(services, session_id)).info.created_at
    await services.delivery.announce(session_id, CloseRequest(DELETED, created_at=created_at), await services.clock.now())
    await _finish_withdrawal(services, session_id)


async def offer(services: Services, state: SessionState) -> str:
    """Put a frozen session into its group; the group's state, "waiting" for the reward of a completed session, or "untrained"."""
    session_id = state.info.session_id
    if not state.info.trained or (state.status == "completed" and state.reward is None):
        await services.delivery.retract(session_id)
        return "waiting" if state.info.trained else "untrained"
    member = await _member(services, state)
    status = await services.delivery.fill(
        group_ref(state.info),
        state.info.group_size,
        member,
        policy_of(services.settings),
        await services.clock.now(),
        state.info.group_rule,
    )
    if await services.sessions.load(session_id) is None:
        await _take_out(services, session_id)
    return status


async def sweep(services: Services, *, older_than_seconds: float = SWEEP_AGE_SECONDS, limit: int = 100) -> int:
    """Finish what processes that died left announced; how many sessions that were. Raises `StoreUnavailable`."""
    found = await services.delivery.announced(await services.clock.now() - older_than_seconds, limit)
    for announced in found:
        try:
            await _resume(services, announced)
        except StoreUnavailable:
            raise
        except VerbatimError as error:
            log.error("session %s: its close or delete could not be finished: %s", announced.session_id, error.message)
        except StoredValueError as error:
            log.error("session %s: its close or delete could not be finished: %s", announced.session_id, error)
    return len(found)


def policy_of(settings: Settings) -> GroupPolicy:
    return GroupPolicy(settings.group_policy, settings.group_minimum, settings.zero_variance)


def group_ref(info: SessionInfo) -> str:
    """What the delivery store calls a session's group. Marked, so that a session without a group, which is one of its own,
    cannot meet a group that happens to be named like it."""
    return f"s:{info.session_id}" if info.group_id is None else f"g:{info.group_id}"


def group_name(ref: str) -> str:
    """What trainers call it: the group id, or the session id of a session without one."""
    return ref[2:]


async def _resume(services: Services, announced: Announced) -> None:
    state = await services.sessions.load(announced.session_id)
    if announced.request is not None and announced.request.status == DELETED:
        await _resume_withdrawal(services, announced.session_id, state, announced.request)
    elif state is not None and state.status in CLOSED:
        await offer(services, state)
    elif state is not None and announced.request is not None:
        request = announced.request
        await _finish_close(services, announced.session_id, request.status, request.reward, request.error)
    else:
        await services.delivery.retract(announced.session_id)


async def _resume_withdrawal(services: Services, session_id: str, state: SessionState | None, request: CloseRequest) -> None:
    # The id may have been taken again since: that session is not the one to delete.
    if state is not None and state.info.created_at == request.created_at:
        await _finish_withdrawal(services, session_id)
    else:
        await services.delivery.retract(session_id)


async def _finish_withdrawal(services: Services, session_id: str) -> None:
    try:
        await services.sessions.begin_close(session_id)
        await services.peers.cut(session_id)
        await services.delivery.withdraw(session_id, policy_of(services.settings))
    except (NotFound, Conflict):
        await services.delivery.retract(session_id)
        raise
    await services.sessions.delete(session_id)
    await _take_out(services, session_id)
    await services.delivery.retract(session_id)
    services.trees.forget(session_id)


async def _take_out(services: Services, session_id: str) -> None:
    """A deleted session out of the group that a reward or a close under way at the same time has filled it into again. Its group
    stays as it is once a trainer has it: the group will be a dead letter."""
    with contextlib.suppress(Conflict):
        await services.delivery.withdraw(session_id, policy_of(services.settings))


async def _finish_close(
    services: Services, session_id: str, status: str, reward: float | None, error: str | None
) -> SessionState:
    try:
        await services.sessions.begin_close(session_id)
        await services.peers.cut(session_id)
        state = await services.sessions.close(session_id, status, reward, error, await services.clock.now())
    except NotFound:
        await services.delivery.retract(session_id)
        raise
    services.trees.forget(session_id)
    await offer(services, state)
    return state


async def _member(services: Services, state: SessionState) -> Member:
    session_id = state.info.session_id
    try:
        built = await rows.session_rows(services, state)
    except ReconstructError as error:
        log.error("session %s has no usable trajectories: %s", session_id, error)
        return Member(session_id, False, state.reward, 0, 0, complete=False)
    by_policy = _by_policy(built.rows)
    usable = (
        state.status in RUN_ENDED and state.reward is not None and bool(by_policy) and _keeps_enough(services, state, built)
    )
    default = by_policy.pop("", PolicyRows(0, 0))
    complete = built.accounting.complete
    return Member(session_id, usable, state.reward, default.rows, default.oldest_version, by_policy, complete)


def _keeps_enough(services: Services, state: SessionState, built: rows.Built) -> bool:
    """Whether no more of what was sampled is lost than the session's group allows."""
    own = state.info.group_rule.max_quarantined_share if state.info.group_rule else None
    most = services.settings.max_quarantined_share if own is None else own
    lost = lost_share(built.settled, built.accounting)
    if most is None or lost <= most:
        return True
    log.warning(
        "session %s is not usable: %.1f %% of its tokens are in quarantine, %.1f %% may be",
        state.info.session_id,
        100 * lost,
        100 * most,
    )
    return False


def _by_policy(built: Sequence[Trajectory]) -> dict[str, PolicyRows]:
    """Of each policy that sampled what is trained."""
    trained: dict[str, list[Trajectory]] = {}
    for row in built:
        if row.loss_mask.any():
            trained.setdefault(row.policy, []).append(row)
    return {
        policy: PolicyRows(len(found), min(span.version for row in found for span in row.weight_versions))
        for policy, found in trained.items()
    }


async def _load(services: Services, session_id: str) -> SessionState:
    state = await services.sessions.load(session_id)
    if state is None:
        raise NotFound(f"there is no session {session_id}")
    return state


# Sessions that nobody uses any more are closed as timeout, by one process each, so that their groups need not wait for ever.


LEFT_CLOSING_SECONDS = 60.0
"""A session that is closing for so long was left by whoever began to close it: what finishes announced closes did not."""
SWEEP_SECONDS = 10.0


def sweep_seconds(settings: Settings) -> float:
    """How often to look: so that a short idle time is kept to."""
    idle_seconds = settings.session_idle_seconds
    return min(SWEEP_SECONDS, max(0.5, idle_seconds / 2)) if idle_seconds else SWEEP_SECONDS


async def expire_idle(services: Services, limit: int = 100) -> int:
    """Close sessions that were idle for `session_idle_seconds`; how many. Raises `StoreUnavailable`."""
    idle_seconds = services.settings.session_idle_seconds
    if not idle_seconds:
        return 0
    expired = 0
    for session_id in await services.sessions.unclosed(await services.clock.now() - idle_seconds, limit):
        try:
            expired += await _expire(services, session_id, idle_seconds)
        except StoreUnavailable:
            raise
        except VerbatimError as error:
            log.warning("session %s: somebody else closed it: %s", session_id, error.message)
    return expired


async def _expire(services: Services, session_id: str, idle_seconds: float) -> bool:
    """Close the session if it is idle indeed; otherwise note since when it is not."""
    state = await services.sessions.load(session_id)
    if state is None or state.status in CLOSED:
        await services.sessions.seen(session_id, None)
        return False
    now = await services.clock.now()
    intents = await services.sessions.intents(session_id)
    active_at = now if await services.peers.in_flight(intents) else state.updated_at
    idle_since = now - idle_seconds
    if active_at > idle_since:
        await services.sessions.seen(session_id, active_at)
        return False
    closing_since = min(idle_since, now - LEFT_CLOSING_SECONDS)
    if not await services.sessions.expire(session_id, idle_since, closing_since, len(intents)):
        return False
    log.info("session %s is closed: it was idle for %g s", session_id, idle_seconds)
    await close_session(services, session_id, "timeout", None, f"no call for {idle_seconds:g} seconds")
    services.metrics.expired()
    return True
