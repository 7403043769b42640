"""Rows as arrays: padded to one rectangle, or packed end to end without padding."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any, Literal, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from reconstruct.details import NO_EXPERT, NO_TOKEN
from reconstruct.trajectory import NAMES, RowDetails, Trajectory
from trainer_client.errors import MixedLogprobModes, RowTooLong, UnseenImages
from trainer_client.media import MediaFiles
from trainer_client.vision import RowVision, Vision, join_rows, join_sequence
from trainer_client.wire import Group, modes_by_token, versions_by_token

Framework = Literal["numpy", "torch"]
Side = Literal["left", "right"]

Array: TypeAlias = Any
"""A numpy array, or with framework="torch" a torch tensor."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class RowColumns:
    """Values per row. Each field has shape (rows,).

    `row_index` int64: the index in `batch.rows`. `rewards` float32: NaN for a row without one, so that nothing trains on it by
    accident. `advantages` float32, or None if none were given. `group_index`, `rollout_index` int64: numbered from 0 in order of
    appearance over the whole batch; rows of one rollout in one group share one. A group that was leased by model comes as several, with
    the same rollouts. `row_weight` float32: 1 / (trained rows of the same rollout), as counted by the service, so that each rollout
    weighs 1 however many rows it has. `staleness` int64: the version of the row's model when the batch was leased minus the oldest version
    in the row; 0 without sampled tokens. `cut_tokens` int64: sampled tokens lost to truncation.
    """

    row_index: Array
    rewards: Array
    advantages: Array | None
    group_index: Array
    rollout_index: Array
    row_weight: Array
    staleness: Array
    cut_tokens: Array

    def to(self, device: Any) -> Self:
        """A copy with every torch tensor on `device`; numpy arrays are unchanged."""
        return self._convert(lambda array: array.to(device) if hasattr(array, "to") else array)

    def in_framework(self, framework: str) -> Self:
        """The same as numpy arrays ("numpy") or as CPU tensors over the same memory ("torch")."""
        if framework == "numpy":
            return self
        if framework != "torch":
            raise ValueError(f"framework is {framework!r}, not 'numpy' or 'torch'")
        import torch

        return self._convert(lambda array: torch.from_numpy(array) if isinstance(array, np.ndarray) else array)

    def _convert(self, change: Callable[[Any], Any]) -> Self:
        """With `change` applied to every array."""
        return replace(self, **{f.name: _change(getattr(self, f.name), change) for f in fields(self)})


@dataclass(frozen=True, slots=True, eq=False)
class ScoreArrays:
    """What one scorer says of tokens, at the tokens themselves: `logprobs` float32, `top_ids` int32 and `top_logprobs` float32 with one
    more dimension, k, the most probable first. NaN and -1 where nothing is known."""

    logprobs: Array
    top_ids: Array
    top_logprobs: Array


