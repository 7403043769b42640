"""Checks on training rows of any builder.

Context is true: a row's calls extend one another and its ids are the prompt and reply of the last one, so the ids before a trained
token are those it was sampled after. Each once: over all rows, every token of a trainable call has `loss_mask` 1 exactly once, with its
own logprob, its mode and weight version; tokens of refused calls and placeholders of media never have.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from reconstruct.errors import LengthMismatch, RecordError
from reconstruct.records import LOGPROB_MODES, Call, Forest, shared_length
from reconstruct.spans import ModeSpan, Span
from reconstruct.trajectory import NAMES, Trajectory

Counts = NDArray[np.int64]

_NONE = -1
_CODES = {mode: code for code, mode in enumerate(LOGPROB_MODES)}


def verify(forest: Forest, refused: Mapping[str, str], rows: Sequence[Trajectory]) -> None:
    """Raise RecordError for the first token that breaks a rule."""
    totals, trained = _make_counts(forest)
    for row in rows:
        _check_context(forest, row)
        _count_trained(forest, row, refused, trained)
    if not np.count_nonzero(totals != 1):
        return
    for call_id, counts in trained.items():
        _refuse_first(counts > 1, forest.calls[call_id], "a sampled token is trained more than once")
        if call_id not in refused:
            _refuse_first(counts == 0, forest.calls[call_id], "a sampled token is neither trained nor quarantined")


def _make_counts(forest: Forest) -> tuple[Counts, dict[str, Counts]]:
    """A zero per sampled token of the session, and for each call a view of its part."""
    ends = list(accumulate((len(call.node.completion_ids) for call in forest.calls.values()), initial=0))
    counts = np.zeros(ends[-1], np.int64)
    return counts, {call_id: counts[start:end] for call_id, (start, end) in zip(forest.calls, pairwise(ends), strict=True)}


def _check_context(forest: Forest, row: Trajectory) -> None:
    if not row.call_ids or any(call_id not in forest for call_id in row.call_ids):
        raise RecordError(f"row {row.trajectory_id} contains calls that are not in the session", session_id=row.session_id)
    for before, after in pairwise(row.call_ids):
        if forest.extended_by(after) != before:
            raise RecordError(
                f"row {row.trajectory_id} wrongly continues call {before}",
                session_id=row.session_id,
                call_id=after,
            )
    last = forest.calls[row.call_ids[-1]]
    length = len(row.token_ids)
    if not length == len(row.loss_mask) == len(row.logprobs) == forest.full_length(last.call_id):
        raise LengthMismatch(
            f"row {row.trajectory_id} has {length} ids, {len(row.loss_mask)} mask values and {len(row.logprobs)} logprobs for "
            f"{forest.full_length(last.call_id)} ids of its last call",
            session_id=row.session_id,
            call_id=last.call_id,
        )
    for name in NAMES if row.details is not None else ():
        array = getattr(row.details, name)
        if array is not None and len(array) != length:
            raise LengthMismatch(
                f"row {row.trajectory_id} has {name} for {len(array)} tokens, not {length}",
                session_id=row.session_id,
                call_id=last.call_id,
            )
    _check_media(forest, row)
    shared = shared_length(forest.full_ids(last.call_id), row.token_ids)
    if shared < length:
        raise RecordError("an id differs from the call's", session_id=row.session_id, call_id=last.call_id, position=shared)


def _check_media(forest: Forest, row: Trajectory) -> None:
    last = row.call_ids[-1]
    if row.media != forest.media(last):
        raise RecordError(
            f"row {row.trajectory_id} has other media than its last call", session_id=row.session_id, call_id=last
        )
    for media in row.media:
        _refuse_first(row.loss_mask[media.start : media.end] != 0, forest.calls[last], "a placeholder is trained")


def _count_trained(forest: Forest, row: Trajectory, refused: Mapping[str, str], trained: Mapping[str, Counts]) -> None:
    """Add the row's mask to the counts of its calls, and check their logprobs, modes and versions."""
    mask = row.loss_mask != 0
    logprobs = np.zeros(len(mask), dtype=np.float32)
    versions, modes = np.full(len(mask), _NONE, dtype=np.int64), np.full(len(mask), _NONE, dtype=np.int8)
    unsampled = mask.copy()
    for call_id in row.call_ids:
        call, start, end = forest.calls[call_id], forest.prompt_length(call_id), forest.full_length(call_id)
        if not np.count_nonzero(mask[start:end]):
            continue
        if call_id in refused:
            _refuse_first(mask[start:end], call, f"a token is trained but quarantined as {refused[call_id]}")
        trained[call_id][:] += row.loss_mask[start:end]
        unsampled[start:end] = False
        logprobs[start:end] = call.node.logprobs
        _lay_versions(versions, call.node.spans, start)
        _lay_modes(modes, call.node.modes, start)
    last = forest.calls[row.call_ids[-1]]
    _refuse_first(unsampled, last, f"row {row.trajectory_id} trains a token that none of its calls sampled")
    _refuse_first(np.where(mask, logprobs, 0) != row.logprobs, last, f"row {row.trajectory_id} has a wrong logprob")
    claimed = np.full(len(mask), _NONE, dtype=np.int64)
    _lay_versions(claimed, row.weight_versions, 0)
    _refuse_first(np.where(mask, versions, _NONE) != claimed, last, f"row {row.trajectory_id} has a wrong weight version")
    claimed_modes = np.full(len(mask), _NONE, dtype=np.int8)
    _lay_modes(claimed_modes, row.logprob_modes, 0)
    _refuse_first(np.where(mask, modes, _NONE) != claimed_modes, last, f"row {row.trajectory_id} has a wrong logprob mode")


def _lay_versions(versions: NDArray[np.int64], spans: Iterable[Span], start: int) -> None:
    for span in spans:
        versions[start + span.start : start + span.end] = span.version


def _lay_modes(modes: NDArray[np.int8], spans: Iterable[ModeSpan], start: int) -> None:
    for span in spans:
        modes[start + span.start : start + span.end] = _CODES.get(span.mode, len(_CODES))


def _refuse_first(wrong: NDArray[np.bool_], call: Call, message: str) -> None:
    # Four times as fast as `any` for the few tokens of most calls.
    if np.count_nonzero(wrong):
        raise RecordError(message, session_id=call.session_id, call_id=call.call_id, position=int(wrong.argmax()))
