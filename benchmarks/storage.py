"""What is kept of a call: bytes in Redis against the length of a session, beside rllm-model-gateway's SQLite, and Redis round trips.

    python -m benchmarks.storage [--quick]

Counts, not times: the same on a busy machine. A harness holds conversations of tool calls of several lengths with the service and with
rllm, before the same engine. Bytes are those of all keys of the session in Redis (MEMORY USAGE), and of rllm's database file. Round
trips are counted by Redis itself, as the reads of its clients' connections, over 1 and 16 connections.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import redis

from benchmarks.contenders import CONTENDERS, DATABASE, Proxy, peer_versions, post, rllm_sqlite, verbatim_token
from benchmarks.plots import lines
from benchmarks.processes import fast_engine, request
from benchmarks.replies import LARGE, SMALL, Size
from benchmarks.results import Grid, main, number, progress, ratio, rounded, times
from benchmarks.sessions import Harness, recorded
from benchmarks.trials import open_all

RESULT_BYTES = 2_000
SAMPLED = 199
COUNTED = ("total_reads_processed", "total_commands_processed", "total_net_input_bytes", "total_net_output_bytes")
PER_TOKEN, PER_CALL = 8, 1024
"""Bytes: what a session may take for each token of its tree and for each call."""


def run(quick: bool) -> dict[str, Any]:
    lengths = (5, 10) if quick else (10, 50, 200)
    settings = [("verbatim", SMALL, 1), ("verbatim", SMALL, 16)]
    if not quick:
        settings += [("verbatim-token", SMALL, 1), ("verbatim-token", SMALL, 16), ("verbatim", LARGE, 16)]
    with progress() as bar:
        task = bar.add_task("storage", total=2 * len(lengths) + len(settings))
        sessions = list(_lengths(lengths, lambda: bar.advance(task)))
        trips = []
        for name, size, connections in settings:
            trips.append(_round_trips(name, size, connections, 50 if quick else 500))
            bar.advance(task)
    return {"peers": peer_versions(), "sessions": sessions, "round_trips": trips}


def _lengths(lengths: Sequence[int], advance: Callable[[], None]) -> Iterator[dict[str, Any]]:
    with fast_engine("--tokens", str(SAMPLED), side="load") as engine, tempfile.TemporaryDirectory() as name:
        for calls in lengths:
            own = _own_bytes(engine, Path(name) / f"own-{calls}", calls)
            advance()
            peer = _rllm_bytes(engine, Path(name) / f"rllm-{calls}", calls)
            advance()
            yield {"calls": calls, **own, "rllm_bytes": peer}


def _own_bytes(engine: str, folder: Path, calls: int) -> dict[str, Any]:
    with verbatim_token(engine, folder) as proxy:
        _converse(proxy, calls)
        session_id = proxy.targets[0].path.split("/")[2]
        rows = request(proxy.url, "GET", f"/sessions/{session_id}/trajectories")["trajectories"]
        assert proxy.redis_port is not None
        kept, size = recorded(proxy.redis_port, session_id)
        ids = sum(len(call.node.delta_ids) + len(call.node.completion_ids) for call in kept)
    assert len(kept) == calls
    row_tokens = sum(len(row["token_ids"]) for row in rows)
    return {
        "tree_tokens": ids,
        "row_tokens": row_tokens,
        "redis_bytes": size,
    }


def _rllm_bytes(engine: str, folder: Path, calls: int) -> int:
    """All of its files once it has ended, since it writes its log into the database then."""
    with rllm_sqlite(engine, folder) as proxy:
        _converse(proxy, calls)
    return sum(file.stat().st_size for file in folder.glob(f"{DATABASE}*"))


def _converse(proxy: Proxy, calls: int) -> None:
    target = proxy.targets[0]
    harness = Harness(proxy.url + target.path.removesuffix("/chat/completions"), target.key, RESULT_BYTES)
    for _ in range(calls):
        harness.turn()
    harness.close()


def _round_trips(name: str, size: Size, connections: int, calls: int) -> dict[str, Any]:
    """Over calls that are all answered, since what wrk leaves under way would be counted, too; of sessions that have had calls before."""
    with open_all(size, False, {name: CONTENDERS[name]}) as opened, ThreadPoolExecutor(connections) as pool:
        body = size.body(False)
        proxy = replace(opened[name], targets=opened[name].targets[:connections])

        def ask(numbers: range) -> None:
            for _ in pool.map(lambda number: post(proxy, body.numbered(number), number), numbers):
                pass

        ask(range(2 * connections))
        before = _counted(proxy)
        ask(range(2 * connections, 2 * connections + calls))
        after = _counted(proxy)
    spent = {counter.removeprefix("total_"): rounded((after[counter] - before[counter]) / calls) for counter in COUNTED}
    return {"contender": name, "size": size.name, "connections": connections, "calls": calls, "per_call": spent}


def _counted(proxy: Proxy) -> dict[str, int]:
    assert proxy.redis_port is not None
    with redis.Redis(port=proxy.redis_port, single_connection_client=True, protocol=2) as client:
        found: dict[str, int] = client.info("stats")
        return found


def tables(result: dict[str, Any]) -> Sequence[Grid]:
    rows = []
    for cell in result["sessions"]:
        calls, own, peer = cell["calls"], cell["redis_bytes"], cell["rllm_bytes"]
        allowed = PER_TOKEN * cell["tree_tokens"] + PER_CALL * calls
        sizes = (number(own / calls), number(own / cell["tree_tokens"]), f"{own / allowed:.0%}")
        peers = (number(peer / calls), number(peer / cell["tree_tokens"]), times(ratio(peer, own)))
        rows.append((str(calls), f"{cell['tree_tokens']:,}", *sizes, *peers))
    columns = (
        "calls",
        "tokens",
        "Redis B/call",
        "B/token",
        f"of {PER_TOKEN} B/token + 1 KiB/call",
        "rllm SQLite B/call",
        "B/token",
        "beside Redis",
    )
    kept = Grid("Bytes kept of one session", columns, tuple(rows))
    names = ("reads_processed", "commands_processed", "net_input_bytes", "net_output_bytes")
    found = []
    for cell in result["round_trips"]:
        spent = (number(cell["per_call"][name]) for name in names)
        found.append((cell["contender"], cell["size"], str(cell["connections"]), *spent))
    counted = ("path", "calls", "connections", "round trips per call", "commands", "bytes in", "bytes out")
    return [kept, Grid("Redis per call, as Redis counts", counted, tuple(found))]


def draw(result: dict[str, Any], path: Path) -> None:
    def points(name: str, per: str) -> list[tuple[float, float]]:
        return [(cell["calls"], cell[name] / cell[per]) for cell in result["sessions"]]

    series = {"Verbatim, Redis": "redis_bytes", "rllm-model-gateway, SQLite": "rllm_bytes"}
    panels = [
        (f"bytes per {unit}", "calls of the session", "bytes", {label: points(name, per) for label, name in series.items()})
        for unit, per in (("call", "calls"), ("token", "tree_tokens"))
    ]
    lines(path, panels)


if __name__ == "__main__":
    main("storage", __doc__, run, tables, draw)
