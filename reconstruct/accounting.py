"""Accounts for every sampled token: exported once, or quarantined with a reason.

`settle` takes a session's calls in any order and decides which may be trained. `verify` checks the rows of any builder: the ids before
a trained token are those it was sampled after, and each sampled token is either trained exactly once or quarantined. `check` asserts
sampled == exported + quarantined. Replayed calls are another session's: they are the context of a fork's rows, counted beside these.

One fact decides whether a call is an abandoned attempt: was its reply delivered. If not, nothing came of it: its tokens are quarantined
and the session is complete without them. If it was, whole or cut, the agent acted on it: it is trained, or the session is incomplete.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from reconstruct.errors import IdOutOfRange, ReconstructError, RecordError, UnknownParent
from reconstruct.records import LOGITS, NOT_CHOSEN, Call, Forest, order_key, request_of
from reconstruct.roles import credited_role, infer_side_calls
from reconstruct.trajectory import Accounting, Quarantined, Trajectory
from reconstruct.verification import verify

DANGLING = "dangling"
"""The reason of a call without a record: its process died while the engine sampled."""
FROZEN = "frozen_model"
"""The reason of a call of a model that is never trained."""
REPLAYED = "replayed"
"""The reason of a fork's call that its origin sampled, and trains."""
NOT_DELIVERED = "not_delivered"
"""The reason of an abandoned attempt: the harness did not get the reply, and nothing continued it."""
UNWANTED_MODE = "logprob_mode"
"""The reason of a call whose logprobs have a mode that is not to be trained."""
_LEFT_OUT = (FROZEN, NOT_CHOSEN, UNWANTED_MODE)
"""The reasons of calls that are left out by choice."""


@dataclass(frozen=True, slots=True)
class Settled:
    """The session's forest, and by call id the reason of each call that must not be trained. `stray` calls are not in the forest because
    their parent or base is missing or too short. `shown` calls are sound but of a role that is not trained: they get rows with nothing
    to train. `replayed` calls were sampled in another session."""

    forest: Forest
    refused: Mapping[str, str]
    stray: Sequence[Call]
    shown: frozenset[str] = frozenset()
    replayed: frozenset[str] = frozenset()

    def has_row(self, call_id: str) -> bool:
        """Whether the call has sampled tokens to train or to show."""
        known = call_id not in self.refused or call_id in self.shown
        return known and len(self.forest.calls[call_id].node.completion_ids) > 0


def settle(
    calls: Iterable[Call],
    *,
    delivered: Container[str] | None = None,
    train_roles: Container[str] | None = None,
    train_inferred: bool = True,
    logprob_modes: Container[str] | None = None,
    session_id: str | None = None,
) -> Settled:
    """Build the forest from calls in any order and find the calls that must not be trained. A bad record never raises.

    `delivered` has the ids of calls whose reply the harness got, whole or cut (None: all). `train_roles` are the roles to train
    (None: all); `train_inferred`: also train side calls that are only inferred to be ones (see `reconstruct.roles`). `logprob_modes` are
    the modes of logprobs to train (None: all but logits). Calls of other sessions than `session_id` are replayed (None: none is).
    """
    ordered = infer_side_calls(sorted({call.call_id: call for call in calls}.values(), key=order_key))
    forest, refused = _plant(ordered)
    stray = [call for call in ordered if call.call_id in refused]
    unsound = _out_of_range(forest)
    elsewhere = ordered if session_id is not None else ()
    replayed = frozenset(call.call_id for call in elsewhere if call.session_id != session_id)
    attempts = frozenset[str]() if delivered is None else find_attempts(forest, delivered)
    for call in forest.calls.values():
        reason = (
            (call.call_id in replayed and REPLAYED)
            or (call.quarantine_reason in _LEFT_OUT and call.quarantine_reason)
            or (call.call_id in attempts and NOT_DELIVERED)
            or _refusal(call)
            or (IdOutOfRange.reason if call.call_id in unsound else "")
            or _wrong_mode(call, logprob_modes)
        )
        if reason:
            refused[call.call_id] = reason
    shown = {} if train_roles is None else _find_untrained(forest, refused, train_roles, train_inferred)
    return Settled(forest, {**refused, **shown}, stray, frozenset(shown), replayed)


def _find_untrained(
    forest: Forest, refused: Mapping[str, str], train_roles: Container[str], train_inferred: bool
) -> dict[str, str]:
    """The sound calls of roles that are not trained, with the reason."""
    credited = {
        call_id: credited_role(call, train_inferred=train_inferred)
        for call_id, call in forest.calls.items()
        if call_id not in refused
    }
    return {call_id: f"role_{role}" for call_id, role in credited.items() if role not in train_roles}


def find_attempts(forest: Forest, delivered: Container[str]) -> frozenset[str]:
    """The ids of the abandoned attempts: calls that are not `delivered` and that nothing continues. A continuation replays the reply, so
    the harness had it, whatever was noted; and it had all choices of that request."""
    heard = {request_of(call) for call in forest.calls.values() if call.call_id in delivered or forest.children(call.call_id)}
    return frozenset(call_id for call_id, call in forest.calls.items() if request_of(call) not in heard)


def presume_delivered(calls: Iterable[Call], untold: Container[str]) -> set[str]:
    """Of the `untold`, whose process died before it could tell what became of their replies, those that count as delivered: the call did
    not fail, and the harness did not ask the same again afterwards. Requests that overlap are samples, not retries."""
    last_asked: dict[tuple[object, ...], float] = {}
    for call in (known := list(calls)):
        asked = _history_of(call)
        last_asked[asked] = max(call.started_at, last_asked.get(asked, call.started_at))
    return {
        call.call_id
        for call in known
        if call.call_id in untold
        and call.status != "failed"
        and last_asked[_history_of(call)] < call.started_at + call.engine_seconds + call.own_seconds
    }


