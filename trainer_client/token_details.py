"""What is known of tokens beside what every row has, for rows that are put together: padded to one shape, or laid end to end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reconstruct.details import NAMES, NO_EXPERT, NO_TOKEN, RowDetails
from reconstruct.trajectory import MIXED, Trajectory
from trainer_client.columns import Array, RowColumns
from trainer_client.errors import MixedLogprobModes

_MISSING: dict[str, tuple[Any, Any]] = {
    "top_token_ids": (np.int32, NO_TOKEN),
    "top_logprobs": (np.float32, np.nan),
    "prompt_logprobs": (np.float32, np.nan),
    "routed_experts": (np.int16, NO_EXPERT),
}
"""Of each the type, and what stands where nothing is known."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class TokenArrays(RowColumns):
    """`logprob_mode` is that of `inference_logprobs`, the same in all rows. What follows is None unless one of the rows has it, and is
    of the shape of the token fields with more dimensions behind: `top_token_ids` int32 and `top_logprobs` float32 (…, k), -1 and
    NaN where not known; `prompt_logprobs` float32 (…), NaN where not known; `routed_experts` int16 (…, layers, experts per token), -1
    where not known. See `reconstruct.details.RowDetails`."""

    logprob_mode: str
    top_token_ids: Array | None
    top_logprobs: Array | None
    prompt_logprobs: Array | None
    routed_experts: Array | None


def one_mode(rows: Sequence[Trajectory]) -> str:
    """The logprob mode of all rows. Raises MixedLogprobModes when they differ, or one row holds several."""
    modes = {row.logprob_mode for row in rows}
    if len(modes) > 1 or MIXED in modes:
        first = {row.logprob_mode: row.trajectory_id for row in reversed(rows)}
        named = ", ".join(f"{mode} (as in trajectory {name!r})" for mode, name in sorted(first.items()))
        raise MixedLogprobModes(
            f"the logprobs of these rows do not mean the same: {named}; choose rows of one mode with `rows`"
        )
    return modes.pop() if modes else ""


def padded_details(rows: Sequence[Trajectory], lengths: Sequence[int], places: Sequence[slice], width: int) -> dict[str, Any]:
    """The details of the first `lengths` tokens of each row, of shape (rows, width, …), each row's at its place."""
    made: dict[str, Any] = dict.fromkeys(NAMES)
    for name, behind in _shapes(rows).items():
        dtype, missing = _MISSING[name]
        table = made[name] = np.full((len(rows), width, *behind), missing, dtype=dtype)
        for line, row, length, place in zip(table, rows, lengths, places, strict=True):
            _lay(line[place], row.details, name, length)
    return made


def joined_details(rows: Sequence[Trajectory], lengths: Sequence[int]) -> dict[str, Any]:
    """The details of the first `lengths` tokens of each row, end to end: of shape (tokens, …)."""
    ends = np.cumsum(lengths)
    places = [slice(int(end) - length, int(end)) for end, length in zip(ends, lengths, strict=True)]
    made: dict[str, Any] = dict.fromkeys(NAMES)
    for name, behind in _shapes(rows).items():
        dtype, missing = _MISSING[name]
        made[name] = np.full((sum(lengths), *behind), missing, dtype=dtype)
        for row, length, place in zip(rows, lengths, places, strict=True):
            _lay(made[name][place], row.details, name, length)
    return made


def _lay(place: NDArray[Any], details: RowDetails | None, name: str, length: int) -> None:
    """Put the row's array into its place, which may be wider in its last dimension: rows with fewer of the most probable tokens."""
    array = None if details is None else getattr(details, name)
    if array is None:
        return
    place[(..., slice(array.shape[-1])) if array.ndim > 1 else ...] = array[:length]


def _shapes(rows: Sequence[Trajectory]) -> dict[str, tuple[int, ...]]:
    """For each detail that a row has, the dimensions behind the tokens, wide enough for all rows.

    Raises ValueError for routed experts of different shapes: they are of different models."""
    found: dict[str, set[tuple[int, ...]]] = {}
    for row in rows:
        for name in NAMES:
            array = None if row.details is None else getattr(row.details, name)
            if array is not None:
                found.setdefault(name, set()).add(array.shape[1:])
    if len(found.get("routed_experts", ())) > 1:
        raise ValueError(f"routed experts of these rows are of different models: {sorted(found['routed_experts'])}")
    return {name: max(shapes) for name, shapes in found.items()}
