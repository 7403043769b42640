"""One contender under load, and what it cost: calls per second, latency, CPU seconds, memory.

`measured` runs all contenders in turn, A B C A B C, so that whatever else the machine does falls on all of them alike.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.contenders import Proxy, post
from benchmarks.load import Body, CallsFailed, Loaded, load
from benchmarks.nginx import upstream
from benchmarks.processes import Started, family_cpu_seconds, resident_mib
from benchmarks.replies import Size, answers
from benchmarks.results import rounded, spread

WARM_UP_CALLS = 5
MOST_SECONDS, SLOWEST_SECONDS = 16.0, 45.0
"""Of a run in which each connection has had three calls answered, or one; however slow the contender is."""
_WARM_SECONDS = 5.0
_IDLE = 0.1
"""Of a core: with less a contender has nothing left to do."""
_IDLE_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Trial:
    """One run of wrk. CPU seconds are those of the contender alone, and of the store beside it."""

    loaded: Loaded
    cpu_seconds: float | None
    store_cpu_seconds: float | None
    resident_mib: float | None


@contextmanager
def open_all(size: Size, stream: bool, openers: Mapping[str, Any]) -> Iterator[dict[str, Proxy]]:
    """All contenders before one upstream that answers calls of this size, each asked a few times already."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="verbatim-bench-", ignore_cleanup_errors=True)))
        folder.chmod(0o755)
        engine = stack.enter_context(upstream(answers(size, stream), folder / "upstream"))
        proxies = {name: stack.enter_context(opener(engine, folder / name)) for name, opener in openers.items()}
        yield proxies


def warm(proxy: Proxy, body: Body) -> float:
    """Seconds of the fastest of the first calls: one in each session, whose first call costs more; of a slow contender fewer."""
    seconds = []
    for number in range(max(WARM_UP_CALLS, len(proxy.targets))):
        began = time.perf_counter()
        post(proxy, body.numbered(number), number)
        seconds.append(time.perf_counter() - began)
        if number and sum(seconds) > _WARM_SECONDS:
            break
    return min(seconds)


def warm_all(proxies: Mapping[str, Proxy], bodies: Mapping[str, Body]) -> dict[str, float | CallsFailed]:
    """By contender, what `warm` says, or why it cannot be asked."""
    found: dict[str, float | CallsFailed] = {}
    for name, proxy in proxies.items():
        try:
            found[name] = warm(proxy, bodies[name])
        except CallsFailed as error:
            found[name] = error
    return found


def run_seconds(least: float, connections: int, call_seconds: float) -> float:
    """Long enough for three calls over each connection, and of the slowest for one: of the calls that are under way at the end
    the work counts and they do not, so there must be many others."""
    once = connections * call_seconds
    return max(least, min(MOST_SECONDS, 3 * once), min(SLOWEST_SECONDS, 1.25 * once))


def trial(proxy: Proxy, body: Body, connections: int, seconds: float) -> Trial:
    before, store_before = _cpu(proxy.tested), _cpu(proxy.store)
    loaded = load(proxy.url, proxy.targets, body, connections, seconds)
    after, store_after = _cpu(proxy.tested), _cpu(proxy.store)
    memory = None if proxy.tested is None else resident_mib(proxy.tested.pid)
    wait_until_idle(proxy.tested)
    return Trial(loaded, _difference(after, before), _difference(store_after, store_before), memory)


def wait_until_idle(process: Started | None) -> None:
    """wrk leaves while calls are under way; what a contender still does for them must not fall on the next one."""
    deadline = time.monotonic() + _IDLE_SECONDS
    while process is not None and time.monotonic() < deadline:
        before = family_cpu_seconds(process.pid)
        time.sleep(0.1)
        if family_cpu_seconds(process.pid) - before < 0.1 * _IDLE:
            return


def measured(
    proxies: Mapping[str, Proxy],
    bodies: Mapping[str, Body],
    connections: int,
    seconds: float,
    rounds: int,
    warmed: Mapping[str, float | CallsFailed],
    advance: Callable[[], None],
) -> dict[str, dict[str, Any]]:
    """The figures of every contender, by name, or why there are none: one that failed is not asked again. Raises SystemExit when the
    service itself failed: that is no figure but a bug."""
    trials: dict[str, list[Trial]] = {name: [] for name in proxies}
    paces = dict(warmed)
    for name in list(proxies) * rounds:
        proxy, pace = proxies[name], paces[name]
        if isinstance(pace, float):
            try:
                trials[name].append(trial(proxy, bodies[name], connections, run_seconds(seconds, connections, pace)))
            except CallsFailed as error:
                paces[name] = pace = error
        if isinstance(pace, CallsFailed) and proxy.name.startswith("verbatim"):
            raise SystemExit(f"{proxy.name} at {connections} connections: {pace}")
        advance()
    return {
        name: {"calls": 0, "failed": str(pace)} if isinstance(pace, CallsFailed) else figures(trials[name])
        for name, pace in paces.items()
    }


def figures(trials: Sequence[Trial]) -> dict[str, Any]:
    """The medians and spread of some runs of one contender in one setting; without those names of which nothing is known."""
    answered = [trial for trial in trials if trial.loaded.calls]
    found: dict[str, Any] = {"calls": sum(trial.loaded.calls for trial in trials)}
    if answered:
        for name in ("calls_per_second", "p50_ms", "p90_ms", "p99_ms"):
            found[name] = spread(getattr(trial.loaded, name) for trial in answered)
        for name in ("cpu_seconds", "store_cpu_seconds"):
            used = [(getattr(trial, name), trial.loaded.calls) for trial in answered]
            if all(seconds is not None for seconds, _ in used):
                costs = [rounded(1000 * seconds / calls) for seconds, calls in used]
                found[f"{name}_per_1000_calls"] = spread(costs)
                found[f"{name}_by_round"] = costs
    memory = [trial.resident_mib for trial in trials if trial.resident_mib is not None]
    if memory:
        found["resident_mib"] = round(max(memory), 1)
    return found


def _cpu(process: Started | None) -> float | None:
    return None if process is None else family_cpu_seconds(process.pid)


def _difference(after: float | None, before: float | None) -> float | None:
    return None if after is None or before is None else after - before
