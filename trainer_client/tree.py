"""Rows as trees: every prefix that rows share is computed once.

Rows of one session share the history of their branches; rollouts of one group share the task's prompt. A sequence lists the distinct
tokens of its rows depth first, so that the descendants of token j follow it directly, up to `subtree_end[j]`. Token i attends to
token j exactly when j is i or an ancestor of i:

    j <= i < subtree_end[j]

    rows            tree                 token_ids     7  8  9  4  5  6
    7 8 9 4         7 ─ 8 ─┬─ 9 ─ 4      position_ids  0  1  2  3  2  3
    7 8 5 6                └─ 5 ─ 6      subtree_end   6  6  4  4  6  6

`position_ids` is the depth. With this mask and these positions a token sees what it sees in its row, so logits, loss and gradients equal
those of the flat rows, up to the order of float additions. This holds for layers that mix tokens by attention only; models with
convolutions or recurrent states over the sequence need `Batch.packed`.

Rows branch where their ids differ, where the experts recorded for a token differ, and before images that differ: an image is computed once
for all rows that share it, and placeholders of different images have the same ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from reconstruct.details import NO_EXPERT
from reconstruct.media import agreed_length
from reconstruct.trajectory import Trajectory
from trainer_client.arrays import (
    Array,
    ImageArrays,
    ScoreArrays,
    Selection,
    lay_out_scores,
    lay_out_sequence_of_images,
    limit_lengths,
)
from trainer_client.vision import RowVision, cut_media
from trainer_client.wire import modes_by_token, versions_by_token

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn.attention.flex_attention import BlockMask


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class TreeBatch(ImageArrays):
    """One sequence of trees; see ImageArrays for their images.

    Fields of shape (tokens,), int64, one value per distinct token: `token_ids`; `position_ids`, the token's depth; `subtree_end`, the
    index after its last descendant.

    Fields of shape (trained,), one value per trained token of every row, in the order of the rows: `trained_index` int64, where the
    token is in `token_ids`; `logit_index` int64, where the token before it is, whose logits predict it; `segment_index` int64, its row,
    so that `advantages[segment_index]` is per trained token; `loss_mask` bool, all true; `inference_logprobs` float32, `logprob_modes` int8
    and `weight_versions` int64 as in PaddedBatch; `scores`, by the scorer's name, as in TokenArrays. A trained token that rows share has
    one entry per row.

    The fields of RowColumns have shape (rows,). `flat_tokens`: the tokens of the rows laid flat. `routed_experts` int16 of shape
    (tokens, layers, experts per token), -1 if unknown; None if no row has any.
    """

    token_ids: Array
    position_ids: Array
    subtree_end: Array
    trained_index: Array
    logit_index: Array
    segment_index: Array
    loss_mask: Array
    inference_logprobs: Array
    logprob_modes: Array
    weight_versions: Array
    routed_experts: Array | None
    scores: Mapping[str, ScoreArrays]
    flat_tokens: int

    def dense_mask(self, window: int | None = None) -> Array:
        """Bool of shape (tokens, tokens), true where the row's token attends to the column's; `window`: only to the last `window`
        positions, itself included, as in layers with sliding windows."""
        count = len(self.token_ids)
        index = self.subtree_end.new_tensor(range(count)) if hasattr(self.subtree_end, "new_tensor") else np.arange(count)
        mask = (index[None, :] <= index[:, None]) & (index[:, None] < self.subtree_end[None, :])
        if window is not None:
            mask &= self.position_ids[:, None] - self.position_ids[None, :] < window
        return mask

    def attention_mask(self, dtype: Any, window: int | None = None) -> Tensor:
        """`dense_mask` as transformers takes it for eager and SDPA attention: shape (1, 1, tokens, tokens), added to the scores."""
        import torch

        mask = torch.as_tensor(self.dense_mask(window))
        bias = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
        return bias.masked_fill_(~mask, torch.finfo(dtype).min)[None, None]

    def block_mask(self, device: Any = None, block_size: int = 128) -> BlockMask:
        """The mask for FlexAttention, in time and memory of (tokens / block_size)²: no (tokens, tokens) array is made."""
        import torch
        from torch.nn.attention.flex_attention import BlockMask

        ends = torch.as_tensor(self.subtree_end)
        device = ends.device if device is None else device
        partial, full = _find_blocks(ends.cpu().numpy(), block_size)
        # Kernels read past the end of a partial last block.
        last = torch.zeros(len(partial) * block_size, dtype=ends.dtype, device=device)
        last[: len(ends)] = ends.to(device)

        def attends(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (key <= query) & (query < last[key])

        (counts, indexes), (full_counts, full_indexes) = (
            tuple(torch.as_tensor(array, device=device)[None, None] for array in _compress(table)) for table in (partial, full)
        )
        length = len(self.token_ids)
        return BlockMask.from_kv_blocks(
            counts, indexes, full_counts, full_indexes, BLOCK_SIZE=block_size, mask_mod=attends, seq_lengths=(length, length)
        )

    def trained_logprobs(self, logits: Tensor) -> Tensor:
        """log p of every trained token, shape (trained,), from logits of shape (tokens, vocabulary) or (1, tokens, vocabulary)."""
        import torch

        table = logits[0] if logits.dim() == 3 else logits
        before = torch.as_tensor(self.logit_index, device=table.device)
        chosen = torch.as_tensor(self.token_ids, device=table.device)[torch.as_tensor(self.trained_index, device=table.device)]
        # Compute each source once: siblings are often predicted by the same token.
        sources, place = torch.unique(before, return_inverse=True)
        return torch.log_softmax(table[sources], dim=-1)[place, chosen]


def build_trees(selection: Selection, token_budget: int) -> list[TreeBatch]:
    """The rows as sequences of trees; see `Batch.tree`."""
    lengths = limit_lengths(selection.rows, token_budget, truncate=selection.truncate)
    return [
        _lay_out_sequence(selection.take([at for at, _ in part]), [(lengths[at], shared) for at, shared in part]).in_framework(
            selection.framework
        )
        for part in _fill_sequences(selection.rows, lengths, token_budget)
    ]


def _fill_sequences(rows: Sequence[Trajectory], lengths: Sequence[int], budget: int) -> list[list[tuple[int, int]]]:
    """Sequences of at most `budget` distinct tokens, each a list of (row, length of the prefix that it shares with the row before).

    Sorted by ids and images, rows share their longest prefixes with their neighbours, so a sequence is a slice of that order."""
    order = sorted(range(len(rows)), key=lambda at: _sort_key(rows[at], lengths[at]))
    parts: list[list[tuple[int, int]]] = []
    room = 0
    # The first row begins a sequence, whatever it is compared with.
    for before, at in zip(order[:1] + order[:-1], order, strict=True):
        shared = _measure_shared(rows[before], rows[at], min(lengths[before], lengths[at]))
        if not parts or lengths[at] - shared > room:
            parts.append([])
            shared, room = 0, budget
        parts[-1].append((at, shared))
        room -= lengths[at] - shared
    return parts


def _sort_key(row: Trajectory, length: int) -> bytes:
    """The ids of the row, with each image's digest before its placeholders."""
    ids = np.asarray(row.token_ids[:length], dtype=">u4")
    pieces, at = [], 0
    for item in cut_media(row, length):
        pieces += [ids[at : item.start].tobytes(), item.digest.encode()]
        at = item.start
    return b"".join([*pieces, ids[at:].tobytes()])


