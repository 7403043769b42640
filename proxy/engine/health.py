"""Health: when failures take a replica out, and how many good probes bring it back.

One refused connection is proof; a call that broke or a probe that timed out may be chance, so only some in a row count. A replica
that comes and goes has to show more than one good probe before it is trusted again.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HealthRule:
    """`failures` in a row, of calls or of probes, take a replica out. After two ejections within `flap_seconds` it needs
    `return_probes` good probes in a row to return, otherwise one."""

    failures: int = 3
    return_probes: int = 3
    flap_seconds: float = 60.0


class Health:
    """One replica's recent past. It counts; `standing` takes out and brings back."""

    def __init__(self, rule: HealthRule = HealthRule(), clock: Callable[[], float] = time.monotonic) -> None:
        self._rule = rule
        self._clock = clock
        self._failed_calls = 0
        self._failed_probes = 0
        self._good_probes = 0
        self._needed = 1
        self._ejections: deque[float] = deque(maxlen=2)

    @property
    def recovered(self) -> bool:
        """Whether it has answered as many probes in a row as it must to serve."""
        return self._good_probes >= self._needed

    @property
    def missing_probes(self) -> int:
        return max(0, self._needed - self._good_probes)

    @property
    def doubtful(self) -> bool:
        """Whether its last call or probe failed: worth another look soon."""
        return self._failed_calls > 0 or self._failed_probes > 0

    def call_failed(self) -> bool:
        """Whether that makes too many in a row."""
        self._failed_calls += 1
        return self._failed_calls >= self._rule.failures

    def call_worked(self) -> None:
        self._failed_calls = 0

    def probe_failed(self) -> bool:
        """Whether that makes too many in a row."""
        self._good_probes = 0
        self._failed_probes += 1
        return self._failed_probes >= self._rule.failures

    def probe_worked(self) -> None:
        self._failed_probes = 0
        self._good_probes += 1

    def ejected(self) -> None:
        """It was just taken out: what it must show to return."""
        now = self._clock()
        self._ejections.append(now)
        flaps = sum(1 for at in self._ejections if now - at <= self._rule.flap_seconds)
        self._needed = self._rule.return_probes if flaps > 1 else 1
        self._good_probes = self._failed_calls = self._failed_probes = 0
