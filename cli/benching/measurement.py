"""The measurement: sessions opened, both ways warmed up and asked in turn, and what the service says of it."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from cli.benching.load import Asked, Door, Round, Tally
from cli.benching.report import DIRECT, THROUGH, Report
from cli.benching.told import Cost, Told, cost, told
from cli.control import Control
from cli.stop_signals import StopSignals

ROUNDS = 2
"""Of each way, in turn: whatever else the machine does falls on both."""
WARM_UP_CALLS = 2
COUNTED_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Bounds:
    """Of each way."""

    calls: int
    seconds: float
    connections: int


class Bench:
    def __init__(self, engine: str, control: Control, asked: Asked, bounds: Bounds, stop: StopSignals) -> None:
        self._engine = engine
        self._control = control
        self._asked = asked
        self._bounds = bounds
        self._stop = stop
        self._numbers = itertools.count(time.time_ns() // 1000)

    def run(self) -> Report:
        """Raises `Refusal` where no session can be opened."""
        ways = {DIRECT: Tally(), THROUGH: Tally()}
        with self._sessions() as doors:
            both = {DIRECT: [Door(f"{self._engine}/v1/chat/completions")] * len(doors), THROUGH: doors}
            began, warm = told(self._control), {name: Tally() for name in both}
            for name, tally in warm.items():
                asyncio.run(self._round(both[name], WARM_UP_CALLS * len(doors), tally))
            before = self._settled(began.calls + warm[THROUGH].calls)
            for _ in range(ROUNDS):
                for name, tally in ways.items():
                    if self._stop.number is None:
                        asyncio.run(self._round(both[name], -(-self._bounds.calls // ROUNDS), tally))
            through = ways[THROUGH].calls
            spent = cost(before, self._settled(before.calls + through), through)
        return Report(
            self._engine, self._control.url, self._asked, self._bounds.connections, ways, spent, self._notes(ways, spent)
        )

    def _notes(self, ways: Mapping[str, Tally], spent: Cost | None) -> list[str]:
        notes = [f"{name}: {tally.failure}" for name, tally in ways.items() if tally.failure]
        if self._stop.number is not None:
            notes.append("stopped: these are the calls that were answered by then")
        if spent is None:
            notes.append(
                "the service's own time is not told: its /metrics did not count just these calls. It may have several processes, "
                "each of which tells of itself, other calls at the same time, or calls that broke off."
            )
        return notes

    async def _round(self, doors: Sequence[Door], calls: int, tally: Tally) -> None:
        seconds = self._bounds.seconds / ROUNDS
        await Round(self._asked, calls, seconds, lambda: self._stop.number is not None).run(doors, self._numbers, tally)

    def _settled(self, calls: int) -> Told:
        """What the service tells once it has counted so many calls: the last answer comes before it is counted."""
        deadline = time.monotonic() + COUNTED_SECONDS
        while (now := told(self._control)).calls < calls and time.monotonic() < deadline:
            time.sleep(0.05)
        return now

    @contextmanager
    def _sessions(self) -> Iterator[list[Door]]:
        """One per connection, deleted in the end."""
        opened: list[str] = []
        doors = []
        try:
            for _ in range(self._bounds.connections):
                made = self._control.post("/sessions", {})
                opened.append(made["session_id"])
                doors.append(Door(made["base_urls"]["openai"] + "/chat/completions", made["api_key"]))
            yield doors
        finally:
            for session_id in opened:
                self._control.delete(f"/sessions/{session_id}")
