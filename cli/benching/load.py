"""Calls to an engine or through a service: so many at once, so many in all, and no longer than that."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import aiohttp
import msgspec

POLL_SECONDS = 0.05
MOST_ERROR_CHARACTERS = 300
WORDS = "lorem ipsum dolor sit amet "
END_BYTES = 64
"""The end of a stream may come in pieces."""


@dataclass(frozen=True, slots=True)
class Door:
    """Where one connection asks: the address of chat completions, and the key it is opened with."""

    url: str
    key: str = ""


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
