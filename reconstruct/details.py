"""Details: what an engine reports of tokens besides the logprobs of sampled ones, if requested.

A call stores only what is new: the top tokens at its sampled positions, the logprobs of its delta, and the experts of positions that its
base lacks. `row_details` aligns them with a row. Details never decide what is trained; missing ones are marked as missing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

NO_TOKEN = -1
NO_EXPERT = -1

Experts: TypeAlias = NDArray[np.uint8] | NDArray[np.uint16]


@dataclass(frozen=True, slots=True, eq=False)
class CallDetails:
    """The details of a call with d delta ids and m sampled ones; None: not reported.

    `top_token_ids` int32 and `top_logprobs` float32, both (m, k): the k most probable tokens at each sampled position, the most
    probable first; NO_TOKEN and NaN if there are fewer. `prompt_logprobs` float32 (d,): of the delta's tokens; NaN for a session's
    first. `routed_experts` uint8 or uint16 (r, layers, experts per token): of the r positions from `routed_from` on, counted in the
    call's prompt and reply. An engine computes none for the last sampled token; the call that continues it has them.
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

    def cut_to_delta(self, base_length: int, delta: int) -> CallDetails | None:
        """These details of a whole prompt, cut to those that a call with `base_length` ids of its base and `delta` own ids stores.

        Keeps the routing of the base's last position, which the base may lack."""
        prompt_logprobs, routed, first = self.prompt_logprobs, self.routed_experts, self.routed_from
        if prompt_logprobs is not None:
            prompt_logprobs = prompt_logprobs[base_length : base_length + delta] if delta else None
        if routed is not None:
            kept = max(0, base_length - 1 - first)
            routed, first = (routed[kept:], first + kept) if kept < len(routed) else (None, 0)
        cut = CallDetails(self.top_token_ids, self.top_logprobs, prompt_logprobs, routed, first)
        return None if cut.empty else cut


def spell_array(array: NDArray[Any], arrays: str) -> Any:
    """The array in the shape of the HTTP contract: `{"shape", "data"}`, or nested lists if `arrays` is "list"."""
    if arrays != "list":
        return {"shape": list(array.shape), "data": array.tobytes()}
    return convert_to_lists(array)


def convert_to_lists(array: NDArray[Any]) -> list[Any]:
    """Nested lists with None for NaN, which JSON lacks."""
    known = array.astype(object)
    if array.dtype.kind == "f":
        known[np.isnan(array)] = None
    listed: list[Any] = known.tolist()
    return listed


def of_one_shape(left: NDArray[Any] | None, right: NDArray[Any] | None) -> bool:
    """Whether both have the same shape, or both are None."""
    return (None if left is None else left.shape) == (None if right is None else right.shape)