def _change(value: Any, change: Callable[[Any], Any]) -> Any:
    """With `change` applied to every array in it."""
    if isinstance(value, Mapping):
        return {name: _change(each, change) for name, each in value.items()}
    if isinstance(value, ScoreArrays):
        return ScoreArrays(*(change(getattr(value, f.name)) for f in fields(value)))
    return change(value)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ImageArrays(RowColumns):
    """`vision_inputs`: what the rows' images add to the arguments of the model, by name; empty without images. `rope_position_ids` int64:
    of models with M-RoPE, the positions of frames, rows and columns, the shape of the token fields with 3 before it; else None."""

    vision_inputs: Mapping[str, Array]
    rope_position_ids: Array | None


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class TokenArrays(ImageArrays):
    """The fields are None unless a row has them; they have the shape of the token fields with these dimensions appended: `top_token_ids`
    int32 and `top_logprobs` float32 (…, k), -1 and NaN if unknown; `prompt_logprobs` float32 (…), NaN if unknown; `routed_experts` int16
    (…, layers, experts per token), -1 if unknown. See `reconstruct.trajectory.RowDetails`. `scores`: by the scorer's name, in the shape
    of the token fields; empty if no row has any."""

    top_token_ids: Array | None
    top_logprobs: Array | None
    prompt_logprobs: Array | None
    routed_experts: Array | None
    scores: Mapping[str, ScoreArrays]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PaddedBatch(TokenArrays):
    """Token fields have shape (rows, length), see also TokenArrays; the fields of RowColumns have shape (rows,).

    `token_ids` int64, `pad_id` outside the row. `attention_mask` int64: 1 on the row. `position_ids` int64: 0, 1, … on the row, 0
    outside. `loss_mask` bool: True on sampled tokens, at the token itself: compare the prediction at t - 1 with the token at t.
    `inference_logprobs` float32: the engine's, 0.0 on other tokens. `logprob_modes` int8: what they were taken from, as the place in
    `reconstruct.records.LOGPROB_MODES` (raw, processed, masked, unknown); -1 if not sampled. `weight_versions` int64: -1 if not sampled.
    """

    token_ids: Array
    attention_mask: Array
    position_ids: Array
    loss_mask: Array
    inference_logprobs: Array
    logprob_modes: Array
    weight_versions: Array


@dataclass(frozen=True, slots=True, eq=False)
class Selection:
    """Some rows of a batch, and what every form of them takes: `indexes` are theirs in the batch, `columns`, `advantages` and `media` are
    the whole batch's. `vision` False: without pixels. Raises MixedLogprobModes unless `mix_modes`."""

    rows: Sequence[Trajectory]
    indexes: Sequence[int]
    columns: RowColumns
    truncate: bool
    advantages: Any
    framework: Framework
    media: MediaFiles
    vision: Vision | Literal[False] | None
    mix_modes: bool = False

    def __post_init__(self) -> None:
        if not self.mix_modes:
            require_one_mode(self.rows)

    def take(self, places: Sequence[int]) -> Selection:
        """Those at these places of this selection."""
        return replace(self, rows=[self.rows[at] for at in places], indexes=[self.indexes[at] for at in places])

    def select_columns(self, lengths: Sequence[int]) -> dict[str, Array]:
        """Copies of their columns, with the tokens lost where rows end at `lengths`. Raises ValueError for advantages of another length."""
        at = np.asarray(self.indexes, dtype=np.int64)
        taken = {f.name: None if (c := getattr(self.columns, f.name)) is None else c[at] for f in fields(RowColumns)}
        taken["cut_tokens"] = np.asarray(count_lost_tokens(self.rows, lengths), dtype=np.int64)
        if self.advantages is not None:
            per_row = np.asarray(self.advantages, dtype=np.float32)
            if per_row.shape != self.columns.row_index.shape:
                raise ValueError(f"advantages have shape {per_row.shape} for {len(self.columns.row_index)} rows")
            taken["advantages"] = per_row[at]
        return taken

    def read_images(self, lengths: Sequence[int]) -> list[RowVision] | None:
        """The images in the first `lengths` tokens of each row; None if the model sees none. Raises UnseenImages, VisionMismatch."""
        if self.vision:
            return self.vision.read(self.rows, lengths, self.media)
        if self.vision is None:
            require_no_images(self.rows)
        return None


def pad_rows(selection: Selection, *, pad_id: int, max_length: int | None, multiple_of: int, side: Side) -> PaddedBatch:
    """See `Batch.padded`."""
    if side not in ("left", "right"):
        raise ValueError(f"side is {side!r}, not 'left' or 'right'")
    if max_length is not None and max_length % multiple_of:
        raise ValueError(f"max_length {max_length} is not a multiple of {multiple_of}")
    chosen = selection.rows
    lengths = limit_lengths(chosen, max_length, truncate=selection.truncate)
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
        logprob_modes=rectangle(-1, np.int8, modes_by_token),
        weight_versions=rectangle(-1, np.int64, versions_by_token),
        **_lay_out_images(selection.read_images(lengths), places, width),
        **lay_out_details(chosen, lengths, list(enumerate(places)), (len(chosen), width)),
        **selection.select_columns(lengths),
    ).in_framework(selection.framework)


