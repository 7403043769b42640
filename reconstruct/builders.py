"""Builders: from a settled session to training rows.

`merged` gives one row per branch: the longest runs of calls in which each extends the one before. Calls shared by several branches
are trained in the first branch in canonical order and masked in the others, so that every sampled token is trained exactly once.
`per_call` gives one row per call. Both train the same tokens.

A builder is a function `(Settled, RowContext) -> list[Trajectory]`; the service finds it by name (`proxy/builders.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reconstruct.accounting import Settled
from reconstruct.details import NO_EXPERT, NO_TOKEN
from reconstruct.records import BASE_VERSIONS, CONTROL_TOKENS, DIFFERS, DIVERGED, PIVOT, REPLAY, Call, Forest, order_key
from reconstruct.spans import ModeSpan, Span, merge_modes
from reconstruct.trajectory import RowDetails, Trajectory


@dataclass(frozen=True, slots=True)
class RowContext:
    """What the rows of a session share, and its rewards."""

    session_id: str
    group_id: str | None = None
    task_id: str | None = None
    reward: float | None = None
    per_call: Mapping[str, float] = field(default_factory=dict)
    per_branch: Mapping[str, float] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    budget_cut: str | None = None
    """The call that spent the session's budget, after which the harness was stopped."""
    origin: str | None = None
    """The session that this one replays."""


CUT = ("length", "abort")
"""The finish reasons of a reply that the model did not end."""
BUDGET = "budget"
"""The finish reason of a row that ends with that call."""

Builder = Callable[[Settled, RowContext], list[Trajectory]]


def merged(settled: Settled, context: RowContext) -> list[Trajectory]:
    """One row per branch that trains or shows anything, in canonical order of the branches' last calls."""
    forest = settled.forest
    owned: set[str] = set()
    rows = []
    for leaf in _leaves(settled):
        path = forest.branch(leaf.call_id)
        own = (
            set() if leaf.call_id in settled.shown else {call_id for call_id in path if call_id not in settled.refused} - owned
        )
        owned |= own
        rows.append(_row("merged", forest, path, own, context))
    return rows


def per_call(settled: Settled, context: RowContext) -> list[Trajectory]:
    """One row per trainable call: its prompt, masked, and what it sampled."""
    forest = settled.forest
    called = [call.call_id for call in forest.in_order() if settled.has_row(call.call_id)]
    return [_row("per_call", forest, [name], {name} - settled.refused.keys(), context) for name in called]


def _leaves(settled: Settled) -> list[Call]:
    """The trained calls that no trained call extends, and the shown calls that no call with a row extends, directly or indirectly. So
    the work before a compaction ends in its own row, not in the compaction's."""
    forest = settled.forest
    in_trained_rows: set[str] = set()
    in_rows: set[str] = set()
    leaves = []
    # The forest holds parents before children.
    for call in reversed(forest.calls.values()):
        passed = in_rows if call.call_id in settled.shown else in_trained_rows
        has_row = settled.has_row(call.call_id)
        if has_row and call.call_id not in passed:
            leaves.append(call)
        parent_id = forest.extended_by(call.call_id)
        if parent_id is None:
            continue
        if has_row or call.call_id in in_rows:
            in_rows.add(parent_id)
        if (has_row and call.call_id not in settled.shown) or call.call_id in in_trained_rows:
            in_trained_rows.add(parent_id)
    return sorted(leaves, key=order_key)


