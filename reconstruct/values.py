"""Values by Monte Carlo: what a state is worth, from the rewards of attempts that were sampled from it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Value:
    """The `mean` of `samples` rewards, NaN without any, and its standard `error`, NaN below two."""

    mean: float
    error: float
    samples: int

    def __str__(self) -> str:
        return f"{self.mean:.3g}" if math.isnan(self.error) else f"{self.mean:.3g} ± {self.error:.2g}"


def estimate(rewards: Iterable[float]) -> Value:
    """The value that independent rewards speak of; its error is their sample deviation (n - 1) / sqrt(n). Rewards that are all alike have
    an error of 0, however few they are. Raises ValueError for a reward that is not finite."""
    given = [float(reward) for reward in rewards]
    if not all(map(math.isfinite, given)):
        raise ValueError(f"not every reward is finite: {given}")
    count = len(given)
    mean = statistics.fmean(given) if given else math.nan
    error = statistics.stdev(given, mean) / math.sqrt(count) if count > 1 else math.nan
    return Value(mean, error, count)