def _lay_out_images(seen: list[RowVision] | None, places: Sequence[slice], width: int) -> dict[str, Any]:
    """The images of the rows of a rectangle. With M-RoPE a model finds the positions from the token types, and here they are, too."""
    if seen is None:
        return NO_IMAGES
    inputs = join_rows(seen)
    positions = [row.rope_positions for row in seen if row.rope_positions is not None]
    if not positions:
        return {"vision_inputs": inputs, "rope_position_ids": None}
    rope = np.zeros((3, len(seen), width), dtype=np.int64)
    token_types = np.zeros((len(seen), width), dtype=np.int64)
    for line, (row, own, place) in enumerate(zip(seen, positions, places, strict=True)):
        rope[:, line, place], token_types[line, place] = own, row.token_types
    return {"vision_inputs": inputs | ({"mm_token_type_ids": token_types} if inputs else {}), "rope_position_ids": rope}


def limit_lengths(rows: Sequence[Trajectory], limit: int | None, *, truncate: bool) -> list[int]:
    """How many tokens of each row are kept: all, or with `truncate` at most `limit`, but no part of an image. Raises RowTooLong for a
    longer row without `truncate`, ValueError for a limit below 1."""
    if limit is not None and limit < 1:
        raise ValueError(f"the limit is {limit} tokens, less than 1")
    for row in rows:
        if limit is not None and len(row.token_ids) > limit and not truncate:
            raise RowTooLong(f"trajectory {row.trajectory_id!r} has {len(row.token_ids)} tokens, the limit is {limit}")
    return [
        len(row.token_ids) if limit is None or len(row.token_ids) <= limit else _cut_before_image(row, limit) for row in rows
    ]


def _cut_before_image(row: Trajectory, limit: int) -> int:
    """`limit`, or the start of the image that it would cut in two."""
    return next((item.start for item in row.media if item.start < limit < item.end), limit)


def require_no_images(
    rows: Sequence[Trajectory], rule: str = "give `vision=Vision.load(model)`, or `vision=False` for the ids alone"
) -> None:
    """Raises UnseenImages if a row has images, which would be trained without their pixels."""
    for row in rows:
        if row.media:
            raise UnseenImages(f"trajectory {row.trajectory_id!r} has images: {rule}")


NO_IMAGES: dict[str, Any] = {"vision_inputs": {}, "rope_position_ids": None}


def count_lost_tokens(rows: Sequence[Trajectory], lengths: Sequence[int]) -> list[int]:
    """Sampled tokens after the cut, per row."""
    return [int(row.loss_mask[length:].sum()) for row, length in zip(rows, lengths, strict=True)]


# Packed rows: one forward pass per sequence. Each row's `position_ids` start at 0 and `cu_seqlens` marks its borders, as
# variable-length attention needs (flash-attn's varlen functions, transformers' padding-free path) to keep rows separate. The
# first token of a row is never sampled, so shifting by one does not train the last token of a row to predict the next row.


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PackedBatch(TokenArrays):
    """Token fields have shape (tokens,), see also TokenArrays; the fields of RowColumns have shape (rows,), in the packed order.

    `token_ids`, `position_ids` int64, `loss_mask` bool, `inference_logprobs` float32, `logprob_modes` int8, `weight_versions` int64 as in
    PaddedBatch.
    `segment_index` int64: the row of each token, so that `advantages[segment_index]` is per token. `cu_seqlens` int32 of shape
    (rows + 1,): row i is `cu_seqlens[i]:cu_seqlens[i + 1]`. `max_seqlen`: the longest row.
    """

    token_ids: Array
    position_ids: Array
    segment_index: Array
    loss_mask: Array
    inference_logprobs: Array
    logprob_modes: Array
    weight_versions: Array
    cu_seqlens: Array
    max_seqlen: int

    def split(self, per_token: Array) -> list[Array]:
        """`per_token`, of shape (tokens, …), split by row."""
        borders = [int(border) for border in self.cu_seqlens]
        return [per_token[start:end] for start, end in pairwise(borders)]


