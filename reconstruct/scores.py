"""Scores: what another distribution says of the tokens that a call sampled, kept per call and laid on rows.

A scorer (a teacher, the same model without a grammar, a model that was told more) is asked for the logprob of each sampled id after the
ids that it was sampled after, and for the k ids that it holds most probable there. A score never changes ids, masks or stored logprobs.

Positions are a token's own, as for `logprobs`: entry i is about the i-th token given those before it. Where nothing is known stands NaN,
and NO_TOKEN for an id; no number is made up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import msgpack
import numpy as np
from numpy.typing import NDArray

from reconstruct.details import NO_TOKEN, spell_array
from reconstruct.errors import DecodeError
from reconstruct.records import Call, Forest, Logprobs, Span

if TYPE_CHECKING:
    from reconstruct.trajectory import Trajectory

SCHEMA_VERSION = 1
_LOGPROBS, _IDS = "<f4", "<i4"


@dataclass(frozen=True, slots=True, eq=False)
class Score:
    """What one scorer says of n tokens: a call's sampled ones, or all of a row's.

    `logprobs` float32 (n,). `top_ids` int32 and `top_logprobs` float32, both (n, k), the most probable first; k may be 0. `policy` and
    `weight_versions` say which weights the numbers are of, in the same positions; `mode` is one of `reconstruct.records.LOGPROB_MODES`.
    `error`: why tokens have no score, "" if all of them have one."""

    policy: str
    mode: str
    logprobs: Logprobs
    top_ids: NDArray[np.int32]
    top_logprobs: NDArray[np.float32]
    weight_versions: tuple[Span, ...] = ()
    error: str = ""

    def __post_init__(self) -> None:
        if self.logprobs.ndim != 1 or self.top_ids.shape != self.top_logprobs.shape or self.top_ids.ndim != 2:
            raise ValueError(
                f"the shapes of a score differ: {self.logprobs.shape}, {self.top_ids.shape}, {self.top_logprobs.shape}"
            )
        if len(self.top_ids) != len(self.logprobs):
            raise ValueError(f"a score of {len(self.logprobs)} tokens has the best ids of {len(self.top_ids)}")

    @property
    def top_k(self) -> int:
        return int(self.top_ids.shape[1])

    @property
    def known(self) -> NDArray[np.bool_]:
        """Where the logprob is known, (n,)."""
        return ~np.isnan(self.logprobs)


Scores = Mapping[str, Score]
"""By the scorer's name."""


def unscored(tokens: int, policy: str, mode: str, error: str, top_k: int = 0) -> Score:
    """The score of tokens of which nothing is known, and why."""
    return Score(
        policy,
        mode,
        np.full(tokens, np.nan, np.float32),
        np.full((tokens, top_k), NO_TOKEN, np.int32),
        np.full((tokens, top_k), np.nan, np.float32),
        error=error,
    )


def encode_score(score: Score) -> bytes:
    """The score as msgpack, with packed arrays: 4 bytes a token and 8 for each of the k best."""
    spans = [(span.version, span.start, span.end) for span in score.weight_versions]
    arrays = (score.logprobs.astype(_LOGPROBS), score.top_ids.astype(_IDS), score.top_logprobs.astype(_LOGPROBS))
    packed: bytes = msgpack.packb(
        (SCHEMA_VERSION, score.policy, score.mode, score.top_k, *(each.tobytes() for each in arrays), spans, score.error)
    )
    return packed


def decode_score(data: bytes) -> Score:
    """Raises DecodeError for anything that `encode_score` did not write."""
    try:
        version, policy, mode, top_k, logprobs, ids, best, spans, error = msgpack.unpackb(data)
        if version != SCHEMA_VERSION:
            raise DecodeError(f"a score of schema version {version!r} is unknown to this build, which reads {SCHEMA_VERSION}")
        if not all(isinstance(word, str) for word in (policy, mode, error)):
            raise TypeError("its policy, mode or error is no text")
        shape = len(logprobs) // 4, top_k
        return Score(
            policy,
            mode,
            np.frombuffer(logprobs, _LOGPROBS),
            np.frombuffer(ids, _IDS).reshape(shape),
            np.frombuffer(best, _LOGPROBS).reshape(shape),
            tuple(Span(*span) for span in spans),
            error,
        )
    except (ValueError, TypeError, msgpack.UnpackException) as failure:
        raise DecodeError(f"a score of {len(data)} bytes is damaged: {failure}") from failure


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


def encode_row_score(score: Score, arrays: str) -> dict[str, Any]:
    """The score in the shape of the HTTP contract. `arrays="list"`: nested lists with null for NaN; otherwise `{"shape", "data"}`."""
    return {
        "logprobs": spell_array(score.logprobs, arrays),
        "top_ids": spell_array(score.top_ids, arrays),
        "top_logprobs": spell_array(score.top_logprobs, arrays),
        "policy": score.policy,
        "weight_versions": [[span.version, span.start, span.end] for span in score.weight_versions],
        "mode": score.mode,
        **({"error": score.error} if score.error else {}),
    }
