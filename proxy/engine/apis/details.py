"""Details beside the sampled tokens and their logprobs: alternatives, prompt logprobs and routed experts, requested and read.

vLLM 0.32: `logprobs: k` returns k entries, the sampled token first and then the most probable others, so one more than wanted is
requested. `prompt_logprobs: 0` scores the prompt's own tokens; only whole replies carry it, and vLLM dies when the prompt is read from
the prefix cache, hence `skip_reading_prefix_cache`. With `--enable-return-routed-experts` every reply ends with the experts of each
position as a base64 `.npy`; `routed_experts_prompt_start` skips the known positions.
"""

from __future__ import annotations

import base64
import io
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from reconstruct.details import NO_TOKEN, CallDetails, Experts
from reconstruct.records import Logprobs

log = logging.getLogger(__name__)

T = TypeVar("T")

_MAX_EXPERTS = 2**15
"""Rows store experts as int16."""

Tops = Sequence[Sequence[tuple[int, float]]]
"""For each sampled token, its most probable alternatives as (id, logprob), in any order."""


@dataclass(frozen=True, slots=True)
class WantedDetails:
    """`top_logprobs`: how many alternatives per token; `routed_from`: the first position whose experts are unknown."""

    top_logprobs: int = 0
    prompt_logprobs: bool = False
    routed_experts: bool = False
    routed_from: int = 0

    def logprobs(self, shown: int | None) -> int:
        """The `logprobs` to request when the harness wants to see `shown` of them."""
        return max(shown or 0, self.top_logprobs + 1 if self.top_logprobs else 0)

    @property
    def parameters(self) -> dict[str, Any]:
        """vLLM's sampling parameters for prompt logprobs and routed experts."""
        parameters: dict[str, Any] = {}
        if self.prompt_logprobs:
            parameters |= {"prompt_logprobs": 0, "skip_reading_prefix_cache": True}
        if self.routed_experts and self.routed_from:
            parameters["routed_experts_prompt_start"] = self.routed_from
        return parameters


class PromptLogprob(msgspec.Struct):
    logprob: float | None = None


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""For each prompt token, logprobs by id; None for the first."""


class _Unfit(Exception):
    """A detail that does not belong to these tokens."""


def read_details(
    wanted: WantedDetails,
    prompt_ids: Sequence[int] | NDArray[np.int32],
    sampled: int,
    *,
    tops: Tops | None = None,
    prompt_logprobs: PromptLogprobs | Logprobs | None = None,
    routed_experts: str | bytes | None = None,
) -> CallDetails | None:
    """The wanted details the engine returned, for the whole prompt and `sampled` tokens. Details of other lengths are logged and
    left out. `prompt_logprobs` as an array are of the prompt's own tokens; `routed_experts` as bytes are not in base64."""
    top = prompt = experts = None
    if wanted.top_logprobs and tops is not None:
        top = _read_or_log(lambda: _read_tops(tops, wanted.top_logprobs, sampled))
    if wanted.prompt_logprobs and prompt_logprobs is not None:
        prompt = _read_or_log(lambda: _read_prompt_logprobs(prompt_ids, prompt_logprobs))
    if wanted.routed_experts and routed_experts is not None:
        # The last sampled token was not fed back, so it has no experts.
        positions = len(prompt_ids) + sampled - 1 - wanted.routed_from
        experts = _read_or_log(lambda: _read_experts(routed_experts, positions))
    if top is None and prompt is None and experts is None:
        return None
    top_ids, top_logprobs = top or (None, None)
    return CallDetails(top_ids, top_logprobs, prompt, experts, wanted.routed_from if experts is not None else 0)


def _read_or_log(read: Callable[[], T]) -> T | None:
    try:
        return read()
    except _Unfit as error:
        log.warning("a detail of an engine's reply is left out: %s", error)
        return None


def _read_tops(tops: Tops, most: int, sampled: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    if len(tops) != sampled:
        raise _Unfit(f"alternatives of {len(tops)} positions for {sampled} sampled tokens")
    ids = np.full((sampled, most), NO_TOKEN, dtype=np.int32)
    logprobs = np.full((sampled, most), np.nan, dtype=np.float32)
    for position, alternatives in enumerate(tops):
        best = sorted(dict(alternatives).items(), key=lambda entry: -entry[1])[:most]
        if best:
            ids[position, : len(best)], logprobs[position, : len(best)] = zip(*best, strict=True)
    return ids, logprobs


def _read_prompt_logprobs(prompt_ids: Sequence[int] | NDArray[np.int32], entries: PromptLogprobs | Logprobs) -> Logprobs:
    if len(entries) != len(prompt_ids):
        raise _Unfit(f"logprobs of {len(entries)} tokens for a prompt of {len(prompt_ids)}")
    if isinstance(entries, np.ndarray):
        return entries
    found = [(entry or {}).get(str(token)) for entry, token in zip(entries, prompt_ids, strict=True)]
    values = [float("nan") if one is None or one.logprob is None else one.logprob for one in found]
    return np.array(values, dtype=np.float32)


def _read_experts(told: str | bytes, positions: int) -> Experts:
    try:
        content = base64.b64decode(told) if isinstance(told, str) else told
        experts: NDArray[Any] = np.load(io.BytesIO(content), allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise _Unfit(f"unreadable routed experts ({error})") from error
    if experts.ndim != 3 or len(experts) != positions or experts.dtype.kind not in "iu":
        raise _Unfit(f"routed experts of shape {experts.shape} for {positions} positions")
    if experts.size and not 0 <= int(experts.min()) <= int(experts.max()) < _MAX_EXPERTS:
        raise _Unfit(f"routed experts from {int(experts.min())} to {int(experts.max())}")
    return experts.astype(np.uint8) if not experts.size or int(experts.max()) < 256 else experts.astype(np.uint16)
