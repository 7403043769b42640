"""What sessions cost the store: CPU, memory, bytes in and out and bytes of the append-only file, per session, per call, per token.

The real service over loopback, a real redis-server with its append-only file and an engine that costs next to nothing. Sessions of
three shapes are opened, called, closed with a reward, leased and acknowledged; three equations give the three shares.

    python -m benchmarks.store_load [--quick]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import redis

from benchmarks.processes import ADMIN, Parts, request, running
from benchmarks.results import Grid, main, number
from benchmarks.sessions import Harness
from trainer_client import TrainerClient

BYTES_PER_TOKEN = 4
"""Of the fast engine's tokeniser."""


@dataclass(frozen=True, slots=True)
class Shape:
    sessions: int
    calls: int
    result_tokens: int
    """Tokens of each tool's answer."""


SHAPES = (Shape(200, 1, 96), Shape(20, 20, 96), Shape(20, 20, 1600))
QUICK = (Shape(16, 1, 96), Shape(4, 5, 96), Shape(4, 5, 1600))


@dataclass(frozen=True, slots=True)
class Used:
    """What the store's server used; seconds of CPU, bytes."""

    cpu_seconds: float
    memory_bytes: float
    bytes_in: float
    bytes_out: float
    file_bytes: float


FIELDS = tuple(Used.__dataclass_fields__)


@dataclass(frozen=True, slots=True)
class Load:
    """One shape: `tokens` are those of the trees, each counted once."""

    sessions: int
    calls: int
    tokens: int
    used: Used


def used(client: redis.Redis) -> Used:
    told: dict[str, Any] = client.info("all")
    return Used(
        told["used_cpu_user"] + told["used_cpu_sys"],
        told["used_memory"],
        told["total_net_input_bytes"],
        told["total_net_output_bytes"],
        told["aof_current_size"],
    )


def loaded(parts: Parts, shape: Shape) -> Load:
    with redis.Redis(port=parts.redis_port, single_connection_client=True, protocol=2) as client:
        client.config_set("auto-aof-rewrite-percentage", 0)
        before = used(client)
        tokens = sum(_session(parts, shape) for _ in range(shape.sessions))
        # Before the trainer comes: what it is asked for is read, and held until then.
        held = used(client).memory_bytes
        _train(parts, shape.sessions)
        after = used(client)
    spent = {name: getattr(after, name) - getattr(before, name) for name in FIELDS} | {
        "memory_bytes": held - before.memory_bytes
    }
    return Load(shape.sessions, shape.sessions * shape.calls, tokens, Used(**spent))


def _session(parts: Parts, shape: Shape) -> int:
    """Tokens of the one row that the session became."""
    made = request(parts.url, "POST", "/sessions", {})
    harness = Harness(made["base_urls"]["openai"], made["api_key"], shape.result_tokens * BYTES_PER_TOKEN)
    for _ in range(shape.calls):
        harness.turn()
    harness.close()
    path = f"/sessions/{made['session_id']}"
    request(parts.url, "POST", f"{path}/close", {"status": "completed", "reward": 1.0})
    rows = request(parts.url, "GET", f"{path}/trajectories")["trajectories"]
    assert len(rows) == 1
    return len(rows[0]["token_ids"])


def _train(parts: Parts, groups: int) -> None:
    """Lease and acknowledge that many groups, eight at a time."""
    with TrainerClient(parts.url, ADMIN + "-trainer") as client:
        while groups:
            batch = client.lease(max_groups=min(8, groups), wait_seconds=30)
            assert batch is not None, f"{groups} groups did not come"
            groups -= len(batch.groups)
            batch.ack()


def shares(loads: Sequence[Load]) -> dict[str, dict[str, float]]:
    """What one session, call and token cost, by what is used: the solution of one equation per shape."""
    counts = np.array([[load.sessions, load.calls, load.tokens] for load in loads], dtype=float)
    found = {}
    for name in FIELDS:
        solved = np.linalg.solve(counts, np.array([getattr(load.used, name) for load in loads]))
        # Where nothing depends on a share its solution is noise around nought.
        found[name] = dict(zip(("session", "call", "token"), (max(0.0, float(value)) for value in solved), strict=True))
    return found


def run(quick: bool) -> dict[str, Any]:
    with running() as parts:
        # Scripts are loaded and files opened once.
        loaded(parts, Shape(10, 2, 96))
        loads = [loaded(parts, shape) for shape in (QUICK if quick else SHAPES)]
    return {"loads": [asdict(load) for load in loads], "shares": shares(loads)}


def tables(result: dict[str, Any]) -> Sequence[Grid]:
    rows = tuple((name, *map(number, share.values())) for name, share in result["shares"].items())
    return [Grid("What the store's server uses", ("", "per session", "per call", "per token"), rows)]


if __name__ == "__main__":
    main("store_load", __doc__, run, tables, alone=False)
