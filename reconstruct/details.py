"""Details: what an engine says of tokens beside the logprob of each sampled one, kept where it was asked for.

A call keeps only what is new: the most probable tokens at its sampled positions, the logprobs of its delta, and the experts of the
positions that its base does not know. `row_details` lays the details of a row's calls out by the row's own positions. Nothing here
decides what is trained: a detail that is missing is marked as missing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from reconstruct.errors import LengthMismatch

if TYPE_CHECKING:
    from reconstruct.forest import Forest

Experts: TypeAlias = NDArray[np.uint8] | NDArray[np.uint16]

NO_TOKEN = -1
NO_EXPERT = -1


@dataclass(frozen=True, slots=True, eq=False)
class CallDetails:
    """Of one call with d delta ids and m sampled ones; None: the engine did not say.

    `top_token_ids` int32 and `top_logprobs` float32, both (m, k): the k most probable tokens where each token was sampled, the most
    probable first; NO_TOKEN and NaN where there are fewer. `prompt_logprobs` float32 (d,): of the delta's tokens as they were given;
    NaN for a session's very first. `routed_experts` uint8 or uint16 (r, layers, experts per token): of the r positions from
    `routed_from` on, counted in the call's prompt and reply. An engine computes none for the last sampled token of a call: the call
    that continues it brings them.
    """

    top_token_ids: NDArray[np.int32] | None = None
    top_logprobs: NDArray[np.float32] | None = None
    prompt_logprobs: NDArray[np.float32] | None = None
    routed_experts: Experts | None = None
    routed_from: int = 0

    @property
    def empty(self) -> bool:
        return self.top_token_ids is None and self.prompt_logprobs is None and self.routed_experts is None

    @property
    def size_bytes(self) -> int:
        arrays = (self.top_token_ids, self.top_logprobs, self.prompt_logprobs, self.routed_experts)
        return sum(array.nbytes for array in arrays if array is not None)

    def check(self, delta: int, sampled: int, where: dict[str, Any]) -> None:
        """Raise LengthMismatch when they are not of `delta` given and `sampled` sampled tokens."""
        if not of_one_shape(self.top_token_ids, self.top_logprobs):
            raise LengthMismatch("top_token_ids and top_logprobs differ in shape", **where)
        for name, array, length in (
            ("top_token_ids", self.top_token_ids, sampled),
            ("top_logprobs", self.top_logprobs, sampled),
            ("prompt_logprobs", self.prompt_logprobs, delta),
        ):
            if array is not None and len(array) != length:
                raise LengthMismatch(f"{name} is of {len(array)} tokens, not of {length}", **where)

    def told_after(self, base_length: int, delta: int) -> CallDetails | None:
        """The same of a whole prompt, cut to what a call stores that leans on `base_length` ids and has `delta` ids of its own.

        One position of routing stays that the base may lack, its last token's."""
        prompt_logprobs, routed, first = self.prompt_logprobs, self.routed_experts, self.routed_from
        if prompt_logprobs is not None:
            prompt_logprobs = prompt_logprobs[base_length : base_length + delta] if delta else None
        if routed is not None:
            kept = max(0, base_length - 1 - first)
            routed, first = (routed[kept:], first + kept) if kept < len(routed) else (None, 0)
        cut = CallDetails(self.top_token_ids, self.top_logprobs, prompt_logprobs, routed, first)
        return None if cut.empty else cut


@dataclass(frozen=True, slots=True, eq=False)
class RowDetails:
    """Of a row of n tokens, aligned with its `token_ids`; None: of no token.

    `top_token_ids` int32 and `top_logprobs` float32, both (n, k): at trained tokens, the most probable first; NO_TOKEN and NaN
    elsewhere. `prompt_logprobs` float32 (n,): of tokens that were given, under the weights of the call that brought them; NaN for
    sampled tokens and wherever the engine did not say. `routed_experts` int16 (n, layers, experts per token): NO_EXPERT where the
    engine did not say, as for the row's last token, which was sampled and never fed back.
    """

    top_token_ids: NDArray[np.int32] | None = None
    top_logprobs: NDArray[np.float32] | None = None
    prompt_logprobs: NDArray[np.float32] | None = None
    routed_experts: NDArray[np.int16] | None = None


