"""What streaming costs: time to the first byte at one connection, and the CPU of the proxy for each streamed token.

    python -m benchmarks.streams [--quick]

Before the static engine, which sends its whole stream at once, so that waiting is the proxy's own. Each round asks every contender
once, in turn. CPU per token is the difference between long and short streams, which differ by so many tokens, under load;
`whole` shows the same for calls that are not streamed. What a real vLLM's stream looks like through the service is in
`benchmarks.first_byte`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.calls import NAMES
from benchmarks.contenders import CONTENDERS, Proxy, peer_versions
from benchmarks.load import Body
from benchmarks.processes import connection_to
from benchmarks.replies import Size
from benchmarks.results import Grid, main, median_of, number, progress, rounded, spread
from benchmarks.trials import measured, open_all, warm_all

NAMED = ("engine", "nginx", "verbatim", "verbatim-token", "rllm-sqlite", "litellm")
SHORT, LONG = Size("short", 1_000, 128), Size("long", 1_000, 1_152)
"""Of one prompt: what they differ by is what is sampled."""
CONNECTIONS = 16


def run(quick: bool) -> dict[str, Any]:
    rounds, seconds, loads = (5, 1, 1) if quick else (60, 2, 2)
    found: dict[str, dict[str, Any]] = {name: {} for name in NAMED}
    with progress() as bar:
        task = bar.add_task("streams", total=2 * 2 * loads * len(NAMED) + rounds)
        for size in (SHORT, LONG):
            for stream in (True, False):
                proxies = {name: CONTENDERS[name] for name in NAMED}
                with open_all(size, stream, proxies) as opened:
                    body = size.body(stream)
                    bodies = dict.fromkeys(opened, body)
                    warmed = warm_all(opened, bodies)
                    if stream and size is SHORT:
                        for name, times_ms in _first_bytes(opened, body, rounds, lambda: bar.advance(task)).items():
                            found[name] |= times_ms
                    cells = measured(opened, bodies, CONNECTIONS, seconds, loads, warmed, lambda: bar.advance(task))
                    for name, cell in cells.items():
                        found[name][f"{size.name}_{'streamed' if stream else 'whole'}"] = cell
    for cell in found.values():
        cell |= {f"cpu_us_per_token_{way}": _per_token(cell, way) for way in ("streamed", "whole")}
    return {"peers": peer_versions(), "connections": CONNECTIONS, "contenders": found}


def _first_bytes(
    proxies: Mapping[str, Proxy], body: Body, rounds: int, advance: Callable[[], None]
) -> dict[str, dict[str, Any]]:
    first: dict[str, list[float]] = {name: [] for name in proxies}
    last: dict[str, list[float]] = {name: [] for name in proxies}
    for number_of_round in range(rounds):
        for name, proxy in proxies.items():
            begun, ended = _timed(proxy, body.numbered(number_of_round), number_of_round)
            first[name].append(begun * 1000)
            last[name].append(ended * 1000)
        advance()
    return {name: {"first_byte_ms": spread(first[name]), "last_byte_ms": spread(last[name])} for name in proxies}


def _timed(proxy: Proxy, content: bytes, number_of_call: int) -> tuple[float, float]:
    connection, target = connection_to(proxy.url), proxy.targets[number_of_call % len(proxy.targets)]
    connection.connect()
    headers = {"content-type": "application/json", "authorization": f"Bearer {target.key}"}
    began = time.perf_counter()
    connection.request("POST", target.path, content, headers)
    answer = connection.getresponse()
    answer.peek(1)
    begun = time.perf_counter() - began
    answer.read()
    ended = time.perf_counter() - began
    connection.close()
    if answer.status != 200:
        raise SystemExit(f"{proxy.name} answered {answer.status}")
    return begun, ended


def _per_token(cell: Mapping[str, Any], way: str) -> float | None:
    """Microseconds of CPU for each token more."""
    short, long = (median_of(cell[f"{size}_{way}"], "cpu_seconds_per_1000_calls") for size in ("short", "long"))
    if short is None or long is None:
        return None
    return rounded((long - short) * 1000 / (LONG.sampled - SHORT.sampled))


def tables(result: dict[str, Any]) -> Sequence[Grid]:
    rows = []
    for name, cell in result["contenders"].items():
        waits = (number(median_of(cell, wait)) for wait in ("first_byte_ms", "last_byte_ms"))
        costs = (
            number(median_of(cell[f"{size}_{way}"], "cpu_seconds_per_1000_calls"))
            for way in ("streamed", "whole")
            for size in ("short", "long")
        )
        rows.append(
            (NAMES[name], *waits, *costs, number(cell["cpu_us_per_token_streamed"]), number(cell["cpu_us_per_token_whole"]))
        )
    sizes = (f"{SHORT.sampled} tokens", f"{LONG.sampled:,} tokens")
    columns = (
        "",
        "first byte ms, p50",
        "last byte ms, p50",
        *(f"CPU s per 1,000 calls, {way}, {size}" for way in ("streamed", "whole") for size in sizes),
        "CPU µs per token, streamed",
        "CPU µs per token, whole",
    )
    return [Grid("Streams after a prompt of 1,000 tokens", columns, tuple(rows))]


if __name__ == "__main__":
    main("streams", __doc__, run, tables)
