"""The three tables of an archive: their columns, as Arrow types and as Hugging Face features. docs/archive.md explains each.

`trajectories` has one row per training row, `sessions` one per session, `records` one per call, in the encoding of the store.
Columns of kind `json` hold JSON text: their objects differ from row to row, which no column type survives. A change of a column
is a new SCHEMA_VERSION.

Version 2 adds a row's logprob mode, its token details and its policy; version 3 whether a trainer gets the session; version 4 who says so
of a row's role, and of a session its echo policy, its budget, its dangling calls and whether it is complete. Nothing else of what is
read back, sessions and records, differs.
"""

from __future__ import annotations

import json
from typing import Any

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