def _row(builder: str, forest: Forest, path: Sequence[str], own: set[str], context: RowContext) -> Trajectory:
    last = forest.calls[path[-1]]
    cut = last.call_id == context.budget_cut
    token_ids = forest.full_ids(last.call_id)
    loss_mask = np.zeros(len(token_ids), dtype=np.int8)
    logprobs = np.zeros(len(token_ids), dtype=np.float32)
    spans: list[Span] = []
    modes: list[ModeSpan] = []
    places: dict[str, tuple[int, int]] = {}
    for call_id in path:
        if call_id not in own:
            continue
        node = forest.calls[call_id].node
        start = forest.prompt_length(call_id)
        end = start + len(node.completion_ids)
        places[call_id] = (start, end)
        loss_mask[start:end] = 1
        logprobs[start:end] = node.logprobs
        spans.extend(Span(span.version, start + span.start, start + span.end) for span in node.spans)
        modes.extend(ModeSpan(span.mode, start + span.start, start + span.end) for span in node.modes)
    trajectory_id = _trajectory_id(builder, context.session_id, path)
    return Trajectory(
        trajectory_id=trajectory_id,
        session_id=context.session_id,
        group_id=context.group_id,
        task_id=context.task_id,
        role=last.role,
        agent=last.agent,
        token_ids=token_ids,
        loss_mask=loss_mask,
        logprobs=logprobs,
        logprob_modes=merge_modes(modes),
        weight_versions=tuple(spans),
        reward=_reward(builder, context, trajectory_id, last.call_id),
        call_ids=tuple(path),
        finish_reason=BUDGET if cut else last.finish_reason,
        truncated=cut or last.finish_reason in CUT,
        metadata=_metadata(forest, context, places, path),
        details=row_details(forest, last.call_id, list(places)),
        policy=last.policy,
        role_source=last.role_source,
        media=forest.media(last.call_id),
    )


def _reward(builder: str, context: RowContext, trajectory_id: str, last_call_id: str) -> float | None:
    """The branch's own reward if it has one (by trajectory or last call); for a row of one call, that call's; otherwise the session's."""
    for name in (trajectory_id, last_call_id):
        if name in context.per_branch:
            return context.per_branch[name]
    if builder == "per_call" and last_call_id in context.per_call:
        return context.per_call[last_call_id]
    return context.reward


def _metadata(
    forest: Forest, context: RowContext, places: Mapping[str, tuple[int, int]], path: Sequence[str]
) -> Mapping[str, Any]:
    """The session's metadata, with the control tokens in the texts of the row's history; the per-call rewards of the calls that this row
    trains (of rows that share a call, one has its reward); those of them with an unreadable tool call; with either of the last
    two, the spans of its trained calls; of an adapter's tokens, the versions of the base model; and what it replays."""
    facts: dict[str, Any] = {}
    if given := {call_id: context.per_call[call_id] for call_id in places if call_id in context.per_call}:
        facts["per_call_rewards"] = given
    if unread := [call_id for call_id in places if forest.calls[call_id].invalid_tool_call]:
        facts["invalid_tool_calls"] = unread
    if facts:
        facts["per_call_spans"] = {call_id: list(place) for call_id, place in places.items()}
    if based := {call_id: start for call_id, (start, _) in places.items() if BASE_VERSIONS in forest.calls[call_id].marks}:
        facts[BASE_VERSIONS] = [
            [version, at + start, at + end]
            for call_id, at in based.items()
            for version, start, end in forest.calls[call_id].base_versions
        ]
    if context.origin is not None and (replay := _describe_replay(forest, context, path)):
        facts["replay"] = replay
    if forest.controlled and (found := {token for call in forest.lineage(path[-1]) for token in call.control_tokens}):
        facts[CONTROL_TOKENS] = sorted(found)
    return {**context.metadata, **facts} if facts else context.metadata


def _describe_replay(forest: Forest, context: RowContext, path: Sequence[str]) -> dict[str, Any]:
    """The row's tokens that other sessions sampled, with the weight versions they have there, in the row's positions; where in the row
    the fork was sampled in the place of its pivot; and the first calls of its history that differ from the record or were not
    recorded. Empty if its history has neither replayed calls nor the pivot."""
    history = list(forest.lineage(path[-1]))[::-1]
    replayed = [call for call in history if call.session_id != context.session_id]
    # A replayed call may be the pivot of the fork that sampled it.
    own = [call for call in history if call.session_id == context.session_id]
    pivots = [call.call_id for call in own if call.marks.get(REPLAY) == PIVOT]
    if not replayed and not pivots:
        return {}
    row = set(path)
    within = [call for call in replayed if call.call_id in row]
    starts = {call.call_id: forest.prompt_length(call.call_id) for call in within}
    versions = [
        [span.version, starts[call.call_id] + span.start, starts[call.call_id] + span.end]
        for call in within
        for span in call.node.spans
    ]
    return {
        "session_id": context.origin,
        "calls": len(replayed),
        "tokens": sum(len(call.node.completion_ids) for call in within),
        "weight_versions": versions,
        "pivot": next((forest.prompt_length(call_id) for call_id in pivots if call_id in row), None),
        "differs_from": next((call.call_id for call in history if DIFFERS in call.marks), None),
        "diverged_at": next((call.call_id for call in history if call.marks.get(REPLAY) == DIVERGED), None),
    }


