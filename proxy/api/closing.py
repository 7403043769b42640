"""Closing, rewarding and deleting sessions so that a crash at any step is recovered.

A session and its group live in different slots of the store. The session is therefore *announced* among the groups first, with what the
close asked for; then it is frozen; then it is filled into its group, which removes the announcement. If a process dies in between, the
announcement remains, and `finish_announced`, in any process, takes the remaining steps; each can be repeated. A delete is announced in the
same way; its announcement is removed once the session is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from contract.attempts import ENDED
from contract.sessions import TokenSums
from proxy import rows
from proxy.errors import Conflict, NotFound, StoreUnavailable, VerbatimError
from proxy.services import Services
from proxy.settings import Settings
from proxy.store.delivery import Announced, CloseRequest
from proxy.store.groups import GroupDefaults, GroupMember, PolicyRows
from proxy.store.keys import StoredValueError
from proxy.store.run import PolicyOutcome, choose_label
from proxy.store.states import SessionInfo, SessionState
from reconstruct.accounting import measure_lost_share, presume_delivered
from reconstruct.errors import ReconstructError
from reconstruct.records import Call
from reconstruct.trajectory import Quarantined, Trajectory

log = logging.getLogger(__name__)

RUN_ENDED = ("completed", "timeout")
"""Statuses of a trainable session: an agent that ran out of time still did what the policy made it do."""
DELETED = "deleted"
"""Announced by a delete in place of a status."""
RUN_LABEL = "label"
"""The field of a session's metadata whose value divides the numbers of its run."""
SWEEP_AGE_SECONDS = 30.0
"""Age from which an announcement is taken to be left by a process that died or lost its store, not by one still at work."""
STUCK_CLOSING_SECONDS = 60.0
"""Time in status closing after which `close_idle` closes a session: no announcement finishes it."""
SWEEP_SECONDS = 10.0
NAMED_FORKS = 5
"""Forks that a refused delete names."""


async def load_session(services: Services, session_id: str) -> SessionState:
    """Raises `NotFound`, and `Unavailable` for a session that only a newer build understands."""
    state = await services.sessions.load(session_id)
    if state is None:
        raise NotFound(f"there is no session {session_id}")
    state.info.check_understood()
    return state


async def close_session(
    services: Services, session_id: str, status: str, reward: float | None, error: str | None
) -> SessionState:
    """The frozen session. Calls in flight in any process are cut and recorded first. Raises `NotFound`, or `Conflict` if it was closed with
    another status."""
    await load_session(services, session_id)
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
    """The session with its reward. A session already closed now joins its group. Raises as `set_reward` does."""
    if (await load_session(services, session_id)).status in ENDED:
        await services.delivery.announce(session_id, None, await services.clock.now())
    state = await services.sessions.set_reward(session_id, reward, per_call, per_branch, metadata)
    if state.status in ENDED:
        await fill_group(services, state)
    return state


async def delete_session(services: Services, session_id: str) -> None:
    """Also frees its place in its group. Raises `NotFound`, or `Conflict` while a trainer leases it or forks replay it."""
    created_at = (await load_session(services, session_id)).info.created_at
    if forks := await services.sessions.find_forks(session_id, await services.clock.now()):
        raise Conflict(
            f"session {session_id} is replayed by {', '.join(forks[:NAMED_FORKS])}: delete its {len(forks)} forks first"
        )
    await services.delivery.announce(session_id, CloseRequest(DELETED, created_at=created_at), await services.clock.now())
    await _finish_delete(services, session_id)


async def fill_group(services: Services, state: SessionState, *, broken: bool = False) -> str:
    """Put a frozen session into its group. Returns the group's state, "waiting" if it lacks scores, or a completed session its reward, or
    "untrained". `broken`: it cannot be scored, nor its rows built, by a fault of this service; it has none for its group."""
    session_id = state.info.session_id
    unrewarded, wants_scores = state.status == "completed" and state.reward is None, _wants_scores(state)
    built = None
    if state.info.trained and not broken and (wants_scores or not unrewarded):
        built = await _build_rows(services, state)
    # Scored while it waits for its reward: its jobs are stored before the announcement is retracted.
    unscored = wants_scores and built is not None and await services.scoring.hold_back(state, built.settled, built.scores)
    if not state.info.trained or unscored or unrewarded:
        await services.delivery.retract(session_id)
        return "waiting" if state.info.trained else "untrained"
    member, outcomes = await _build_member(services, state, built)
    status = await services.delivery.fill(
        group_ref(state.info),
        state.info.group_size,
        member,
        build_group_defaults(services.settings),
        await services.clock.now(),
        state.info,
        outcomes,
    )
    if await services.sessions.load(session_id) is None:
        await _withdraw_deleted(services, session_id)
    return status


