"""The measurement: sessions opened, both ways warmed up and asked in turn, and what the service says of it."""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import aiohttp
import msgspec
from rich.console import Console
from rich.table import Table

from cli.control import Control
from cli.stop_signals import StopSignals
from cli.top import Exposition
from proxy.timeline import PARTS, STEPS

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


@dataclass(frozen=True, slots=True)
class Door:
    """Where one connection asks: the address of chat completions, and the key it is opened with."""

    url: str
    key: str = ""


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


# Calls to an engine or through a service: so many at once, so many in all, and no longer than that.


POLL_SECONDS = 0.05
MOST_ERROR_CHARACTERS = 300
WORDS = "lorem ipsum dolor sit amet "
END_BYTES = 64
"""The end of a stream may come in pieces."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What every call asks for. `prompt_words` are about as many tokens."""

    model: str
    prompt_words: int
    sampled_tokens: int
    stream: bool

    def body(self, number: int) -> bytes:
        """No two calls have the same beginning, so that no engine answers one from its cache of another."""
        text = f"{number}: " + " ".join((WORDS * (self.prompt_words // 5 + 1)).split()[: self.prompt_words])
        asked = {"model": self.model, "messages": [{"role": "user", "content": text}], "max_tokens": self.sampled_tokens}
        return msgspec.json.encode(asked | ({"stream": True} if self.stream else {}))


@dataclass(slots=True)
class Tally:
    """What became of the calls on one way, over all its rounds. Seconds of one call each, in the order in which they ended."""

    whole: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    seconds: float = 0.0
    failed: int = 0
    failure: str = ""

    @property
    def calls(self) -> int:
        return len(self.whole)

    def fails(self, why: str) -> None:
        self.failed += 1
        self.failure = self.failure or why[:MOST_ERROR_CHARACTERS]


@dataclass(frozen=True, slots=True)
class Round:
    """`calls` to the doors, one at a time through each, until they are answered, `seconds` are over or `stopped` says so. A call that
    is then under way is broken off and counts for nothing."""

    asked: Asked
    calls: int
    seconds: float
    stopped: Callable[[], bool]

    async def run(self, doors: Sequence[Door], numbers: Iterator[int], tally: Tally) -> None:
        left = itertools.repeat(None, self.calls)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as http:
            began = time.perf_counter()
            work = [asyncio.create_task(self._through(http, door, left, numbers, tally)) for door in doors]
            try:
                await self._watch(work)
            finally:
                for task in work:
                    task.cancel()
                ended = await asyncio.gather(*work, return_exceptions=True)
                tally.seconds += time.perf_counter() - began
        # Whoever broke off for another reason than a call that failed would only have made fewer calls.
        for fault in ended:
            if isinstance(fault, Exception):
                raise fault

    async def _watch(self, work: Sequence[asyncio.Task[None]]) -> None:
        deadline = time.monotonic() + self.seconds
        pending = set(work)
        while pending and time.monotonic() < deadline and not self.stopped():
            _, pending = await asyncio.wait(pending, timeout=POLL_SECONDS)

    async def _through(
        self, http: aiohttp.ClientSession, door: Door, left: Iterator[None], numbers: Iterator[int], tally: Tally
    ) -> None:
        for _ in left:
            try:
                await self._call(http, door, self.asked.body(next(numbers)), tally)
            except (aiohttp.ClientError, OSError) as error:
                tally.fails(f"{door.url}: {error or type(error).__name__}")

    async def _call(self, http: aiohttp.ClientSession, door: Door, body: bytes, tally: Tally) -> None:
        headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {door.key}"} if door.key else {})
        began, first = time.perf_counter(), 0.0
        async with http.post(door.url, data=body, headers=headers) as response:
            if response.status != 200:
                tally.fails(f"{door.url} answered {response.status}: {await response.text(errors='replace')}")
                return
            end = b""
            async for chunk in response.content.iter_any():
                first = first or time.perf_counter() - began
                end = (end + chunk)[-END_BYTES:]
        if self.asked.stream and b"[DONE]" not in end:
            tally.fails(f"{door.url}: the stream broke off")
            return
        tally.whole.append(time.perf_counter() - began)
        tally.first.append(first)


# What a service's /metrics says of some calls: its own time and its waiting in each step, and its CPU time.


@dataclass(frozen=True, slots=True)
class Told:
    """The counters of one process since it began. Seconds by (step, part)."""

    process: float
    cpu_seconds: float
    calls: int
    seconds: dict[tuple[str, str], float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one call in the mean: `steps` are milliseconds by step, then by part (own, engine, store, harness)."""

    calls: int
    cpu_seconds_per_1000_calls: float
    steps: dict[str, dict[str, float]]


def told(control: Control) -> Told:
    """Raises `Refusal` where the service does not tell."""
    page = Exposition(control.text("/metrics"))
    return Told(
        process=page.total("process_start_time_seconds"),
        cpu_seconds=page.total("process_cpu_seconds_total"),
        calls=int(page.total("verbatim_step_seconds_count", step="commit", part="own")),
        seconds={(of.labels["step"], of.labels["part"]): of.value for of in page.series("verbatim_step_seconds_sum")},
    )


def cost(before: Told, after: Told, calls: int) -> Cost | None:
    """What the calls in between cost; None where another process answered the second time, or where others than these `calls`, or
    not all of them, went through this one."""
    counted = after.calls - before.calls
    if not calls or after.process != before.process or counted != calls:
        return None
    steps: dict[str, dict[str, float]] = defaultdict(dict)
    for (step, part), seconds in after.seconds.items():
        steps[step][part] = (seconds - before.seconds.get((step, part), 0.0)) * 1000 / calls
    return Cost(calls, (after.cpu_seconds - before.cpu_seconds) * 1000 / calls, dict(steps))


# What was measured, as JSON and as tables.


DIRECT, THROUGH = "engine alone", "through verbatim"


@dataclass(frozen=True, slots=True)
class Report:
    """`notes` are sentences about what is missing, and why."""

    engine: str
    service: str
    asked: Asked
    connections: int
    ways: Mapping[str, Tally]
    cost: Cost | None
    notes: Sequence[str]

    def data(self) -> dict[str, Any]:
        return {
            "engine": self.engine,
            "service": self.service,
            "asked": asdict(self.asked),
            "connections": self.connections,
            "ways": {name: figures(tally) for name, tally in self.ways.items()},
            "service_cost": asdict(self.cost) if self.cost else None,
            "notes": list(self.notes),
        }

    def show(self, console: Console) -> None:
        console.print(self._ways())
        if self.cost is not None:
            console.print(_steps(self.cost))
            console.print(f"CPU of the service: {self.cost.cpu_seconds_per_1000_calls:.2f} s per 1,000 calls")
        for note in self.notes:
            console.print(note, soft_wrap=True)

    def _ways(self) -> Table:
        asked = self.asked
        how = "streamed" if asked.stream else "whole"
        title = f"{asked.prompt_words} words in, {asked.sampled_tokens} tokens out, {how}, {self.connections} at once"
        table = Table(title=title, title_justify="left")
        for name in ("", "calls", "failed", "calls/s", "p50 ms", "p95 ms", "first byte p50", "p95"):
            table.add_column(name, justify="right" if name else "left")
        for name, tally in self.ways.items():
            told = figures(tally)
            times = (told["p50_ms"], told["p95_ms"], told["first_byte_p50_ms"], told["first_byte_p95_ms"])
            rate = _shown(told["calls_per_second"])
            table.add_row(name, str(tally.calls), str(tally.failed), rate, *map(_shown, times))
        return table


def figures(tally: Tally) -> dict[str, Any]:
    """Numbers of one way; None for what no call has told."""
    return {
        "calls": tally.calls,
        "failed": tally.failed,
        "failure": tally.failure or None,
        "seconds": tally.seconds,
        "calls_per_second": tally.calls / tally.seconds if tally.calls else None,
        "p50_ms": quantile(tally.whole, 0.5),
        "p95_ms": quantile(tally.whole, 0.95),
        "first_byte_p50_ms": quantile(tally.first, 0.5),
        "first_byte_p95_ms": quantile(tally.first, 0.95),
    }


def quantile(seconds: Sequence[float], share: float) -> float | None:
    """Milliseconds within which this share of the calls was done: one that was measured, none in between."""
    if not seconds:
        return None
    return sorted(seconds)[math.ceil(share * len(seconds)) - 1] * 1000


def _steps(cost: Cost) -> Table:
    table = Table(title=f"Where the service spends a call: ms in the mean of {cost.calls}", title_justify="left")
    for name in ("step", *PARTS):
        table.add_column(name, justify="left" if name == "step" else "right")
    for step in STEPS:
        if parts := cost.steps.get(step):
            table.add_row(step, *(_shown(parts.get(part)) for part in PARTS))
    table.add_section()
    sums = [sum(parts.get(part, 0.0) for parts in cost.steps.values()) for part in PARTS]
    table.add_row("all", *map(_shown, sums))
    return table


def _shown(number: float | None) -> str:
    return "" if number is None else f"{number:,.2f}" if number < 100 else f"{number:,.0f}"
