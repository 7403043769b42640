"""What a leased batch is cut into: single rows, padded rectangles or packed lines, as torch tensors.

Each is a small value, so that a DataLoader can send it to its workers, and a function from a batch to its parts. Rows that
train nothing, or nothing any more once their end was cut, are left out of every part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from trainer_client.arrays import PackedBatch, PaddedBatch, Side, kept_lengths
from trainer_client.batch import Batch

Microbatch = PaddedBatch | PackedBatch


class Cut(Protocol):
    """`advantages`: one per row of the whole batch, or None. Raises RowTooLong."""

    def __call__(self, batch: Batch, advantages: Any) -> Sequence[Microbatch]: ...


@dataclass(frozen=True, slots=True)
class Rows:
    """One part per row: a PackedBatch that holds this row alone, so its token fields have shape (tokens,)."""

    max_length: int | None = None
    truncate: bool = False

    def __call__(self, batch: Batch, advantages: Any) -> list[PackedBatch]:
        """The rows in the batch's order. One over `max_length` loses its end with `truncate`, otherwise RowTooLong is raised."""
        return [
            part
            for index in trained_rows(batch, self.max_length, truncate=self.truncate)
            for part in batch.packed(
                self.max_length or len(batch.rows[index].token_ids),
                "torch",
                truncate=self.truncate,
                advantages=advantages,
                rows=[index],
            )
        ]


@dataclass(frozen=True, slots=True)
class Padded:
    """Parts of at most `micro_rows` rows, each a PaddedBatch as `Batch.padded` makes it."""

    micro_rows: int
    pad_id: int = 0
    max_length: int | None = None
    multiple_of: int = 1
    side: Side = "right"
    truncate: bool = False

    def __call__(self, batch: Batch, advantages: Any) -> list[PaddedBatch]:
        """Rows of similar length together: the rows by length, the longest first."""
        rows = trained_rows(batch, self.max_length, truncate=self.truncate)
        rows.sort(key=lambda index: -len(batch.rows[index].token_ids))
        return [
            batch.padded(
                self.pad_id,
                self.max_length,
                self.multiple_of,
                self.side,
                "torch",
                truncate=self.truncate,
                advantages=advantages,
                rows=rows[start : start + self.micro_rows],
            )
            for start in range(0, len(rows), self.micro_rows)
        ]


@dataclass(frozen=True, slots=True)
class Packed:
    """Parts of at most `token_budget` tokens, each a PackedBatch as `Batch.packed` makes it."""

    token_budget: int
    truncate: bool = False

    def __call__(self, batch: Batch, advantages: Any) -> list[PackedBatch]:
        rows = trained_rows(batch, self.token_budget, truncate=self.truncate)
        return batch.packed(self.token_budget, "torch", truncate=self.truncate, advantages=advantages, rows=rows)


def trained_rows(batch: Batch, max_length: int | None, *, truncate: bool) -> list[int]:
    """The indexes of the rows in which a sampled token is left. Raises RowTooLong."""
    lengths = kept_lengths(batch.rows, max_length, truncate=truncate)
    return [index for index, length in enumerate(lengths) if batch.rows[index].loss_mask[:length].any()]
