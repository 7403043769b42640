"""A request for the logprobs of ids that an engine did not sample, and how much of its answer is believed.

An engine may answer 200 with numbers that it never computed: vLLM 0.32 fills the positions of a prefix that it had cached with whatever
was in memory, ends an aborted request with a list of one entry, and writes -9999.0 for a probability of 0. So nothing is believed by its
place alone: `Scored` has one number for each id that was sent, of that id, behind what was cached, and NaN elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

import numpy as np
from numpy.typing import NDArray

from proxy.engine.apis.reply import Version
from proxy.engine.replica import Replica, Served
from proxy.errors import EngineFailed
from reconstruct.details import NO_TOKEN
from reconstruct.media import Ranges
from reconstruct.records import Ids, Logprobs
from reconstruct.spans import Span

NO_PROBABILITY = -9999.0
"""What vLLM writes for a logprob of minus infinity."""
_ROUNDING = 1e-4
"""How far above 0 the logprob of a certain token may be."""


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


@dataclass(frozen=True, slots=True, eq=False)
class ScoreArrays:
    """As an engine tells them, of whatever length."""

    logprobs: Logprobs
    top_ids: NDArray[np.int32]
    top_logprobs: NDArray[np.float32]

    @classmethod
    def unknown(cls, count: int, top_k: int) -> Self:
        """For so many ids, to be filled."""
        tops = np.full((count, top_k), NO_TOKEN, np.int32), np.full((count, top_k), np.nan, np.float32)
        return cls(np.full(count, np.nan, np.float32), *tops)


def check_scores(
    replica: Replica,
    job: ScoringJob,
    told: ScoreArrays,
    finish_reason: str | None,
    versions: Sequence[Version],
    cached: int | None,
) -> Scored:
    """Raises EngineFailed for an answer of which nothing is believed."""
    count = len(job.ids)
    if finish_reason == "abort":
        raise EngineFailed(f"engine {replica.name} aborted the request to score {count} ids")
    if len(told.logprobs) != count or len(told.top_ids) != count or len(told.top_logprobs) != count:
        raise EngineFailed(f"engine {replica.name} gave {len(told.logprobs)} logprobs for {count} ids")
    if cached is not None and not 0 <= cached <= count:
        raise EngineFailed(f"engine {replica.name} says that {cached} of {count} ids were cached")
    if job.reads_cache and cached is None:
        raise EngineFailed(f"engine {replica.name} does not say how many of {count} ids were cached")
    # The first token behind a cached prefix is predicted by its last one, which was not computed either.
    first = max(1, (cached or 0) + 1)
    replica.host.tells_cached = cached is not None
    logprobs, top_ids, top_logprobs = told.logprobs.copy(), told.top_ids.copy(), told.top_logprobs.copy()
    impossible = np.zeros(count, bool)
    impossible[first:] = logprobs[first:] <= NO_PROBABILITY
    known = logprobs[first:][~impossible[first:]]
    if not np.isfinite(known).all():
        at = first + int(np.argmin(np.isfinite(logprobs[first:]) | impossible[first:]))
        raise EngineFailed(
            f"engine {replica.name} has no logprob of the id {int(job.ids[at])} at position {at}: it scored another"
        )
    if len(known) and float(known.max()) > _ROUNDING:
        raise EngineFailed(f"engine {replica.name} gave the logprob {float(known.max()):g}, which no token has")
    logprobs[:first], logprobs[impossible] = np.nan, np.nan
    top_ids[:first], top_logprobs[:first] = NO_TOKEN, np.nan
    nothing = ~(top_logprobs > NO_PROBABILITY)
    top_ids[nothing], top_logprobs[nothing] = NO_TOKEN, np.nan
    if (top_logprobs > _ROUNDING).any():
        raise EngineFailed(f"engine {replica.name} gave an alternative a logprob above 0, which no token has")
    return Scored(logprobs, top_ids, top_logprobs, impossible, _read_version(replica, job, versions), cached)


def _read_version(replica: Replica, job: ScoringJob, versions: Sequence[Version]) -> int:
    """The version of all numbers: an engine scores a row again that a push interrupts, and then samples the one token."""
    found = {replica.host.version_of(None if each.version is None else str(each.version)) for each in versions}
    (version,) = found if len(found) == 1 else (None,)
    spans = job.served.read_spans([] if version is None else [Span(version, 0, 1)])
    if not spans:
        raise EngineFailed(f"engine {replica.name} does not say under which weights it scored")
    return spans[0].version
