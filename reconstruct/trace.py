"""A session as a trace: an entry for each trained call, with its whole prompt and the mask of the row that trains it.

The shape is OpenEnv's `TraceEntry` (0.10.0, `openenv.core.harness`): `loss_mask` covers prompt and completion. The entries train exactly
the tokens that the rows train, each once; every other sampled token is in the session's accounting. They come chain by chain, as rows do,
so that whoever joins each to the one before finds no more branches than there are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from reconstruct.trajectory import Trajectory


class TrainedCalls(Protocol):
    """Of a training row, which calls it has and what of them it trains."""

    @property
    def loss_mask(self) -> Any: ...
    @property
    def call_ids(self) -> Sequence[str]: ...


def is_trained_whole(row: TrainedCalls, call: Mapping[str, Any]) -> bool:
    """Whether the row trains every sampled token of the call, after a prompt that is its ids alone: one without images. `call` as
    `GET /sessions/{id}/calls` lists it. For formats of ids that have neither a loss mask nor images."""
    return not call["media"] and count_trained(row, call) == len(call["completion_ids"]) > 0


def count_trained(row: TrainedCalls, call: Mapping[str, Any]) -> int:
    """Tokens of the call that the row trains."""
    start = len(call["prompt_ids"])
    mask = row.loss_mask[start : start + len(call["completion_ids"])] if call["call_id"] in row.call_ids else ()
    return sum(map(int, mask))


def trace_entries(calls: Iterable[Mapping[str, Any]], rows: Sequence[Trajectory]) -> Iterator[dict[str, Any]]:
    """The entries, those of the main agent last. `calls` as `GET /sessions/{id}/calls` lists them, with lists; `rows` of the same session.
    Raises ValueError where a row's ids are not those of its calls."""
    known = {call["call_id"]: call for call in calls}
    for row in sorted(rows, key=lambda row: row.role == "main"):
        left = int(row.loss_mask.sum())
        for call in (known[call_id] for call_id in row.call_ids if call_id in known):
            start, ids = len(call["prompt_ids"]), [*call["prompt_ids"], *call["completion_ids"]]
            mask = row.loss_mask[start : len(ids)].astype(int).tolist()
            # In other rows it is context.
            if not any(mask):
                continue
            if not np.array_equal(row.token_ids[: len(ids)], ids):
                raise ValueError(
                    f"row {row.trajectory_id} trains call {call['call_id']} after other ids than it was sampled after"
                )
            left -= sum(mask)
            yield _make_entry(call, row, [0] * start + mask)
        if left:
            raise ValueError(f"row {row.trajectory_id} trains {left} tokens of calls that are not given")


def _make_entry(call: Mapping[str, Any], row: Trajectory, loss_mask: list[int]) -> dict[str, Any]:
    return {
        "request": {"messages": call["messages"], "tools": None},
        "response": {"choices": [{"message": call["reply"], "finish_reason": call["finish_reason"]}]},
        "prompt_token_ids": call["prompt_ids"],
        "completion_token_ids": call["completion_ids"],
        # An engine's rounding may leave one just above 0, which OpenEnv refuses.
        "per_token_logps": [min(logprob, 0.0) for logprob in call["logprobs"]],
        "loss_mask": loss_mask,
        "reward": row.reward,
        "metadata": {
            "node_id": call["call_id"],
            "trajectory_id": row.trajectory_id,
            "role": row.role,
            "agent": row.agent,
            "model": call["model"],
            "sampling_params": call["sampling"],
            "weight_versions": call["weight_versions"],
            "media": call["media"],
        },
    }
