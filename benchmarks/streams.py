"""Streams as engines send them, and engines that refuse: what each contender adds, and what it asks of the engine.

    python -m benchmarks.streams [--quick]

The engine sends one event per token at a pace (`benchmarks.paced_engine`): an upstream that sends a whole stream at once hides what
every event costs. All streams of a wave are asked for at the same instant, and each contender has its wave in turn, before the same
engine. CPU per token is that of the time in which all streams flow; CPU per reply is everything. What a real vLLM's stream looks like
through the service is in `benchmarks.first_byte`.
"""

from __future__ import annotations

import http.client
import itertools
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.calls import NAMES
from benchmarks.contenders import CONTENDERS, Proxy, passing_nginx, peer_versions
from benchmarks.load import Body, CallsFailed, load
from benchmarks.paced_engine import REFUSALS, Behavior, Refusal, behave, counted, paced_engine
from benchmarks.paced_load import Plan, Seen, open_streams
from benchmarks.processes import connection_to, family_cpu_seconds
from benchmarks.replies import Size
from benchmarks.results import Grid, main, number, progress, rounded
from benchmarks.trials import wait_until_idle, warm

NAMED = ("engine", "nginx", "verbatim", "verbatim-token", "verbatim-plugin", "rllm-sqlite", "litellm")
OPENERS = CONTENDERS | {"nginx": partial(passing_nginx, at_once=True)}
REFUSED = ("nginx", "verbatim", "verbatim-token", "verbatim-plugin", "rllm-sqlite")
"""Without the LiteLLM proxy: it asks again after pauses, so the little time of a run says nothing about it."""
REFUSED_CONNECTIONS, REFUSED_SECONDS = 16, 2.0
_WARM = Behavior(prompt=1_000, sampled=4, pace_ms=5)
_STEP = 100_000

_firsts = itertools.count(step=_STEP)


@dataclass(frozen=True, slots=True)
class Wave:
    """So many streams at once, of `sampled` tokens each, after a prompt of so many."""

    streams: int
    pace_ms: int
    sampled: int
    prompt: int
    named: tuple[str, ...] = NAMED

    @property
    def title(self) -> str:
        return f"{self.streams} streams at once, {self.sampled} tokens each {self.pace_ms} ms, after {self.prompt:,} tokens"


FULL = (
    Wave(500, 100, 60, 1_000),
    # As many tokens per second, from fewer and quicker engines.
    Wave(100, 20, 200, 1_000, NAMED[:6]),
    # For what is sent to the engine while a reply after a long prompt streams.
    Wave(16, 20, 200, 32_000, NAMED[:5]),
)
QUICK = (Wave(20, 50, 20, 1_000), Wave(2, 20, 40, 32_000, NAMED[:5]))


def run(quick: bool) -> Iterator[dict[str, Any]]:
    waves = QUICK if quick else FULL
    found: dict[str, Any] = {"peers": peer_versions(), "waves": [], "refusals": []}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="verbatim-bench-", ignore_cleanup_errors=True)))
        folder.chmod(0o755)
        engine = stack.enter_context(paced_engine())
        proxies = {name: stack.enter_context(OPENERS[name](engine, folder / name)) for name in NAMED}
        bar = stack.enter_context(progress())
        task = bar.add_task("streams", total=sum(len(wave.named) for wave in waves) + len(REFUSALS) * len(REFUSED))
        behave(engine, _WARM)
        body = Size("warm", _WARM.prompt, _WARM.sampled).body(True)
        for proxy in proxies.values():
            warm(proxy, body)
        for wave in waves:
            for name in wave.named:
                found["waves"].append({"contender": name, **_setting(wave), **_measure(wave, proxies[name], engine)})
                bar.advance(task)
            yield found
        for refusal in REFUSALS:
            for name in REFUSED:
                cell = _measure_refusal(refusal, proxies[name], engine, body)
                found["refusals"].append({"contender": name, "refusal": refusal, **cell})
                bar.advance(task)
        yield found
    failed = [f"{cell['contender']}, {cell['title']}: {cell['failed']}" for cell in found["waves"] if "failed" in cell]
    if ours := [line for line in failed if line.startswith("verbatim")]:
        raise SystemExit("\n".join(ours))


def _setting(wave: Wave) -> dict[str, Any]:
    return {
        "title": wave.title,
        "streams": wave.streams,
        "pace_ms": wave.pace_ms,
        "sampled": wave.sampled,
        "prompt": wave.prompt,
    }


def _measure(wave: Wave, proxy: Proxy, engine: str) -> dict[str, Any]:
    behave(engine, Behavior(wave.prompt, wave.sampled, wave.pace_ms))
    body = Size("paced", wave.prompt, wave.sampled).body(True)
    pace = wave.pace_ms / 1000
    pid = proxy.tested.pid if proxy.tested else None
    targets = [(target.path, target.key) for target in proxy.targets]
    plan = Plan(
        url=proxy.url,
        engine_url=engine,
        targets=targets,
        before=body.before,
        after=body.after,
        first_number=next(_firsts),
        streams=wave.streams,
        stream_seconds=(wave.sampled - 1) * pace,
        pace_seconds=pace,
        pid=pid,
    )
    before = family_cpu_seconds(pid) if pid else None
    try:
        seen = open_streams(plan)
    except CallsFailed as error:
        return {"failed": str(error)}
    wait_until_idle(proxy.tested)
    spent = family_cpu_seconds(pid) - before if pid and before is not None else None
    return figures(seen, spent) | _asked_of_engine(engine)


