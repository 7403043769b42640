"""One session as rows of the archive's tables, and back."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from reconstruct.trajectory import listed

Row = dict[str, Any]

_ARRAYS = {"token_ids": "<i4", "loss_mask": "i1", "logprobs": "<f4"}
_DETAILS = {"top_token_ids": "<i4", "top_logprobs": "<f4", "prompt_logprobs": "<f4", "routed_experts": "<i2"}
_JSON = ("per_call", "per_branch", "reward_metadata", "metadata", "sampling", "intents")
_BUDGET = ("max_calls", "max_completion_tokens", "max_total_tokens")
_PLAIN = (
    "session_id",
    "created_at",
    "closed_at",
    "updated_at",
    "status",
    "task_id",
    "group_id",
    "group_size",
    "reward",
    "error",
    "calls",
)


@dataclass(frozen=True, slots=True)
class ArchivedSession:
    """A closed session, whole.

    `state` is the session as `GET /sessions/{id}` has it; `records` are (call id, record bytes) in the order of the store;
    `delivered` the calls whose answer went out whole; `intents` the calls without a result. `trajectories` are on the wire with
    packed arrays. `problem` says why there are none, when the session's records contradict each other.
    """

    state: Mapping[str, Any]
    records: Sequence[tuple[str, bytes]]
    delivered: Sequence[str] = ()
    intents: Sequence[Mapping[str, Any]] = ()
    trajectories: Sequence[Mapping[str, Any]] = ()
    accounting: Mapping[str, Any] = field(default_factory=dict)
    problem: str | None = None

    @property
    def key(self) -> tuple[str, float]:
        """What tells it from every other: an id may be used again once its session is deleted."""
        return self.state["session_id"], self.state["created_at"]

    @property
    def size_bytes(self) -> int:
        """Roughly what it takes in memory and on disk."""
        arrays = sum(len(row[name]) for row in self.trajectories for name in _ARRAYS)
        arrays += sum(len(row[name]["data"]) for row in self.trajectories for name in _DETAILS if name in row)
        return arrays + sum(len(record) for _, record in self.records) + 1024


def rows_of(session: ArchivedSession) -> dict[str, list[Row]]:
    """Its rows by table."""
    return {
        "sessions": [_session_row(session)],
        "records": [
            {"session_id": session.state["session_id"], "position": position, "call_id": call_id, "record": record}
            for position, (call_id, record) in enumerate(session.records)
        ],
        "trajectories": [_trajectory_row(row, session.state) for row in session.trajectories],
    }


def session_of(row: Row, records: Sequence[Row]) -> ArchivedSession:
    """The session of a row of `sessions` and its rows of `records`, without its trajectories: they follow from the records."""
    state = {name: row[name] for name in _PLAIN} | {name: json.loads(row[name]) for name in _JSON}
    # Not in archives of earlier versions.
    state["trained"] = row.get("trained") is not False
    state["echo_policy"] = row.get("echo_policy") or "strict"
    state |= {name: row.get(name) for name in _BUDGET}
    ordered = sorted(records, key=lambda record: record["position"])
    return ArchivedSession(
        state={name: value for name, value in state.items() if name != "intents"},
        records=[(record["call_id"], record["record"]) for record in ordered],
        delivered=row["delivered"],
        intents=state["intents"],
    )


def _session_row(session: ArchivedSession) -> Row:
    state, accounting = session.state, session.accounting
    return {
        **{name: state[name] for name in _PLAIN},
        **{name: _text(state[name]) for name in _JSON if name != "intents"},
        # A service of an earlier build does not say these.
        "trained": state.get("trained"),
        "echo_policy": state.get("echo_policy"),
        **{name: state.get(name) for name in _BUDGET},
        "intents": _text(list(session.intents)),
        "delivered": sorted(session.delivered),
        "sampled_tokens": accounting.get("sampled_tokens"),
        "exported_tokens": accounting.get("exported_tokens"),
        "quarantined": _text(accounting.get("quarantined", [])),
        "dangling_calls": accounting.get("dangling_calls"),
        "complete": accounting.get("complete"),
        "problem": session.problem,
    }


def _trajectory_row(row: Mapping[str, Any], state: Mapping[str, Any]) -> Row:
    return {
        **row,
        **{name: np.frombuffer(row[name], dtype=dtype) for name, dtype in _ARRAYS.items()},
        **{name: _detail(row.get(name), dtype) for name, dtype in _DETAILS.items()},
        "metadata": _text(row["metadata"]),
        "session_status": state["status"],
        "session_reward": state["reward"],
        "session_trained": state.get("trained"),
        "group_size": state["group_size"],
        "reward_metadata": _text(state["reward_metadata"]),
        "created_at": state["created_at"],
        "closed_at": state["closed_at"],
    }


def _detail(packed: Mapping[str, Any] | None, dtype: str) -> list[Any] | None:
    """The array as nested lists, None for NaN: neither Arrow nor JSON takes arrays of several dimensions."""
    if packed is None:
        return None
    array = np.frombuffer(packed["data"], dtype=dtype).reshape(packed["shape"])
    return listed(array)


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True)
