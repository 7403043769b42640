"""What a trainer waits for: leases per second, the bytes of a batch, a lease of 100 MB, and the time that the client decodes.

    python -m benchmarks.delivery [--quick]

Sessions of one call each are sampled from the static engine, closed with a reward in groups of eight, and leased over loopback by
`trainer_client` as a trainer would. The answer is timed as bytes first, then its decoding and checking.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgpack

from benchmarks.contenders import Proxy, verbatim
from benchmarks.processes import ADMIN, connection_to, family_cpu_seconds, request, resident_mib
from benchmarks.replies import LARGE, SMALL, Size
from benchmarks.results import Grid, main, number, progress, rounded, spread
from benchmarks.trials import open_all
from trainer_client import TrainerClient
from trainer_client.wire import ACCEPT, decode_group

TRAINER = ADMIN + "-trainer"
GROUP_SIZE = 8
THREADS = 8
ROUNDS = 3
"""Leases of the same batch; it is given back after each."""
BIG_BYTES = 100_000_000
_BYTES_PER_TOKEN = 9
"""Of a packed row: id, mask, logprob."""


def run(quick: bool) -> dict[str, Any]:
    few, big_bytes = (20, BIG_BYTES // 20) if quick else (150, BIG_BYTES)
    big = max(1, round(big_bytes / (_BYTES_PER_TOKEN * (LARGE.prompt + LARGE.sampled) * GROUP_SIZE)))
    with progress() as bar:
        leases = _leases(few, bar.track)
        batches = [_batch(SMALL, few, bar.track), _batch(LARGE, big, bar.track)]
    return {"group_size": GROUP_SIZE, "leases": leases, "batches": batches}


def _leases(groups: int, track: Callable[..., Any]) -> dict[str, Any]:
    """One group per lease, leased and acknowledged one after the other."""
    with open_all(SMALL, False, {"service": verbatim}) as opened:
        proxy = opened["service"]
        _finish(proxy, SMALL, groups, track)
        assert proxy.tested is not None
        with TrainerClient(proxy.url, TRAINER) as client:
            before, began, taken = family_cpu_seconds(proxy.tested.pid), time.perf_counter(), 0
            while (batch := client.lease(max_groups=1)) is not None:
                batch.ack()
                taken += 1
            seconds = time.perf_counter() - began
        assert taken == groups, f"{taken} of {groups} groups were leased"
        cpu = family_cpu_seconds(proxy.tested.pid) - before
    return {"groups": groups, "leases_per_second": rounded(groups / seconds), "cpu_ms_per_lease": rounded(1000 * cpu / groups)}


def _batch(size: Size, groups: int, track: Callable[..., Any]) -> dict[str, Any]:
    """All groups in one lease."""
    with open_all(size, False, {"service": verbatim}) as opened:
        proxy = opened["service"]
        _finish(proxy, size, groups, track)
        assert proxy.tested is not None
        waited, decoded, cpu = [], [], []
        for _ in range(ROUNDS):
            before, began = family_cpu_seconds(proxy.tested.pid), time.perf_counter()
            content = _leased(proxy.url, groups)
            arrived = time.perf_counter()
            body = msgpack.unpackb(content, strict_map_key=False)
            rows = [row for group in body["groups"] for row in decode_group(group).trajectories]
            decoded.append(time.perf_counter() - arrived)
            waited.append(arrived - began)
            cpu.append(family_cpu_seconds(proxy.tested.pid) - before)
            request(proxy.url, "POST", f"/batches/{body['lease_id']}/nack", {}, token=TRAINER)
        assert len(rows) == groups * GROUP_SIZE
        memory = resident_mib(proxy.tested.pid)
    tokens = sum(len(row.token_ids) for row in rows)
    return {
        "size": size.name,
        "rows": len(rows),
        "tokens": tokens,
        "bytes": len(content),
        "lease_seconds": spread(waited),
        "service_cpu_seconds": spread(cpu),
        "client_decode_seconds": spread(decoded),
        "service_resident_mib": round(memory, 1),
    }


def _finish(proxy: Proxy, size: Size, groups: int, track: Callable[..., Any]) -> None:
    body = size.body(False)

    def one(place: int) -> None:
        group = {"group_id": f"group-{place // GROUP_SIZE}", "group_size": GROUP_SIZE}
        made = request(proxy.url, "POST", "/sessions", group)
        session = made["session_id"]
        request(proxy.url, "POST", f"/s/{session}/v1/chat/completions", body.numbered(place), token=made["api_key"])
        request(proxy.url, "POST", f"/sessions/{session}/close", {"status": "completed", "reward": place % 2})

    with ThreadPoolExecutor(THREADS) as pool:
        for _ in track(pool.map(one, range(groups * GROUP_SIZE)), groups * GROUP_SIZE, description=f"{size.name} sessions"):
            pass


def _leased(url: str, groups: int) -> bytes:
    connection = connection_to(url)
    headers = {"authorization": f"Bearer {TRAINER}", "content-type": "application/json", "accept": ACCEPT}
    connection.request("POST", "/batches/lease", json.dumps({"max_groups": groups, "consumer": "bench"}), headers)
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    assert answer.status == 200, content[:500]
    return content


def tables(result: dict[str, Any]) -> Sequence[Grid]:
    leases = result["leases"]
    row = (f"{leases['groups']:,} groups of {result['group_size']} small rows", number(leases["leases_per_second"]))
    one = Grid(
        "One group per lease",
        ("", "leases/s, leased and acknowledged", "service CPU ms"),
        ((*row, number(leases["cpu_ms_per_lease"])),),
    )
    rows = []
    for cell in result["batches"]:
        seconds = [cell[name]["median"] for name in ("lease_seconds", "service_cpu_seconds", "client_decode_seconds")]
        speed = number(cell["bytes"] / 1e6 / seconds[0])
        sizes = (
            f"{cell['rows']:,}",
            f"{cell['tokens']:,}",
            number(cell["bytes"] / 1e6),
            number(cell["bytes"] / cell["tokens"]),
        )
        rows.append((f"{cell['size']} rows", *sizes, *map(number, seconds), speed, number(cell["service_resident_mib"])))
    columns = ("", "rows", "tokens", "MB", "B/token", "lease s", "service CPU s", "client decodes in s", "MB/s", "service MiB")
    return [one, Grid("All groups in one lease", columns, tuple(rows))]


if __name__ == "__main__":
    main("delivery", __doc__, run, tables)