def _measure_shared(left: Trajectory, right: Trajectory, length: int) -> int:
    """The length of the common prefix within the first `length` tokens, which holds whole images only."""
    differs = np.asarray(left.token_ids[:length]) != np.asarray(right.token_ids[:length])
    ours, theirs = _get_experts(left), _get_experts(right)
    if (ours is None) != (theirs is None):
        return 0
    if ours is not None and theirs is not None:
        if ours.shape[1:] != theirs.shape[1:]:
            return 0
        differs |= (ours[:length] != theirs[:length]).any(axis=(1, 2))
    return agreed_length(int(np.argmax(differs)) if differs.any() else length, left.media, right.media)


def _get_experts(row: Trajectory) -> NDArray[np.int16] | None:
    return None if row.details is None else row.details.routed_experts


def _lay_out_sequence(selection: Selection, places: Sequence[tuple[int, int]]) -> TreeBatch:
    """`places`: for each row its length and the length of the prefix that it shares with the row before."""
    chosen = selection.rows
    ids, depths, paths = [], [], []
    path = np.zeros(0, dtype=np.int64)
    count = 0
    for row, (length, shared) in zip(chosen, places, strict=True):
        new = np.arange(count, count + length - shared, dtype=np.int64)
        path = np.concatenate([path[:shared], new])
        count += len(new)
        paths.append(path)
        ids.append(np.asarray(row.token_ids[shared:length], dtype=np.int64))
        depths.append(np.arange(shared, length, dtype=np.int64))
    end = np.zeros(count, dtype=np.int64)
    for path in paths:
        # A token's last descendant is the end of the last row through it.
        end[path] = path[-1] + 1
    trained = [np.flatnonzero(np.asarray(row.loss_mask[:length])) for row, (length, _) in zip(chosen, places, strict=True)]
    seen = selection.read_images([length for length, _ in places])
    new_images = None if seen is None else [_skip_shared(*each) for each in zip(chosen, seen, places, strict=True)]

    def concatenate(dtype: Any, values: Sequence[NDArray[Any]]) -> NDArray[Any]:
        return np.concatenate([np.zeros(0, dtype), *values], dtype=dtype, casting="unsafe")

    lengths = [length for length, _ in places]
    ends = np.cumsum([0, *map(len, trained)]).tolist()
    return TreeBatch(
        token_ids=concatenate(np.int64, ids),
        position_ids=concatenate(np.int64, depths),
        subtree_end=end,
        trained_index=concatenate(np.int64, [path[at] for path, at in zip(paths, trained, strict=True)]),
        logit_index=concatenate(np.int64, [path[at - 1] for path, at in zip(paths, trained, strict=True)]),
        segment_index=np.repeat(np.arange(len(chosen), dtype=np.int64), [len(at) for at in trained]),
        loss_mask=np.ones(ends[-1], dtype=np.bool_),
        inference_logprobs=concatenate(np.float32, [row.logprobs[at] for row, at in zip(chosen, trained, strict=True)]),
        logprob_modes=concatenate(np.int8, [modes_by_token(row)[at] for row, at in zip(chosen, trained, strict=True)]),
        weight_versions=concatenate(np.int64, [versions_by_token(row)[at] for row, at in zip(chosen, trained, strict=True)]),
        routed_experts=_lay_out_experts(chosen, places),
        scores=lay_out_scores(chosen, trained, list(map(slice, ends[:-1], ends[1:])), (ends[-1],)),
        flat_tokens=sum(lengths),
        **lay_out_sequence_of_images(new_images),
        **selection.select_columns(lengths),
    )


