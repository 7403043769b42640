"""How long the pure core takes for large sessions: from record bytes to training rows and their accounting, in one process; and, on the
same sessions, the merge loop of a peer, which is given every call's whole prompt and gives unaccounted rows.

    python -m benchmarks.reconstruction [--quick]
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.merging import merge_seconds, skyrl_version
from benchmarks.results import Grid, main, rounded, times, track
from benchmarks.results import number as told
from reconstruct.accounting import account, settle
from reconstruct.builders import RowContext, merged
from reconstruct.codec import decode, encode
from reconstruct.records import RAW, Call, Node, Sampling, pack_ids, pack_logprobs
from reconstruct.spans import ModeSpan, Span

CONTEXT = RowContext(session_id="s")


@dataclass(frozen=True, slots=True)
class Shape:
    """`calls` calls with `new` prompt tokens and `sampled` ones each; every call continues call `parent(number)`."""

    name: str
    calls: int
    new: int
    sampled: int
    parent: Callable[[int], int | None]


@dataclass(frozen=True, slots=True)
class Reconstructed:
    """Seconds of CPU of each step, which are those of the clock where nothing else is at work. `whole` is what a lease or a look at
    the trajectories costs: decode, settle, merge, account."""

    shape: str
    calls: int
    tokens: int
    record_bytes: int
    rows: int
    row_tokens: int
    decode: float
    settle: float
    merged: float
    account: float
    whole: float


def _chain(number: int) -> int | None:
    return number - 1 if number else None


def _star(number: int) -> int | None:
    return 0 if number else None


SHAPES = (
    Shape("500 calls deep, 500,000 tokens", 500, 800, 200, _chain),
    Shape("1,000 calls deep, 1,000,000 tokens", 1000, 800, 200, _chain),
    Shape("5,000 calls wide", 5_000, 20, 30, _star),
    Shape("10,000 calls wide", 10_000, 20, 30, _star),
)


def records(shape: Shape) -> list[bytes]:
    """The session's records as a store holds them."""
    random = np.random.default_rng(7)
    lengths: list[int] = []
    made = []
    for number in range(shape.calls):
        parent = shape.parent(number)
        base_length = lengths[parent] if parent is not None else 0
        node = Node(
            parent_id=f"c{parent}" if parent is not None else None,
            branch_reason=None,
            base_id=f"c{parent}" if parent is not None else None,
            base_length=base_length,
            delta_ids=pack_ids(random.integers(0, 150_000, shape.new)),
            completion_ids=pack_ids(random.integers(0, 150_000, shape.sampled)),
            logprobs=pack_logprobs(-random.random(shape.sampled)),
            spans=(Span(0, 0, shape.sampled),),
            modes=(ModeSpan(RAW, 0, shape.sampled),),
        )
        lengths.append(base_length + shape.new + shape.sampled)
        made.append(encode(_call(number, node)))
    return made


def _call(number: int, node: Node) -> Call:
    return Call(
        call_id=f"c{number}",
        session_id="s",
        node=node,
        dialect="chat",
        api="token",
        status="finished",
        role="main",
        agent="",
        finish_reason="stop",
        stop_reason=None,
        sampling=Sampling(temperature=1.0),
        root_key=b"root",
        fingerprint=b"asked %d" % number,
        reply_fingerprint=b"answered %d" % number,
        message_count=2,
        messages_from=0,
        messages=b"[]",
        reply=b"{}",
        preamble=b"",
        digest=b"%d" % number,
        projection="exact",
        replica="r",
        started_at=float(number),
        engine_seconds=0.0,
        own_seconds=0.0,
    )


def reconstruct(shape: Shape, repeats: int = 3) -> Reconstructed:
    """The fastest of `repeats` runs."""
    stored = records(shape)
    runs = [_run(shape, stored) for _ in range(repeats)]
    return min(runs, key=lambda run: run.whole)


def _run(shape: Shape, stored: list[bytes]) -> Reconstructed:
    clock = [time.process_time()]
    calls = [decode(record) for record in stored]
    clock.append(time.process_time())
    settled = settle(calls, delivered={call.call_id for call in calls})
    clock.append(time.process_time())
    rows = merged(settled, CONTEXT)
    clock.append(time.process_time())
    accounting = account(settled, rows)
    clock.append(time.process_time())
    assert accounting.sampled_tokens == accounting.exported_tokens == shape.calls * shape.sampled
    steps = [later - earlier for earlier, later in pairwise(clock)]
    return Reconstructed(
        shape=shape.name,
        calls=shape.calls,
        tokens=shape.calls * (shape.new + shape.sampled),
        record_bytes=sum(map(len, stored)),
        rows=len(rows),
        row_tokens=sum(len(row.token_ids) for row in rows),
        decode=steps[0],
        settle=steps[1],
        merged=steps[2],
        account=steps[3],
        whole=sum(steps),
    )


SHORT = (
    Shape("125 calls deep, 125,000 tokens", 125, 800, 200, _chain),
    Shape("250 calls deep, 250,000 tokens", 250, 800, 200, _chain),
)
_POINTER_BYTES = 8
_SPARE_BYTES = 4_000_000_000


def prompt_tokens(shape: Shape) -> int:
    """Of all calls' whole prompts together, which is what the peer is given."""
    whole: list[int] = []
    for place in range(shape.calls):
        parent = shape.parent(place)
        whole.append((whole[parent] + shape.sampled if parent is not None else 0) + shape.new)
    return sum(whole)


def _fits(shape: Shape) -> bool:
    """Whether the machine has memory for the peer's lists: 4 GB for a million tokens in a thousand calls."""
    memory = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(memory["MemAvailable"].split()[0]) * 1024
    return prompt_tokens(shape) * _POINTER_BYTES + _SPARE_BYTES < available


def run(quick: bool) -> dict[str, Any]:
    sessions = []
    for shape in track((SHORT[0], SHAPES[-1]) if quick else (*SHORT, *SHAPES), "reconstruction"):
        cell = {
            name: rounded(value) if isinstance(value, float) else value for name, value in asdict(reconstruct(shape)).items()
        }
        if _fits(shape):
            seconds, rows = merge_seconds(records(shape), [shape.parent(place) for place in range(shape.calls)])
            cell |= {"skyrl_merge": rounded(seconds), "skyrl_rows": rows}
        sessions.append(cell)
    return {"peers": {"skyrl": skyrl_version()}, "sessions": sessions}


def tables(result: dict[str, Any]) -> Sequence[Grid]:
    columns = (
        "session",
        "rows",
        "decode s",
        "settle s",
        "merge s",
        "account s",
        "whole s",
        "µs per call",
        "SkyRL's merge s",
        "that, beside merge",
    )
    rows = []
    for cell in result["sessions"]:
        peer = cell.get("skyrl_merge")
        steps = (told(cell[step]) for step in ("decode", "settle", "merged", "account", "whole"))
        ratio = None if peer is None else peer / cell["merged"]
        per_call = told(cell["whole"] / cell["calls"] * 1e6)
        rows.append((cell["shape"], f"{cell['rows']:,}", *steps, per_call, told(peer), times(ratio)))
    return [Grid("From record bytes to rows and their accounting, one process; CPU seconds", columns, tuple(rows))]


if __name__ == "__main__":
    main("reconstruction", __doc__, run, tables, alone=False)
