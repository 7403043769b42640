"""Stalls: engines that hold calls and show no sign of life, what becomes of their calls, and their return.

A sign of life is a token or the end of a reply, of whichever call. Other answers are none: an API server goes on listing its models and
rendering prompts while the engine behind it hangs. Before the first token, and all through a reply that is not streamed, a call hears
nothing, so the engine's own counters (`/metrics`) speak for it. Of an engine without any, a reply that is not streamed says nothing,
and a stream is given `WITHOUT_COUNTERS` times as long: some servers hold text back, and a long prompt takes what it takes.

A single call may be lost where the engine lives, on a connection that only seems to be open. It is given up when the engine tells
that nothing waits there, and others are served that it should have come before. What was sampled of it is recorded.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable, Iterable

import aiohttp

from proxy.engine.pool.standing import Standing
from proxy.engine.replica import EngineCall, Replica, TokenCounts
from proxy.engine.wire.http import EngineHttp
from proxy.errors import RequestError, VerbatimError

log = logging.getLogger(__name__)

LOOKS = 10
"""How often a silent engine is looked at before it counts as stalled."""
WITHOUT_COUNTERS = 5
SAMPLE_SECONDS = 30.0
"""How long a stalled engine may take over one token, at most."""

_COUNTED = re.compile(
    r"^(?:vllm|sglang):(?:(?P<progress>(?:prompt|generation)_tokens_total|iteration_tokens_total_count|kv_cache_usage_perc|token_usage)"
    r"|(?P<running>num_requests_running|num_running_reqs)|(?P<queued>num_requests_waiting|num_queue_reqs))"
    r"(?:\{[^}\n]*\})? (?P<value>\S+)$",
    re.MULTILINE,
)


def read_counts(page: str) -> TokenCounts:
    """What a page of Prometheus metrics tells of vLLM (0.32) or SGLang, summed over the engines behind one server."""
    progress: dict[str, float] = {}
    running = queued = 0.0
    for found in _COUNTED.finditer(page):
        value = float(found["value"])
        if found["progress"]:
            progress[found["progress"]] = progress.get(found["progress"], 0.0) + value
        elif found["running"]:
            running += value
        else:
            queued += value
    return TokenCounts(tuple(progress.values()), running, queued)


class Stalls:
    """`replicas` gives those that there are, draining ones too. `sample_token` has one of them sample a token that belongs to no call.
    `is_updating` says whether a replica samples nothing because its weights change. `wake` has it visited at once."""

    def __init__(
        self,
        seconds: float,
        replicas: Callable[[], Iterable[Replica]],
        standing: Standing,
        sample_token: Callable[[Replica], Awaitable[None]],
        http: EngineHttp,
        is_updating: Callable[[Replica], Awaitable[bool]],
        wake: Callable[[Replica], None],
    ) -> None:
        self._seconds = seconds
        self._interval = seconds / LOOKS
        self._replicas = replicas
        self._standing = standing
        self._sample_token = sample_token
        self._http = http
        self._is_updating = is_updating
        self._wake = wake
        self._looks: dict[Replica, asyncio.Task[None]] = {}

    async def watch(self) -> None:
        """Runs until it is cancelled."""
        try:
            while self._seconds:
                for replica in self._replicas():
                    # One for each engine: its adapters share the signs of life.
                    if replica.base is None:
                        self._attend(replica)
                await asyncio.sleep(min(1.0, self._interval))
        finally:
            for task in self._looks.values():
                task.cancel()
            await asyncio.gather(*self._looks.values(), return_exceptions=True)

    def _attend(self, replica: Replica) -> None:
        pulse, now = replica.pulse, time.perf_counter()
        if replica.stalled:
            if pulse.last_sign_at > pulse.stalled_at:
                self._revive(replica)
            else:
                self._move_calls(replica)
        overdue = any(now - call.heard_at > self._seconds for call in pulse.calls)
        if replica not in self._looks and (replica.stalled or overdue or _silence(replica, now) > self._interval):
            task = self._looks[replica] = asyncio.create_task(self._look(replica))
            task.add_done_callback(lambda _: self._looks.pop(replica, None))

    async def _look(self, replica: Replica) -> None:
        try:
            if replica.stalled:
                await self._try(replica)
            else:
                await self._judge(replica)
        except Exception:
            # Raised here, it would only be seen when the service ends.
            log.exception("engine %s: the look for a sign of life failed", replica.name)
        await asyncio.sleep(min(1.0, self._interval) if replica.stalled else self._interval)

    async def _judge(self, replica: Replica) -> None:
        """Take it out if it is silent for too long, or give up the calls that are lost there."""
        pulse, before = replica.pulse, replica.pulse.counts
        await self._count(replica)
        if _silence(replica, time.perf_counter()) < self._patience(replica):
            self._give_up_lost(replica, before)
        elif await self._is_updating(replica):
            pulse.heard_at = time.perf_counter()
        elif _silence(replica, time.perf_counter()) >= self._patience(replica):
            self._standing.stall(replica, self._seconds)
            self._move_calls(replica)

    async def _try(self, replica: Replica) -> None:
        """Look whether it samples again, for the calls that it still has or one token of nobody's."""
        pulse, begun_at = replica.pulse, time.perf_counter()
        if not await self._count(replica):
            try:
                async with asyncio.timeout(min(self._seconds, SAMPLE_SECONDS)):
                    await self._sample_token(replica)
            except RequestError:
                # It is not to be tried like this; the next calls will tell.
                pass
            except (TimeoutError, VerbatimError):
                return
            else:
                pulse.answered = (begun_at, time.perf_counter())
        pulse.heard_at = time.perf_counter()
        self._revive(replica)

    def _revive(self, replica: Replica) -> None:
        if replica.stalled:
            self._standing.revive(replica)
            self._wake(replica)

    async def _count(self, replica: Replica) -> bool:
        """Ask the engine what it has counted. Whether that went on since it was last asked, in the same silence: a sign of life."""
        pulse, counts = replica.pulse, await self._read_counts(replica)
        if counts is None:
            return False
        went_on = (
            pulse.counts is not None and pulse.counted_at >= pulse.last_sign_at and counts.progress != pulse.counts.progress
        )
        pulse.counts, pulse.counted_at = counts, time.perf_counter()
        if went_on:
            pulse.heard_at = pulse.counted_at
        return went_on

    async def _read_counts(self, replica: Replica) -> TokenCounts | None:
        """None if the engine does not answer."""
        timeout = aiohttp.ClientTimeout(total=min(self._seconds, SAMPLE_SECONDS))
        try:
            async with self._http.session.get(f"{replica.url}/metrics", timeout=timeout) as answer:
                return read_counts(await answer.text(errors="replace")) if answer.status == 200 else TokenCounts()
        except (TimeoutError, aiohttp.ClientError, OSError):
            return None

    def _patience(self, replica: Replica) -> float:
        counts = replica.pulse.counts
        return self._seconds * (WITHOUT_COUNTERS if counts is not None and not counts.progress else 1)

    def _move_calls(self, replica: Replica) -> None:
        """Those of which nothing was heard go to another replica, where there is one that serves."""
        for call in tuple(replica.pulse.calls):
            if not call.scope.heard_at and self._standing.is_served_elsewhere(call.replica):
                call.move()

    def _give_up_lost(self, replica: Replica, before: TokenCounts | None) -> None:
        """Those that seem lost, as they did at the look before, when the engine had counted `before`: after a pause one call hears from it
        before another does."""
        for call in tuple(replica.pulse.calls):
            doubtful, call.doubtful = call.doubtful, self._seems_lost(call, replica, before)
            if not (doubtful and call.doubtful):
                continue
            silent = time.perf_counter() - call.heard_at
            log.warning("engine %s has lost a call: nothing was heard of it for %.0f seconds", replica.name, silent)
            if call.scope.heard_at:
                call.scope.break_off()
            else:
                call.move()

    def _seems_lost(self, call: EngineCall, replica: Replica, before: TokenCounts | None) -> bool:
        """Whether the engine has nothing to do, or has served calls of late that this one should have come before: it serves them in order,
        and all at once."""
        pulse, since = replica.pulse, call.heard_at + self._patience(replica)
        counts = pulse.counts
        if counts is None or before is None or before.queued or counts.queued or time.perf_counter() < since:
            return False
        if counts.progress and not before.running and not counts.running:
            return True
        if not call.streams or (call.scope.heard_at and not counts.progress):
            # Servers without counters are also those that hold text back.
            return False
        others = [(other.begun_at, other.scope.heard_at) for other in pulse.calls if other is not call]
        return any(
            heard_at > since and (call.scope.heard_at or begun_at > call.begun_at)
            for begun_at, heard_at in [pulse.answered, *others]
        )


def _silence(replica: Replica, now: float) -> float:
    """For how many seconds calls have waited for a sign of life; 0 if there are none that would hear it."""
    pulse = replica.pulse
    counts_nothing = pulse.counts is not None and not pulse.counts.progress
    waiting = [call.begun_at for call in pulse.calls if call.streams or call.scope.heard_at or not counts_nothing]
    return now - max(pulse.last_sign_at, min(waiting)) if waiting else 0.0
