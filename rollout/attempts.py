"""How an attempt fails on a node, and how the node names what it makes for an attempt."""

from __future__ import annotations

import hashlib
from uuid import uuid4

from contract.attempts import AttemptId, Failure

RETRIED = frozenset({Failure.NODE_LOST, Failure.NODE_FAILED, Failure.BAD_RUNTIME, Failure.SERVICE_FAILED})
"""Not the agent's doing: retried, on another node if there is one, until the task's attempts are used up."""


class RolloutFailed(Exception):
    """Ends an attempt. `message` names the value and the rule it broke; `look` says where to find more."""

    def __init__(self, failure: Failure, message: str, look: str = "") -> None:
        super().__init__(message)
        self.failure = failure
        self.message = message
        self.look = look


def node_prefix(node: str, service: str) -> str:
    """The prefix of the names of a node's runtimes, by which a restarted node finds and removes what it left. `service` is the service's
    URL, or whatever else identifies it on this machine: nodes of two services often have one name, the machine's."""
    return f"vb-{_digest(f'{node} {service}', 10)}-"


def runtime_name(prefix: str, attempt: AttemptId, what: str) -> str:
    """A new name each time, of at most 63 characters of [a-z0-9-]: what is left of an earlier runtime is in nobody's way. `prefix` is its
    node's, and `what` distinguishes the runtimes of one attempt."""
    return f"{prefix}{_digest(attempt.task_id, 16)}-{attempt.index}-{attempt.attempt}-{what}-{uuid4().hex[:8]}"


def _digest(text: str, digits: int) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:digits]
