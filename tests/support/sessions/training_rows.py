"""Rows with valid defaults for tests of the trainer's side, small enough to check by eye."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import msgpack
import numpy as np

from reconstruct.records import RAW, pack_ids, pack_logprobs
from reconstruct.spans import ModeSpan, Span, merge_modes
from reconstruct.trajectory import Trajectory, encode_row, weigh_rows
from tests.support.service.scripted_service import Answer, json_answer
from trainer_client.wire import Group


def trajectory(
    name: str = "t1",
    *,
    prompt: Sequence[int] = (1, 2),
    versions: Sequence[int] = (5, 5),
    session: str = "",
    mode: str = RAW,
    **changes: Any,
) -> Trajectory:
    """`prompt` ids with mask 0, then ids 101, 102, … with mask 1 and logprobs -0.5, -1.0, … of `mode`, one per entry of `versions`."""
    sampled, start = len(versions), len(prompt)
    mask = np.array([0] * start + [1] * sampled, dtype=np.int8)
    fields: dict[str, Any] = {
        "trajectory_id": name,
        "session_id": session or f"s-{name}",
        "group_id": "g1",
        "task_id": "task-1",
        "role": "main",
        "agent": "",
        "token_ids": pack_ids([*prompt, *range(101, 101 + sampled)]),
        "loss_mask": mask,
        "logprobs": pack_logprobs([0.0] * start + [-0.5 * at for at in range(1, sampled + 1)]),
        "weight_versions": spans(start, versions),
        "reward": 1.0,
        "call_ids": (f"c-{name}",),
        "finish_reason": "stop",
        "truncated": False,
        "metadata": {"note": "ü"},
    }
    fields |= changes
    fields.setdefault("logprob_modes", mode_spans(fields["loss_mask"], mode))
    return Trajectory(**fields)


def mode_spans(mask: Any, mode: str = RAW) -> tuple[ModeSpan, ...]:
    """All sampled tokens as of one mode."""
    return merge_modes(ModeSpan(mode, at, at + 1) for at in np.flatnonzero(mask).tolist())


def spans(start: int, versions: Sequence[int]) -> tuple[Span, ...]:
    found = []
    for version, run in groupby(versions):
        length = len(list(run))
        found.append(Span(version, start, start + length))
        start += length
    return tuple(found)


def groups(*members: Sequence[Trajectory]) -> tuple[Group, ...]:
    return tuple(Group(f"g{at}", tuple(weigh_rows(rows))) for at, rows in enumerate(members, start=1))


def lease_body(*members: Sequence[Trajectory], arrays: str = "list", **changes: Any) -> dict[str, Any]:
    leased = [
        {"group_id": group.group_id, "trajectories": [encode_row(row, arrays=arrays) for row in group.trajectories]}
        for group in groups(*members)
    ]
    return {"lease_id": "lease-1", "expires_at": 2000.0, "weight_version": 7, "groups": leased, **changes}


def leased(*members: Sequence[Trajectory], encoding: str = "packed", **changes: Any) -> Answer:
    """A 200 to `POST /batches/lease` as json, msgpack (lists) or packed (msgpack with arrays as bytes)."""
    body = lease_body(*members, arrays="bytes" if encoding == "packed" else "list", **changes)
    if encoding == "json":
        return json_answer(body)
    kind = "application/msgpack;arrays=packed" if encoding == "packed" else "application/msgpack"
    return Answer(200, msgpack.packb(body), {"content-type": kind})
