"""Scores: what another distribution says of the tokens that a call sampled, kept per call and laid on rows.

A scorer (a teacher, the same model without a grammar, a model that was told more) is asked for the logprob of each sampled id after the
ids that it was sampled after, and for the k ids that it holds most probable there. A score never changes ids, masks or stored logprobs.

Positions are a token's own, as for `logprobs`: entry i is about the i-th token given those before it. Where nothing is known stands NaN,
and NO_TOKEN for an id; no number is made up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgpack
import numpy as np
from numpy.typing import NDArray

from reconstruct.details import NO_TOKEN, spell_array
from reconstruct.errors import DecodeError
from reconstruct.spans import Span

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
    logprobs: NDArray[np.float32]
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