def of_one_shape(left: NDArray[Any] | None, right: NDArray[Any] | None) -> bool:
    """Whether both are there with the same shape, or neither is there."""
    return (None if left is None else left.shape) == (None if right is None else right.shape)


NAMES = ("top_token_ids", "top_logprobs", "prompt_logprobs", "routed_experts")
"""The arrays of a row's details, by the names they have on the wire."""


def row_details(forest: Forest, last: str, trained: Sequence[str]) -> RowDetails | None:
    """What is known of the tokens of the row that ends with the call `last` and trains the calls `trained`."""
    if not forest.detailed:
        return None
    length = forest.full_length(last)
    pieces = list(forest.pieces(last, length))
    top = _top(forest, length, trained)
    prompt_logprobs = _given(forest, length, pieces, trained)
    routed = _routed(forest, length, pieces)
    if top is None and prompt_logprobs is None and routed is None:
        return None
    top_token_ids, top_logprobs = top or (None, None)
    return RowDetails(top_token_ids, top_logprobs, prompt_logprobs, routed)


def _top(forest: Forest, length: int, trained: Iterable[str]) -> tuple[NDArray[np.int32], NDArray[np.float32]] | None:
    said: list[tuple[int, NDArray[np.int32], NDArray[np.float32]]] = []
    for name in trained:
        details = forest.calls[name].node.details
        if details is not None and details.top_token_ids is not None and details.top_logprobs is not None:
            said.append((forest.prompt_length(name), details.top_token_ids, details.top_logprobs))
    if not said:
        return None
    widest = max(ids.shape[1] for _, ids, _ in said)
    token_ids = np.full((length, widest), NO_TOKEN, dtype=np.int32)
    logprobs = np.full((length, widest), np.nan, dtype=np.float32)
    for start, ids, values in said:
        place = slice(start, start + len(ids)), slice(0, ids.shape[1])
        token_ids[place], logprobs[place] = ids, values
    return token_ids, logprobs


def _given(
    forest: Forest, length: int, pieces: Iterable[tuple[str, int, int]], trained: Iterable[str]
) -> NDArray[np.float32] | None:
    """The logprobs of the tokens that a call of the row stores as given."""
    values = np.full(length, np.nan, dtype=np.float32)
    said = False
    for owner, start, end in pieces:
        node = forest.calls[owner].node
        if node.details is None or node.details.prompt_logprobs is None:
            continue
        end = min(end, node.base_length + len(node.delta_ids))
        if start < end:
            values[start:end] = node.details.prompt_logprobs[start - node.base_length : end - node.base_length]
            said = True
    for name in trained:
        # Where another call stores as given what this one sampled, that is the logprob to go by.
        start = forest.prompt_length(name)
        values[start : start + len(forest.calls[name].node.completion_ids)] = np.nan
    return values if said else None


def _routed(forest: Forest, length: int, pieces: Iterable[tuple[str, int, int]]) -> NDArray[np.int16] | None:
    """The experts of every position, from the last call to the first: whose ids they are has the last word on them."""
    table: NDArray[np.int16] | None = None
    for owner, _, end in pieces:
        details = forest.calls[owner].node.details
        if details is None or details.routed_experts is None:
            continue
        rows = details.routed_experts
        if table is None:
            table = np.full((length, *rows.shape[1:]), NO_EXPERT, dtype=np.int16)
        stop = min(details.routed_from + len(rows), end)
        # Of another shape are those of another model, whose ids happen to be shared.
        if table.shape[1:] == rows.shape[1:] and details.routed_from < stop:
            table[details.routed_from : stop] = rows[: stop - details.routed_from]
    return table
