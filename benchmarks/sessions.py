"""What a session costs as it grows: rows, bytes in Redis and milliseconds of the service's own time per call.

A harness holds one append-only conversation of tool calls with the real service (one process, a real redis-server with its
append-only file) over loopback, in front of an engine that costs next to nothing. Measured at 50 to 800 calls, each in a session of
its own. A straight line means that the figures per call do not depend on the length of the session.

    python -m benchmarks.sessions [--lengths 50,100,...] [--out DIR]

prints tables and writes `sessions.json` and `sessions.png`. Own time is CPU time of the service's process, whatever it waited for.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import redis
from rich.console import Console
from rich.table import Table

from benchmarks.processes import ROOT, Parts, connection_to, cpu_seconds, machine, request, running
from benchmarks.reconstruction import SHAPES, Reconstructed, reconstruct
from proxy.store import keys
from reconstruct.codec import decode
from reconstruct.records import Call

LENGTHS = (50, 100, 200, 400, 800)
RESULT_BYTES = 384
"""Size of a tool's answer; the fast engine makes a token of four bytes."""
TAIL = 25
"""Calls at the end of a session over which its last figures are taken."""
WARM_UP_CALLS = 60
FLAT = 1.25
"""Per-call figures within this factor from the shortest to the longest session are called flat."""
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "lookup",
            "description": "Looks a key up.",
            "parameters": {"type": "object", "properties": {"key": {"type": "string"}, "number": {"type": "integer"}}},
        },
    }
]


@dataclass(frozen=True, slots=True)
class Measured:
    """One session. Times are milliseconds per call, over the whole session (`mean`) and over its last calls (`last`)."""

    calls: int
    tokens: int
    rows: int
    redis_bytes: int
    body_bytes_last: int
    own_cpu_ms_mean: float
    own_cpu_ms_last: float
    recorded_own_ms_mean: float
    recorded_own_ms_last: float
    engine_cpu_ms_mean: float
    wall_ms_mean: float
    wall_ms_last: float

    @property
    def bytes_per_call(self) -> float:
        return self.redis_bytes / self.calls

    @property
    def bytes_per_token(self) -> float:
        return self.redis_bytes / self.tokens


def measure(parts: Parts, length: int) -> Measured:
    created = request(parts.url, "POST", "/sessions", {})
    harness = Harness(created["base_urls"]["openai"], created["api_key"])
    engine_before = request(parts.engine_url, "GET", "/seconds")
    own, wall = [], []
    for _ in range(length):
        before, clock = cpu_seconds(parts.service.pid), time.perf_counter()
        harness.turn()
        wall.append((time.perf_counter() - clock) * 1000)
        own.append((cpu_seconds(parts.service.pid) - before) * 1000)
    engine_seconds = request(parts.engine_url, "GET", "/seconds") - engine_before
    harness.close()
    return _measured(parts, created["session_id"], harness, own, wall, engine_seconds)


def _measured(
    parts: Parts, session_id: str, harness: Harness, own: list[float], wall: list[float], engine_seconds: float
) -> Measured:
    rows = request(parts.url, "GET", f"/sessions/{session_id}/trajectories")
    accounting, (row,) = rows["accounting"], rows["trajectories"]
    assert accounting["sampled_tokens"] == accounting["exported_tokens"]
    calls, redis_bytes = recorded(parts.redis_port, session_id)
    assert len(calls) == len(own)
    recorded_ms = [call.own_seconds * 1000 for call in calls]
    return Measured(
        calls=len(calls),
        tokens=len(row["token_ids"]),
        rows=len(rows["trajectories"]),
        redis_bytes=redis_bytes,
        body_bytes_last=harness.body_bytes,
        own_cpu_ms_mean=statistics.fmean(own),
        own_cpu_ms_last=statistics.fmean(own[-TAIL:]),
        recorded_own_ms_mean=statistics.fmean(recorded_ms),
        recorded_own_ms_last=statistics.median(recorded_ms[-TAIL:]),
        engine_cpu_ms_mean=engine_seconds * 1000 / len(calls),
        wall_ms_mean=statistics.fmean(wall),
        wall_ms_last=statistics.median(wall[-TAIL:]),
    )


