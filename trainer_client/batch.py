"""A leased batch: groups of rows, as arrays a training step can use, and the lease they are held under.

    with batch:                                   # acknowledged at the end, given back when the block raises
        data = batch.padded(pad_id=0, framework="torch", advantages=batch.advantages(grpo))

While the block runs, a thread extends the lease each time half of it has passed. A batch that is used without `with` is
neither acknowledged nor given back: its lease expires and another trainer, or this one, gets the rows again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from reconstruct.trajectory import Trajectory
from trainer_client.arrays import Framework, PackedBatch, PaddedBatch, RowColumns, Side, packed, padded, row_columns
from trainer_client.lease import Lease
from trainer_client.tree import TreeBatch, trees
from trainer_client.wire import Group

Estimator = Callable[[NDArray[np.float32], NDArray[np.int64], NDArray[np.int64]], NDArray[np.float32]]


class Batch:
    """`rows` are all trajectories in the order of `groups`; per-row values are in `columns`, in that order.

    `weight_version` is the default policy's when the batch was leased, `weight_versions` has that of every policy; each row is measured
    against its own. Raises ValueError for rows of a policy whose version is not said.

    Without a `lease` (rows read from a file, say) ack, nack, extend and the `with` block have nothing to do."""

    def __init__(
        self,
        groups: Sequence[Group],
        weight_version: int,
        lease: Lease | None = None,
        *,
        weight_versions: Mapping[str, int] | None = None,
    ) -> None:
        self.groups = tuple(groups)
        self.weight_version = weight_version
        self.weight_versions: Mapping[str, int] = {**(weight_versions or {}), "": weight_version}
        self.rows: tuple[Trajectory, ...] = tuple(row for group in self.groups for row in group.trajectories)
        if unknown := {row.policy for row in self.rows} - self.weight_versions.keys():
            raise ValueError(f"there are rows of {', '.join(map(repr, sorted(unknown)))}, whose weight version is not said")
        self.columns: RowColumns = row_columns(self.groups, self.weight_versions)
        self._lease = lease

    @classmethod
    def joined(cls, parts: Sequence[Batch]) -> Self:
        """The groups of several batches as one without a lease, whose versions are the newest of its parts."""
        versions: dict[str, int] = {}
        for part in parts:
            for policy, version in part.weight_versions.items():
                versions[policy] = max(version, versions.get(policy, version))
        return cls([group for part in parts for group in part.groups], versions[""], weight_versions=versions)

    @property
    def lease_id(self) -> str | None:
        return self._lease.lease_id if self._lease else None

    @property
    def expires_at(self) -> float | None:
        """Epoch seconds of the service's clock; moves when the lease is extended."""
        return self._lease.expires_at if self._lease else None

    @property
    def staleness(self) -> NDArray[np.int64]:
        """Per row: the version of its policy minus the oldest one that any of its tokens was sampled under."""
        return self.columns.staleness  # type: ignore[no-any-return]

    @property
    def row_versions(self) -> NDArray[np.int64]:
        """Per row: the version of its policy when the batch was leased."""
        return np.array([self.weight_versions[row.policy] for row in self.rows], dtype=np.int64)

    @property
    def rollout_ids(self) -> tuple[str, ...]:
        """Per row: the rollout it belongs to. `columns.rollout_index` numbers these, `columns.row_weight` weighs the rows."""
        return tuple(row.rollout_id for row in self.rows)

    @property
    def logprob_modes(self) -> tuple[str, ...]:
        """Per row: what its logprobs are, `raw_logprobs`, `processed_logprobs` or `unknown`; `mixed` for a row of several. `padded` and
        `packed` take rows of one mode only, see docs/trainers.md."""
        return tuple(row.logprob_mode for row in self.rows)

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
    ) -> PaddedBatch:
        """All rows, or those at the indexes `rows` (a micro-batch), as one rectangle.

        It is as long as its longest row, rounded up to `multiple_of`. A row over `max_length` tokens raises RowTooLong, or
        loses its end with `truncate` (counted in `cut_tokens`). `advantages`: one per row of the whole batch.
        Raises: RowTooLong, MixedLogprobModes, ValueError.
        """
        return padded(
            self.rows,
            self.columns,
            self._indexes(rows),
            pad_id=pad_id,
            max_length=max_length,
            multiple_of=multiple_of,
            side=side,
            truncate=truncate,
            advantages=advantages,
            framework=framework,
        )

    def packed(
        self,
        token_budget: int,
        framework: Framework = "numpy",
        *,
        truncate: bool = False,
        advantages: Any = None,
        rows: Sequence[int] | None = None,
    ) -> list[PackedBatch]:
        """All rows, or those at the indexes `rows`, in sequences of at most `token_budget` tokens, each row in one piece.

        A row over the budget raises RowTooLong, or loses its end with `truncate` (counted in `cut_tokens`). Raises MixedLogprobModes.
        """
        return packed(
            self.rows,
            self.columns,
            self._indexes(rows),
            token_budget=token_budget,
            truncate=truncate,
            advantages=advantages,
            framework=framework,
        )

    def tree(
        self,
        token_budget: int,
        framework: Framework = "numpy",
        *,
        truncate: bool = False,
        advantages: Any = None,
        rows: Sequence[int] | None = None,
    ) -> list[TreeBatch]:
        """All rows, or those at the indexes `rows`, as sequences of at most `token_budget` distinct tokens: each shared prefix once.

        A row over the budget raises RowTooLong, or loses its end with `truncate` (counted in `cut_tokens`). Raises MixedLogprobModes.
        """
        return trees(
            self.rows,
            self.columns,
            self._indexes(rows),
            token_budget=token_budget,
            truncate=truncate,
            advantages=advantages,
            framework=framework,
        )

    def ack(self) -> None:
        """Done: the batch is never delivered again. Raises LeaseLost."""
        if self._lease:
            self._lease.ack()

    def nack(self) -> None:
        """Give it back now instead of letting it expire. Raises LeaseLost."""
        if self._lease:
            self._lease.nack()

    def extend(self, lease_seconds: float | None = None) -> float | None:
        """The new `expires_at`, `lease_seconds` from now (default: as long as the last time). Raises LeaseLost."""
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

    def _indexes(self, rows: Sequence[int] | None) -> Sequence[int]:
        return range(len(self.rows)) if rows is None else rows