def _skip_shared(row: Trajectory, seen: RowVision, place: tuple[int, int]) -> RowVision:
    """What the row sees after the prefix that it shares with the row before."""
    shared = place[1]
    shared_images = len(cut_media(row, shared))
    rope = None if seen.rope_positions is None else seen.rope_positions[:, shared:]
    return RowVision(seen.images[shared_images:], seen.token_types[shared:], rope)


def _lay_out_experts(rows: Sequence[Trajectory], places: Sequence[tuple[int, int]]) -> NDArray[np.int16] | None:
    shapes = {experts.shape[1:] for row in rows if (experts := _get_experts(row)) is not None}
    if not shapes:
        return None
    if len(shapes) > 1:
        raise ValueError(f"the routed experts of these rows come from different models: {sorted(shapes)}")
    (behind,) = shapes
    missing = [np.full((length, *behind), NO_EXPERT, dtype=np.int16) for length, _ in places]
    tables = [blank if (experts := _get_experts(row)) is None else experts for row, blank in zip(rows, missing, strict=True)]
    return np.concatenate([table[shared:length] for table, (length, shared) in zip(tables, places, strict=True)])


def _find_blocks(ends: NDArray[np.int64], size: int) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """The key blocks (columns) that each query block (row) attends to partially, and fully; each bool of shape (blocks, blocks)."""
    count = -(-len(ends) // size)
    padded = np.zeros(count * size, dtype=np.int64)
    padded[: len(ends)] = ends
    blocks = padded.reshape(count, size)
    starts = np.arange(count) * size
    # Positions past the end in the last block attend to nothing and nothing attends to them.
    stops = np.minimum(starts + size, len(ends))
    earlier = np.tril(np.ones((count, count), dtype=np.bool_), -1)
    some = earlier & (blocks.max(axis=1)[None, :] > starts[:, None])
    full = earlier & (blocks.min(axis=1)[None, :] >= stops[:, None])
    return (some & ~full) | np.eye(count, dtype=np.bool_), full


def _compress(table: NDArray[np.bool_]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Per row the number of true columns, and the columns with the true ones first; int32 of shape (rows,) and (rows, columns)."""
    return table.sum(axis=1, dtype=np.int32), np.argsort(~table, axis=1, kind="stable").astype(np.int32)