class Harness:
    """An append-only conversation; keeps its history as JSON, so that its own share of the time is small."""

    def __init__(self, base_url: str, api_key: str, result_bytes: int = RESULT_BYTES) -> None:
        self._connection = connection_to(base_url)
        self._path = f"{urlsplit(base_url).path}/chat/completions"
        self._headers = {"authorization": f"Bearer {api_key}", "content-type": "application/json"}
        self._head = json.dumps({"model": "policy", "tools": TOOLS})[:-1] + ', "messages": ['
        system = {"role": "system", "content": "You look keys up until you know the answer. " * 40}
        self._messages = [json.dumps(system), json.dumps({"role": "user", "content": "Find alpha."})]
        self._turns = 0
        self._result_bytes = result_bytes
        self.body_bytes = 0

    def turn(self) -> None:
        body = (self._head + ", ".join(self._messages) + "]}").encode()
        self.body_bytes = len(body)
        self._connection.request("POST", self._path, body, self._headers)
        answer = self._connection.getresponse()
        content = answer.read()
        assert answer.status == 200, content
        message = json.loads(content)["choices"][0]["message"]
        result = f"{self._turns}: ".ljust(self._result_bytes, "r")
        tool = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": result}
        self._messages += [json.dumps(message), json.dumps(tool)]
        self._turns += 1

    def close(self) -> None:
        self._connection.close()


def recorded(port: int, session_id: str) -> tuple[list[Call], int]:
    """The session's records, and the bytes of all its keys in Redis, by MEMORY USAGE of every element."""
    with redis.Redis(port=port, single_connection_client=True, protocol=2) as client:
        names = list(client.scan_iter(match=f"*{{s:{session_id}}}*", count=1000))
        size = sum(client.memory_usage(name, samples=0) or 0 for name in names)
        return [decode(record) for record in client.lrange(keys.calls(session_id), 0, -1)], size


def growth(measured: Sequence[Measured], field: str) -> float:
    """The figure of the longest session over that of the shortest."""
    return float(getattr(measured[-1], field) / getattr(measured[0], field))


def per_thousand_tokens(measured: Sequence[Measured]) -> tuple[float, float]:
    """(a, b): a call's own CPU ms at the end of a session is a + b per thousand tokens of its history, by least squares."""
    b, a = np.polyfit([item.tokens / 1000 for item in measured], [item.own_cpu_ms_last for item in measured], 1)
    return float(a), float(b)


def verdicts(measured: Sequence[Measured]) -> list[str]:
    """What the figures say, a sentence each."""
    first, last = measured[0], measured[-1]
    fixed, slope = per_thousand_tokens(measured)
    bytes_growth, own_growth = growth(measured, "bytes_per_call"), growth(measured, "recorded_own_ms_last")
    return [
        f"rows: {', '.join(str(item.rows) for item in measured)}",
        f"bytes in Redis per call: {first.bytes_per_call:.0f} at {first.calls} calls, {last.bytes_per_call:.0f} at {last.calls}: "
        f"{_shape(bytes_growth)}",
        f"own milliseconds beside the engine's requests: {first.recorded_own_ms_last:.2f} and {last.recorded_own_ms_last:.2f} "
        f"at the end of the shortest and longest session: {_shape(own_growth)}",
        f"own CPU of a whole call, reading and writing its history included: {fixed:.2f} ms + {slope:.3f} ms per thousand tokens "
        f"of history ({last.tokens:,} tokens: {last.own_cpu_ms_last:.1f} ms)",
    ]


def _shape(factor: float) -> str:
    return f"a straight line (x{factor:.2f})" if factor <= FLAT else f"not flat (x{factor:.2f})"