def build_group_defaults(settings: Settings) -> GroupDefaults:
    return GroupDefaults(settings.group.policy, settings.group.minimum, settings.group.zero_variance)


def group_ref(info: SessionInfo) -> str:
    """The delivery store's name for a session's group. Prefixed, so that the group of a session without a `group_id` cannot collide with a
    group of that name."""
    return f"s:{info.session_id}" if info.group_id is None else f"g:{info.group_id}"


def group_name(ref: str) -> str:
    """The trainer's name for a group: its `group_id`, or the id of a session without one."""
    return ref[2:]


async def finish_announced(services: Services, *, older_than_seconds: float = SWEEP_AGE_SECONDS, limit: int = 100) -> int:
    """Finish the closes and deletes that dead processes left announced. Returns the number of sessions. Raises `StoreUnavailable`."""
    found = await services.delivery.find_announced(await services.clock.now() - older_than_seconds, limit)
    for announced in found:
        try:
            await _resume(services, announced)
        except StoreUnavailable:
            raise
        except (VerbatimError, StoredValueError) as error:
            log.error("session %s: its close or delete could not be finished: %s", announced.session_id, error)
    return len(found)


async def _resume(services: Services, announced: Announced) -> None:
    session_id, request = announced.session_id, announced.request
    state = await services.sessions.load(session_id)
    if state is not None:
        state.info.check_understood()
    if request is not None and request.status == DELETED:
        # The id may have been reused since: that session is not the one to delete.
        if state is not None and state.info.created_at == request.created_at:
            await _finish_delete(services, session_id)
        else:
            if request.created_at is not None:
                await services.media.release(session_id, request.created_at)
            await services.delivery.retract(session_id)
    elif state is not None and state.status in ENDED:
        await fill_group(services, state)
    elif state is not None and request is not None:
        await _finish_close(services, session_id, request.status, request.reward, request.error)
    else:
        await services.delivery.retract(session_id)


async def _finish_close(
    services: Services, session_id: str, status: str, reward: float | None, error: str | None
) -> SessionState:
    try:
        await services.sessions.begin_close(session_id)
        await services.peers.cut(session_id)
        presumed = await _presume_delivered(services, session_id)
        state = await services.sessions.close(session_id, status, reward, error, await services.clock.now(), presumed)
    except NotFound:
        await services.delivery.retract(session_id)
        raise
    services.cache.forget(session_id)
    services.pool.release(session_id)
    await fill_group(services, state)
    return state


async def _presume_delivered(services: Services, session_id: str) -> set[str]:
    """The calls that count as delivered though their process died before it could tell."""
    untold = await services.sessions.load_untold(session_id)
    lost = {call_id for call_id, process in untold.items() if process != services.peers.process}
    if not lost:
        return lost
    records = await services.sessions.load_records(session_id)

    def presume() -> set[str]:
        calls, _ = rows.decode_records(records)
        return presume_delivered(calls, lost)

    return await asyncio.to_thread(presume)


async def _finish_delete(services: Services, session_id: str) -> None:
    try:
        await services.sessions.begin_delete(session_id)
        state = await services.sessions.begin_close(session_id)
        await services.peers.cut(session_id)
        await services.delivery.withdraw(session_id, build_group_defaults(services.settings))
    except (NotFound, Conflict):
        await services.sessions.call_off_delete(session_id)
        await services.delivery.retract(session_id)
        raise
    await services.sessions.delete(session_id)
    await services.media.release(session_id, state.info.created_at)
    await _withdraw_deleted(services, session_id)
    await services.delivery.retract(session_id)
    services.cache.forget(session_id)
    if state.status not in ENDED:
        services.pool.release(session_id)


async def _withdraw_deleted(services: Services, session_id: str) -> None:
    """Withdraw a deleted session that a concurrent reward or close has filled into its group again. If a trainer already leases the group,
    it stays and will become a dead letter."""
    with contextlib.suppress(Conflict):
        await services.delivery.withdraw(session_id, build_group_defaults(services.settings), uncount=True)


