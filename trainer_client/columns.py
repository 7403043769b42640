"""What a batch knows per row, in the order of the rows: one value each, carried along into padded and packed arrays."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from reconstruct.trajectory import Trajectory
from trainer_client.wire import Group

Array: TypeAlias = Any
"""A numpy array, or a torch tensor when the batch was asked for with framework="torch"."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class RowColumns:
    """Each field has shape (rows,).

    `row_index` int64: the row's place in `batch.rows`. `rewards` float32: NaN for a row without one, so that nothing
    learns from it by accident. `advantages` float32, or None when none were given. `group_index`, `rollout_index` int64:
    counted from 0 in order of appearance over the whole batch; rows of one rollout have one rollout_index. `row_weight`
    float32: 1 / (trained rows of the same rollout), as the service counted them, so that each rollout weighs 1 however many
    rows it became.
    `staleness` int64: the version of the row's policy when the batch was leased minus the oldest version in the row; 0 for a row without
    sampled tokens.
    `cut_tokens` int64: sampled tokens lost where the end of the row was cut on request; otherwise 0.
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
        """The same with every torch tensor on `device`; numpy arrays stay as they are."""
        tensors = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(self, **{name: tensor.to(device) for name, tensor in tensors.items() if hasattr(tensor, "to")})

    def in_framework(self, framework: str) -> Self:
        """The same with numpy arrays ("numpy") or CPU tensors over the same memory ("torch")."""
        if framework == "numpy":
            return self
        if framework != "torch":
            raise ValueError(f"framework is {framework!r}, not 'numpy' or 'torch'")
        import torch

        arrays = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(self, **{n: torch.from_numpy(a) for n, a in arrays.items() if isinstance(a, np.ndarray)})


def row_columns(groups: Sequence[Group], versions: Mapping[str, int]) -> RowColumns:
    """The columns of all rows of `groups`, without advantages and with nothing cut. `versions`: the current one of each policy."""
    rows = [row for group in groups for row in group.trajectories]
    return RowColumns(
        row_index=np.arange(len(rows), dtype=np.int64),
        rewards=np.array([np.nan if row.reward is None else row.reward for row in rows], dtype=np.float32),
        advantages=None,
        group_index=np.array([at for at, group in enumerate(groups) for _ in group.trajectories], dtype=np.int64),
        rollout_index=_numbered(row.rollout_id for row in rows),
        row_weight=np.array([row.row_weight for row in rows], dtype=np.float32),
        staleness=np.array([_staleness(row, versions[row.policy]) for row in rows], dtype=np.int64),
        cut_tokens=np.zeros(len(rows), dtype=np.int64),
    )


def selected(columns: RowColumns, indexes: Sequence[int], advantages: Any, cut_tokens: Sequence[int]) -> dict[str, Array]:
    """The fields of `columns` at `indexes`, as fresh arrays. `advantages` is for all rows, `cut_tokens` for these."""
    at = np.asarray(indexes, dtype=np.int64)
    taken = {f.name: None if (c := getattr(columns, f.name)) is None else c[at] for f in fields(RowColumns)}
    taken["cut_tokens"] = np.asarray(cut_tokens, dtype=np.int64)
    if advantages is not None:
        per_row = np.asarray(advantages, dtype=np.float32)
        if per_row.shape != columns.row_index.shape:
            raise ValueError(f"advantages have shape {per_row.shape} for {len(columns.row_index)} rows")
        taken["advantages"] = per_row[at]
    return taken


def _numbered(keys: Iterable[Hashable]) -> NDArray[np.int64]:
    seen: dict[Hashable, int] = {}
    return np.array([seen.setdefault(key, len(seen)) for key in keys], dtype=np.int64)


def _staleness(row: Trajectory, weight_version: int) -> int:
    return weight_version - min((span.version for span in row.weight_versions), default=weight_version)
