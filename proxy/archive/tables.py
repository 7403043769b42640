"""The five tables of an archive: their columns, a session as their rows, and back. docs/site/archive_page.py explains each column.

`trajectories` has one row per training row, `sessions` one per session, `records` one per call in the store's encoding, `scores` one per
score of a call, `media` one per image, which several sessions may have. Columns of kind `json` hold JSON text: their objects differ from
row to row, which no column type survives. A changed column is a new SCHEMA_VERSION.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from reconstruct.details import convert_to_lists

Row = dict[str, Any]
Rewards = tuple[float | None, tuple[tuple[str, float], ...], tuple[tuple[str, float], ...], int]
"""A session's reward, those of its calls and branches, and how many scores were stored: what may still change once it is closed."""

SCHEMA = "verbatim-archive"
SCHEMA_VERSION = 10

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
    "logprob_modes": "json",
    "weight_versions": "list<list<int64>>",
    "reward": "float64",
    "row_weight": "float64",
    "call_ids": "list<string>",
    "finish_reason": "string",
    "truncated": "bool",
    "metadata": "json",
    "top_token_ids": "list<list<int32>>",
    "top_logprobs": "list<list<float32>>",
    "prompt_logprobs": "list<float32>",
    "routed_experts": "list<list<list<int16>>>",
    "policy": "string",
    "media": "json",
    "scores": "json",
    "score_logprobs": "list<list<float32>>",
    "score_top_ids": "list<list<list<int32>>>",
    "score_top_logprobs": "list<list<list<float32>>>",
    "text": "string",
    "tools": "json",
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
    "run": "string",
    "project": "string",
    "trained": "bool",
    "echo_policy": "string",
    "max_calls": "int64",
    "max_completion_tokens": "int64",
    "max_total_tokens": "int64",
    "replay": "json",
    "lookahead": "json",
    "scores": "json",
    "reward": "float64",
    "per_call": "json",
    "per_branch": "json",
    "reward_metadata": "json",
    "error": "string",
    "flag": "string",
    "note": "string",
    "unserved": "json",
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
    "replayed_tokens": "int64",
    "problem": "string",
    "log": "string",
    "media": "list<string>",
    "scored": "int64",
}
MEDIA = {"digest": "string", "data": "binary"}
RECORDS = {"session_id": "string", "position": "int32", "call_id": "string", "record": "binary"}

SCORES = {"session_id": "string", "scorer": "string", "call_id": "string", "score": "binary"}

TABLES = {"sessions": SESSIONS, "records": RECORDS, "scores": SCORES, "trajectories": TRAJECTORIES, "media": MEDIA}

_ARRAYS = {"token_ids": "<i4", "loss_mask": "i1", "logprobs": "<f4"}
_DETAILS = {"top_token_ids": "<i4", "top_logprobs": "<f4", "prompt_logprobs": "<f4", "routed_experts": "<i2"}
_SCORES = {"logprobs": "<f4", "top_ids": "<i4", "top_logprobs": "<f4"}
_JSON = ("per_call", "per_branch", "reward_metadata", "metadata", "sampling", "replay", "lookahead", "scores", "intents")
_PLAIN = (
    *("session_id", "created_at", "closed_at", "updated_at", "status", "task_id", "group_id", "group_size", "reward"),
    *("error", "flag", "note", "calls", "run", "project", "trained", "echo_policy"),
    *("max_calls", "max_completion_tokens", "max_total_tokens", "scored"),
)


@dataclass(frozen=True, slots=True)
class ArchivedSession:
    """A closed session with everything an archive holds.

    `state` is the session as in `GET /sessions/{id}`; `records` are (call id, record bytes) in store order; `delivered` the calls whose
    reply was delivered whole; `intents` the calls without a record. `trajectories` are in wire form with packed arrays, and may have a
    `text` and `tools`. `problem`: why there are none, when the session's records contradict each other. `log`: the end of what the agent
    printed, "" if it is not known. `scores`: as the store holds them, by `<scorer>=<call_id>`. `media`: the bytes of its images by digest.
    `unserved`: the last call that was not served, as in `GET /sessions/{id}`.
    """

    state: Mapping[str, Any]
    records: Sequence[tuple[str, bytes]]
    delivered: Sequence[str] = ()
    intents: Sequence[Mapping[str, Any]] = ()
    trajectories: Sequence[Mapping[str, Any]] = ()
    accounting: Mapping[str, Any] = field(default_factory=dict)
    problem: str | None = None
    log: str = ""
    scores: Mapping[str, bytes] = field(default_factory=dict)
    media: Mapping[str, bytes] = field(default_factory=dict)
    unserved: Mapping[str, Any] | None = None

    @property
    def key(self) -> tuple[str, float]:
        """Unique, unlike the id alone, which may be reused once its session is deleted."""
        return self.state["session_id"], self.state["created_at"]

    @property
    def rewards(self) -> Rewards:
        return rewards_of(self.state)

    @property
    def size_bytes(self) -> int:
        """Approximate size in memory and on disk."""
        arrays = sum(len(row[name]) for row in self.trajectories for name in _ARRAYS)
        arrays += sum(len(row[name]["data"]) for row in self.trajectories for name in _DETAILS if name in row)
        # Of a row's scores about as much as of its calls'.
        images = sum(map(len, self.media.values())) + 2 * sum(map(len, self.scores.values()))
        return arrays + images + sum(len(record) for _, record in self.records) + len(self.log) + 1024