async def _build_rows(services: Services, state: SessionState) -> rows.Built | None:
    try:
        return await rows.session_rows(services, state)
    except ReconstructError as error:
        log.error("session %s has no usable trajectories: %s", state.info.session_id, error)
        return None


async def _build_member(
    services: Services, state: SessionState, built: rows.Built | None
) -> tuple[GroupMember, list[PolicyOutcome]]:
    """The member, and what the session adds to the numbers of the run. Without rows it is not usable."""
    session_id = state.info.session_id
    if built is None:
        return GroupMember(session_id, False, state.reward, 0, 0, complete=False, run=state.info.run), [
            replace(_describe_end(services, state), incomplete=True)
        ]
    await services.sessions.note_accounting(session_id, _sum_up(built))
    by_policy = _count_by_policy(built.rows)
    usable = (
        state.status in RUN_ENDED and state.reward is not None and bool(by_policy) and _keeps_enough(services, state, built)
    )
    if usable and _wants_scores(state) and (reason := services.scoring.find_failed(state, built.settled, built.scores)):
        log.warning("session %s is not usable: %s", session_id, reason)
        usable = False
    default = by_policy.pop("", PolicyRows(0, 0))
    complete = built.accounting.complete
    counted = (default.rows, default.oldest_version, by_policy, complete)
    member = GroupMember(session_id, usable, state.reward, *counted, state.info.run)
    return member, await _measure_outcomes(services, state, built)


def _wants_scores(state: SessionState) -> bool:
    return bool(state.info.scores) and state.info.trained and state.status in RUN_ENDED


def _sum_up(built: rows.Built) -> TokenSums:
    accounting, quarantined = built.accounting, Counter[str]()
    for item in accounting.quarantined:
        quarantined[item.reason] += item.tokens
    return TokenSums(
        sampled_tokens=accounting.sampled_tokens,
        exported_tokens=accounting.exported_tokens,
        quarantined=dict(quarantined),
        dangling_calls=accounting.dangling_calls,
        complete=accounting.complete,
        truncated=any(row.truncated for row in built.rows if row.loss_mask.any()),
        versions=_find_versions(built),
    )


def _find_versions(built: rows.Built) -> dict[str, tuple[int, int]]:
    """By policy, the oldest and the newest version of what the session sampled; of tokens without a version nothing is known."""
    found: dict[str, list[int]] = {}
    for call in (*built.settled.forest.calls.values(), *built.settled.stray):
        if call.call_id not in built.settled.replayed:
            found.setdefault(call.policy, []).extend(span.version for span in call.node.spans)
    return {policy: (min(versions), max(versions)) for policy, versions in sorted(found.items()) if versions}


def _keeps_enough(services: Services, state: SessionState, built: rows.Built) -> bool:
    """Whether no more of the sampled tokens is quarantined than the session's group allows."""
    own = state.info.max_quarantined_share
    limit = services.settings.group.max_quarantined_share if own is None else own
    lost = measure_lost_share(built.settled, built.accounting)
    if limit is None or lost <= limit:
        return True
    log.warning(
        "session %s is not usable: %.1f %% of its tokens are quarantined, the limit is %.1f %%",
        state.info.session_id,
        100 * lost,
        100 * limit,
    )
    return False


def _count_by_policy(built: Sequence[Trajectory]) -> dict[str, PolicyRows]:
    """The trained rows of each policy."""
    trained: dict[str, list[Trajectory]] = {}
    for row in built:
        if row.loss_mask.any():
            trained.setdefault(row.policy, []).append(row)
    return {
        policy: PolicyRows(len(found), min(span.version for row in found for span in row.weight_versions))
        for policy, found in trained.items()
    }


async def _measure_outcomes(services: Services, state: SessionState, built: rows.Built) -> list[PolicyOutcome]:
    """One per policy that sampled in the session; without any call, one of the default policy. Calls without a record are the first's."""
    calls: dict[str, list[Call]] = {}
    for call in (*built.settled.forest.calls.values(), *built.settled.stray):
        if call.call_id not in built.settled.replayed:
            calls.setdefault(call.policy, []).append(call)
    end = _describe_end(services, state)
    end = replace(end, incomplete=not built.accounting.complete)
    outcomes = [await _measure_policy(services, end, policy, made, built) for policy, made in sorted(calls.items())] or [end]
    known = {call.call_id for made in calls.values() for call in made}
    unknown = _group_by_reason(item for item in built.accounting.quarantined if item.call_id not in known)
    return [replace(outcomes[0], quarantined={**unknown, **outcomes[0].quarantined}), *outcomes[1:]]