def _history_of(call: Call) -> tuple[object, ...]:
    """What was asked: messages, tools and policy, whatever the transport and the sampling parameters."""
    return call.node.parent_id, call.fingerprint, call.root_key


def _refusal(call: Call) -> str:
    if not call.trainable:
        return call.quarantine_reason or "not_trainable"
    try:
        call.node.check(session_id=call.session_id, call_id=call.call_id)
    except RecordError as error:
        return error.reason
    return ""


def _wrong_mode(call: Call, wanted: Container[str] | None) -> str:
    """The reason if any of the call's logprobs has an unwanted mode; empty for a call without sampled tokens."""
    modes = {span.mode for span in call.node.modes}
    if LOGITS in modes:
        return "logits_for_logprobs"
    return "" if wanted is None or all(mode in wanted for mode in modes) else UNWANTED_MODE


def _plant(ordered: Sequence[Call]) -> tuple[Forest, dict[str, str]]:
    """The forest of all calls whose parent and base exist, and the reason of each other call. Each call is visited a bounded number of
    times because it waits for one missing call at a time."""
    forest = Forest()
    rejected: dict[str, str] = {}
    waiting: dict[str, list[Call]] = {}
    ready = list(reversed(ordered))
    while ready:
        call = ready.pop()
        missing = _missing(call, forest)
        if missing is not None:
            waiting.setdefault(missing, []).append(call)
            continue
        try:
            forest.add(call)
        except RecordError as error:
            rejected[call.call_id] = error.reason
            continue
        ready.extend(reversed(waiting.pop(call.call_id, ())))
    rejected.update((call.call_id, UnknownParent.reason) for calls in waiting.values() for call in calls)
    return forest, rejected


def _missing(call: Call, forest: Forest) -> str | None:
    for named in (call.node.base_id, call.node.parent_id):
        if named is not None and named not in forest:
            return named
    return None


def _out_of_range(forest: Forest) -> set[str]:
    """The calls with a negative id anywhere in their context, through which no row may run."""
    own_ids = [ids for call in forest.calls.values() for ids in (call.node.delta_ids, call.node.completion_ids)]
    # Rare, so search all ids at once first.
    if not own_ids or not np.count_nonzero(np.concatenate(own_ids) < 0):
        return set()
    first: dict[str, int] = {}
    for call in forest.calls.values():
        node = call.node
        position = first.get(node.base_id, node.base_length) if node.base_id is not None else node.base_length
        if position >= node.base_length:
            own = np.flatnonzero(np.concatenate((node.delta_ids, node.completion_ids)) < 0)
            if not len(own):
                continue
            position = node.base_length + int(own[0])
        first[call.call_id] = position
    return set(first)


def account(settled: Settled, rows: Sequence[Trajectory], untold: Mapping[str, str] | None = None) -> Accounting:
    """The session's accounting. `untold` has the ids of calls without a record (dangling intents) and their reasons.

    Raises RecordError with the session, call and token if a row's context is wrong, or if a sampled token is trained twice or neither
    trained nor quarantined.
    """
    verify(settled.forest, settled.refused, rows)
    trained = sum(int(row.loss_mask.sum()) for row in rows)
    calls = [*settled.forest.calls.values(), *settled.stray]
    replayed = 0
    if settled.replayed:
        replayed = sum(len(call.node.completion_ids) for call in calls if call.call_id in settled.replayed)
        calls = [call for call in calls if call.call_id not in settled.replayed]
    sampled = sum(len(call.node.completion_ids) for call in calls)
    quarantined = [
        Quarantined(call.call_id, len(call.node.completion_ids), settled.refused[call.call_id])
        for call in sorted((call for call in calls if call.call_id in settled.refused), key=order_key)
    ]
    quarantined += [Quarantined(call_id, 0, reason) for call_id, reason in (untold or {}).items()]
    dangling = sum(reason == DANGLING for reason in (untold or {}).values())
    complete = not untold and _is_complete(settled)
    accounting = Accounting(sampled, trained, tuple(quarantined), dangling, complete, replayed)
    check(accounting)
    return accounting


def _is_complete(settled: Settled) -> bool:
    """Whether every call that the outcome depends on can be trained or is left out by choice. It does not depend on an attempt."""
    return not settled.stray and all(
        call_id in settled.shown or reason in (*_LEFT_OUT, REPLAYED, NOT_DELIVERED)
        for call_id, reason in settled.refused.items()
    )


def measure_lost_share(settled: Settled, accounting: Accounting) -> float:
    """The share of sampled tokens in quarantine, 0 to 1, without those left out by choice: of roles, models and logprob modes that are
    not trained, and candidates that were not chosen."""
    chosen = [item for item in accounting.quarantined if item.call_id in settled.shown or item.reason in _LEFT_OUT]
    lost = accounting.sampled_tokens - accounting.exported_tokens - sum(item.tokens for item in chosen)
    return lost / accounting.sampled_tokens if accounting.sampled_tokens else 0.0


def check(accounting: Accounting) -> None:
    """Raise ReconstructError unless sampled == exported + quarantined."""
    quarantined = sum(item.tokens for item in accounting.quarantined)
    if accounting.sampled_tokens != accounting.exported_tokens + quarantined:
        raise ReconstructError(
            f"{accounting.sampled_tokens} tokens were sampled, but {accounting.exported_tokens} are exported and "
            f"{quarantined} quarantined"
        )
