"""What is asked of an engine beside the tokens and their logprobs, and what its answer says of it.

vLLM 0.32: `logprobs: k` gives the sampled token first and then the most probable others, k entries in all, so that one more is
asked for than is wanted. `prompt_logprobs: 0` scores the prompt's own tokens. Only whole answers carry it, and no prompt can be scored
that is read from the prefix cache: the engine dies of it, so that what a rendering says of the cache must not stand. With
`--enable-return-routed-experts` the end of every answer carries the experts of each position as a base64 `.npy`;
`routed_experts_prompt_start` leaves out those that are known.
"""

from __future__ import annotations

import base64
import io
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from reconstruct.records import NO_TOKEN, CallDetails, Experts

log = logging.getLogger(__name__)

_MOST_EXPERTS = 2**15
"""Rows have them as int16."""

Tops = Sequence[Sequence[tuple[int, float]]]
"""For each sampled token, the most probable ones as (id, logprob), in any order."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """`top_logprobs`: how many of the most probable tokens; `routed_from`: the first position whose experts are not known yet."""

    top_logprobs: int = 0
    prompt_logprobs: bool = False
    routed_experts: bool = False
    routed_from: int = 0

    def logprobs(self, shown: int | None) -> int:
        """How many an engine is asked for when a harness wants to see `shown` of them."""
        return max(shown or 0, self.top_logprobs + 1 if self.top_logprobs else 0)

    @property
    def parameters(self) -> dict[str, Any]:
        """Sampling parameters of vLLM for what is wanted of the prompt."""
        asked: dict[str, Any] = {}
        if self.prompt_logprobs:
            asked |= {"prompt_logprobs": 0, "skip_reading_prefix_cache": True}
        if self.routed_experts and self.routed_from:
            asked["routed_experts_prompt_start"] = self.routed_from
        return asked


class PromptLogprob(msgspec.Struct):
    logprob: float | None = None


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""For each token of the prompt, logprobs by id, None for the first."""


class _Unfit(Exception):
    """What the engine said is not of the tokens it is said of."""


T = TypeVar("T")


def details_of(
    wanted: Wanted,
    prompt_ids: Sequence[int] | NDArray[np.int32],
    sampled: int,
    *,
    tops: Tops | None = None,
    prompt_logprobs: PromptLogprobs | None = None,
    routed_experts: str | None = None,
) -> CallDetails | None:
    """What was wanted and came, of the whole prompt and `sampled` tokens. What is not of these tokens is left out, and logged."""
    top = given = routed = None
    if wanted.top_logprobs and tops is not None:
        top = _fitting(lambda: _tops(tops, wanted.top_logprobs, sampled))
    if wanted.prompt_logprobs and prompt_logprobs is not None:
        given = _fitting(lambda: _given(prompt_ids, prompt_logprobs))
    if wanted.routed_experts and routed_experts is not None:
        # The last sampled token was not fed back, so nothing was routed for it.
        routed = _fitting(lambda: _routed(routed_experts, len(prompt_ids) + sampled - 1 - wanted.routed_from))
    top_ids, top_logprobs = top or (None, None)
    details = CallDetails(top_ids, top_logprobs, given, routed, wanted.routed_from if routed is not None else 0)
    return None if details.empty else details


def _fitting(read: Callable[[], T]) -> T | None:
    try:
        return read()
    except _Unfit as error:
        log.warning("an engine's answer has %s: they are left out", error)
        return None


def _tops(tops: Tops, most: int, sampled: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    if len(tops) != sampled:
        raise _Unfit(f"the most probable tokens of {len(tops)} positions for {sampled} sampled ones")
    ids = np.full((sampled, most), NO_TOKEN, dtype=np.int32)
    logprobs = np.full((sampled, most), np.nan, dtype=np.float32)
    for at, told in enumerate(tops):
        best = sorted(dict(told).items(), key=lambda entry: -entry[1])[:most]
        if best:
            ids[at, : len(best)], logprobs[at, : len(best)] = zip(*best, strict=True)
    return ids, logprobs


def _given(prompt_ids: Sequence[int] | NDArray[np.int32], told: PromptLogprobs) -> NDArray[np.float32]:
    if len(told) != len(prompt_ids):
        raise _Unfit(f"logprobs of {len(told)} tokens for a prompt of {len(prompt_ids)}")
    return np.array([_of(entry, token) for entry, token in zip(told, prompt_ids, strict=True)], dtype=np.float32)


def _of(entry: Mapping[str, PromptLogprob] | None, token: int) -> float:
    said = (entry or {}).get(str(token))
    return float("nan") if said is None or said.logprob is None else said.logprob


def _routed(text: str, positions: int) -> Experts:
    try:
        routed: NDArray[Any] = np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise _Unfit(f"routed experts that cannot be read ({error})") from error
    if routed.ndim != 3 or len(routed) != positions or routed.dtype.kind not in "iu":
        raise _Unfit(f"routed experts of the shape {routed.shape} for {positions} positions")
    if routed.size and not 0 <= int(routed.min()) <= int(routed.max()) < _MOST_EXPERTS:
        raise _Unfit(f"experts from {int(routed.min())} to {int(routed.max())}")
    return routed.astype(np.uint8) if not routed.size or int(routed.max()) < 256 else routed.astype(np.uint16)