def figures(seen: Seen, cpu_seconds: float | None) -> dict[str, Any]:
    """Percentiles in milliseconds; CPU per token is missing where the streams never flowed all at once."""
    waits = {name: getattr(seen, name) for name in ("first_byte_ms", "first_text_ms", "last_byte_ms")}
    found: dict[str, Any] = {name: _percentiles(values) for name, values in waits.items()}
    if cpu_seconds is not None:
        found["cpu_ms_per_reply"] = rounded(1000 * cpu_seconds / len(seen.first_byte_ms))
        if seen.flow_tokens:
            found["cpu_us_per_token"] = rounded(1e6 * seen.flow_cpu_seconds / seen.flow_tokens)
            found["flow_seconds"] = rounded(seen.flow_seconds)
    return found


def _percentiles(values: Sequence[float]) -> dict[str, float]:
    p50, p99 = np.percentile(values, [50, 99])
    return {"p50": rounded(float(p50)), "p99": rounded(float(p99))}


def _asked_of_engine(engine: str) -> dict[str, float]:
    """Per reply."""
    told = counted(engine)
    replies = max(1, told.replies)
    return {"engine_bytes": rounded(told.bytes_in / replies), "engine_requests": rounded(told.requests / replies)}


def _measure_refusal(refusal: Refusal, proxy: Proxy, engine: str, body: Body) -> dict[str, Any]:
    """Calls that the engine refuses, each after the other over some connections; per call that the harness made."""
    behave(engine, Behavior(_WARM.prompt, _WARM.sampled, _WARM.pace_ms, refusal))
    assert proxy.tested is not None
    answered = _ask(proxy, body)
    behave(engine, Behavior(_WARM.prompt, _WARM.sampled, _WARM.pace_ms, refusal))
    before = family_cpu_seconds(proxy.tested.pid)
    loaded = load(proxy.url, proxy.targets, body, REFUSED_CONNECTIONS, REFUSED_SECONDS, refused=True)
    spent, told = family_cpu_seconds(proxy.tested.pid) - before, counted(engine)
    behave(engine, _WARM)
    wait_until_idle(proxy.tested)
    # What is cut off counts as a call to wrk only if it was answered.
    calls = loaded.calls or loaded.broken
    found: dict[str, Any] = {"answered": answered, "calls": calls, "engine_refused": told.replies}
    if calls:
        found |= {
            "p50_ms": rounded(loaded.p50_ms),
            "cpu_ms_per_call": rounded(1000 * spent / calls),
            "engine_replies": rounded(told.replies / calls),
        }
    return found


def _ask(proxy: Proxy, body: Body) -> str:
    """What a harness is told: the status, and how a stream that has begun ends."""
    connection, target = connection_to(proxy.url), proxy.targets[0]
    headers = {"content-type": "application/json", "authorization": f"Bearer {target.key}"}
    try:
        connection.request("POST", target.path, body.numbered(next(_firsts)), headers)
        answer = connection.getresponse()
        content = answer.read()
    except (OSError, http.client.HTTPException):
        return "broken off"
    finally:
        connection.close()
    if answer.status != 200:
        return str(answer.status)
    return "200, then an error" if b'"error"' in content else "200"


def tables(result: dict[str, Any]) -> Sequence[Grid]:
    titles = list(dict.fromkeys(cell["title"] for cell in result["waves"]))
    grids = [_wave_table(title, [cell for cell in result["waves"] if cell["title"] == title]) for title in titles]
    return [*grids, _refusal_table(result["refusals"])] if result["refusals"] else grids


def _wave_table(title: str, cells: Sequence[Mapping[str, Any]]) -> Grid:
    alone = next((cell for cell in cells if cell["contender"] == "engine"), {})
    rows = []
    for cell in cells:
        first = (number(_part(cell, "first_byte_ms", rank)) for rank in ("p50", "p99"))
        later = (
            number(_later(cell, alone, name, rank))
            for name, ranks in (("first_byte_ms", ("p50", "p99")), ("first_text_ms", ("p50",)), ("last_byte_ms", ("p50",)))
            for rank in ranks
        )
        costs = (number(cell.get(name)) for name in ("cpu_us_per_token", "cpu_ms_per_reply"))
        asked = (number(cell.get(name)) for name in ("engine_requests", "engine_bytes"))
        rows.append((NAMES[cell["contender"]], *first, *later, *costs, *asked))
    columns = (
        "",
        "first byte ms, p50",
        "p99",
        "later than the engine's, p50",
        "p99",
        "first text later, p50",
        "last byte later, p50",
        "CPU µs per token",
        "CPU ms per reply",
        "requests to the engine per reply",
        "bytes to it per reply",
    )
    return Grid(title, columns, tuple(rows))


def _part(cell: Mapping[str, Any], name: str, rank: str) -> float | None:
    return float(cell[name][rank]) if name in cell else None


def _later(cell: Mapping[str, Any], alone: Mapping[str, Any], name: str, rank: str) -> float | None:
    """Than the same of the engine without a proxy."""
    own, base = _part(cell, name, rank), _part(alone, name, rank)
    return None if own is None or base is None or cell is alone else own - base


def _refusal_table(cells: Sequence[Mapping[str, Any]]) -> Grid:
    rows = []
    for cell in cells:
        figures = (number(cell.get(name)) for name in ("p50_ms", "cpu_ms_per_call", "engine_replies"))
        rows.append((cell["refusal"], NAMES[cell["contender"]], cell["answered"], number(cell["calls"]), *figures))
    columns = (
        "the engine answers",
        "",
        "the harness gets",
        "calls",
        "p50 ms",
        "CPU ms per call",
        "requests for sampling per call",
    )
    return Grid(f"Refusals of streamed calls, {REFUSED_CONNECTIONS} connections", columns, tuple(rows))


if __name__ == "__main__":
    main("streams", __doc__, run, tables)