def _trajectory_id(builder: str, session_id: str, path: Sequence[str]) -> str:
    """The same for the same calls of the same session."""
    return blake2b("\0".join((builder, session_id, *path)).encode(), digest_size=12).hexdigest()


def row_details(forest: Forest, last: str, trained: Sequence[str]) -> RowDetails | None:
    """The details of the row that ends with the call `last` and trains the calls `trained`."""
    if not forest.detailed:
        return None
    length = forest.full_length(last)
    pieces = list(forest.pieces(last, length))
    top = _top(forest, length, trained)
    prompt_logprobs = _lay_out_prompt_logprobs(forest, length, pieces, trained)
    routed = _lay_out_experts(forest, length, pieces)
    if top is None and prompt_logprobs is None and routed is None:
        return None
    top_token_ids, top_logprobs = top or (None, None)
    return RowDetails(top_token_ids, top_logprobs, prompt_logprobs, routed)


def _top(forest: Forest, length: int, trained: Iterable[str]) -> tuple[NDArray[np.int32], NDArray[np.float32]] | None:
    reported: list[tuple[int, NDArray[np.int32], NDArray[np.float32]]] = []
    for name in trained:
        details = forest.calls[name].node.details
        if details is not None and details.top_token_ids is not None and details.top_logprobs is not None:
            reported.append((forest.prompt_length(name), details.top_token_ids, details.top_logprobs))
    if not reported:
        return None
    widest = max(ids.shape[1] for _, ids, _ in reported)
    token_ids = np.full((length, widest), NO_TOKEN, dtype=np.int32)
    logprobs = np.full((length, widest), np.nan, dtype=np.float32)
    for start, ids, values in reported:
        place = slice(start, start + len(ids)), slice(0, ids.shape[1])
        token_ids[place], logprobs[place] = ids, values
    return token_ids, logprobs


def _lay_out_prompt_logprobs(
    forest: Forest, length: int, pieces: Iterable[tuple[str, int, int]], trained: Iterable[str]
) -> NDArray[np.float32] | None:
    """The logprobs of the row's prompt tokens, from the calls that store them."""
    values = np.full(length, np.nan, dtype=np.float32)
    found = False
    for owner, start, end in pieces:
        node = forest.calls[owner].node
        if node.details is None or node.details.prompt_logprobs is None:
            continue
        end = min(end, node.base_length + len(node.delta_ids))
        if start < end:
            values[start:end] = node.details.prompt_logprobs[start - node.base_length : end - node.base_length]
            found = True
    for name in trained:
        # Another call may store these tokens as prompt; the sampled logprob counts.
        start = forest.prompt_length(name)
        values[start : start + len(forest.calls[name].node.completion_ids)] = np.nan
    return values if found else None


def _lay_out_experts(forest: Forest, length: int, pieces: Iterable[tuple[str, int, int]]) -> NDArray[np.int16] | None:
    """The experts of every position, from the last call to the first: the call that owns an id overrides the others."""
    table: NDArray[np.int16] | None = None
    for owner, _, end in pieces:
        details = forest.calls[owner].node.details
        if details is None or details.routed_experts is None:
            continue
        rows = details.routed_experts
        if table is None:
            table = np.full((length, *rows.shape[1:]), NO_EXPERT, dtype=np.int16)
        stop = min(details.routed_from + len(rows), end)
        # Another shape is from another model that happens to share ids.
        if table.shape[1:] == rows.shape[1:] and details.routed_from < stop:
            table[details.routed_from : stop] = rows[: stop - details.routed_from]
    return table
