"""Hashes of Redis as the values they are of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from rollout.attempts import ENDED, UNDER_WAY, RolloutState, Status, Verdict
from rollout.codec import decode
from rollout.failures import FailureRecord
from rollout.store.base import Callback, Counts, Event, TaskState
from rollout.task import Task

STATUSES: tuple[Status, ...] = ("queued", *UNDER_WAY, *ENDED)
LISTED = (
    *("outline", "status", "created_at", "ended_at", "usable", "lacks"),
    *("callback_url", "callback_tries", "callback_next", "callback_at", "callback_error"),
    *(f"n:{status}" for status in STATUSES),
)
"""Fields of a task that a listing reads."""
TOLD = ("session_id", "calls", "exit_code", "logs")
"""Fields of `RolloutState` that a node tells."""

Fields = Mapping[str, bytes]


def fields_of(answer: Mapping[bytes, bytes] | Sequence[bytes]) -> dict[str, bytes]:
    """A hash: paired as redis-py answers commands, or flat as scripts do."""
    pairs = answer.items() if isinstance(answer, Mapping) else zip(answer[::2], answer[1::2], strict=True)
    return {name.decode(): value for name, value in pairs}


def task_state(fields: Fields) -> TaskState:
    """Of all fields of a task, or of those in LISTED: then without what its uploads hold. Raises `DecodeError`."""
    counts = {status: int(fields.get(f"n:{status}", b"0")) for status in STATUSES}
    return TaskState(
        task=decode(fields.get("body") or fields["outline"], Task),
        status=fields["status"].decode(),
        created_at=float(fields["created_at"]),
        ended_at=_number(fields.get("ended_at")),
        counts=Counts({status: count for status, count in counts.items() if count}, int(fields.get("usable", b"0"))),
        callback=_callback(fields),
        lacks=fields["lacks"].decode() if "lacks" in fields else None,
    )


def rollout_state(task_id: str, index: int, fields: Fields) -> RolloutState:
    """Raises `DecodeError`."""
    told: dict[str, Any] = {name: msgspec.msgpack.decode(fields[f"f:{name}"]) for name in TOLD if f"f:{name}" in fields}
    status: Any = fields["status"].decode()
    failures = [decode(fields[f"x:{number}"], FailureRecord) for number in range(1, int(fields.get("failed", b"0")) + 1)]
    return RolloutState(
        task_id=task_id,
        index=index,
        status=status,
        attempt=int(fields["attempt"]),
        node=fields["node"].decode() if "node" in fields else None,
        verdict=decode(fields["verdict"], Verdict) if "verdict" in fields else None,
        failures=tuple(failures),
        times={name[2:]: float(value) for name, value in fields.items() if name.startswith("t:")},
        **told,
    )


def event(entry: Sequence[Any]) -> Event:
    """Of an entry of XRANGE."""
    fields = fields_of(entry[1])
    return Event(entry[0].decode(), fields["kind"].decode(), float(fields["at"]), msgspec.msgpack.decode(fields["data"]))


def _callback(fields: Fields) -> Callback | None:
    if "callback_url" not in fields:
        return None
    error = fields.get("callback_error")
    return Callback(
        url=fields["callback_url"].decode(),
        tries=int(fields.get("callback_tries", b"0")),
        next_try_at=_number(fields.get("callback_next")),
        delivered_at=_number(fields.get("callback_at")),
        last_error=error.decode() if error is not None else None,
    )


def _number(value: bytes | None) -> float | None:
    return None if value is None else float(value)
