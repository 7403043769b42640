"""Rows as one rectangle, one row each, padded at one side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from reconstruct.trajectory import Trajectory
from trainer_client.columns import Array, RowColumns, selected
from trainer_client.errors import RowTooLong
from trainer_client.token_details import TokenArrays, one_mode, padded_details
from trainer_client.wire import versions_by_token

Framework = Literal["numpy", "torch"]
Side = Literal["left", "right"]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PaddedBatch(TokenArrays):
    """Each token field has shape (rows, length), those of TokenArrays perhaps more behind; the fields of RowColumns have shape (rows,).

    `token_ids` int64, `pad_id` outside the row. `attention_mask` int64: 1 on the row. `position_ids` int64: 0, 1, … on
    the row, 0 outside. `loss_mask` bool: true on sampled tokens; it stands at the token itself, so compare the
    prediction at t - 1 with the token at t. `inference_logprobs` float32: what the engine said, 0.0 elsewhere.
    `weight_versions` int32: -1 where not sampled.
    """

    token_ids: Array
    attention_mask: Array
    position_ids: Array
    loss_mask: Array
    inference_logprobs: Array
    weight_versions: Array


def padded(
    rows: Sequence[Trajectory],
    columns: RowColumns,
    indexes: Sequence[int],
    *,
    pad_id: int,
    max_length: int | None,
    multiple_of: int,
    side: Side,
    truncate: bool,
    advantages: Any,
    framework: Framework,
) -> PaddedBatch:
    """The rows at `indexes` as a PaddedBatch; see `Batch.padded`."""
    if side not in ("left", "right"):
        raise ValueError(f"side is {side!r}, not 'left' or 'right'")
    if max_length is not None and max_length % multiple_of:
        raise ValueError(f"max_length {max_length} is no multiple of {multiple_of}")
    chosen = [rows[index] for index in indexes]
    lengths = kept_lengths(chosen, max_length, truncate=truncate)
    mode = one_mode(chosen)
    width = -(-max(lengths, default=0) // multiple_of) * multiple_of

    places = [slice(0, length) if side == "right" else slice(width - length, width) for length in lengths]

    def rectangle(fill: Any, dtype: Any, values: Callable[[Trajectory], NDArray[Any]]) -> NDArray[Any]:
        table = np.full((len(chosen), width), fill, dtype=dtype)
        for line, row, length, place in zip(table, chosen, lengths, places, strict=True):
            line[place] = values(row)[:length]
        return table

    return PaddedBatch(
        token_ids=rectangle(pad_id, np.int64, lambda row: row.token_ids),
        attention_mask=rectangle(0, np.int64, lambda row: np.ones_like(row.token_ids)),
        position_ids=rectangle(0, np.int64, lambda row: np.arange(len(row.token_ids))),
        loss_mask=rectangle(False, np.bool_, lambda row: row.loss_mask),
        inference_logprobs=rectangle(0.0, np.float32, lambda row: row.logprobs),
        weight_versions=rectangle(-1, np.int32, versions_by_token),
        logprob_mode=mode,
        **padded_details(chosen, lengths, places, width),
        **selected(columns, indexes, advantages, lost_tokens(chosen, lengths)),
    ).in_framework(framework)


def kept_lengths(rows: Sequence[Trajectory], limit: int | None, *, truncate: bool) -> list[int]:
    """How many tokens of each row are kept: all, or the first `limit`. Raises RowTooLong for a row over `limit` unless it may be
    cut, ValueError for a limit that holds no token."""
    if limit is not None and limit < 1:
        raise ValueError(f"the limit is {limit} tokens: a row has at least one")
    for row in rows:
        if limit is not None and len(row.token_ids) > limit and not truncate:
            raise RowTooLong(f"trajectory {row.trajectory_id!r} has {len(row.token_ids)} tokens, the limit is {limit}")
    return [len(row.token_ids) if limit is None else min(len(row.token_ids), limit) for row in rows]


def lost_tokens(rows: Sequence[Trajectory], lengths: Sequence[int]) -> list[int]:
    """Sampled tokens behind the cut, per row."""
    return [int(row.loss_mask[length:].sum()) for row, length in zip(rows, lengths, strict=True)]
