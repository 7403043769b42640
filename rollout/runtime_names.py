"""Names of runtimes: whose each is, so that a node that starts again finds and removes what it left."""

from __future__ import annotations

import hashlib

from rollout.attempts import AttemptId


def node_prefix(node: str) -> str:
    """What the names of all of a node's runtimes begin with."""
    return f"vb-{_short(node, 10)}-"


def runtime_name(node: str, attempt: AttemptId, what: str) -> str:
    """At most 63 characters of [a-z0-9-]; `what` tells an attempt's runtimes apart."""
    return f"{node_prefix(node)}{_short(attempt.task_id, 16)}-{attempt.index}-{attempt.attempt}-{what}"


def _short(text: str, digits: int) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:digits]