def show(console: Console, measured: Sequence[Measured], rebuilt: Sequence[Reconstructed]) -> None:
    table = Table(title="A session as it grows; times in ms per call")
    for name in (
        "calls",
        "tokens",
        "rows",
        "Redis B",
        "B/call",
        "B/token",
        "own",
        "own, end",
        "CPU",
        "CPU, end",
        "wall",
        "wall, end",
    ):
        table.add_column(name, justify="right")
    for item in measured:
        times = (item.recorded_own_ms_mean, item.recorded_own_ms_last, item.own_cpu_ms_mean, item.own_cpu_ms_last)
        sizes = (f"{item.bytes_per_call:.0f}", f"{item.bytes_per_token:.2f}")
        walls = (item.wall_ms_mean, item.wall_ms_last)
        counts = (f"{item.calls:,}", f"{item.tokens:,}", str(item.rows), f"{item.redis_bytes:,}")
        table.add_row(*counts, *sizes, *(f"{value:.2f}" for value in (*times, *walls)))
    console.print(table)
    table = Table(title="Reconstruction; seconds, in one process")
    for name in ("session", "tokens", "rows", "row tokens", "decode", "settle", "merge", "account", "whole", "µs/call"):
        table.add_column(name, justify="right")
    for built in rebuilt:
        counts = (built.shape, f"{built.tokens:,}", f"{built.rows:,}", f"{built.row_tokens:,}")
        seconds = (built.decode, built.settle, built.merged, built.account, built.whole)
        table.add_row(*counts, *(f"{value:.3f}" for value in seconds), f"{built.whole / built.calls * 1e6:.0f}")
    console.print(table)


def plot(measured: Sequence[Measured], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    calls = [item.calls for item in measured]
    panels = (
        ("bytes in Redis", [("", [item.redis_bytes for item in measured])]),
        ("bytes in Redis per call", [("", [item.bytes_per_call for item in measured])]),
        (
            "milliseconds per call, at the session's end",
            [
                ("own, beside the engine's requests", [item.recorded_own_ms_last for item in measured]),
                ("own CPU, all of it", [item.own_cpu_ms_last for item in measured]),
                ("wall", [item.wall_ms_last for item in measured]),
            ],
        ),
    )
    figure, axes = pyplot.subplots(1, len(panels), figsize=(15, 4.2))
    for axis, (title, lines) in zip(axes, panels, strict=True):
        for label, values in lines:
            axis.plot(calls, values, "o-", label=label)
        axis.set(title=title, xlabel="calls of the session", xlim=(0, None), ylim=(0, 1.05 * axis.get_ylim()[1]))
        if lines[0][0]:
            axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", default=",".join(map(str, LENGTHS)), help="calls of the sessions, comma-separated")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="folder of sessions.json and .png")
    options = parser.parse_args()
    console = Console(width=140)
    described = machine()
    console.print(", ".join(f"{name} {value}" for name, value in described.items()), soft_wrap=True, highlight=False)
    with running() as parts:
        measure(parts, WARM_UP_CALLS)
        measured = [measure(parts, int(length)) for length in options.lengths.split(",")]
    rebuilt = [reconstruct(shape) for shape in SHAPES]
    show(console, measured, rebuilt)
    said = verdicts(measured)
    for sentence in said:
        console.print(sentence, soft_wrap=True, highlight=False)
    options.out.mkdir(parents=True, exist_ok=True)
    sizes = [{"bytes_per_call": item.bytes_per_call, "bytes_per_token": item.bytes_per_token} for item in measured]
    sessions = [asdict(item) | size for item, size in zip(measured, sizes, strict=True)]
    result = {
        "machine": described,
        "sessions": sessions,
        "reconstruction": [asdict(item) for item in rebuilt],
        "verdicts": said,
    }
    (options.out / "sessions.json").write_text(json.dumps(result, indent=2) + "\n")
    plot(measured, options.out / "sessions.png")
    console.print(f"written: {options.out / 'sessions.json'}, {options.out / 'sessions.png'}", soft_wrap=True, highlight=False)


if __name__ == "__main__":
    main()
