"""Rows laid end to end in sequences of at most a token budget: no padding, one forward pass per sequence.

Each row's `position_ids` start at 0 and `cu_seqlens` marks its borders, which is what variable-length attention
(flash-attn's varlen functions, transformers' padding-free path) needs to keep rows from seeing each other. The first
token of a row is never sampled, so shifting by one does not train the last token of one row to predict the next row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reconstruct.trajectory import Trajectory
from trainer_client.columns import Array, RowColumns, selected
from trainer_client.padding import Framework, kept_lengths, lost_tokens
from trainer_client.token_details import TokenArrays, joined_details, one_mode
from trainer_client.wire import versions_by_token


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PackedBatch(TokenArrays):
    """Each token field has shape (tokens,), those of TokenArrays perhaps more behind; the fields of RowColumns have shape (rows,), in
    the order the rows lie.

    `token_ids`, `position_ids` int64, `loss_mask` bool, `inference_logprobs` float32, `weight_versions` int32 as in
    PaddedBatch. `segment_index` int64: which row a token belongs to, so that `advantages[segment_index]` is per token.
    `cu_seqlens` int32 of shape (rows + 1,): row i is `cu_seqlens[i]:cu_seqlens[i + 1]`. `max_seqlen`: the longest row.
    """

    token_ids: Array
    position_ids: Array
    segment_index: Array
    loss_mask: Array
    inference_logprobs: Array
    weight_versions: Array
    cu_seqlens: Array
    max_seqlen: int

    def split(self, per_token: Array) -> list[Array]:
        """`per_token`, of shape (tokens, …), cut into one piece per row."""
        borders = [int(border) for border in self.cu_seqlens]
        return [per_token[start:end] for start, end in pairwise(borders)]


def packed(
    rows: Sequence[Trajectory],
    columns: RowColumns,
    indexes: Sequence[int],
    *,
    token_budget: int,
    truncate: bool,
    advantages: Any,
    framework: Framework,
) -> list[PackedBatch]:
    """The rows at `indexes` in as few sequences as first-fit decreasing finds; see `Batch.packed`."""
    lengths = kept_lengths([rows[index] for index in indexes], token_budget, truncate=truncate)
    one_mode([rows[index] for index in indexes])
    # By their place in `indexes`: a row that is asked for twice is there twice.
    return [
        _sequence(rows, columns, [indexes[at] for at in bin_], [lengths[at] for at in bin_], advantages).in_framework(framework)
        for bin_ in first_fit_decreasing(dict(enumerate(lengths)), token_budget)
    ]


def first_fit_decreasing(lengths: dict[int, int], budget: int) -> list[list[int]]:
    """The keys of `lengths` in bins whose lengths sum to at most `budget`; longest first, ties in the given order.

    At most 11/9 of the fewest bins possible, plus 6/9 (Dósa 2007, "The tight bound of first fit decreasing bin-packing
    algorithm is FFD(I) ≤ 11/9 OPT(I) + 6/9")."""
    bins: list[list[int]] = []
    room: list[int] = []
    for key in sorted(lengths, key=lambda key: -lengths[key]):
        place = next((at for at, free in enumerate(room) if free >= lengths[key]), None)
        if place is None:
            bins.append([])
            room.append(budget)
            place = len(bins) - 1
        bins[place].append(key)
        room[place] -= lengths[key]
    return bins


def _sequence(
    rows: Sequence[Trajectory], columns: RowColumns, indexes: Sequence[int], lengths: Sequence[int], advantages: Any
) -> PackedBatch:
    chosen = [rows[index] for index in indexes]

    def line(dtype: Any, values: Callable[[Trajectory], NDArray[Any]]) -> NDArray[Any]:
        return np.concatenate(
            [values(row)[:length] for row, length in zip(chosen, lengths, strict=True)], dtype=dtype, casting="unsafe"
        )

    return PackedBatch(
        token_ids=line(np.int64, lambda row: row.token_ids),
        position_ids=line(np.int64, lambda row: np.arange(len(row.token_ids))),
        segment_index=np.repeat(np.arange(len(chosen), dtype=np.int64), lengths),
        loss_mask=line(np.bool_, lambda row: row.loss_mask),
        inference_logprobs=line(np.float32, lambda row: row.logprobs),
        weight_versions=line(np.int32, versions_by_token),
        cu_seqlens=np.concatenate([[0], np.cumsum(lengths)], dtype=np.int32, casting="unsafe"),
        max_seqlen=max(lengths),
        logprob_mode=one_mode(chosen),
        **joined_details(chosen, lengths),
        **selected(columns, indexes, advantages, lost_tokens(chosen, lengths)),
    )
