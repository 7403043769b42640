"""The errors of this package, one class per rule that a record can break.

ReconstructError
├── DecodeError        bytes that are not a record of a known schema
└── RecordError        a record that breaks an invariant, with session, call and token position
    ├── LengthMismatch     arrays of unequal length
    ├── MissingLogprob     a sampled token without a finite logprob
    ├── SpanError          weight-version spans that do not tile the sampled tokens
    ├── UnknownParent      a parent or base that is not in the session
    └── IdOutOfRange       an id outside the vocabulary (or negative)
"""

from __future__ import annotations


class ReconstructError(Exception):
    """Base of every error of this package."""


class DecodeError(ReconstructError):
    """Bytes that are not a record of a schema version that this build reads."""


class RecordError(ReconstructError):
    """A record breaks an invariant; `reason` is its word in the quarantine list."""

    reason = "invalid_record"

    def __init__(self, message: str, *, session_id: str = "", call_id: str = "", position: int | None = None) -> None:
        where = f"session {session_id or '?'}, call {call_id or '?'}"
        if position is not None:
            where += f", token {position}"
        super().__init__(f"{message} ({where})")
        self.session_id = session_id
        self.call_id = call_id
        self.position = position


class LengthMismatch(RecordError):
    reason = "length_mismatch"


class MissingLogprob(RecordError):
    reason = "missing_logprob"


class SpanError(RecordError):
    reason = "weight_version_unknown"


class UnknownParent(RecordError):
    reason = "unknown_parent"


class IdOutOfRange(RecordError):
    reason = "id_out_of_range"
