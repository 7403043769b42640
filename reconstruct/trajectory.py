"""Trajectory: one training row, and the accounting of a session's sampled tokens.

`token_ids`, `loss_mask` and `logprobs` have one length; `logprobs` is 0.0 where the mask is 0; `weight_versions` spans cover
sampled tokens only, in the row's own positions. `trajectory_id` depends on the session and the calls in the row alone, so
that a redelivered row has the id it had before.

`role` is its last call's, and `role_source` says who says so: declared, rule or inferred (see `reconstruct.roles`).

`policy` is the named model that sampled the row, "" the default one: the versions of the row's spans are that policy's.

One rollout may become several rows. `rollout_id` says which belong together, and `row_weight` is 1 / the number of rows of the
rollout and the policy that train anything (0 for a row that trains nothing), so that what a rollout has for a policy adds up to 1.

`logprob_mode` is the mode of all its logprobs (see `reconstruct.records.Sampling`), or MIXED where its calls differ in it: then
the row has no one meaning of a ratio. `details` are None unless they were asked for and the engine gave them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from reconstruct.records import INFERRED, UNKNOWN_MODE, Ids, Logprobs, Span

if TYPE_CHECKING:
    pass


Mask = NDArray[np.int8]

MIXED = "mixed"
"""The logprob mode of a row whose calls were sampled under different ones."""


@dataclass(frozen=True, slots=True, eq=False)
class RowDetails:
    """Of a row of n tokens, aligned with its `token_ids`; None: of no token.

    `top_token_ids` int32 and `top_logprobs` float32, both (n, k): at trained tokens, the most probable first; NO_TOKEN and NaN
    elsewhere. `prompt_logprobs` float32 (n,): of tokens that were given, under the weights of the call that brought them; NaN for
    sampled tokens and wherever the engine did not say. `routed_experts` int16 (n, layers, experts per token): NO_EXPERT where the
    engine did not say, as for the row's last token, which was sampled and never fed back.
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
    weight_versions: tuple[Span, ...]
    reward: float | None
    call_ids: tuple[str, ...]
    finish_reason: str
    truncated: bool
    metadata: Mapping[str, Any] = field(default_factory=dict)
    row_weight: float = 1.0
    logprob_mode: str = UNKNOWN_MODE
    details: RowDetails | None = None
    policy: str = ""
    role_source: str = INFERRED

    @property
    def rollout_id(self) -> str:
        """The session is the rollout: one harness run is one attempt at the task."""
        return self.session_id


def weigh_rows(rows: Sequence[Trajectory]) -> list[Trajectory]:
    """The rows, in their order, each with its weight among the trained rows of its rollout and policy."""
    trained = Counter((row.rollout_id, row.policy) for row in rows if row.loss_mask.any())
    return [replace(row, row_weight=1 / trained[row.rollout_id, row.policy] if row.loss_mask.any() else 0.0) for row in rows]


@dataclass(frozen=True, slots=True)
class Quarantined:
    """Sampled tokens of one call that no row trains, and why."""

    call_id: str
    tokens: int
    reason: str


@dataclass(frozen=True, slots=True)
class Accounting:
    """sampled_tokens == exported_tokens + the quarantined tokens, always.

    `dangling_calls` are those whose process died while the engine sampled: what they said is not known. `complete`: none dangles, no
    record is damaged or missing, and no call is in quarantine that something went on from or that is unsound. What is left out because its
    role or model is not trained, and an attempt that nothing went on from, leaves a session complete."""

    sampled_tokens: int
    exported_tokens: int
    quarantined: Sequence[Quarantined]
    dangling_calls: int = 0
    complete: bool = True


def encode_row(row: Trajectory, *, arrays: str = "list") -> dict[str, Any]:
    """The row as the HTTP contract has it. `arrays="list"` for JSON; "bytes" for msgpack: token_ids as little-endian int32,
    loss_mask as int8, logprobs as little-endian float32, each in a bytes field. Details, where there are any, come beside them under
    their own names: as lists, nested where they have more dimensions, with null for NaN; or as `{"shape", "data"}`, of which
    top_token_ids is int32, routed_experts int16 and the others float32."""
    return {
        "trajectory_id": row.trajectory_id,
        "session_id": row.session_id,
        "group_id": row.group_id,
        "task_id": row.task_id,
        "role": row.role,
        "role_source": row.role_source,
        "agent": row.agent,
        "token_ids": _array(row.token_ids, arrays),
        "loss_mask": _array(row.loss_mask, arrays),
        "logprobs": _array(row.logprobs, arrays),
        "weight_versions": [[span.version, span.start, span.end] for span in row.weight_versions],
        "reward": row.reward,
        "call_ids": list(row.call_ids),
        "finish_reason": row.finish_reason,
        "truncated": row.truncated,
        "metadata": dict(row.metadata),
        "rollout_id": row.rollout_id,
        "row_weight": row.row_weight,
        "logprob_mode": row.logprob_mode,
        **(_details(row.details, arrays) if row.details is not None else {}),
        "policy": row.policy,
    }


def _details(details: RowDetails, arrays: str) -> dict[str, Any]:
    given = {name: array for name in NAMES if (array := getattr(details, name)) is not None}
    if arrays != "list":
        return {name: {"shape": list(array.shape), "data": array.tobytes()} for name, array in given.items()}
    return {name: convert_to_lists(array) for name, array in given.items()}


def convert_to_lists(array: NDArray[Any]) -> list[Any]:
    """As lists, with None for NaN, which JSON does not have."""
    known = array.astype(object)
    if array.dtype.kind == "f":
        known[np.isnan(array)] = None
    listed: list[Any] = known.tolist()
    return listed


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
    }


NAMES = ("top_token_ids", "top_logprobs", "prompt_logprobs", "routed_experts")
"""The arrays of a row's details, by the names they have on the wire."""
