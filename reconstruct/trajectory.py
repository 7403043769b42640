"""Trajectory: one training row, and the accounting of a session's sampled tokens.

`token_ids`, `loss_mask` and `logprobs` have one length; `logprobs` is 0.0 where the mask is 0; `logprob_modes` and `weight_versions` are
spans that cover sampled tokens only, in the row's own positions. `trajectory_id` depends on the session and the calls in the row alone, so
that a redelivered row has the id it had before.

`role` is its last call's; `role_source` is where the role comes from: declared, rule or inferred (see `reconstruct.roles`).

`policy` is the model that sampled the row, "" being the default one; the versions in its spans are that model's.

A rollout may have several rows, which share a `rollout_id`. `row_weight` is 1 / the number of rows of that rollout and policy that train
anything (0 for a row that trains nothing), so that the rows of a rollout add up to 1 for each policy.

`logprob_modes` say what its logprobs were taken from: see `reconstruct.records.LOGPROB_MODES`. `details` are None unless they were
requested and the engine sent them.

`scores` are what scorers say of its sampled tokens, by the scorer's name: see `reconstruct.scores`.

`media` are the images of the prompts in it, by the row's own positions; their ids are never trained. Rows of equal ids are of equal context
only if their media are equal, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reconstruct.details import spell_array
from reconstruct.media import Media, as_wire
from reconstruct.records import INFERRED, Ids, Logprobs
from reconstruct.scores import Score, encode_row_score
from reconstruct.spans import ModeSpan, Span

Mask = NDArray[np.int8] | NDArray[np.int32]
"""int8 where rows are built; int32 where a trainer reads them, who may add it up."""


@dataclass(frozen=True, slots=True, eq=False)
class RowDetails:
    """Arrays aligned with the n `token_ids` of a row; None if no token has the detail.

    `top_token_ids` int32 and `top_logprobs` float32, both (n, k): at trained tokens, the most probable first; NO_TOKEN and NaN
    elsewhere. `prompt_logprobs` float32 (n,): of prompt tokens, under the weights of the call that added them; NaN for sampled tokens
    and if unknown. `routed_experts` int16 (n, layers, experts per token): NO_EXPERT if unknown, as for the row's last token, which was
    sampled but never fed back.
    """

    top_token_ids: NDArray[np.int32] | None = None
    top_logprobs: NDArray[np.float32] | None = None
    prompt_logprobs: NDArray[np.float32] | None = None
    routed_experts: NDArray[np.int16] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Trajectory:
    trajectory_id: str
    session_id: str
    group_id: str | None
    task_id: str | None
    role: str
    agent: str
    token_ids: Ids
    loss_mask: Mask
    logprobs: Logprobs
    logprob_modes: tuple[ModeSpan, ...]
    weight_versions: tuple[Span, ...]
    reward: float | None
    call_ids: tuple[str, ...]
    finish_reason: str
    truncated: bool
    metadata: Mapping[str, Any] = field(default_factory=dict)
    row_weight: float = 1.0
    details: RowDetails | None = None
    policy: str = ""
    role_source: str = INFERRED
    media: tuple[Media, ...] = ()
    scores: Mapping[str, Score] = field(default_factory=dict)

    @property
    def rollout_id(self) -> str:
        """The session's id: one harness run is one rollout."""
        return self.session_id


def weigh_rows(rows: Sequence[Trajectory]) -> list[Trajectory]:
    """The rows with their `row_weight` set."""
    trained = Counter((row.rollout_id, row.policy) for row in rows if row.loss_mask.any())
    return [replace(row, row_weight=1 / trained[row.rollout_id, row.policy] if row.loss_mask.any() else 0.0) for row in rows]


@dataclass(frozen=True, slots=True)
class Quarantined:
    """Sampled tokens of a call that no row trains, and the reason."""

    call_id: str
    tokens: int
    reason: str


@dataclass(frozen=True, slots=True)
class Accounting:
    """sampled_tokens == exported_tokens + the quarantined tokens, always.

    `dangling_calls`: their process died while the engine sampled, so their reply is unknown. `complete`: none dangles, no record is
    damaged or missing, and no quarantined call is unsound or has a continuation. Calls of roles or models that are not trained, and
    abandoned attempts, leave a session complete. `replayed_tokens`: of a fork, sampled and accounted for in other sessions."""

    sampled_tokens: int
    exported_tokens: int
    quarantined: Sequence[Quarantined]
    dangling_calls: int = 0
    complete: bool = True
    replayed_tokens: int = 0


def encode_row(row: Trajectory, *, arrays: str = "list", spell: Callable[[NDArray[Any]], Any] | None = None) -> dict[str, Any]:
    """The row in the shape of the HTTP contract. `arrays="list"` for JSON; "bytes" for msgpack: token_ids as little-endian int32,
    loss_mask as int8, logprobs as little-endian float32, each a bytes field. Details are further fields: nested lists with null for
    NaN, or `{"shape", "data"}` with top_token_ids in int32, routed_experts in int16 and the others in float32; so are the arrays of scores,
    which a row without any does not mention. `spell`: what stands for
    the list of token_ids, loss_mask and logprobs."""
    put = spell or partial(_array, arrays=arrays)
    return {
        "trajectory_id": row.trajectory_id,
        "session_id": row.session_id,
        "group_id": row.group_id,
        "task_id": row.task_id,
        "role": row.role,
        "role_source": row.role_source,
        "agent": row.agent,
        "token_ids": put(row.token_ids),
        "loss_mask": put(row.loss_mask),
        "logprobs": put(row.logprobs),
        "logprob_modes": [[span.mode, span.start, span.end] for span in row.logprob_modes],
        "weight_versions": [[span.version, span.start, span.end] for span in row.weight_versions],
        "reward": row.reward,
        "call_ids": list(row.call_ids),
        "finish_reason": row.finish_reason,
        "truncated": row.truncated,
        "metadata": dict(row.metadata),
        "rollout_id": row.rollout_id,
        "row_weight": row.row_weight,
        **(_details(row.details, arrays) if row.details is not None else {}),
        "policy": row.policy,
        "media": as_wire(row.media),
        **({"scores": {name: encode_row_score(each, arrays) for name, each in row.scores.items()}} if row.scores else {}),
    }


def _details(details: RowDetails, arrays: str) -> dict[str, Any]:
    return {name: spell_array(array, arrays) for name in NAMES if (array := getattr(details, name)) is not None}


def _array(array: NDArray[Any], arrays: str) -> Any:
    return array.tolist() if arrays == "list" else array.tobytes()


def encode_accounting(accounting: Accounting) -> dict[str, Any]:
    return {
        "sampled_tokens": accounting.sampled_tokens,
        "exported_tokens": accounting.exported_tokens,
        "quarantined": [
            {"call_id": item.call_id, "tokens": item.tokens, "reason": item.reason} for item in accounting.quarantined
        ],
        "dangling_calls": accounting.dangling_calls,
        "complete": accounting.complete,
        "replayed_tokens": accounting.replayed_tokens,
    }


NAMES = ("top_token_ids", "top_logprobs", "prompt_logprobs", "routed_experts")
"""The fields of RowDetails, which are also their wire names."""
