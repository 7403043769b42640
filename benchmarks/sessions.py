"""What a session costs as it grows: bytes in Redis and milliseconds of the service's own time per call.

A harness holds one append-only conversation of tool calls with the real service (one process, a real redis-server with its
append-only file) over loopback, in front of an engine that costs next to nothing. Measured at 50 to 800 calls, each in a session of
its own. Figures per call that stay the same do not depend on the length of the session. Own time is CPU time of the service's process,
whatever it waited for.

    python -m benchmarks.sessions [--quick] [--out DIR]
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any
from urllib.parse import urlsplit

import redis

from benchmarks.processes import Parts, connection_to, cpu_seconds, request, running
from benchmarks.results import Grid, main, number, progress
from proxy.store import keys
from reconstruct.codec import decode
from reconstruct.records import Call

LENGTHS = (50, 100, 200, 400, 800)
QUICK = (5, 10)
RESULT_BYTES = 384
"""Size of a tool's answer; the fast engine makes a token of four bytes."""
TAIL = 25
"""Calls at the end of a session over which its last figures are taken."""
WARM_UP_CALLS = 60
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
    """The session's records, and the bytes of all its keys in Redis."""
    with redis.Redis(port=port, single_connection_client=True, protocol=2) as client:
        return [decode(record) for record in client.lrange(keys.calls(session_id), 0, -1)], stored_bytes(client, session_id)


def stored_bytes(client: redis.Redis, session_id: str) -> int:
    """Of all the session's keys, by MEMORY USAGE of every element."""
    names = client.scan_iter(match=f"*{{s:{session_id}}}*", count=1000)
    return sum(client.memory_usage(name, samples=0) or 0 for name in names)


def run(quick: bool) -> dict[str, Any]:
    with running() as parts, progress() as bar:
        measure(parts, WARM_UP_CALLS)
        measured = [measure(parts, length) for length in bar.track(QUICK if quick else LENGTHS, description="sessions")]
    return {"sessions": [asdict(item) for item in measured]}


def tables(result: dict[str, Any]) -> Sequence[Grid]:
    rows = []
    for item in result["sessions"]:
        kept = (item["redis_bytes"] / item["calls"], item["redis_bytes"] / item["tokens"])
        spent = (item["own_cpu_ms_mean"], item["own_cpu_ms_last"], item["wall_ms_last"])
        rows.append((str(item["calls"]), f"{item['tokens']:,}", *map(number, (*kept, *spent))))
    columns = ("calls", "tokens", "Redis B/call", "B/token", "own CPU ms per call", "at its end", "wall ms at its end")
    return [Grid("One append-only conversation as it grows", columns, tuple(rows))]


if __name__ == "__main__":
    main("sessions", __doc__, run, tables, alone=False)
