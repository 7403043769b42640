"""The scores of calls laid on rows: of each scorer one column, as long as the row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from reconstruct.records import Call, Forest
from reconstruct.scores import Score, Scores, unscored
from reconstruct.spans import Span
from reconstruct.trajectory import Trajectory


def lay_scores(rows: Sequence[Trajectory], forest: Forest, by_call: Mapping[str, Scores]) -> list[Trajectory]:
    """The rows with the scores of what they train, each score as long as its row. `by_call`: of each call's sampled tokens.

    A score that a row cannot take leaves NaN, and `error` says why: a trained call has none, or one of another length, policy or mode."""
    return [replace(row, scores=_lay_row(row, forest, by_call)) for row in rows]


def _lay_row(row: Trajectory, forest: Forest, by_call: Mapping[str, Scores]) -> dict[str, Score]:
    places = {call_id: place for call_id in row.call_ids if row.loss_mask[place := _place(forest, call_id)].any()}
    names = sorted({name for call_id in places for name in by_call.get(call_id, {})})
    return {
        name: _lay(row, forest, places, {call_id: by_call.get(call_id, {}).get(name) for call_id in places}) for name in names
    }


def _place(forest: Forest, call_id: str) -> slice:
    """Of the call's sampled tokens in a row that extends it."""
    start = forest.prompt_length(call_id)
    return slice(start, start + len(forest.calls[call_id].node.completion_ids))


def _lay(row: Trajectory, forest: Forest, places: Mapping[str, slice], by_call: Mapping[str, Score | None]) -> Score:
    given = [score for score in by_call.values() if score is not None]
    first = next((score for score in given if len(score.logprobs)), given[0])
    laid = unscored(len(row.token_ids), first.policy, first.mode, "", max(score.top_k for score in given))
    spans: list[Span] = []
    errors: list[str] = []
    for call_id, score in by_call.items():
        place = places[call_id]
        if score is None or (reason := _refuse(score, first, row, place, forest.calls[call_id])):
            errors.append(f"{call_id} is not scored" if score is None else reason)
            continue
        laid.logprobs[place] = score.logprobs
        laid.top_ids[place, : score.top_k] = score.top_ids
        laid.top_logprobs[place, : score.top_k] = score.top_logprobs
        spans += [Span(span.version, place.start + span.start, place.start + span.end) for span in score.weight_versions]
        errors += [score.error] if score.error else []
    return replace(laid, weight_versions=tuple(spans), error="; ".join(dict.fromkeys(errors)))


def _refuse(score: Score, first: Score, row: Trajectory, place: slice, call: Call) -> str:
    """Why the row cannot take the call's score; "" if it can."""
    if len(score.logprobs) != len(call.node.completion_ids):
        return (
            score.error or f"{call.call_id} sampled {len(call.node.completion_ids)} tokens, its score has {len(score.logprobs)}"
        )
    if (score.policy, score.mode) != (first.policy, first.mode):
        return f"{call.call_id} is scored by policy {score.policy!r} in mode {score.mode}, others by {first.policy!r} in {first.mode}"
    if not np.array_equal(row.token_ids[place], call.node.completion_ids):
        return f"{call.call_id} does not stand in the row where it was sampled"
    return ""
