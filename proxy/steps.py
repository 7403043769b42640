"""Where the time of a call goes: its steps, and within each the service's own time and the time it waits for somebody else.

| step | what happens | waits for |
|---|---|---|
| admit | path, key and session, and the body as it comes in | store (a session that is not in memory), harness |
| parse | the body becomes a canonical request | |
| queue | a replica that serves and has room is found | engine |
| plan | the parent is found, the prompt's ids are made and proven | engine (renderings; token path) |
| intent | what is about to be sampled is written down; only what that takes longer than what is done meanwhile | store |
| sample | the engine is asked for a reply, which is put together | engine |
| interpret | what the sampled ids say, by the engine's own parsers (token path) | engine |
| commit | the records are made and stored | store |
| reply | the answer is rendered and sent | harness |

The clock of a call runs through: everything between two marks belongs to one step and one part, so that all parts together are the
time from the first look at the request to the answer that went out. Waiting is measured where it happens, at the wire; what a client
library does there counts as waiting, and so does what else the event loop does meanwhile.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterator
from contextvars import ContextVar
from itertools import compress

from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

STEPS = ("admit", "parse", "queue", "plan", "intent", "sample", "interpret", "commit", "reply")
ADMIT, PARSE, QUEUE, PLAN, INTENT, SAMPLE, INTERPRET, COMMIT, REPLY = range(len(STEPS))

PARTS = ("own", "engine", "store", "harness")
OWN, ENGINE, STORE, HARNESS = range(len(PARTS))

_CELLS = range(len(STEPS) * len(PARTS))

SECONDS = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 2.0, 10.0, 60.0, 300.0)
"""Upper ends of the histogram's buckets."""


class CallClock:
    """One call's time so far, by step and part. It starts in `admit`."""

    __slots__ = ("_at", "_first", "seconds")

    def __init__(self) -> None:
        self.seconds = [0.0] * len(_CELLS)
        self._first = ADMIT * len(PARTS)
        self._at = time.perf_counter()

    def begin(self, step: int) -> None:
        """The step that was under way is over, and this one begins."""
        self.wait()
        self._first = step * len(PARTS)

    def wait(self) -> None:
        """From here on somebody else is waited for."""
        now = time.perf_counter()
        self.seconds[self._first] += now - self._at
        self._at = now

    def waited(self, part: int) -> None:
        """It is over; `part` is who was waited for."""
        now = time.perf_counter()
        self.seconds[self._first + part] += now - self._at
        self._at = now

    def taken(self) -> Iterator[tuple[int, float]]:
        """(place in `seconds`, seconds) where there are any."""
        return zip(compress(_CELLS, self.seconds), filter(None, self.seconds), strict=True)

    @property
    def step(self) -> int:
        return self._first // len(PARTS)


CLOCK: ContextVar[CallClock | None] = ContextVar("clock", default=None)
"""The clock of the call that the running task works for, so that the wire needs not be told."""


class Waiting:
    """`with Waiting(STORE):` around an await; counts for the running task's call, where it works for one."""

    __slots__ = ("_clock", "_part")

    def __init__(self, part: int) -> None:
        self._clock = CLOCK.get()
        self._part = part

    def __enter__(self) -> None:
        if self._clock is not None:
            self._clock.wait()

    def __exit__(self, *_: object) -> None:
        if self._clock is not None:
            self._clock.waited(self._part)


class Within:
    """`with Within(INTERPRET):` around what is a step of its own in the middle of another one."""

    __slots__ = ("_before", "_clock", "_step")

    def __init__(self, step: int) -> None:
        self._clock = CLOCK.get()
        self._step = step
        self._before = step

    def __enter__(self) -> None:
        if self._clock is not None:
            self._before = self._clock.step
            self._clock.begin(self._step)

    def __exit__(self, *_: object) -> None:
        if self._clock is not None:
            self._clock.begin(self._before)


class StepSeconds(Collector):
    """`verbatim_step_seconds`: histograms by step and part. Only those that were ever seen are shown.

    Counted in lists instead of metric objects, whose locks would cost a call more than all its marks: one thread writes here."""

    def __init__(self) -> None:
        cells = len(STEPS) * len(PARTS)
        self._counts = [[0] * (len(SECONDS) + 1) for _ in range(cells)]
        self._sums = [0.0] * cells

    def took(self, clock: CallClock) -> None:
        """A call was recorded and its answer has gone out."""
        for cell, seconds in clock.taken():
            self._counts[cell][bisect_left(SECONDS, seconds)] += 1
            self._sums[cell] += seconds

    def collect(self) -> Iterator[Metric]:
        shown = HistogramMetricFamily("verbatim_step_seconds", "Seconds of a call by step and part.", labels=["step", "part"])
        for cell, counts in enumerate(self._counts):
            if any(counts):
                step, part = divmod(cell, len(PARTS))
                shown.add_metric([STEPS[step], PARTS[part]], _buckets(counts), self._sums[cell])
        yield shown


def _buckets(counts: list[int]) -> list[tuple[str, float]]:
    """(upper end, calls up to it), the whole last."""
    buckets: list[tuple[str, float]] = []
    total = 0
    for end, count in zip((*map(str, SECONDS), "+Inf"), counts, strict=True):
        total += count
        buckets.append((end, total))
    return buckets
