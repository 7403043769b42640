"""How long the pure core takes for large sessions: from record bytes to training rows and their accounting, in one process."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from reconstruct.accounting import account, settle
from reconstruct.builders import RowContext, merged
from reconstruct.codec import decode, encode
from reconstruct.records import Call, Node, Sampling, Span, pack_ids, pack_logprobs

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
    """Seconds of each step. `whole` is what a lease or a look at the trajectories costs: decode, settle, merge, account."""

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
    clock = [time.perf_counter()]
    calls = [decode(record) for record in stored]
    clock.append(time.perf_counter())
    settled = settle(calls, delivered={call.call_id for call in calls})
    clock.append(time.perf_counter())
    rows = merged(settled, CONTEXT)
    clock.append(time.perf_counter())
    accounting = account(settled, rows)
    clock.append(time.perf_counter())
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
