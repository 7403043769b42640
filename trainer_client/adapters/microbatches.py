"""Ways to split a leased batch into microbatches of torch tensors: single rows, padded rectangles or packed sequences.

Each is a small picklable callable from a batch to its parts, so that a DataLoader can send it to workers. Rows that train nothing, or
nothing after truncation, are left out. `vision`: see `Batch`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from trainer_client.arrays import PackedBatch, PaddedBatch, Side, limit_lengths, require_one_mode
from trainer_client.batch import Batch
from trainer_client.vision import Vision

Microbatch = PaddedBatch | PackedBatch


class Cut(Protocol):
    """`advantages`: one per row of the whole batch, or None. Raises RowTooLong."""

    def __call__(self, batch: Batch, advantages: Any) -> Sequence[Microbatch]: ...


@dataclass(frozen=True, slots=True)
class Rows:
    """One part per row: a PackedBatch of this row alone, with token fields of shape (tokens,)."""

    max_length: int | None = None
    truncate: bool = False
    vision: Vision | Literal[False] | None = None

    def __call__(self, batch: Batch, advantages: Any) -> list[PackedBatch]:
        """The rows in the batch's order. A row over `max_length` raises RowTooLong, or with `truncate` loses its end."""
        return [
            part
            for index in trained_rows(batch, self.max_length, truncate=self.truncate)
            for part in batch.packed(
                self.max_length or len(batch.rows[index].token_ids),
                "torch",
                truncate=self.truncate,
                advantages=advantages,
                rows=[index],
                vision=self.vision,
            )
        ]


@dataclass(frozen=True, slots=True)
class Padded:
    """Parts of at most `micro_rows` rows, each a PaddedBatch; see `Batch.padded`."""

    micro_rows: int
    pad_id: int = 0
    max_length: int | None = None
    multiple_of: int = 1
    side: Side = "right"
    truncate: bool = False
    vision: Vision | Literal[False] | None = None

    def __call__(self, batch: Batch, advantages: Any) -> list[PaddedBatch]:
        """Parts of rows of similar length, the longest first."""
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
                vision=self.vision,
            )
            for start in range(0, len(rows), self.micro_rows)
        ]


@dataclass(frozen=True, slots=True)
class Packed:
    """Parts of at most `token_budget` tokens, each a PackedBatch; see `Batch.packed`."""

    token_budget: int
    truncate: bool = False
    vision: Vision | Literal[False] | None = None

    def __call__(self, batch: Batch, advantages: Any) -> list[PackedBatch]:
        rows = trained_rows(batch, self.token_budget, truncate=self.truncate)
        return batch.packed(
            self.token_budget, "torch", truncate=self.truncate, advantages=advantages, rows=rows, vision=self.vision
        )


def trained_rows(batch: Batch, max_length: int | None, *, truncate: bool) -> list[int]:
    """The indexes of the rows with a sampled token after truncation. Raises RowTooLong, and MixedLogprobModes for the whole batch: each
    part may have one mode and the step they make together several."""
    require_one_mode(batch.rows)
    lengths = limit_lengths(batch.rows, max_length, truncate=truncate)
    return [index for index, length in enumerate(lengths) if batch.rows[index].loss_mask[:length].any()]
