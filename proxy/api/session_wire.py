"""A session as the API shows it, and back: what is fixed at its creation and where it stands, in one flat object."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from proxy.store.session_store import SessionState

BUDGET = ("max_calls", "max_completion_tokens", "max_total_tokens")
# Named one by one: a field that comes to be must not be shown by itself, and key_hash never. group_rule is the group's and not shown,
# nor is unserved, which matters only while a session is open.
INFO_FIELDS = (
    "session_id",
    "created_at",
    "task_id",
    "group_id",
    "group_size",
    "metadata",
    "sampling",
    "trained",
    "echo_policy",
    *BUDGET,
)
STATE_FIELDS = (
    "status",
    "calls",
    "reward",
    "per_call",
    "per_branch",
    "reward_metadata",
    "error",
    "closed_at",
    "updated_at",
)


def session_as_wire(state: SessionState) -> dict[str, Any]:
    shown = {name: getattr(state.info, name) for name in INFO_FIELDS}
    return shown | {name: getattr(state, name) for name in STATE_FIELDS}


def session_of_wire(wire: Mapping[str, Any]) -> SessionState:
    """The session that was shown so; no key opens it. Raises msgspec.ValidationError when a field is missing or of a wrong type."""
    # What was shown by an earlier build does not say these.
    wire = {"trained": True, "echo_policy": "strict", **dict.fromkeys(BUDGET), **wire}
    if missing := [name for name in (*INFO_FIELDS, *STATE_FIELDS) if name not in wire]:
        raise msgspec.ValidationError(f"session: {', '.join(missing)} missing")
    info = {"key_hash": b"", **{name: wire[name] for name in INFO_FIELDS}}
    return msgspec.convert({"info": info, **{name: wire[name] for name in STATE_FIELDS}}, SessionState)
