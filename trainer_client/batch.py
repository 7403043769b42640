"""A leased batch: groups of rows as arrays for a training step, and their lease.

    with batch:                                   # acked at the end, nacked if the block raises
        data = batch.padded(pad_id=0, framework="torch", advantages=batch.advantages(grpo))

While the block runs, a thread extends the lease whenever half of it has passed. A batch used without `with` is neither acked nor
nacked: its lease expires and its groups are delivered again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from reconstruct.trajectory import Trajectory
from trainer_client.arrays import (
    Framework,
    PackedBatch,
    PaddedBatch,
    RowColumns,
    Selection,
    Side,
    pack_rows,
    pad_rows,
    row_columns,
)
from trainer_client.lease import Lease
from trainer_client.media import MediaFiles
from trainer_client.tree import TreeBatch, build_trees
from trainer_client.vision import Vision
from trainer_client.wire import Group

Estimator = Callable[[NDArray[np.float32], NDArray[np.int64], NDArray[np.int64]], NDArray[np.float32]]


class Batch:
    """`rows` are all trajectories in the order of `groups`; `columns` has their per-row values in the same order.

    `weight_version` is the default model's version when the batch was leased, `weight_versions` has every model's; the staleness of a
    row is relative to its own model's. Raises ValueError for rows of a model without a version.

    `media` has the images of the rows, by digest. `padded`, `packed` and `tree` take a `vision`, which processes them; see
    `trainer_client.vision`. Without one, rows with images raise UnseenImages; False lays out their ids alone.

    Without a `lease` (for example for rows read from a file) ack, nack, extend and the `with` block do nothing."""

    def __init__(
        self,
        groups: Sequence[Group],
        weight_version: int,
        lease: Lease | None = None,
        *,
        weight_versions: Mapping[str, int] | None = None,
        media: MediaFiles | None = None,
    ) -> None:
        self.groups = tuple(groups)
        self.weight_version = weight_version
        self.weight_versions: Mapping[str, int] = {**(weight_versions or {}), "": weight_version}
        self.rows: tuple[Trajectory, ...] = tuple(row for group in self.groups for row in group.trajectories)
        if unknown := {row.policy for row in self.rows} - self.weight_versions.keys():
            raise ValueError(f"there is no weight version for the rows of {', '.join(map(repr, sorted(unknown)))}")
        self.columns: RowColumns = row_columns(self.groups, self.weight_versions)
        self.media = media or MediaFiles({})
        self._lease = lease

    @classmethod
    def join(cls, parts: Sequence[Batch]) -> Self:
        """The groups of several batches as one batch without a lease, with the newest weight versions of the parts."""
        versions: dict[str, int] = {}
        for part in parts:
            for policy, version in part.weight_versions.items():
                versions[policy] = max(version, versions.get(policy, version))
        groups = [group for part in parts for group in part.groups]
        return cls(groups, versions[""], weight_versions=versions, media=MediaFiles.join([part.media for part in parts]))

    @property
    def lease_id(self) -> str | None:
        return self._lease.lease_id if self._lease else None

    @property
    def expires_at(self) -> float | None:
        """Epoch seconds of the service's clock; changes when the lease is extended."""
        return self._lease.expires_at if self._lease else None

    @property
    def staleness(self) -> NDArray[np.int64]:
        """Per row: its model's version at the lease minus the oldest version that any of its tokens was sampled under."""
        return self.columns.staleness  # type: ignore[no-any-return]

    @property
    def row_versions(self) -> NDArray[np.int64]:
        """Per row: its model's version when the batch was leased."""
        return np.array([self.weight_versions[row.policy] for row in self.rows], dtype=np.int64)

    @property
    def rollout_ids(self) -> tuple[str, ...]:
        """Per row: its rollout. `columns.rollout_index` numbers them, `columns.row_weight` weighs the rows."""
        return tuple(row.rollout_id for row in self.rows)

    @property
    def logprob_modes(self) -> tuple[frozenset[str], ...]:
        """Per row: what its logprobs were taken from, of `raw`, `processed`, `masked` and `unknown`. `padded`, `packed` and `tree` take
        rows of one mode unless they are told to mix; see docs/trainers.md."""
        return tuple(frozenset(span.mode for span in row.logprob_modes) for row in self.rows)

    def advantages(self, estimator: Estimator) -> NDArray[np.float32]:
        """`estimator` (one of trainer_client.advantages) over all rows; float32 of shape (rows,)."""
        return estimator(self.columns.rewards, self.columns.group_index, self.columns.rollout_index)

    def padded(
        self,
        pad_id: int = 0,
        max_length: int | None = None,
        multiple_of: int = 1,
        side: Side = "right",
        framework: Framework = "numpy",
        *,
        truncate: bool = False,
        advantages: Any = None,
        rows: Sequence[int] | None = None,
        vision: Vision | Literal[False] | None = None,
        mix_modes: bool = False,
    ) -> PaddedBatch:
        """All rows, or those at the indexes `rows` (a micro-batch), as one rectangle.

        Its width is the longest row, rounded up to `multiple_of`. A row over `max_length` tokens raises RowTooLong, or with
        `truncate` loses its end (counted in `cut_tokens`). `advantages`: one per row of the whole batch. `mix_modes`: take tokens whose
        logprobs were taken from different distributions, as `logprob_modes` says of each.
        Raises: RowTooLong, MixedLogprobModes, UnseenImages, VisionMismatch, ValueError.
        """
        selection = self._select(rows, truncate, advantages, framework, vision, mix_modes)
        return pad_rows(selection, pad_id=pad_id, max_length=max_length, multiple_of=multiple_of, side=side)

    def packed(
        self,
        token_budget: int,
        framework: Framework = "numpy",
        *,
        truncate: bool = False,
        advantages: Any = None,
        rows: Sequence[int] | None = None,
        vision: Vision | Literal[False] | None = None,
        mix_modes: bool = False,
    ) -> list[PackedBatch]:
        """All rows, or those at the indexes `rows`, in sequences of at most `token_budget` tokens, no row split.

        A row over the budget raises RowTooLong, or with `truncate` loses its end (counted in `cut_tokens`). Raises MixedLogprobModes,
        UnseenImages, VisionMismatch.
        """
        return pack_rows(self._select(rows, truncate, advantages, framework, vision, mix_modes), token_budget)

    def tree(
        self,
        token_budget: int,
        framework: Framework = "numpy",
        *,
        truncate: bool = False,
        advantages: Any = None,
        rows: Sequence[int] | None = None,
        vision: Vision | Literal[False] | None = None,
        mix_modes: bool = False,
    ) -> list[TreeBatch]:
        """All rows, or those at the indexes `rows`, as sequences of at most `token_budget` distinct tokens: each shared prefix once.

        A row over the budget raises RowTooLong, or loses its end with `truncate` (counted in `cut_tokens`). Raises MixedLogprobModes,
        UnseenImages, VisionMismatch.
        """
        return build_trees(self._select(rows, truncate, advantages, framework, vision, mix_modes), token_budget)

    def ack(self) -> None:
        """End the lease; the batch is never delivered again. Raises LeaseLost."""
        if self._lease:
            self._lease.ack()

    def nack(self) -> None:
        """Give the batch back now instead of letting the lease expire. Raises LeaseLost."""
        if self._lease:
            self._lease.nack()

    def extend(self, lease_seconds: float | None = None) -> float | None:
        """Extend the lease to `lease_seconds` from now (default: its last length). The new `expires_at`. Raises LeaseLost."""
        return self._lease.extend(lease_seconds) if self._lease else None

    def __enter__(self) -> Self:
        if self._lease:
            self._lease.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if self._lease:
            self._lease.__exit__(kind, error, traceback)

    def __len__(self) -> int:
        return len(self.rows)

    def __repr__(self) -> str:
        return f"Batch(lease_id={self.lease_id!r}, groups={len(self.groups)}, rows={len(self.rows)})"

    def _select(
        self,
        rows: Sequence[int] | None,
        truncate: bool,
        advantages: Any,
        framework: Framework,
        vision: Vision | Literal[False] | None,
        mix_modes: bool,
    ) -> Selection:
        """Those at the indexes `rows`; None: all."""
        indexes = range(len(self.rows)) if rows is None else rows
        chosen = [self.rows[at] for at in indexes]
        return Selection(chosen, indexes, self.columns, truncate, advantages, framework, self.media, vision, mix_modes)
