"""A request for the logprobs of ids that an engine did not sample, and what is known from its answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from proxy.engine.replica import Served
from reconstruct.media import Ranges
from reconstruct.records import Ids, Logprobs


@dataclass(frozen=True, slots=True, eq=False)
class ScoringJob:
    """One request for the logprobs of `ids`, each given those before it, with the `top_k` most probable ids there.

    `reads_cache`: what the engine has computed before need not be computed, and is not scored then. `images` are the bytes of the images
    at the ranges `media`."""

    request_id: str
    ids: Ids
    top_k: int = 0
    reads_cache: bool = False
    media: Ranges = ()
    images: Sequence[bytes] = ()
    served: Served = field(default_factory=Served)


@dataclass(frozen=True, slots=True, eq=False)
class Scored:
    """The answer: `logprobs` float32 (n,), `top_ids` int32 and `top_logprobs` float32 (n, k); NaN and NO_TOKEN where nothing is known, as
    of the first id and of a cached prefix. `impossible` (n,): the engine gives the id no probability.

    All numbers are of the weights `version`. `cached_tokens`: how many ids were not computed; None if the engine does not say."""

    logprobs: Logprobs
    top_ids: NDArray[np.int32]
    top_logprobs: NDArray[np.float32]
    impossible: NDArray[np.bool_]
    version: int
    cached_tokens: int | None = None

    @property
    def computed_tokens(self) -> int:
        return len(self.logprobs) - (self.cached_tokens or 0)
