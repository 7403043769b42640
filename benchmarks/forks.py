"""What replaying a recorded session costs: calls per second of CPU, bytes in Redis, and nothing of an engine.

A harness holds one append-only conversation of tool calls with the real service (one process, a real redis-server with its append-only
file) in front of an engine that costs next to nothing. Then it holds the same conversation again in forks that replay all of it.

    python -m benchmarks.forks [--quick] [--out DIR]
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import redis

from benchmarks.processes import Parts, cpu_seconds, request, running
from benchmarks.results import Grid, main, number, progress
from benchmarks.sessions import Harness, stored_bytes

LENGTHS = (10, 50, 200)
QUICK = (3,)
FORKS = 5
WARM_UP_CALLS = 60


@dataclass(frozen=True, slots=True)
class Walked:
    """Conversations of one length. Milliseconds and bytes per call."""

    cpu_ms: float
    wall_ms: float
    redis_bytes: float


@dataclass(frozen=True, slots=True)
class Measured:
    calls: int
    live: Walked
    """The origin: everything is sampled."""
    replayed: Walked
    """The mean over `FORKS` forks."""


def measure(parts: Parts, length: int) -> Measured:
    live, origin = _walk(parts, length, {})
    replay = {"session_id": origin, "on_divergence": "fail"}
    walked = [_walk(parts, length, {"replay": replay})[0] for _ in range(FORKS)]
    means = (sum(getattr(each, name) for each in walked) / FORKS for name in Walked.__dataclass_fields__)
    return Measured(length, live, Walked(*means))


def _walk(parts: Parts, length: int, fields: dict[str, Any]) -> tuple[Walked, str]:
    """One conversation in a session of its own, and the session's id."""
    created = request(parts.url, "POST", "/sessions", fields)
    harness = Harness(created["base_urls"]["openai"], created["api_key"])
    cpu, clock = cpu_seconds(parts.service.pid), time.perf_counter()
    for _ in range(length):
        harness.turn()
    spent = ((cpu_seconds(parts.service.pid) - cpu) * 1000, (time.perf_counter() - clock) * 1000)
    harness.close()
    session_id = created["session_id"]
    request(parts.url, "POST", f"/sessions/{session_id}/close", {"status": "completed", "reward": 1.0})
    accounting = request(parts.url, "GET", f"/sessions/{session_id}/trajectories")["accounting"]
    assert bool(accounting["sampled_tokens"]) != bool(fields), "a fork samples nothing of what is recorded"
    with redis.Redis(port=parts.redis_port, single_connection_client=True, protocol=2) as client:
        size = stored_bytes(client, session_id)
    return Walked(*(value / length for value in (*spent, size))), session_id


def run(quick: bool) -> dict[str, Any]:
    with running() as parts, progress() as bar:
        measure(parts, WARM_UP_CALLS)
        measured = [measure(parts, length) for length in bar.track(QUICK if quick else LENGTHS, description="forks")]
    return {"forks": [asdict(item) for item in measured]}


def tables(result: dict[str, Any]) -> Sequence[Grid]:
    rows = []
    for item in result["forks"]:
        live, replayed = item["live"], item["replayed"]
        times = (live["cpu_ms"], replayed["cpu_ms"], live["wall_ms"], replayed["wall_ms"], 1000 / replayed["cpu_ms"])
        rows.append((str(item["calls"]), *map(number, (*times, live["redis_bytes"], replayed["redis_bytes"]))))
    columns = (
        "calls",
        "CPU ms",
        "CPU ms replayed",
        "wall ms",
        "wall ms replayed",
        "replayed per CPU s",
        "Redis B",
        "Redis B replayed",
    )
    return [Grid("A conversation, and forks that replay all of it: per call", columns, tuple(rows))]


if __name__ == "__main__":
    main("forks", __doc__, run, tables, alone=False)