def _group_by_reason(items: Iterable[Quarantined]) -> dict[str, tuple[int, int]]:
    """Calls and tokens."""
    found: dict[str, tuple[int, int]] = {}
    for item in items:
        calls, tokens = found.get(item.reason, (0, 0))
        found[item.reason] = (calls + 1, tokens + item.tokens)
    return found


async def _measure_policy(
    services: Services, end: PolicyOutcome, policy: str, calls: Sequence[Call], built: rows.Built
) -> PolicyOutcome:
    version = min((span.version for call in calls for span in call.node.spans), default=None)
    current = 0 if version is None else (await services.weights.current(policy)).version
    made, sampled = {call.call_id for call in calls}, sum(len(call.node.completion_ids) for call in calls)
    quarantined = _group_by_reason(item for item in built.accounting.quarantined if item.call_id in made)
    return replace(
        end,
        policy=policy,
        version=version,
        behind=0 if version is None else max(0, current - version),
        calls=len(calls),
        invalid_tool_calls=sum(call.invalid_tool_call for call in calls),
        sampled_tokens=sampled,
        exported_tokens=sampled - sum(tokens for _, tokens in quarantined.values()),
        quarantined=quarantined,
        truncated=any(row.truncated for row in built.rows if row.policy == policy and row.loss_mask.any()),
    )


def _describe_end(services: Services, state: SessionState) -> PolicyOutcome:
    settings, closed_at = services.settings, state.closed_at or state.updated_at
    return PolicyOutcome(
        closed_at=closed_at,
        status=state.status,
        reward=state.reward,
        solved=state.reward is not None and state.reward >= settings.solved_reward,
        seconds=max(0.0, closed_at - state.info.created_at),
        label=choose_label(state.info.metadata, RUN_LABEL),
        run=state.info.run,
    )


# Idle sessions are closed as timeout, each by one process, so that their groups do not wait forever.


def choose_sweep_interval(settings: Settings) -> float:
    """Seconds between sweeps: short enough to honour a short `session_idle_seconds`."""
    idle_seconds = settings.session_idle_seconds
    return min(SWEEP_SECONDS, max(0.5, idle_seconds / 2)) if idle_seconds else SWEEP_SECONDS


async def close_idle(services: Services, limit: int = 100) -> int:
    """Close the sessions that were idle for `session_idle_seconds`. Returns their number. Raises `StoreUnavailable`."""
    idle_seconds = services.settings.session_idle_seconds
    if not idle_seconds:
        return 0
    closed = 0
    for session_id in await services.sessions.find_unclosed(await services.clock.now() - idle_seconds, limit):
        try:
            closed += await _close_if_idle(services, session_id, idle_seconds)
        except StoreUnavailable:
            raise
        except VerbatimError as error:
            log.warning("session %s: closed by another process: %s", session_id, error.message)
    return closed


async def _close_if_idle(services: Services, session_id: str, idle_seconds: float) -> bool:
    """False if it is not idle; the store then records when it was last active."""
    state = await services.sessions.load(session_id)
    if state is None or state.status in ENDED:
        await services.sessions.mark_active(session_id, None)
        return False
    state.info.check_understood()
    now = await services.clock.now()
    intents = await services.sessions.load_intents(session_id)
    active_at = now if await services.peers.in_flight(intents) else state.updated_at
    idle_since = now - idle_seconds
    if active_at > idle_since:
        await services.sessions.mark_active(session_id, active_at)
        return False
    closing_since = min(idle_since, now - STUCK_CLOSING_SECONDS)
    if not await services.sessions.expire(session_id, idle_since, closing_since, len(intents)):
        return False
    log.info("session %s is closed: it was idle for %g s", session_id, idle_seconds)
    await close_session(services, session_id, "timeout", None, f"no call for {idle_seconds:g} seconds")
    services.metrics.count_expired()
    return True
