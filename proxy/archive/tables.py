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


# The three tables of an archive: their columns, as Arrow types and as Hugging Face features. docs/store.md explains each.
#
# `trajectories` has one row per training row, `sessions` one per session, `records` one per call, in the encoding of the store.
# Columns of kind `json` hold JSON text: their objects differ from row to row, which no column type survives. A change of a column
# is a new SCHEMA_VERSION.
#
# Version 2 adds a row's logprob mode, its token details and its policy; version 3 whether a trainer gets the session; version 4 who says so
# of a row's role, and of a session its echo policy, its budget, its dangling calls and whether it is complete. Nothing else of what is
# read back, sessions and records, differs.


SCHEMA = "verbatim-archive"
SCHEMA_VERSION = 4
READ_VERSIONS = (1, 2, 3, 4)

TRAJECTORIES = {
    "trajectory_id": "string",
    "session_id": "string",
    "rollout_id": "string",
    "group_id": "string",
    "task_id": "string",
    "role": "string",
    "role_source": "string",
    "agent": "string",
    "token_ids": "list<int32>",
    "loss_mask": "list<int8>",
    "logprobs": "list<float32>",
    "weight_versions": "list<list<int64>>",
    "reward": "float64",
    "row_weight": "float64",
    "call_ids": "list<string>",
    "finish_reason": "string",
    "truncated": "bool",
    "metadata": "json",
    "logprob_mode": "string",
    "top_token_ids": "list<list<int32>>",
    "top_logprobs": "list<list<float32>>",
    "prompt_logprobs": "list<float32>",
    "routed_experts": "list<list<list<int16>>>",
    "policy": "string",
    "session_status": "string",
    "session_reward": "float64",
    "session_trained": "bool",
    "group_size": "int32",
    "reward_metadata": "json",
    "created_at": "float64",
    "closed_at": "float64",
}
SESSIONS = {
    "session_id": "string",
    "created_at": "float64",
    "closed_at": "float64",
    "updated_at": "float64",
    "status": "string",
    "task_id": "string",
    "group_id": "string",
    "group_size": "int32",
    "trained": "bool",
    "echo_policy": "string",
    "max_calls": "int64",
    "max_completion_tokens": "int64",
    "max_total_tokens": "int64",
    "reward": "float64",
    "per_call": "json",
    "per_branch": "json",
    "reward_metadata": "json",
    "error": "string",
    "metadata": "json",
    "sampling": "json",
    "calls": "int32",
    "delivered": "list<string>",
    "intents": "json",
    "sampled_tokens": "int64",
    "exported_tokens": "int64",
    "quarantined": "json",
    "dangling_calls": "int32",
    "complete": "bool",
    "problem": "string",
}
RECORDS = {"session_id": "string", "position": "int32", "call_id": "string", "record": "binary"}

TABLES = {"sessions": SESSIONS, "records": RECORDS, "trajectories": TRAJECTORIES}


def arrow_schema(table: str) -> Any:
    """The table's pyarrow schema, with the archive's version and the Hugging Face features in its metadata."""
    import pyarrow as pa

    columns = TABLES[table]
    features = {name: _feature(kind) for name, kind in columns.items()}
    metadata = {
        "verbatim": json.dumps({"schema": SCHEMA, "schema_version": SCHEMA_VERSION, "table": table}),
        "huggingface": json.dumps({"info": {"features": features}}),
    }
    return pa.schema([pa.field(name, _arrow_type(kind)) for name, kind in columns.items()], metadata=metadata)


def _arrow_type(kind: str) -> Any:
    import pyarrow as pa

    if kind.startswith("list<"):
        return pa.list_(_arrow_type(kind[5:-1]))
    return pa.string() if kind == "json" else pa.type_for_alias(kind)


def _feature(kind: str) -> Any:
    """A list is written `[feature]`: the one spelling that all versions of `datasets` read."""
    if kind.startswith("list<"):
        return [_feature(kind[5:-1])]
    return {"dtype": "string" if kind == "json" else kind, "_type": "Value"}
