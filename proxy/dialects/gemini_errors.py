"""Errors as Google's APIs say them: google.rpc.Status with a status name and details (google.rpc error model, AIP-193)."""

from __future__ import annotations

from typing import Any

from proxy.errors import ContextTooLong, VerbatimError

_STATUS_NAMES = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    405: "UNIMPLEMENTED",
    409: "ABORTED",
    413: "INVALID_ARGUMENT",
    426: "FAILED_PRECONDITION",
    429: "RESOURCE_EXHAUSTED",
    500: "INTERNAL",
    502: "UNAVAILABLE",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}
_TYPE = "type.googleapis.com/google.rpc."


def google_error(error: VerbatimError) -> dict[str, Any]:
    """The error's object, as it stands under `error` in a body and in a stream."""
    fallback = "INVALID_ARGUMENT" if error.status < 500 else "INTERNAL"
    name = _STATUS_NAMES.get(error.status, fallback)
    return {"code": error.status, "message": _message(error), "status": name, "details": _details(error)}


def _message(error: VerbatimError) -> str:
    if not isinstance(error, ContextTooLong):
        return error.message
    # Clients know an overflow by this sentence alone.
    if error.tokens is None or error.window is None:
        return f"The input token count exceeds the maximum number of tokens allowed. {error.message}"
    return f"The input token count ({error.tokens}) exceeds the maximum number of tokens allowed ({error.window})."


def _details(error: VerbatimError) -> list[dict[str, Any]]:
    details: list[dict[str, Any]] = [{"@type": _TYPE + "ErrorInfo", "reason": error.code.upper(), "domain": "verbatim"}]
    if error.param is not None:
        violation = {"field": error.param, "description": error.message}
        details.append({"@type": _TYPE + "BadRequest", "fieldViolations": [violation]})
    if error.retry_after_seconds is not None:
        details.append({"@type": _TYPE + "RetryInfo", "retryDelay": f"{error.retry_after_seconds:g}s"})
    return details