def rewards_of(state: Mapping[str, Any]) -> Rewards:
    """Those of a session as in `GET /sessions/{id}`, or of its row."""
    given = (state[name] for name in ("per_call", "per_branch"))
    calls, branches = (json.loads(each) if isinstance(each, str) else each for each in given)
    return state["reward"], tuple(sorted(calls.items())), tuple(sorted(branches.items())), state["scored"]


def rows_of(session: ArchivedSession) -> dict[str, list[Row]]:
    """Its rows, by table."""
    return {
        "sessions": [_session_row(session)],
        "records": [
            {"session_id": session.state["session_id"], "position": position, "call_id": call_id, "record": record}
            for position, (call_id, record) in enumerate(session.records)
        ],
        "scores": [_score_row(session.state["session_id"], name, score) for name, score in sorted(session.scores.items())],
        "trajectories": [_trajectory_row(row, session.state) for row in session.trajectories],
        "media": [{"digest": digest, "data": data} for digest, data in session.media.items()],
    }


def session_of(row: Row, records: Sequence[Row], scores: Sequence[Row], media: Mapping[str, bytes]) -> ArchivedSession:
    """The session of one row of `sessions`, its rows of `records` and of `scores`, and its images. Without trajectories, which follow
    from the records."""
    state = {name: row[name] for name in _PLAIN} | {name: json.loads(row[name]) for name in _JSON}
    ordered = sorted(records, key=lambda record: record["position"])
    return ArchivedSession(
        state={name: value for name, value in state.items() if name != "intents"},
        records=[(record["call_id"], record["record"]) for record in ordered],
        delivered=row["delivered"],
        intents=state["intents"],
        log=row["log"] or "",
        scores={f"{score['scorer']}={score['call_id']}": score["score"] for score in scores},
        media=media,
        unserved=json.loads(row["unserved"]),
    )


def arrow_schema(table: str) -> Any:
    """The table's pyarrow schema. Its metadata holds the archive's version and the Hugging Face features."""
    import pyarrow as pa

    columns = TABLES[table]
    features = {name: _feature(kind) for name, kind in columns.items()}
    metadata = {
        "verbatim": json.dumps({"schema": SCHEMA, "schema_version": SCHEMA_VERSION, "table": table}),
        "huggingface": json.dumps({"info": {"features": features}}),
    }
    return pa.schema([pa.field(name, _arrow_type(kind)) for name, kind in columns.items()], metadata=metadata)


def _session_row(session: ArchivedSession) -> Row:
    state, accounting = session.state, session.accounting
    return {
        **{name: state[name] for name in _PLAIN},
        **{name: _dump(state[name]) for name in _JSON if name != "intents"},
        "unserved": _dump(session.unserved),
        "intents": _dump(list(session.intents)),
        "delivered": sorted(session.delivered),
        "sampled_tokens": accounting.get("sampled_tokens"),
        "exported_tokens": accounting.get("exported_tokens"),
        "quarantined": _dump(accounting.get("quarantined", [])),
        "dangling_calls": accounting.get("dangling_calls"),
        "complete": accounting.get("complete"),
        "replayed_tokens": accounting.get("replayed_tokens"),
        "problem": session.problem,
        "log": session.log or None,
        "media": sorted(session.media),
    }


def _trajectory_row(row: Mapping[str, Any], state: Mapping[str, Any]) -> Row:
    return {
        **row,
        **{name: np.frombuffer(row[name], dtype=dtype) for name, dtype in _ARRAYS.items()},
        **{name: _detail(row.get(name), dtype) for name, dtype in _DETAILS.items()},
        **_score_columns(row.get("scores", {})),
        "metadata": _dump(row["metadata"]),
        "logprob_modes": _dump(row["logprob_modes"]),
        "media": _dump(row["media"]),
        "text": row.get("text"),
        "tools": None if row.get("tools") is None else _dump(row["tools"]),
        "session_status": state["status"],
        "session_reward": state["reward"],
        "session_trained": state["trained"],
        "group_size": state["group_size"],
        "reward_metadata": _dump(state["reward_metadata"]),
        "created_at": state["created_at"],
        "closed_at": state["closed_at"],
    }


def _score_row(session_id: str, name: str, score: bytes) -> Row:
    scorer, _, call_id = name.partition("=")
    return {"session_id": session_id, "scorer": scorer, "call_id": call_id, "score": score}


def _score_columns(scores: Mapping[str, Any]) -> Row:
    """Those of a row's scores: what each scorer is in `scores`, and its arrays, one after the other in that order."""
    if not scores:
        return {"scores": None, **{f"score_{name}": None for name in _SCORES}}
    ordered = sorted(scores)
    described = {name: {key: value for key, value in scores[name].items() if key not in _SCORES} for name in ordered}
    arrays = {f"score_{key}": [_detail(scores[name][key], dtype) for name in ordered] for key, dtype in _SCORES.items()}
    return {"scores": _dump(described), **arrays}


def _detail(packed: Mapping[str, Any] | None, dtype: str) -> list[Any] | None:
    """The array as nested lists, None for NaN: neither Arrow nor JSON takes multidimensional arrays."""
    if packed is None:
        return None
    array = np.frombuffer(packed["data"], dtype=dtype).reshape(packed["shape"])
    return convert_to_lists(array)


def _dump(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _arrow_type(kind: str) -> Any:
    import pyarrow as pa

    if kind.startswith("list<"):
        return pa.list_(_arrow_type(kind[5:-1]))
    return pa.string() if kind == "json" else pa.type_for_alias(kind)


def _feature(kind: str) -> Any:
    """`[feature]` for a list: the one spelling that all versions of `datasets` read."""
    if kind.startswith("list<"):
        return [_feature(kind[5:-1])]
    return {"dtype": "string" if kind == "json" else kind, "_type": "Value"}
