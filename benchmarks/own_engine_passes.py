"""The measurement: open sessions, warm up both targets, call them in turn, and read the service's own counters."""

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
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.table import Table

from cli.control import CommandClient
from cli.stop_signals import StopSignals
from proxy.timeline import PARTS, STEPS

ROUNDS = 2
"""Rounds per target, alternating, so that other load on the machine affects both."""
WARM_UP_CALLS = 2
COUNTED_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Bounds:
    """The limits per target."""

    calls: int
    seconds: float
    connections: int


@dataclass(frozen=True, slots=True)
class Target:
    """The URL and the API key of one connection."""

    url: str
    key: str = ""


class Bench:
    def __init__(self, engine: str, control: CommandClient, request: LoadShape, bounds: Bounds, stop: StopSignals) -> None:
        self._engine = engine
        self._control = control
        self._request = request
        self._bounds = bounds
        self._stop = stop
        self._numbers = itertools.count(time.time_ns() // 1000)

    def run(self) -> Report:
        """Raises `CommandError` if no session can be opened."""
        ways = {DIRECT: Tally(), THROUGH: Tally()}
        with self._sessions() as endpoints:
            both = {DIRECT: [Target(f"{self._engine}/v1/chat/completions")] * len(endpoints), THROUGH: endpoints}
            began, warm = read_counters(self._control), {name: Tally() for name in both}
            for name, tally in warm.items():
                asyncio.run(self._round(both[name], WARM_UP_CALLS * len(endpoints), tally))
            before = self._await_count(began.calls + warm[THROUGH].calls)
            for _ in range(ROUNDS):
                for name, tally in ways.items():
                    if self._stop.number is None:
                        asyncio.run(self._round(both[name], -(-self._bounds.calls // ROUNDS), tally))
            through = ways[THROUGH].calls
            spent = compute_cost(before, self._await_count(before.calls + through), through)
        return Report(
            self._engine, self._control.url, self._request, self._bounds.connections, ways, spent, self._notes(ways, spent)
        )

    def _notes(self, ways: Mapping[str, Tally], spent: Cost | None) -> list[str]:
        notes = [f"{name}: {tally.failure}" for name, tally in ways.items() if tally.failure]
        if self._stop.number is not None:
            notes.append("stopped: these are the calls answered so far")
        if spent is None:
            notes.append(
                "the service's own time is unknown: its /metrics did not count exactly these calls. It may have several processes, "
                "each with its own counters, other calls at the same time, or calls that broke off."
            )
        return notes

    async def _round(self, endpoints: Sequence[Target], calls: int, tally: Tally) -> None:
        seconds = self._bounds.seconds / ROUNDS
        await Round(self._request, calls, seconds, lambda: self._stop.number is not None).run(endpoints, self._numbers, tally)

    def _await_count(self, calls: int) -> Counters:
        """The counters once they include so many calls: a call is counted after its reply."""
        deadline = time.monotonic() + COUNTED_SECONDS
        while (now := read_counters(self._control)).calls < calls and time.monotonic() < deadline:
            time.sleep(0.05)
        return now

    @contextmanager
    def _sessions(self) -> Iterator[list[Target]]:
        """One session per connection, deleted at the end."""
        opened: list[str] = []
        endpoints = []
        try:
            for _ in range(self._bounds.connections):
                made = self._control.post("/sessions", {})
                opened.append(made["session_id"])
                endpoints.append(Target(made["base_urls"]["openai"] + "/chat/completions", made["api_key"]))
            yield endpoints
        finally:
            for session_id in opened:
                self._control.delete(f"/sessions/{session_id}")


# Calls to one target, the engine or the service


POLL_SECONDS = 0.05
MOST_ERROR_CHARACTERS = 300
WORDS = "lorem ipsum dolor sit amet "
END_BYTES = 64
"""How much of a stream's end to keep: its last event may be split over chunks."""


@dataclass(frozen=True, slots=True)
class LoadShape:
    """The request of every call. `prompt_words` are about as many tokens."""

    model: str
    prompt_words: int
    sampled_tokens: int
    stream: bool

    def body(self, number: int) -> bytes:
        """The JSON body. Prompts start with the call's number, so that no engine serves one from its prefix cache."""
        text = f"{number}: " + " ".join((WORDS * (self.prompt_words // 5 + 1)).split()[: self.prompt_words])
        body = {"model": self.model, "messages": [{"role": "user", "content": text}], "max_tokens": self.sampled_tokens}
        return msgspec.json.encode(body | ({"stream": True} if self.stream else {}))


@dataclass(slots=True)
class Tally:
    """The calls to one target over all rounds. `whole` and `first` are seconds to the last and the first byte, per call as it ended."""

    whole: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    seconds: float = 0.0
    failed: int = 0
    failure: str = ""

    @property
    def calls(self) -> int:
        return len(self.whole)

    def count_failure(self, why: str) -> None:
        self.failed += 1
        self.failure = self.failure or why[:MOST_ERROR_CHARACTERS]


@dataclass(frozen=True, slots=True)
class Round:
    """`calls` calls, one at a time per endpoint, until all are answered, `seconds` have passed or `is_stopped()`. A call then in flight
    is cancelled and not counted."""

    request: LoadShape
    calls: int
    seconds: float
    is_stopped: Callable[[], bool]

    async def run(self, endpoints: Sequence[Target], numbers: Iterator[int], tally: Tally) -> None:
        left = itertools.repeat(None, self.calls)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as http:
            began = time.perf_counter()
            work = [asyncio.create_task(self._through(http, endpoint, left, numbers, tally)) for endpoint in endpoints]
            try:
                await self._watch(work)
            finally:
                for task in work:
                    task.cancel()
                ended = await asyncio.gather(*work, return_exceptions=True)
                tally.seconds += time.perf_counter() - began
        # An unexpected error must not pass for a run with fewer calls.
        for fault in ended:
            if isinstance(fault, Exception):
                raise fault

    async def _watch(self, work: Sequence[asyncio.Task[None]]) -> None:
        deadline = time.monotonic() + self.seconds
        pending = set(work)
        while pending and time.monotonic() < deadline and not self.is_stopped():
            _, pending = await asyncio.wait(pending, timeout=POLL_SECONDS)

    async def _through(
        self, http: aiohttp.ClientSession, endpoint: Target, left: Iterator[None], numbers: Iterator[int], tally: Tally
    ) -> None:
        for _ in left:
            try:
                await self._call(http, endpoint, self.request.body(next(numbers)), tally)
            except (aiohttp.ClientError, OSError) as error:
                tally.count_failure(f"{endpoint.url}: {error or type(error).__name__}")

    async def _call(self, http: aiohttp.ClientSession, endpoint: Target, body: bytes, tally: Tally) -> None:
        headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {endpoint.key}"} if endpoint.key else {})
        began, first = time.perf_counter(), 0.0
        async with http.post(endpoint.url, data=body, headers=headers) as response:
            if response.status != 200:
                tally.count_failure(f"{endpoint.url} answered {response.status}: {await response.text(errors='replace')}")
                return
            end = b""
            async for chunk in response.content.iter_any():
                first = first or time.perf_counter() - began
                end = (end + chunk)[-END_BYTES:]
        if self.request.stream and b"[DONE]" not in end:
            tally.count_failure(f"{endpoint.url}: the stream broke off")
            return
        tally.whole.append(time.perf_counter() - began)
        tally.first.append(first)


# The service's counters: its own time and its waits per step, and its CPU time


@dataclass(frozen=True, slots=True)
class Counters:
    """The counters of one process since it started. Seconds by (step, part)."""

    process: float
    cpu_seconds: float
    calls: int
    seconds: dict[tuple[str, str], float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Cost:
    """The mean of one call: `steps` are milliseconds by step, then by part (own, engine, store, harness)."""

    calls: int
    cpu_seconds_per_1000_calls: float
    steps: dict[str, dict[str, float]]


def read_counters(control: CommandClient) -> Counters:
    """Raises `CommandError`."""
    page = text_string_to_metric_families(control.fetch("/metrics").text)
    series = [sample for family in page for sample in family.samples]
    values = {sample.name: sample.value for sample in series if not sample.labels}
    steps = {
        name: {(of.labels["step"], of.labels["part"]): of.value for of in series if of.name == f"verbatim_step_seconds_{name}"}
        for name in ("count", "sum")
    }
    return Counters(
        process=values["process_start_time_seconds"],
        cpu_seconds=values["process_cpu_seconds_total"],
        calls=int(steps["count"].get(("commit", "own"), 0)),
        seconds=steps["sum"],
    )


def compute_cost(before: Counters, after: Counters, calls: int) -> Cost | None:
    """The cost of the calls in between; None if another process answered the second time, or if it counted other than these `calls`."""
    counted = after.calls - before.calls
    if not calls or after.process != before.process or counted != calls:
        return None
    steps: dict[str, dict[str, float]] = defaultdict(dict)
    for (step, part), seconds in after.seconds.items():
        steps[step][part] = (seconds - before.seconds.get((step, part), 0.0)) * 1000 / calls
    return Cost(calls, (after.cpu_seconds - before.cpu_seconds) * 1000 / calls, dict(steps))


DIRECT, THROUGH = "engine alone", "through verbatim"


@dataclass(frozen=True, slots=True)
class Report:
    """`notes` are sentences that explain missing figures."""

    engine: str
    service: str
    request: LoadShape
    connections: int
    ways: Mapping[str, Tally]
    cost: Cost | None
    notes: Sequence[str]

    def data(self) -> dict[str, Any]:
        return {
            "engine": self.engine,
            "service": self.service,
            "asked": asdict(self.request),
            "connections": self.connections,
            "ways": {name: summarize(tally) for name, tally in self.ways.items()},
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
        request = self.request
        how = "streamed" if request.stream else "whole"
        title = f"{request.prompt_words} words in, {request.sampled_tokens} tokens out, {how}, {self.connections} connections"
        table = Table(title=title, title_justify="left")
        for name in ("", "calls", "failed", "calls/s", "p50 ms", "p95 ms", "first byte p50", "p95"):
            table.add_column(name, justify="right" if name else "left")
        for name, tally in self.ways.items():
            figures = summarize(tally)
            times = (figures[name] for name in ("p50_ms", "p95_ms", "first_byte_p50_ms", "first_byte_p95_ms"))
            rate = _format(figures["calls_per_second"])
            table.add_row(name, str(tally.calls), str(tally.failed), rate, *map(_format, times))
        return table


def summarize(tally: Tally) -> dict[str, Any]:
    """The figures of one target; None for those without a call."""
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
    """The milliseconds within which this share of the calls was done, without interpolation."""
    if not seconds:
        return None
    return sorted(seconds)[math.ceil(share * len(seconds)) - 1] * 1000


def _steps(cost: Cost) -> Table:
    table = Table(title=f"Where the service spends a call: mean ms over {cost.calls} calls", title_justify="left")
    for name in ("step", *PARTS):
        table.add_column(name, justify="left" if name == "step" else "right")
    for step in STEPS:
        if parts := cost.steps.get(step):
            table.add_row(step, *(_format(parts.get(part)) for part in PARTS))
    table.add_section()
    sums = [sum(parts.get(part, 0.0) for parts in cost.steps.values()) for part in PARTS]
    table.add_row("all", *map(_format, sums))
    return table


def _format(number: float | None) -> str:
    return "" if number is None else f"{number:,.2f}" if number < 100 else f"{number:,.0f}"