def pack_rows(selection: Selection, token_budget: int) -> list[PackedBatch]:
    """The rows packed by first-fit decreasing; see `Batch.packed`."""
    lengths = limit_lengths(selection.rows, token_budget, truncate=selection.truncate)
    # Keyed by the place in the selection, so that a row may be requested twice.
    return [
        _sequence(selection.take(bin_), [lengths[at] for at in bin_]).in_framework(selection.framework)
        for bin_ in first_fit_decreasing(dict(enumerate(lengths)), token_budget)
    ]


def first_fit_decreasing(lengths: dict[int, int], budget: int) -> list[list[int]]:
    """The keys of `lengths` in bins with at most `budget` in sum; longest first, ties in the given order.

    Needs at most 11/9 of the optimal number of bins plus 6/9 (Dósa 2007, "The tight bound of first fit decreasing bin-packing
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


def _sequence(selection: Selection, lengths: Sequence[int]) -> PackedBatch:
    chosen = selection.rows
    borders = [0, *np.cumsum(lengths).tolist()]

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
        logprob_modes=line(np.int8, modes_by_token),
        weight_versions=line(np.int64, versions_by_token),
        cu_seqlens=np.array(borders, dtype=np.int32),
        max_seqlen=max(lengths),
        **lay_out_sequence_of_images(selection.read_images(lengths)),
        **lay_out_details(chosen, lengths, [(slice(start, end),) for start, end in pairwise(borders)], (borders[-1],)),
        **selection.select_columns(lengths),
    )


def lay_out_sequence_of_images(seen: Sequence[RowVision] | None) -> dict[str, Any]:
    """The images of rows laid end to end."""
    if seen is None:
        return NO_IMAGES
    rope = [row.rope_positions for row in seen if row.rope_positions is not None]
    return {"vision_inputs": join_sequence(seen), "rope_position_ids": np.concatenate(rope, axis=1) if rope else None}


def row_columns(groups: Sequence[Group], versions: Mapping[str, int]) -> RowColumns:
    """The columns of all rows of `groups`, without advantages and cuts. `versions`: the current version of each model."""
    rows = [row for group in groups for row in group.trajectories]
    return RowColumns(
        row_index=np.arange(len(rows), dtype=np.int64),
        rewards=np.array([np.nan if row.reward is None else row.reward for row in rows], dtype=np.float32),
        advantages=None,
        group_index=np.array([at for at, group in enumerate(groups) for _ in group.trajectories], dtype=np.int64),
        rollout_index=_number((at, row.rollout_id) for at, group in enumerate(groups) for row in group.trajectories),
        row_weight=np.array([row.row_weight for row in rows], dtype=np.float32),
        staleness=np.array([_staleness(row, versions[row.policy]) for row in rows], dtype=np.int64),
        cut_tokens=np.zeros(len(rows), dtype=np.int64),
    )


def _number(keys: Iterable[Hashable]) -> NDArray[np.int64]:
    seen: dict[Hashable, int] = {}
    return np.array([seen.setdefault(key, len(seen)) for key in keys], dtype=np.int64)


def _staleness(row: Trajectory, weight_version: int) -> int:
    return weight_version - min((span.version for span in row.weight_versions), default=weight_version)


# Details of tokens that only some rows have


_MISSING: dict[str, tuple[Any, Any]] = {
    "top_token_ids": (np.int32, NO_TOKEN),
    "top_logprobs": (np.float32, np.nan),
    "prompt_logprobs": (np.float32, np.nan),
    "routed_experts": (np.int16, NO_EXPERT),
}
"""The dtype, and the value for unknown."""


def require_one_mode(rows: Sequence[Trajectory]) -> None:
    """Raises MixedLogprobModes if the logprobs of the rows, or of one row, were taken from different distributions."""
    first = {span.mode: row.trajectory_id for row in reversed(rows) for span in row.logprob_modes}
    if len(first) > 1:
        named = ", ".join(f"{mode} (as in trajectory {name!r})" for mode, name in sorted(first.items()))
        advice = (
            "lease one mode, as in `client.lease(logprob_modes=['raw'])`, or have the service train one alone "
            "(VERBATIM_TRAIN_LOGPROB_MODES)"
        )
        raise MixedLogprobModes(f"these rows have different logprob modes: {named}; {advice}")


def lay_out_details(
    rows: Sequence[Trajectory], lengths: Sequence[int], places: Sequence[tuple[Any, ...]], shape: tuple[int, ...]
) -> dict[str, Any]:
    """The details and scores of the first `lengths` tokens of each row at its place in arrays of `shape` and their own dimensions."""
    arrays: dict[str, Any] = dict.fromkeys(NAMES) | {"scores": lay_out_scores(rows, list(map(slice, lengths)), places, shape)}
    for name, own_shape in _shapes(rows).items():
        dtype, missing = _MISSING[name]
        arrays[name] = np.full((*shape, *own_shape), missing, dtype=dtype)
        for row, length, place in zip(rows, lengths, places, strict=True):
            _lay(arrays[name][place], row.details, name, length)
    return arrays


def lay_out_scores(
    rows: Sequence[Trajectory], chosen: Sequence[Any], places: Sequence[Any], shape: tuple[int, ...]
) -> dict[str, ScoreArrays]:
    """The scores of the `chosen` tokens of each row at its place in arrays of `shape`, by the scorer's name."""
    widest: dict[str, int] = {}
    for row in rows:
        for name, score in row.scores.items():
            widest[name] = max(score.top_k, widest.get(name, 0))
    arrays = {
        name: ScoreArrays(
            np.full(shape, np.nan, np.float32),
            np.full((*shape, top_k), NO_TOKEN, np.int32),
            np.full((*shape, top_k), np.nan, np.float32),
        )
        for name, top_k in sorted(widest.items())
    }
    for row, tokens, place in zip(rows, chosen, places, strict=True):
        for name, score in row.scores.items():
            laid = arrays[name]
            laid.logprobs[place] = score.logprobs[tokens]
            laid.top_ids[place][..., : score.top_k] = score.top_ids[tokens]
            laid.top_logprobs[place][..., : score.top_k] = score.top_logprobs[tokens]
    return arrays


def _lay(place: NDArray[Any], details: RowDetails | None, name: str, length: int) -> None:
    """Copy the row's array to its place, which is wider in the last dimension if other rows have more top tokens."""
    array = None if details is None else getattr(details, name)
    if array is None:
        return
    place[(..., slice(array.shape[-1])) if array.ndim > 1 else ...] = array[:length]


def _shapes(rows: Sequence[Trajectory]) -> dict[str, tuple[int, ...]]:
    """For each detail that a row has, the dimensions after the tokens, wide enough for all rows.

    Raises ValueError for routed experts of different shapes, which come from different models."""
    found: dict[str, set[tuple[int, ...]]] = {}
    for row in rows:
        for name in NAMES:
            array = None if row.details is None else getattr(row.details, name)
            if array is not None:
                found.setdefault(name, set()).add(array.shape[1:])
    if len(found.get("routed_experts", ())) > 1:
        raise ValueError(f"the routed experts of these rows come from different models: {sorted(found['routed_experts'])}")
    return {name: max(shapes) for name, shapes in found.items()}
