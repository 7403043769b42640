"""Rows split into a prompt and a response, the form of a sample in most trainers.

The response is the row from its first sampled token on; the tokens of tools, users and templates in between are in it with
loss_mask 0. Nothing is moved, dropped or invented:

    prompt_ids + response_ids == token_ids            and every sampled token has loss_mask 1 in the response, once.

A row that trains nothing is kept, because the trainer may count it in a baseline: its response is its last token, with
loss_mask 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reconstruct.trajectory import Mask, Trajectory
from trainer_client.arrays import count_lost_tokens, limit_lengths, require_no_images, require_one_mode
from trainer_client.batch import Batch
from trainer_client.vision import RowVision, Vision, join_sequence
from trainer_client.wire import versions_by_token


@dataclass(frozen=True, slots=True, eq=False)
class SplitRow:
    """`prompt_ids` is `row.token_ids[:start]`; `response_ids`, `loss_mask`, `logprobs` and `versions` are the row from `start`
    to `end`, all of one length, at least 1. `versions` is -1 for tokens that were not sampled. `cut_tokens`: sampled tokens after
    `end`. `index`: the row's index in `batch.rows`."""

    row: Trajectory
    index: int
    start: int
    end: int
    cut_tokens: int

    @property
    def prompt_ids(self) -> NDArray[np.int32]:
        return self.row.token_ids[: self.start]

    @property
    def response_ids(self) -> NDArray[np.int32]:
        return self.row.token_ids[self.start : self.end]

    @property
    def loss_mask(self) -> Mask:
        return self.row.loss_mask[self.start : self.end]

    @property
    def logprobs(self) -> NDArray[np.float32]:
        return self.row.logprobs[self.start : self.end]

    @property
    def versions(self) -> NDArray[np.int64]:
        return versions_by_token(self.row)[self.start : self.end]

    @property
    def truncated(self) -> bool:
        """Whether a limit cut the row, in the engine or here."""
        return self.row.truncated or self.end < len(self.row.token_ids)


def split_rows(batch: Batch, *, max_length: int | None = None, truncate: bool = False, images: bool = False) -> list[SplitRow]:
    """All rows in order. A row over `max_length` tokens raises RowTooLong, or with `truncate` loses its end. `images`: the adapter carries
    them.

    Raises: RowTooLong; MixedLogprobModes; UnseenImages for a row with images that the adapter does not carry; ValueError for a row of a
    single token, which has no prompt.
    """
    require_one_mode(batch.rows)
    if not images:
        require_no_images(batch.rows, "this adapter does not carry them, or was given no `vision`")
    lengths = limit_lengths(batch.rows, max_length, truncate=truncate)
    lost = count_lost_tokens(batch.rows, lengths)
    return [
        SplitRow(row, index, _start(row, length), length, cut)
        for index, (row, length, cut) in enumerate(zip(batch.rows, lengths, lost, strict=True))
    ]


def read_images(batch: Batch, rows: Sequence[SplitRow], vision: Vision) -> list[RowVision]:
    """What each row sees. Raises VisionMismatch."""
    return vision.read([row.row for row in rows], [row.end for row in rows], batch.media)


def tensors_of(seen: RowVision) -> dict[str, Any]:
    """The row's images as torch tensors, by the names of the model's parameters; empty without images."""
    import torch

    return {name: torch.from_numpy(array) for name, array in join_sequence([seen]).items()}


def image_tensors(batch: Batch, rows: Sequence[SplitRow], vision: Vision | None) -> list[dict[str, Any]]:
    """The tensors of each row's images; all empty without `vision`. Raises VisionMismatch."""
    return [{} for _ in rows] if vision is None else [tensors_of(seen) for seen in read_images(batch, rows, vision)]


def _start(row: Trajectory, length: int) -> int:
    if length < 2:
        raise ValueError(f"trajectory {row.trajectory_id!r} has {length} tokens: no prompt and response")
    sampled = np.flatnonzero(row.loss_mask[:length])
    return int(sampled[0]) if sampled.size else length - 1


def weight_versions(row: Trajectory) -> list[int]:
    """The weight version of each span, in order."""
    return [span.version for span in row.weight_versions]


def find_runs(mask: NDArray[Any]) -> list[tuple[int, int, bool]]:
    """The runs of equal mask values, as (start, end, sampled)."""
    borders = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), len(mask)]
    return [(start, end, bool(mask[start])) for start, end in pairwise(borders)]


def check_rewards(batch: Batch) -> NDArray[np.float32]:
    """One finite reward per row. Raises ValueError for a row without one."""
    rewards: NDArray[np.float32] = batch.columns.rewards
    for row, reward in zip(batch.rows, rewards, strict=True):
        if not np.isfinite(reward):
            raise ValueError(f"trajectory {row.trajectory_id!r} has no reward")
    return rewards


def check_advantages(batch: Batch, advantages: Any) -> NDArray[np.float32]:
    """`advantages` as one finite float32 per row of the batch. Raises ValueError."""
    values = np.asarray(advantages, dtype=np.float32)
    if values.shape != (len(batch.rows),):
        raise ValueError(f"advantages have shape {values.shape} for {len(batch.rows)} rows")
    if not np.isfinite(values).all():
        raise ValueError(f"the advantage of row {int(np.argmin(np.isfinite(values)))} is not finite")
    return values


def group_names(batch: Batch) -> list[str]:
    """Per row, a name unique to its group: two groups of one batch may have the same group_id."""
    return [f"{batch.groups[at].group_id}:{at}" for at in batch.columns.group_index.tolist()]


def group_by_rollout(batch: Batch) -> list[list[list[int]]]:
    """Row indexes, nested as groups, their rollouts, and the rows of each, every level in order of appearance."""
    groups: dict[int, dict[int, list[int]]] = {}
    places: Iterable[Sequence[int]] = zip(batch.columns.group_index.tolist(), batch.columns.rollout_index.tolist(), strict=True)
    for index, (group, rollout) in enumerate(places):
        groups.setdefault(group, {}).setdefault(rollout, []).append(index)
    return [list(rollouts.values()) for rollouts in groups.values()]
